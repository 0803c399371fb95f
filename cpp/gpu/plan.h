// Launch plans of the portable kernels: checks, grids and argument blocks in plain C++, the same for every backend.
//
// A backend includes this with a launcher `int launch(Kernel, unsigned grid_x, unsigned grid_y, const void* block, int bytes, void* stream)`
// and `int refuse(exl3_status, const char* format, ...)` declared in namespace exl3::portable. Grids follow sizes only, never a length.
#pragma once
#include "entries.h"
#include "exl3/attend.h"

namespace exl3::portable {

enum Kernel {
#define X(name, args, threads, body) K_##name,
  EXL3_PORTABLE_KERNELS(X)
#undef X
  KERNELS
};
struct Entry {
  const char* name;
  int threads, bytes;
};
static const Entry entries[] = {
#define X(name, args, threads, body) {"k_" #name, threads, (int)sizeof(args)},
    EXL3_PORTABLE_KERNELS(X)
#undef X
};

int launch(Kernel kernel, unsigned grid_x, unsigned grid_y, const void* block, int bytes, void* stream);
int refuse(exl3_status status, const char* format, ...);

template <class Args>
int start(Kernel kernel, int64_t grid_x, int64_t grid_y, const Args& block, void* stream) {
  if (grid_x <= 0 || grid_y <= 0) return EXL3_OK;  // no rows
  if (grid_x > 0x7fffffff || grid_y > 65535) return refuse(EXL3_BAD_ARGUMENT, "%s: too large for one launch", entries[kernel].name);
  return launch(kernel, (unsigned)grid_x, (unsigned)grid_y, &block, sizeof(Args), stream);
}
inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

inline const void* advance(const void* p, int64_t elements, int dtype) { return (const char*)p + elements * (dtype == EXL3_F32 ? 4 : 2); }
inline void* advance(void* p, int64_t elements, int dtype) { return (char*)p + elements * (dtype == EXL3_F32 ? 4 : 2); }

// Rows beyond the second grid dimension's limit go into several launches: f(first row, rows).
template <class F>
int in_row_chunks(int rows, int chunk, F f) {
  for (int first = 0; first < rows; first += chunk)
    if (const int status = f(first, rows - first < chunk ? rows - first : chunk)) return status;
  return EXL3_OK;
}

inline bool known_rate(int k2) { return (k2 >= 2 && k2 <= 8) || k2 == 10 || k2 == 12 || k2 == 14 || k2 == 16; }
inline int check_weight(const char* op, const exl3_weight* w) {
  if (!w || !w->trellis || !w->suh || !w->svh) return refuse(EXL3_BAD_ARGUMENT, "%s: the weight has no data", op);
  if (!known_rate(w->k2) || (w->k2 % 2 && w->codebook != EXL3_MUL1))
    return refuse(EXL3_UNSUPPORTED, "%s: rate K = %g does not exist for this codebook", op, w->k2 / 2.0);
  if (w->in_padded <= 0 || w->out_padded <= 0 || w->in_padded % 128 || w->out_padded % 128)
    return refuse(EXL3_BAD_ARGUMENT, "%s: padded sizes %d x %d must be multiples of 128", op, w->in_padded, w->out_padded);
  if (w->layout != 0) return refuse(EXL3_UNSUPPORTED, "%s: this backend reads the trellis as it lies on disk (layout 0), got %d", op, w->layout);
  if ((uintptr_t)w->trellis % 16) return refuse(EXL3_BAD_ARGUMENT, "%s: the trellis must be aligned to 16 bytes", op);
  return EXL3_OK;
}

inline int rms_norm(const exl3_rms_norm_args* a, void* stream) { return start(K_rms_norm, a->rows, 1, *a, stream); }
inline int rotate(const exl3_rotate_args* a, void* stream) {
  if (a->n_padded % 128) return refuse(EXL3_BAD_ARGUMENT, "rotate: n_padded %d is not a multiple of 128", a->n_padded);
  return start(K_rotate, parts((int64_t)a->rows * (a->n_padded / 128), 8), 1, *a, stream);
}
inline int rotary_table(const exl3_rotary_table_args* a, void* stream) {
  return start(K_rotary_table, parts((int64_t)a->tokens * a->half, 256), 1, *a, stream);
}
inline int rotary(const exl3_rotary_args* a, void* stream) {
  if (a->head_dim > 512 || a->rotary_dim > a->head_dim) return refuse(EXL3_UNSUPPORTED, "rotary: head_dim %d is above 512", a->head_dim);
  return start(K_rotary, parts((int64_t)a->tokens * (a->q_heads + (a->k ? a->k_heads : 0)), 4), 1, *a, stream);
}
inline int check_cache(const char* op, const exl3_cache_layer& c) {
  if (c.head_dim % 32 || c.head_dim > 512) return refuse(EXL3_UNSUPPORTED, "%s: head_dim %d is not a multiple of 32 up to 512", op, c.head_dim);
  for (int bits : {c.k_bits, c.v_bits})
    if (bits != 16 && (bits < 2 || bits > 8)) return refuse(EXL3_UNSUPPORTED, "%s: cache bits must be 2 to 8 or 16, got %d", op, bits);
  return EXL3_OK;
}
inline int cache_append(const exl3_cache_append_args* a, void* stream) {
  if (const int status = check_cache("cache_append", a->cache)) return status;
  return start(K_cache_append, parts((int64_t)a->tokens * 2 * (a->cache.kv_heads * a->cache.head_dim / 32), 8), 1, *a, stream);
}
inline int cache_read(const exl3_cache_read_args* a, void* stream) {
  if (const int status = check_cache("cache_read", a->cache)) return status;
  return start(K_cache_read, parts((int64_t)a->count * 2 * (a->cache.kv_heads * a->cache.head_dim / 32), 8), 1, *a, stream);
}
inline int check_attention(const exl3_attention_args* a) {
  if (const int status = check_cache("attention", a->cache)) return status;
  if (a->cache.kv_heads <= 0 || a->heads % a->cache.kv_heads)
    return refuse(EXL3_BAD_ARGUMENT, "attention: %d heads over %d key/value heads", a->heads, a->cache.kv_heads);
  return EXL3_OK;
}
inline int attention_plain(const exl3_attention_args* a, void* stream) {
  if (const int status = check_attention(a)) return status;
  return in_row_chunks(a->tokens, 65535, [&](int first, int rows) {
    exl3_attention_args part = *a;
    part.tokens = rows;
    part.q = advance(a->q, first * a->q_stride, a->dtype);
    part.y = advance(a->y, first * a->y_stride, a->dtype);
    part.positions += first;
    part.token_row += first;
    return start(K_attention_plain, a->heads, rows, part, stream);
  });
}
inline int attend_plain(const exl3_attend_args* a, void* stream) { return attend_in_three(a, stream, rotary, cache_append, attention_plain); }
inline int act_mul(const exl3_act_mul_args* a, void* stream) {
  return in_row_chunks(a->rows, 65535, [&](int first, int rows) {
    exl3_act_mul_args part = *a;
    part.rows = rows;
    part.gate = advance(a->gate, first * a->gate_stride, a->dtype);
    part.up = a->up ? advance(a->up, first * a->up_stride, a->dtype) : nullptr;
    part.y = advance(a->y, first * a->y_stride, a->dtype);
    return start(K_act_mul, parts(a->n, 1024), rows, part, stream);
  });
}
inline int add(const exl3_add_args* a, void* stream) { return start(K_add, parts(a->n, 1024), 1, *a, stream); }
inline int softcap(const exl3_softcap_args* a, void* stream) { return start(K_softcap, parts(a->n, 1024), 1, *a, stream); }
inline int embedding(const exl3_embedding_args* a, void* stream) {
  if (a->trellis_bits < 0 || a->trellis_bits > 8) return refuse(EXL3_UNSUPPORTED, "embedding: %d bits; 1 to 8 exist", a->trellis_bits);
  return in_row_chunks(a->tokens, 65535, [&](int first, int rows) {
    exl3_embedding_args part = *a;
    part.tokens = rows;
    part.ids += first;
    part.y = advance(a->y, first * a->y_stride, a->y_dtype);
    return a->trellis_bits ? start(K_embedding_ring, parts(a->n, 256), rows, part, stream)
                           : start(K_embedding, parts(a->n, 1024), rows, part, stream);
  });
}
inline int64_t sample_workspace(const exl3_sample_args* a) { return a->history ? (int64_t)a->rows * a->vocab * 8 : 0; }
inline int sample(const exl3_sample_args* a, void* stream) {
  if (a->workspace_bytes < sample_workspace(a)) return refuse(EXL3_BAD_ARGUMENT, "sample: the workspace is too small");
  return start(K_sample, a->rows, 1, *a, stream);
}
inline int reconstruct(const exl3_reconstruct_args* a, void* stream) {
  if (const int status = check_weight("reconstruct", a->weight)) return status;
  const ReconstructArgs block{*a->weight, a->out, a->out_dtype, a->original_basis};
  const int64_t rows = a->weight->in_padded, columns = a->weight->out_padded;
  return a->original_basis ? start(K_reconstruct_original, columns / 128, rows / 128, block, stream)
                           : start(K_reconstruct, parts(rows / 16 * (columns / 16), 8), 1, block, stream);
}
inline int dense(const exl3_dense_args* a, void* stream) { return start(K_dense, parts(a->out_features, 8), parts(a->rows, 8), *a, stream); }

inline int check_linear(const exl3_linear_args* a) {
  if (a->count < 1 || a->count > EXL3_MAX_GROUP) return refuse(EXL3_BAD_ARGUMENT, "linear: %d matrices; 1 to %d", a->count, EXL3_MAX_GROUP);
  for (int i = 0; i < a->count; i++) {
    if (const int status = check_weight("linear", a->weights[i])) return status;
    if (a->weights[i]->in_features != a->weights[0]->in_features || a->weights[i]->in_padded != a->weights[0]->in_padded)
      return refuse(EXL3_BAD_ARGUMENT, "linear: matrices of one group take different inputs");
  }
  if (a->activation != EXL3_ACT_NONE && (a->count != 2 || a->weights[0]->out_features != a->weights[1]->out_features))
    return refuse(EXL3_BAD_ARGUMENT, "linear: an activation needs exactly two matrices (gate, up) of one size");
  if (a->activation == EXL3_ACT_XIELU) return refuse(EXL3_UNSUPPORTED, "linear: xielu has parameters; use act_mul");
  if (a->accumulate && a->y_dtype != EXL3_F32) return refuse(EXL3_BAD_ARGUMENT, "linear: accumulate needs an fp32 result");
  return EXL3_OK;
}
inline int rotations(const exl3_linear_args* a) { return a->shared_suh || a->count == 1 ? 1 : a->count; }

// The portable product: rotated input in the workspace (behind its first 64 KiB), then sums and epilogue.
inline int64_t linear_workspace(const exl3_linear_args* a) {
  return 65536 + (int64_t)rotations(a) * a->rows * a->weights[0]->in_padded * 4;
}
inline int linear(const exl3_linear_args* a, void* stream) {
  if (const int status = check_linear(a)) return status;
  if (a->rows <= 0) return EXL3_OK;
  if (a->workspace_bytes < linear_workspace(a)) return refuse(EXL3_BAD_ARGUMENT, "linear: the workspace is too small");
  const exl3_weight& w = *a->weights[0];
  float* rotated = (float*)((char*)a->workspace + 65536);
  RotateInputArgs r{};
  r.x = a->x;
  r.norm_weight = a->norm_weight;
  for (int i = 0; i < a->count; i++) r.suh[i] = a->weights[i]->suh;
  r.out = rotated;
  r.x_stride = a->x_stride;
  r.rows = a->rows;
  r.in_features = w.in_features;
  r.in_padded = w.in_padded;
  r.x_dtype = a->x_dtype;
  r.eps = a->norm_eps;
  if (const int status = start(K_rotate_input, a->rows, rotations(a), r, stream)) return status;
  ProductArgs p{};
  p.x = rotated;
  p.rows = a->rows;
  p.count = a->activation ? 1 : a->count;
  p.rotations = rotations(a);
  p.y_dtype = a->y_dtype;
  p.activation = a->activation;
  p.accumulate = a->accumulate;
  for (int i = 0; i < a->count; i++) {
    p.out[i] = {*a->weights[i], a->y[a->activation ? 0 : i], a->y_stride[a->activation ? 0 : i]};
    p.first_group[i + 1] = p.first_group[i] + a->weights[i]->out_padded / 128;
  }
  return start(K_product, p.first_group[p.count], parts(a->rows, kProductRows), p, stream);
}

}  // namespace exl3::portable
