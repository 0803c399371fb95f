// The one exported symbol: the table of operations, and the launch plans of RDNA's own kernels. Plain C++ that knows the kernels by name.
#include <stdarg.h>
#include <stdio.h>

#include "device.h"
#include "gpu/plan.h"
#include "entries.h"

#ifndef EXL3_ROCM_ARCH_TEXT
#define EXL3_ROCM_ARCH_TEXT "unknown"
#endif
#ifndef EXL3_ROCM_COMPILER
#define EXL3_ROCM_COMPILER "clang"
#endif

namespace exl3::portable {

int refuse(exl3_status status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  char text[400];
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  return exl3::refuse(status, "%s", text);
}
int launch(Kernel kernel, unsigned grid_x, unsigned grid_y, const void* block, int, void* stream) {
  return exl3::launch(kernel, entries[kernel].name, grid_x, grid_y, entries[kernel].threads, block, stream);
}

}  // namespace exl3::portable

namespace exl3 {

using portable::advance;
using portable::parts;

// ------------------------------------------------------------------------------------------------ RDNA's own kernels, by number
enum Kernel {
#define X(name, args, threads, body) R_##name,
  EXL3_RDNA_KERNELS(X)
#undef X
  R_KERNELS
};
static const portable::Entry rdna_entries[] = {
#define X(name, args, threads, body) {"k_" #name, threads, (int)sizeof(args)},
    EXL3_RDNA_KERNELS(X)
#undef X
};
static_assert(portable::KERNELS + R_KERNELS <= kSlots, "raise kSlots");

template <class Args>
static int start(int kernel, int64_t grid_x, int64_t grid_y, const Args& block, void* stream) {
  if (grid_x <= 0 || grid_y <= 0) return EXL3_OK;
  if (grid_x > 0x7fffffff || grid_y > 65535) return refuse(EXL3_BAD_ARGUMENT, "%s: too large for one launch", rdna_entries[kernel].name);
  return launch(portable::KERNELS + kernel, rdna_entries[kernel].name, (unsigned)grid_x, (unsigned)grid_y, rdna_entries[kernel].threads, &block, stream);
}
static int64_t clamp(int64_t v, int64_t low, int64_t high) { return v < low ? low : v > high ? high : v; }
static int64_t round_up(int64_t v) { return (v + 255) / 256 * 256; }
static const int64_t kCounters = 65536 / 4;

// ------------------------------------------------------------------------------------------------ products
// Kernels of one rate stand side by side in the list: mul1's eleven rates, then the eight of 3inst and mcg.
static int rate_number(const exl3_weight& w) {
  const int mul1 = w.k2 <= 8 ? w.k2 - 2 : 7 + (w.k2 - 10) / 2;
  return w.codebook == EXL3_MUL1 ? mul1 : 11 + w.k2 / 2 - 1;
}
static bool same_kernel(const exl3_weight& a, const exl3_weight& b) {
  return a.k2 == b.k2 && (a.codebook == EXL3_MUL1) == (b.codebook == EXL3_MUL1);
}

// Few rows go through gemv eight at a time, more through gemm. Where a card has no matrix product, gemm only pays for whole tiles of rows.
constexpr int kGemvRows = 8, kChunk = 256;
static int most_gemv_rows(const Device& d) { return d.matrix_products ? 16 : 32; }

struct Plan {
  bool gemv;
  int rows, splits, groups, row_tiles;  // of one launch
  int64_t halves, scales, sums, bytes;  // offsets behind the counters, and all of it
};
// How `rows` of a call are multiplied, at most as many as one launch takes. gemv's splits follow the matrices and the card alone.
static Plan plan_rows(const exl3_linear_args* a, const Device& d, int rows) {
  Plan p{};
  p.gemv = a->rows <= most_gemv_rows(d);
  p.rows = (int)clamp(rows, 1, p.gemv ? kGemvRows : kChunk);
  for (int i = 0; i < a->count; i++) p.groups += a->weights[i]->out_padded / 128;
  p.row_tiles = p.gemv ? 1 : (int)parts(p.rows, rdna::kGemmRows);
  const int64_t in = a->weights[0]->in_padded;
  // waves wanted: about sixteen a compute unit of four-warp blocks for gemv, eight for gemm, whose waves are heavy
  p.splits = (int)(p.gemv ? clamp(d.multiprocessors * 4 / p.groups, 1, clamp(in / 64, 1, 32))
                          : clamp(d.multiprocessors * 2 / (p.groups * p.row_tiles), 1, clamp(in / 256, 1, 16)));
  const int rotations = portable::rotations(a);
  p.halves = 65536;
  p.scales = p.halves + round_up((int64_t)rotations * p.rows * in * 2);
  p.sums = p.scales + round_up((int64_t)rotations * p.rows * 8);
  p.bytes = p.sums + (int64_t)p.splits * p.rows * p.groups * 128 * 4;
  return p;
}

static int64_t linear_workspace(const exl3_linear_args* a) {
  const Device* d = device();
  if (portable::check_linear(a) || !d) return -1;
  // the last rows of a call may be fewer and take more splits
  int64_t most = plan_rows(a, *d, a->rows).bytes;
  if (a->rows > kChunk && a->rows % kChunk) {
    const int64_t rest = plan_rows(a, *d, a->rows % kChunk).bytes;
    if (rest > most) most = rest;
  }
  return most;
}

static int multiply_rows(const exl3_linear_args* a, const Plan& p, int first, void* stream) {
  char* space = (char*)a->workspace;
  const exl3_weight& w = *a->weights[0];
  rdna::HalvesArgs h{};
  h.x = advance(a->x, first * a->x_stride, a->x_dtype);
  h.norm_weight = a->norm_weight;
  for (int i = 0; i < a->count; i++) h.suh[i] = a->weights[i]->suh;
  h.out = (uint16_t*)(space + p.halves);
  h.scales = (float*)(space + p.scales);
  h.x_stride = a->x_stride;
  h.rows = p.rows;
  h.in_features = w.in_features;
  h.in_padded = w.in_padded;
  h.x_dtype = a->x_dtype;
  h.eps = a->norm_eps;
  const int rotations = portable::rotations(a);
  if (const int status = start(R_rotate_halves, p.rows, rotations, h, stream)) return status;

  rdna::ProductArgs q{};
  q.x = h.out;
  q.scales = h.scales;
  q.parts = (float*)(space + p.sums);
  q.counters = (int*)space;
  for (int i = 0; i < a->count; i++) {
    const int y = a->activation ? 0 : i;
    q.out[i] = {*a->weights[i], advance(a->y[y], first * a->y_stride[y], a->y_dtype), a->y_stride[y]};
  }
  for (int i = 0; i < EXL3_MAX_GROUP; i++) q.first_group[i + 1] = q.first_group[i] + (i < a->count ? a->weights[i]->out_padded / 128 : 0);
  q.rows = p.rows;
  q.count = a->count;
  q.rotations = rotations;
  q.splits = p.splits;
  q.columns = p.groups * 128;
  q.y_dtype = a->y_dtype;
  q.activation = a->activation;
  q.accumulate = a->accumulate;
  for (int m = 0; m < a->count; m += q.matrices) {  // matrices side by side with the same kernel take one launch
    q.matrix = m;
    q.matrices = 1;
    while (m + q.matrices < a->count && same_kernel(*a->weights[m], *a->weights[m + q.matrices])) q.matrices++;
    const int groups = q.first_group[m + q.matrices] - q.first_group[m], rate = rate_number(*a->weights[m]);
    const int kernel = p.gemv ? R_gemv_mul1_2_1 + 4 * rate + (p.rows == 1 ? 0 : p.rows == 2 ? 1 : p.rows <= 4 ? 2 : 3) : R_gemm_mul1_2 + rate;
    if (const int status = start(kernel, groups, p.splits * p.row_tiles, q, stream)) return status;
  }
  return EXL3_OK;
}

static int linear(const exl3_linear_args* a, void* stream) {
  if (const int status = portable::check_linear(a)) return status;
  if (a->rows <= 0) return EXL3_OK;
  const Device* d = device();
  if (!d) return EXL3_UNSUPPORTED;
  for (int first = 0; first < a->rows;) {
    const Plan p = plan_rows(a, *d, a->rows - first);
    if (a->workspace_bytes < p.bytes) return refuse(EXL3_BAD_ARGUMENT, "linear: the workspace is too small");
    if ((int64_t)p.groups * p.row_tiles > kCounters) return refuse(EXL3_UNSUPPORTED, "linear: %d columns are too many for one call", p.groups * 128);
    if (const int status = multiply_rows(a, p, first, stream)) return status;
    first += p.rows;
  }
  return EXL3_OK;
}

// ------------------------------------------------------------------------------------------------ attention
struct AttentionPlan {
  int queries, chunks, splits, tokens;  // tokens of one launch
  int64_t bytes;
};
static AttentionPlan plan_attention(const exl3_attention_args* a, const Device& d) {
  AttentionPlan p{};
  p.queries = a->cache.head_dim <= 128 ? 4 : a->cache.head_dim <= 256 ? 2 : 1;
  p.chunks = (int)parts(a->heads / a->cache.kv_heads, p.queries);
  const int64_t blocks = (int64_t)a->cache.kv_heads * p.chunks;
  p.tokens = (int)clamp(kCounters / blocks, 1, 256);
  if (p.tokens > a->tokens) p.tokens = a->tokens > 0 ? a->tokens : 1;
  p.splits = (int)clamp(d.multiprocessors * 8 / (blocks * p.tokens), 1, 64);
  p.bytes = 65536 + (int64_t)p.tokens * a->heads * p.splits * (a->cache.head_dim + 2) * 4;
  return p;
}
// Prefill takes what it can of steps with this many tokens: a block has 4 warps (2 for wide heads) of 16 queries each, heads first.
constexpr int kPrefillTokens = 16;
static int prefill_warps(const exl3_attention_args* a) { return a->cache.head_dim <= 128 ? 4 : 2; }
static int prefill_heads(const exl3_attention_args* a) {
  const int each = a->heads / a->cache.kv_heads, warps = prefill_warps(a);
  return each >= warps ? warps : each >= 2 ? 2 : 1;
}
static rdna::TokenGroups prefill_groups(const exl3_attention_args* a, const Device& d) {
  const bool some = a->tokens >= kPrefillTokens && a->cache.head_dim <= (d.matrix_products ? 256 : 128);
  return {a->token_row, a->tokens, some ? 16 * prefill_warps(a) / prefill_heads(a) : 0};
}
static int prefill(const exl3_attention_args* a, const rdna::TokenGroups& groups, void* stream) {
  const rdna::PrefillArgs block{*a, groups, prefill_heads(a)};
  const int kernel = a->cache.head_dim <= 64 ? R_prefill_64 : a->cache.head_dim <= 128 ? R_prefill_128 : R_prefill_256;
  return start(kernel, a->cache.kv_heads * parts(a->heads / a->cache.kv_heads, block.block_heads), parts(a->tokens, groups.size), block, stream);
}
static int64_t attention_workspace(const exl3_attention_args* a) {
  const Device* d = device();
  if (portable::check_attention(a) || !d) return -1;
  return plan_attention(a, *d).bytes;
}
static int attention(const exl3_attention_args* a, void* stream) {
  if (const int status = portable::check_attention(a)) return status;
  if (a->tokens <= 0) return EXL3_OK;
  const Device* d = device();
  if (!d) return EXL3_UNSUPPORTED;
  const AttentionPlan p = plan_attention(a, *d);
  if (a->workspace_bytes < p.bytes) return refuse(EXL3_BAD_ARGUMENT, "attention: the workspace is too small");
  if ((int64_t)a->cache.kv_heads * p.chunks > kCounters) return refuse(EXL3_UNSUPPORTED, "attention: %d heads are too many", a->heads);
  const int kernel = a->cache.head_dim <= 128 ? R_attention_128 : a->cache.head_dim <= 256 ? R_attention_256 : R_attention_512;
  const rdna::TokenGroups groups = prefill_groups(a, *d);
  if (groups.size)
    if (const int status = prefill(a, groups, stream)) return status;
  return portable::in_row_chunks(a->tokens, p.tokens, [&](int first, int tokens) {
    rdna::AttentionArgs block{*a, (float*)((char*)a->workspace + 65536), (int*)a->workspace, p.splits, first, groups};
    block.a.tokens = tokens;
    block.a.q = advance(a->q, first * a->q_stride, a->dtype);
    block.a.y = advance(a->y, first * a->y_stride, a->dtype);
    block.a.positions += first;
    block.a.token_row += first;
    return start(kernel, (int64_t)a->cache.kv_heads * p.chunks * p.splits, tokens, block, stream);
  });
}

// ------------------------------------------------------------------------------------------------ encoder
static int64_t nodes_of(int k2) { return (int64_t)1 << (16 - k2 / 2); }
// Tiles of one launch: enough for the card, in at most 256 MiB of history.
static int encode_tiles(const exl3_encode_args* a) {
  return (int)clamp(((int64_t)256 << 20) / (256 * nodes_of(a->k2)), 1, a->tiles_count > 0 ? a->tiles_count : 1);
}
static int64_t encode_tile_bytes(int k2) { return nodes_of(k2) * (256 + 8); }
static int64_t encode_workspace(const exl3_encode_args* a) { return encode_tiles(a) * encode_tile_bytes(a->k2); }
static int encode(const exl3_encode_args* a, void* stream) {
  if (!portable::known_rate(a->k2) || (a->k2 % 2 && a->codebook != EXL3_MUL1))
    return refuse(EXL3_UNSUPPORTED, "encode: rate K = %g does not exist for this codebook", a->k2 / 2.0);
  if (a->seam_window % 2 || a->seam_window < 0 || a->seam_window > 256)
    return refuse(EXL3_BAD_ARGUMENT, "encode: seam_window %d must be even, 0 to 256", a->seam_window);
  if (a->workspace_bytes < encode_workspace(a)) return refuse(EXL3_BAD_ARGUMENT, "encode: the workspace is too small");
  const int chunk = encode_tiles(a);
  return portable::in_row_chunks(a->tiles_count, chunk, [&](int first, int tiles) {
    rdna::EncodeArgs block{};
    block.tiles = a->tiles + (int64_t)first * 256;
    block.states = a->states + (int64_t)first * 256;
    block.values = a->values ? a->values + (int64_t)first * 256 : nullptr;
    block.nodes = (int)nodes_of(a->k2);
    block.costs = (float*)a->workspace;
    block.history = (uint8_t*)a->workspace + (int64_t)chunk * 2 * block.nodes * 4;
    block.k2 = a->k2;
    block.codebook = a->codebook;
    block.multiplier = a->multiplier;
    block.seam_window = a->seam_window ? a->seam_window : 256;
    return start(R_encode, tiles, 1, block, stream);
  });
}

// ------------------------------------------------------------------------------------------------ the table
static const char* describe(int index) {
  static thread_local char text[200];
  const Device* d = device(index);
  if (!d) return nullptr;
  int version = 0;
  hip::api(nullptr)->RuntimeGetVersion(&version);
  snprintf(text, sizeof text, "%s, gfx%d.%d, %d compute units, ROCm %d.%d, %s", d->name, d->major, d->minor, d->multiprocessors, version / 10000000,
           version / 100000 % 100, d->matrix_products ? "matrix products (WMMA)" : "dot products");
  return text;
}

static exl3_backend make_table() {
  exl3_backend b{};
  b.abi = EXL3_ABI;
  b.bytes = sizeof(exl3_backend);
  b.name = "rocm";
  b.build = EXL3_ROCM_COMPILER ", architectures " EXL3_ROCM_ARCH_TEXT;
  b.last_error = last_error;
  b.describe = describe;
  b.repack_bytes = [](const exl3_weight*) { return (int64_t)0; };
  b.linear_workspace = linear_workspace;
  b.attention_workspace = attention_workspace;
  b.sample_workspace = portable::sample_workspace;
  b.encode_workspace = encode_workspace;
  b.linear = linear;
  b.attention = attention;
  b.encode = encode;
  b.dense = portable::dense;
  b.reconstruct = portable::reconstruct;
  b.rotate = portable::rotate;
  b.rms_norm = portable::rms_norm;
  b.rotary_table = portable::rotary_table;
  b.rotary = portable::rotary;
  b.cache_append = portable::cache_append;
  b.cache_read = portable::cache_read;
  b.act_mul = portable::act_mul;
  b.embedding = portable::embedding;
  b.add = portable::add;
  b.softcap = portable::softcap;
  b.sample = portable::sample;
  b.attend = [](const exl3_attend_args* a, void* stream) { return attend_in_three(a, stream, portable::rotary, portable::cache_append, attention); };
  return b;
}

}  // namespace exl3

EXL3_EXPORT const exl3_backend* exl3_get_backend(void) {
  static const exl3_backend table = exl3::make_table();
  return &table;
}
