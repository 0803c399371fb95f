// The input of the product of many rows: norm, scales, rotation, and halves in the order in which the tensor cores read them.
#pragma once
#include "wide.cuh"

namespace exl3 {

constexpr int kInputsWarp = 512;  // a warp takes four blocks of 128 inputs, a lane 16 inputs of one

// Threads of a block of prepare_wide: a warp each 512 inputs, as far as there are so many.
inline int prepare_threads(int inputs) {
  const int warps = (inputs + kInputsWarp - 1) / kInputsWarp;
  return 32 * (warps < 32 ? warps : 32);
}

#ifdef __CUDACC__
// Over all threads of a block; space: a float a warp.
template <class F>
__device__ __forceinline__ float over_block(float v, float* space, int warps, F f) {
  for (int m = 16; m; m >>= 1) v = f(v, __shfl_xor_sync(~0u, v, m));
  __syncthreads();
  if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = v;
  __syncthreads();
  v = space[0];
  for (int w = 1; w < warps; w++) v = f(v, space[w]);
  return v;
}

// Unscaled 128-point Hadamard transform over eight lanes of 16 values each.
__device__ __forceinline__ void turn16(float (&v)[16], int lane) {
#pragma unroll
  for (int step = 1; step < 16; step <<= 1)
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (!(i & step)) {
        const float a = v[i], b = v[i | step];
        v[i] = a + b;
        v[i | step] = a - b;
      }
#pragma unroll
  for (int m = 1; m < 8; m <<= 1) {
    const float sign = lane & m ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], m));
  }
}

// 16 values from i on; those at or past n are zero.
__device__ __forceinline__ void load16(const void* p, int i, int n, int dtype, float (&v)[16]) {
  if (dtype != EXL3_F32 && i + 16 <= n && ((uintptr_t)row_of(p, i, dtype) & 15) == 0) {
    const uint4* from = (const uint4*)row_of(p, i, dtype);
    const uint4 a = from[0], b = from[1];
    const uint32_t h[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 8; e++) {
      v[2 * e] = dtype == EXL3_F16 ? half_to_float((uint16_t)h[e]) : bfloat_to_float((uint16_t)h[e]);
      v[2 * e + 1] = dtype == EXL3_F16 ? half_to_float((uint16_t)(h[e] >> 16)) : bfloat_to_float((uint16_t)(h[e] >> 16));
    }
  } else {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      float f[4];
      load4(p, i + 4 * q, n, dtype, f);
#pragma unroll
      for (int e = 0; e < 4; e++) v[4 * q + e] = f[e];
    }
  }
}

// One block a row and rotation. Rows of more inputs than its warps hold at once are read again for what is beyond.
static __global__ void __launch_bounds__(1024) prepare_wide(const __grid_constant__ WideParams p) {
  __shared__ float space[32];
  ptx::launch_dependents();
  const int row = blockIdx.x, rotation = blockIdx.y, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const void* x = row_of(p.x, (int64_t)row * p.x_stride, p.x_dtype);
  const int inputs = p.steps * 64, first = threadIdx.x * 16, stride = blockDim.x * 16;
  auto add = [](float a, float b) { return a + b; };
  // weights may be read before the kernel before has ended
  if (threadIdx.x % 4 == 0 && first < inputs) ptx::prefetch(p.matrix[rotation].suh + first);
  if (threadIdx.x % 2 == 0 && p.norm_weight && first < p.in_features) ptx::prefetch(p.norm_weight + first);
  ptx::wait_for_previous();
  float held[16];
  load16(x, first, p.in_features, p.x_dtype, held);
  float norm = 1.f;
  if (p.norm_weight) {
    float sum = 0.f;
    auto square = [&](const float(&v)[16]) {
#pragma unroll
      for (int e = 0; e < 16; e++) sum = fmaf(v[e], v[e], sum);
    };
    square(held);
    for (int i = first + stride; i < inputs; i += stride) {
      float v[16];
      load16(x, i, p.in_features, p.x_dtype, v);
      square(v);
    }
    norm = rsqrtf(over_block(sum, space, warps, add) / (float)p.in_features + p.norm_eps);
  }
  auto rotate = [&](int i, float(&v)[16]) {  // all lanes of a warp; beyond the inputs all values are zero
    if (i < inputs) {
      float scale[16];
      load16(p.matrix[rotation].suh, i, inputs, EXL3_F16, scale);
#pragma unroll
      for (int e = 0; e < 16; e++) v[e] *= scale[e];
      if (p.norm_weight) {
        load16(p.norm_weight, i, p.in_features, EXL3_F32, scale);
#pragma unroll
        for (int e = 0; e < 16; e++) v[e] *= norm * scale[e];
      }
    }
    turn16(v, lane);
  };
  auto most = [](const float(&v)[16]) {
    float largest = 0.f;
#pragma unroll
    for (int e = 0; e < 16; e++) largest = fmaxf(largest, fabsf(v[e]));
    return largest;
  };
  rotate(first, held);
  float largest = most(held);
  for (int i = first + stride; i - lane * 16 < inputs; i += stride) {
    float v[16];
    load16(x, i, p.in_features, p.x_dtype, v);
    rotate(i, v);
    largest = fmaxf(largest, most(v));
  }
  largest = over_block(largest, space, warps, [](float a, float b) { return fmaxf(a, b); });
  // a power of two that brings the largest to 256 .. 512; the transform's 1/sqrt(128) goes to the scale
  const int exponent = largest > 0.f && largest < 3e38f ? ((__float_as_int(largest) >> 23) & 255) - 127 : 0;
  const int shift = max(-126, min(126, 8 - exponent));
  const float factor = __int_as_float((127 + shift) << 23);
  const int64_t step_bytes = (int64_t)p.row_tiles * p.tile_rows * 128;
  uint8_t* image = p.image + (int64_t)rotation * p.steps * step_bytes + (int64_t)row * 128;
  float sum = 0.f;
  auto write = [&](int i, const float(&v)[16]) {
    if (i >= inputs) return;
    uint32_t h[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const __half2 two = __floats2half2_rn(v[2 * e] * factor, v[2 * e + 1] * factor);
      sum += __low2float(two) + __high2float(two);
      h[e] = *(const uint32_t*)&two;
    }
    const int piece = i % 64 / 8;  // of 16 bytes
    uint8_t* to = image + i / 64 * step_bytes;
    *(uint4*)(to + (piece ^ (row % 8)) * 16) = make_uint4(h[0], h[1], h[2], h[3]);
    *(uint4*)(to + ((piece + 1) ^ (row % 8)) * 16) = make_uint4(h[4], h[5], h[6], h[7]);
  };
  write(first, held);
  for (int i = first + stride; i - lane * 16 < inputs; i += stride) {
    float v[16];
    load16(x, i, p.in_features, p.x_dtype, v);
    rotate(i, v);
    write(i, v);
  }
  sum = over_block(sum, space, warps, add);
  if (threadIdx.x == 0) p.scales[(int64_t)rotation * p.rows + row] = {__int_as_float((127 - shift) << 23) * HADAMARD128_SCALE, 0, 0, sum};
}
#endif

}  // namespace exl3
