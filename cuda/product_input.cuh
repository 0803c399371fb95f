// The input of the product of few rows: rotation and quantization, by the product itself or a kernel before it.
//
// Each kScaleBlocks blocks of 128 inputs have a scale of their own, so warps need nothing of one another and a row's operands depend on
// nothing but the row. The norm's factor is one for the row: it is applied to the results.
#pragma once
#include "product.h"
#include "rotate.cuh"
#include "stamps.cuh"

namespace exl3 {

// What a chunk is multiplied by before it is turned: suh, and the norm's weights. Loads under way, nothing waits for them before they are used.
struct ChunkWeights {
  uint2 suh[kScaleBlocks];
  float4 norm[kScaleBlocks];
  __device__ __forceinline__ void load(const ProductParams& p, const uint16_t* from, int chunk) {
#pragma unroll
    for (int k = 0; k < kScaleBlocks; k++) {
      const int b = min(chunk * kScaleBlocks + k, p.blocks - 1), i = b * 128 + 4 * (threadIdx.x % 32);
      suh[k] = *(const uint2*)(from + i);
      norm[k] = p.norm_weight ? load_norm(p.norm_weight, i, p.in_features) : make_float4(1.f, 1.f, 1.f, 1.f);
    }
  }
  // Rounded, so that the next sum can't take a product in: whoever rotates a row, its operands have the same bits.
  __device__ __forceinline__ void apply(int k, float (&v)[4]) const {
    const float2 low = __half22float2(*(const __half2*)&suh[k].x), high = __half22float2(*(const __half2*)&suh[k].y);
    v[0] = __fmul_rn(v[0], low.x * norm[k].x), v[1] = __fmul_rn(v[1], low.y * norm[k].y);
    v[2] = __fmul_rn(v[2], high.x * norm[k].z), v[3] = __fmul_rn(v[3], high.y * norm[k].w);
  }
};

// A chunk of a row: loads under way, and their values.
struct RawChunk {
  uint4 of[kScaleBlocks];
  __device__ __forceinline__ void load(const ProductParams& p, int row, int chunk) {
    const char* x = (const char*)row_of(p.x, (int64_t)row * p.x_stride, p.x_dtype);
    const bool plain = p.in_features % 128 == 0 && ((uintptr_t)x & 15) == 0;
#pragma unroll
    for (int k = 0; k < kScaleBlocks; k++) {
      const int b = chunk * kScaleBlocks + k, i = b * 128 + 4 * (threadIdx.x % 32);
      of[k] = make_uint4(0, 0, 0, 0);
      if (b < p.blocks) of[k] = load_raw(x, i, p.in_features, p.x_dtype, plain);
    }
  }
  __device__ __forceinline__ void get(const ProductParams& p, float (&v)[kScaleBlocks][4]) const {
#pragma unroll
    for (int k = 0; k < kScaleBlocks; k++) from_raw(of[k], p.x_dtype, v[k]);
  }
};
__device__ __forceinline__ float squares_of(const float (&v)[kScaleBlocks][4]) {
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kScaleBlocks; k++)
#pragma unroll
    for (int e = 0; e < 4; e++) sum = fmaf(v[k][e], v[k][e], sum);
  return warp_sum(sum);
}

// One warp: turns a chunk of one row and writes its operands (`image`: of the chunk) and scale.
template <int MODE>
__device__ __forceinline__ void rotate_chunk(const ProductParams& p, const ChunkWeights& w, int row, int chunk, float (&v)[kScaleBlocks][4],
                                             uint8_t* image, float* scale) {
  const int lane = threadIdx.x % 32, c = lane % 4;
  const LaneSigns signs;
  int most = 0;  // magnitudes as integers: they order alike, and a NaN is the largest, so that it is not lost
#pragma unroll
  for (int k = 0; k < kScaleBlocks; k++) {
    w.apply(k, v[k]);  // zeros where there is no block
    quick_hadamard128(v[k], signs);
#pragma unroll
    for (int e = 0; e < 4; e++) most = max(most, __float_as_int(v[k][e]) & 0x7fffffff);
  }
  const float largest = __int_as_float(ptx::warp_most(most));
  const bool two = p.planes == 2;
  const float unit = two ? 32512.f : 127.f;
  const float factor = MODE != kBytes ? power_of_two(half_shift(largest)) : largest > 1e-30f ? __fdividef(unit, largest) : 0.f;
  // lane l holds inputs 4(l%4) .. +3 of row of tiles l/4 of a block; each pair of them goes to one word
#pragma unroll
  for (int k = 0; k < kScaleBlocks; k++) {
    if (chunk * kScaleBlocks + k >= p.blocks) break;
    uint8_t* out = image + (int64_t)(k * 8 + lane / 4) * p.row_bytes;
    if constexpr (MODE == kBytes) {
      // a number in the last bits of 1.5 * 2^23 + it; its low byte, as a signed one, and what is left to round to the high one
      uint32_t low[4], high[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        low[e] = __float_as_uint(fmaf(v[k][e], factor, 12582912.f));
        high[e] = low[e] + 128;
      }
      out += row * 32 + 8 * (c & 1) + 2 * (c >> 1);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint16_t low_bytes = (uint16_t)__byte_perm(low[2 * half], low[2 * half + 1], 0x40);
        *(uint16_t*)(out + 4 * half) = two ? (uint16_t)__byte_perm(high[2 * half], high[2 * half + 1], 0x51) : low_bytes;
        *(uint16_t*)(out + 16 + 4 * half) = two ? low_bytes : 0;
      }
    } else {
      out += row * 32 + 16 * (c & 1) + 4 * (c >> 1);
#pragma unroll
      for (int half = 0; half < 2; half++)
        *(__half2*)(out + 8 * half) = __floats2half2_rn(v[k][2 * half] * factor, v[k][2 * half + 1] * factor);
    }
  }
  // of a high plane's unit, 256 of the low one's
  const float worth = MODE != kBytes ? power_of_two(-half_shift(largest)) : largest * (1.f / 32512.f);
  if (lane == 0) *scale = HADAMARD128_SCALE * worth;
}

// The factor of the norm of one row, by one warp.
__device__ __forceinline__ float norm_factor(const ProductParams& p, const float* squares, int row) {
  float sum = 0.f;
  for (int i = threadIdx.x % 32; i < chunks_of(p); i += 32) sum += squares[i * kRows + row];
  return rsqrtf(warp_sum(sum) / (float)p.in_features + p.norm_eps);
}

constexpr int kPrepareWarps = 4;
// Rotation as a kernel of its own: a warp each chunk; block (chunks, row, rotation).
template <int MODE>
__global__ void __launch_bounds__(kPrepareWarps * 32) prepare_input(const __grid_constant__ ProductParams p) {
  ptx::launch_dependents();
  const int chunk = blockIdx.x * kPrepareWarps + threadIdx.x / 32, row = blockIdx.y, rotation = blockIdx.z, chunks = chunks_of(p);
  ChunkWeights weights;
  if (chunk < chunks) weights.load(p, p.matrix[rotation].suh, chunk);
  ptx::wait_for_previous();
  if (chunk >= chunks) return;
  float v[kScaleBlocks][4];
  RawChunk raw;
  raw.load(p, row, chunk);
  raw.get(p, v);
  if (p.norm_weight && rotation == 0) {
    const float squares = squares_of(v);
    if (threadIdx.x % 32 == 0) p.squares[chunk * kRows + row] = squares;
  }
  const int64_t chunk_bytes = (int64_t)kScaleBlocks * 8 * p.row_bytes, all = (int64_t)p.blocks * 8 * p.row_bytes;
  rotate_chunk<MODE>(p, weights, row, chunk, v, p.image + rotation * all + chunk * chunk_bytes, p.scales + (rotation * chunks + chunk) * kRows + row);
}

}  // namespace exl3
