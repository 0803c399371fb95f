// The input of the product: norm, scales, rotation, quantization to operands.
#pragma once
#include "../cpp/gpu/numbers.h"
#include "even.h"
#include "ptx.cuh"

namespace exl3::even {

// hadamard128 of cpp/gpu/numbers.h with one multiply-add for each shuffle; `signs`: +1 or -1 by the bits of the lane.
struct LaneSigns {
  float of_bit[5];
  __device__ __forceinline__ LaneSigns() {
#pragma unroll
    for (int b = 0; b < 5; b++) of_bit[b] = threadIdx.x >> b & 1 ? -1.f : 1.f;
  }
};
__device__ __forceinline__ void quick_hadamard128(float (&v)[4], const LaneSigns& signs) {
  const float s0 = v[0] + v[1], d0 = v[0] - v[1], s1 = v[2] + v[3], d1 = v[2] - v[3];
  v[0] = s0 + s1;
  v[1] = d0 + d1;
  v[2] = s0 - s1;
  v[3] = d0 - d1;
#pragma unroll
  for (int b = 0; b < 5; b++)
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = fmaf(v[e], signs.of_bit[b], __shfl_xor_sync(~0u, v[e], 1 << b));
}

struct InputSpace {
  float squares[kWarps];
  int largest[kWarps];
};

// The power of two that brings the largest of a row to 256 .. 512: exact, and far from both ends of fp16. Returned as an exponent.
__device__ __forceinline__ int half_shift(float largest) {
  const int exponent = largest > 0.f && largest < 3e38f ? ((__float_as_int(largest) >> 23) & 255) - 127 : 0;
  return max(-126, min(126, 8 - exponent));
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Four values of one lane of a rotated block of 128 become operands: lane l holds inputs 4(l%4) .. +3 of row of tiles l/4; each pair of
// them goes to one word. `out`: the block's image. Returns the block's sum.
__device__ __forceinline__ float store_operands(const EvenParams& p, const float (&v)[4], float factor, uint8_t* out, int column) {
  const int lane = threadIdx.x % 32, c = lane % 4;
  out += ((lane / 4) * p.columns + column) * 32 + (c >> 1) * 4;
  float sum = 0.f;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const __half2 h = __floats2half2_rn(v[2 * half] * factor, v[2 * half + 1] * factor);
    sum += __low2float(h) + __high2float(h);
    *(__half2*)(out + (2 * (c & 1) + half) * 8) = h;
  }
  return warp_sum(sum);
}

// Four values as they lie in memory, half precision in the first two words.
static __device__ __noinline__ uint4 load_raw_slowly(const void* x, int i, int n, int dtype) {
  float v[4];
  load4(x, i, n, dtype, v);
  if (dtype != EXL3_F32) {
    uint16_t h[4];
    for (int e = 0; e < 4; e++) store(h, e, dtype, v[e]);
    return make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, 0, 0);
  }
  return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}
__device__ __forceinline__ uint4 load_raw(const char* x, int i, int n, int dtype, bool plain) {
  if (!plain) return load_raw_slowly(x, i, n, dtype);
  if (dtype == EXL3_F32) return *(const uint4*)(x + i * 4);
  const uint2 h = *(const uint2*)(x + i * 2);
  return make_uint4(h.x, h.y, 0, 0);
}
__device__ __forceinline__ void from_raw(const uint4& raw, int dtype, float (&v)[4]) {
  if (dtype == EXL3_F16) {
    const float2 a = __half22float2(*(const __half2*)&raw.x), b = __half22float2(*(const __half2*)&raw.y);
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
    return;
  }
  const bool wide = dtype == EXL3_F32;
  v[0] = __uint_as_float(wide ? raw.x : raw.x << 16);
  v[1] = __uint_as_float(wide ? raw.y : raw.x & 0xffff0000);
  v[2] = __uint_as_float(wide ? raw.z : raw.y << 16);
  v[3] = __uint_as_float(wide ? raw.w : raw.y & 0xffff0000);
}
__device__ __forceinline__ float4 load_norm(const float* w, int i, int n) {
  if (i + 4 <= n && ((uintptr_t)(w + i) & 15) == 0) return *(const float4*)(w + i);
  return make_float4(i < n ? w[i] : 0.f, i + 1 < n ? w[i + 1] : 0.f, i + 2 < n ? w[i + 2] : 0.f, i + 3 < n ? w[i + 3] : 0.f);
}

// Norm, scales, rotation, operands: block (row, rotation). Also the row's scale and running sums. The norm's factor goes to the scale.
static __global__ void __launch_bounds__(kWarps * 32, 2) prepare_even(const __grid_constant__ EvenParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ InputSpace space;
  float* sums = (float*)shared;
  const int row = blockIdx.x, rotation = blockIdx.y;
  const uint16_t* suh = p.matrix[rotation].suh;
  const int pass = row / p.columns, column = row - pass * p.columns;
  uint8_t* image = p.image + rotation * p.image_stride + (int64_t)pass * p.blocks * 8 * p.columns * 32;
  ptx::launch_dependents();
  for (int i = threadIdx.x; i < p.blocks * 2; i += kWarps * 32) ptx::prefetch(suh + i * 64);  // a weight: early
  ptx::wait_for_previous();
  constexpr int kBatch = 4, kHeld = kBatch * kWarps;  // blocks whose loads are under way together; so many stay in registers
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const char* x = (const char*)row_of(p.x, (int64_t)row * p.x_stride, p.x_dtype);
  const bool plain = p.in_features % 128 == 0 && ((uintptr_t)x & 15) == 0;
  const LaneSigns lane_signs;
  float v[kBatch][4], squares = 0.f;
  int most = 0;  // magnitudes as integers: they order alike, and a NaN is the largest, so that it is not lost
  auto rotate = [&](int first) {
    constexpr int kTogether = 2;  // loads under way
#pragma unroll
    for (int k0 = 0; k0 < kBatch; k0 += kTogether) {
      uint4 raw[kTogether];
      float4 w[kTogether];
      uint2 signs[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; k++) {
        const int b = first + warp + (k0 + k) * kWarps;
        if (b >= p.blocks) break;
        const int i = b * 128 + 4 * lane;
        raw[k] = load_raw(x, i, p.in_features, p.x_dtype, plain);
        if (p.norm_weight) w[k] = load_norm(p.norm_weight, i, p.in_features);
        signs[k] = *(const uint2*)(suh + i);
      }
#pragma unroll
      for (int k = 0; k < kTogether; k++) {
        if (first + warp + (k0 + k) * kWarps >= p.blocks) break;
        float (&to)[4] = v[k0 + k];
        from_raw(raw[k], p.x_dtype, to);
        if (p.norm_weight) {
#pragma unroll
          for (int e = 0; e < 4; e++) squares += to[e] * to[e];
          to[0] *= w[k].x;
          to[1] *= w[k].y;
          to[2] *= w[k].z;
          to[3] *= w[k].w;
        }
        const float2 low = __half22float2(*(const __half2*)&signs[k].x), high = __half22float2(*(const __half2*)&signs[k].y);
        to[0] *= low.x;
        to[1] *= low.y;
        to[2] *= high.x;
        to[3] *= high.y;
        quick_hadamard128(to, lane_signs);
#pragma unroll
        for (int e = 0; e < 4; e++) most = max(most, __float_as_int(to[e]) & 0x7fffffff);  // 1/sqrt(128) goes to the scale
      }
    }
  };
#pragma unroll 1
  for (int first = 0; first < p.blocks; first += kHeld) rotate(first);
  most = ptx::warp_most(most);
  if (p.norm_weight) squares = warp_sum(squares);
  if (lane == 0) {
    space.largest[warp] = most;
    space.squares[warp] = squares;
  }
  __syncthreads();
  float norm = HADAMARD128_SCALE;
  squares = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    most = max(most, space.largest[w]);
    squares += space.squares[w];
  }
  if (p.norm_weight) norm *= rsqrtf(squares / (float)p.in_features + p.norm_eps);
  const int shift = half_shift(__int_as_float(most)), block_bytes = 8 * p.columns * 32;
  for (int first = 0; first < p.blocks; first += kHeld) {
    if (p.blocks > kHeld) rotate(first);
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      const int at = first + warp + k * kWarps;
      if (at >= p.blocks) break;
      const float sum = store_operands(p, v[k], power_of_two(shift), image + (int64_t)at * block_bytes, column);
      if (lane == 0) sums[at] = sum;
    }
  }
  __syncthreads();
  if (warp > 0) return;
  // running sums: a lane has some blocks one after the other, and what the lanes before have together
  const int each = (p.blocks + 31) / 32, first = min(lane * each, p.blocks), last = min(first + each, p.blocks);
  float mine = 0.f;
  for (int b = first; b < last; b++) mine += sums[b];
  float before = mine;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const float other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  before = __shfl_up_sync(~0u, before, 1);
  if (lane == 0) before = 0.f;
  RunningSum* out = p.sums + ((int64_t)rotation * p.all_rows + row) * (p.blocks + 1);
  const float scale = norm * power_of_two(-shift);
  for (int b = first; b < last; b++) {
    out[b] = {scale, before};
    before += sums[b];
  }
  if (last == p.blocks && first < last) out[last] = {scale, before};
}

}  // namespace exl3::even
