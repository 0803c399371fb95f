// A step's own heads on their way through the decode kernel: norm and rotation of queries and keys, and their place in the cache.
//
// Every block that reads a new position has appended it itself before, so no block waits for another: those that share a position write
// the same bits.
#pragma once
#include "attention_fetch.cuh"

#include "../cpp/gpu/cache.h"
#include "../cpp/gpu/rotary.h"

namespace exl3 {

// A head in a warp: lane l holds values l, l + 32 ...
template <int D>
struct Head {
  float v[D / 32], cos[D / 32], sin[D / 32];
};
template <int D>
__device__ __forceinline__ void load_head(Head<D>& h, const AttentionParams& p, const void* x, int64_t at, int token, int lane) {
  if (p.a.dtype == EXL3_F32) {
    const float* from = (const float*)x + at + lane;
#pragma unroll
    for (int g = 0; g < D / 32; g++) h.v[g] = from[g * 32];
  } else {
    const uint16_t* from = (const uint16_t*)x + at + lane;
    uint16_t raw[D / 32];
#pragma unroll
    for (int g = 0; g < D / 32; g++) raw[g] = from[g * 32];
#pragma unroll
    for (int g = 0; g < D / 32; g++) h.v[g] = p.a.dtype == EXL3_F16 ? half_to_float(raw[g]) : bfloat_to_float(raw[g]);
  }
  const AttentionFresh& f = p.fresh;
  if (!f.cos) return;
  const int half = f.rotary_dim / 2;
  const float *cos = f.cos + (int64_t)token * half, *sin = f.sin + (int64_t)token * half;
#pragma unroll
  for (int g = 0; g < D / 32; g++) {
    const int i = g * 32 + lane;
    if (i >= f.rotary_dim) continue;
    const int of = f.interleaved ? i / 2 : i < half ? i : i - half;
    h.cos[g] = cos[of];
    h.sin[g] = sin[of];
  }
}
__device__ __forceinline__ float rounded(float v, int dtype) {
  return dtype == EXL3_F32 ? v : dtype == EXL3_F16 ? half_to_float(float_to_half(v)) : bfloat_to_float(float_to_bfloat(v));
}
// As the kernel `rotary` does it, rounded to the data type. space: D floats of this warp.
template <int D>
__device__ __forceinline__ void rotate_head(Head<D>& h, const AttentionParams& p, const float* norm, float* space, int lane) {
  const AttentionFresh& f = p.fresh;
  if (norm) {
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < D / 32; g++) sum += h.v[g] * h.v[g];
    const float scale = 1.f / root(warp_sum(sum) / (float)D + f.eps);
#pragma unroll
    for (int g = 0; g < D / 32; g++) h.v[g] *= scale * norm[g * 32 + lane];
  }
  if (f.cos) {
    const int half = f.rotary_dim / 2;
    __syncwarp();
#pragma unroll
    for (int g = 0; g < D / 32; g++) space[g * 32 + lane] = h.v[g];
    __syncwarp();
#pragma unroll
    for (int g = 0; g < D / 32; g++) {
      const int i = g * 32 + lane;
      if (i >= f.rotary_dim) continue;
      const bool second = f.interleaved ? i & 1 : i >= half;
      h.v[g] = rotated(h.v[g], space[f.interleaved ? i ^ 1 : second ? i - half : i + half], h.cos[g], h.sin[g], second);
    }
  }
  if (norm || f.cos)
#pragma unroll
    for (int g = 0; g < D / 32; g++) h.v[g] = rounded(h.v[g], p.a.dtype);
}

// How many tokens of the step stand directly before `token` in its row.
__device__ __forceinline__ int tokens_before(const exl3_attention_args& a, int token, int row, int position, int lane) {
  int count = 0;
  for (; count < 64; count += 32) {
    const int back = count + lane + 1;
    const bool follows = back <= token && a.token_row[token - back] == row && a.positions[token - back] == position - back;
    const unsigned all = __ballot_sync(~0u, follows);
    if (all != ~0u) return count + __ffs((int)~all) - 1;
  }
  return count;
}

// Appends groups `part`, part + parts ... of one side (0 keys, 1 values) of a token's head. One warp.
template <int D>
__device__ __forceinline__ void append_head(const AttentionParams& p, const exl3_cache_layer& c, int side, int bits, int token, int row,
                                            int position, int kv_head, int part, int parts, float* space, int lane) {
  const AttentionFresh& f = p.fresh;
  const int64_t page = p.a.block_table[(int64_t)row * p.a.table_stride + position / EXL3_PAGE];
  Head<D> h;
  load_head(h, p, side ? f.v : f.k, token * (side ? f.v_stride : f.k_stride) + (int64_t)kv_head * D, token, lane);
  if (side == 0) rotate_head(h, p, f.k_norm, space, lane);
  const int64_t place = page * EXL3_PAGE + position % EXL3_PAGE;
  __syncwarp();
#pragma unroll
  for (int g = 0; g < D / 32; g++) space[g * 32 + lane] = h.v[g];
#pragma unroll 1
  for (int g = part; g < D / 32; g += parts) store_group(c, side, bits, place, c.kv_heads * (D / 32), kv_head * (D / 32) + g, space[g * 32 + lane]);
}

}  // namespace exl3
