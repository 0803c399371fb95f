// What the kernels that rotate an input share: loads, the Hadamard transform of 128 values, powers of two as scales.
#pragma once
#include "../cpp/gpu/numbers.h"
#include "ptx.cuh"

namespace exl3 {

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

// The power of two that brings the largest of a row to 256 .. 512: exact, and far from both ends of fp16. Returned as an exponent.
__device__ __forceinline__ int half_shift(float largest) {
  const int exponent = largest > 0.f && largest < 3e38f ? ((__float_as_int(largest) >> 23) & 255) - 127 : 0;
  return max(-126, min(126, 8 - exponent));
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

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

}  // namespace exl3
