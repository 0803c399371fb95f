// The portable kernels for NVIDIA cards.
#include <stdarg.h>
#include <stdio.h>

#include "device.h"

#include "../cpp/gpu/plan.h"

namespace exl3::portable {

#define X(name, args, threads, body) \
  GPU_KERNEL(threads) k_##name(const __grid_constant__ args a) { body(a); }
EXL3_PORTABLE_KERNELS(X)
#undef X

static const void* const kernels[] = {
#define X(name, args, threads, body) (const void*)k_##name,
    EXL3_PORTABLE_KERNELS(X)
#undef X
};

int refuse(exl3_status status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  char text[400];
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  return exl3::refuse(status, "%s", text);
}
int launch(Kernel kernel, unsigned grid_x, unsigned grid_y, const void* block, int, void* stream) {
  return exl3::launch(kernels[kernel], dim3(grid_x, grid_y), entries[kernel].threads, 0, 1, block, (cudaStream_t)stream, entries[kernel].name);
}

void fill(exl3_backend& b) {
  b.sample_workspace = sample_workspace;
  b.dense = dense;
  b.rotate = rotate;
  b.rotary_table = rotary_table;
  b.embedding = embedding;
  b.add = add;
  b.softcap = softcap;
  b.sample = sample;
}
int64_t plain_linear_workspace(const exl3_linear_args* a) { return linear_workspace(a); }
int plain_linear(const exl3_linear_args* a, void* stream) { return linear(a, stream); }
int plain_reconstruct(const exl3_reconstruct_args* a, void* stream) { return reconstruct(a, stream); }
int few_rms_norm(const exl3_rms_norm_args* a, void* stream) { return rms_norm(a, stream); }
int few_rotary(const exl3_rotary_args* a, void* stream) { return rotary(a, stream); }
int few_act_mul(const exl3_act_mul_args* a, void* stream) { return act_mul(a, stream); }
int few_cache_read(const exl3_cache_read_args* a, void* stream) { return cache_read(a, stream); }
int few_cache_append(const exl3_cache_append_args* a, void* stream) { return cache_append(a, stream); }
int plain_attention(const exl3_attention_args* a, void* stream) { return attention_plain(a, stream); }
int checked_linear(const exl3_linear_args* a) { return check_linear(a); }
int checked_weight(const char* op, const exl3_weight* w) { return check_weight(op, w); }
int checked_cache(const char* op, const exl3_cache_layer& c) { return check_cache(op, c); }
int checked_attention(const exl3_attention_args* a) { return check_attention(a); }

}  // namespace exl3::portable
