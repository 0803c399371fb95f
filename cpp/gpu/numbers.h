// What the portable kernels share: loads and stores by data type, reductions over a block, the 128-point Hadamard transform, activations.
#pragma once
#include "exl3/gpu.h"
#include "exl3/ops.h"

GPU_FN float load(const void* p, int64_t i, int dtype) {
  if (dtype == EXL3_F32) return ((const float*)p)[i];
  const uint16_t v = ((const uint16_t*)p)[i];
  return dtype == EXL3_F16 ? half_to_float(v) : bfloat_to_float(v);
}
GPU_FN void store(void* p, int64_t i, int dtype, float v) {
  if (dtype == EXL3_F32)
    ((float*)p)[i] = v;
  else
    ((uint16_t*)p)[i] = dtype == EXL3_F16 ? float_to_half(v) : float_to_bfloat(v);
}
GPU_FN void* row_of(void* p, int64_t elements, int dtype) { return (char*)p + elements * (dtype == EXL3_F32 ? 4 : 2); }
GPU_FN const void* row_of(const void* p, int64_t elements, int dtype) { return (const char*)p + elements * (dtype == EXL3_F32 ? 4 : 2); }

// Four consecutive values from i on; those at or past n are zero.
GPU_FN void load4(const void* p, int i, int n, int dtype, float (&v)[4]) {
  if (i + 4 <= n && ((uintptr_t)row_of(p, i, dtype) & (dtype == EXL3_F32 ? 15 : 7)) == 0) {
    if (dtype == EXL3_F32) {
      struct alignas(16) F4 { float v[4]; };
      const F4 f = *(const F4*)((const float*)p + i);
      for (int e = 0; e < 4; e++) v[e] = f.v[e];
    } else {
      struct alignas(8) H4 { uint16_t v[4]; };
      const H4 h = *(const H4*)((const uint16_t*)p + i);
      for (int e = 0; e < 4; e++) v[e] = dtype == EXL3_F16 ? half_to_float(h.v[e]) : bfloat_to_float(h.v[e]);
    }
  } else {
    for (int e = 0; e < 4; e++) v[e] = i + e < n ? load(p, i + e, dtype) : 0.f;
  }
}

// And four to be stored; none at or past n is.
GPU_FN void store4(void* p, int i, int n, int dtype, const float (&v)[4]) {
  if (i + 4 <= n && ((uintptr_t)row_of(p, i, dtype) & (dtype == EXL3_F32 ? 15 : 7)) == 0) {
    if (dtype == EXL3_F32) {
      struct alignas(16) F4 { float v[4]; };
      *(F4*)((float*)p + i) = F4{{v[0], v[1], v[2], v[3]}};
    } else {
      struct alignas(8) H4 { uint16_t v[4]; };
      H4 h;
      for (int e = 0; e < 4; e++) h.v[e] = dtype == EXL3_F16 ? float_to_half(v[e]) : float_to_bfloat(v[e]);
      *(H4*)((uint16_t*)p + i) = h;
    }
  } else {
    for (int e = 0; e < 4 && i + e < n; e++) store(p, i + e, dtype, v[e]);
  }
}

// The sum over all threads of a block, the same bits in every thread; `space` holds one float a warp.
template <int THREADS>
GPU_FN float block_sum(float v, float* space) {
  v = warp_sum(v);
  block_sync();
  if (lane_id() == 0) space[warp_id()] = v;
  block_sync();
  float total = 0.f;
  for (int w = 0; w < THREADS / 32; w++) total += space[w];
  return total;
}

// Unscaled 128-point Walsh-Hadamard transform of one warp: lane l holds values 4l .. 4l+3 (format 4.1 without 1/sqrt(128)).
GPU_FN void hadamard128(float (&v)[4]) {
  const float s0 = v[0] + v[1], d0 = v[0] - v[1], s1 = v[2] + v[3], d1 = v[2] - v[3];
  v[0] = s0 + s1;
  v[1] = d0 + d1;
  v[2] = s0 - s1;
  v[3] = d0 - d1;
  for (int m = 1; m < 32; m <<= 1)
    for (int e = 0; e < 4; e++) {
      const float other = lane_xor(v[e], m);
      v[e] = lane_id() & m ? other - v[e] : v[e] + other;
    }
}
#define HADAMARD128_SCALE 0.08838834764831845f

// The same over 32 lanes, scaled: the rotation of the cache's groups (format 5).
GPU_FN float hadamard32(float v) {
  for (int m = 1; m < 32; m <<= 1) {
    const float other = lane_xor(v, m);
    v = lane_id() & m ? other - v : v + other;
  }
  return v * 0.17677669529663688f;
}

GPU_FN float activate(float x, int activation, const float* params) {
  switch (activation) {
    case EXL3_ACT_SILU: return x / (1.f + fast_exp(-x));
    case EXL3_ACT_GELU: return 0.5f * x * (1.f + error_function(x * 0.70710678118654752f));
    case EXL3_ACT_GELU_TANH: return 0.5f * x * (1.f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case EXL3_ACT_RELU: return x > 0.f ? x : 0.f;
    case EXL3_ACT_RELU2: return x > 0.f ? x * x : 0.f;
    case EXL3_ACT_XIELU: {
      const float alpha_p = params[0], alpha_n = params[1], beta = params[2], eps = params[3];
      return x > 0.f ? alpha_p * x * x + beta * x : (exp_minus_one(x < eps ? x : eps) - x) * alpha_n + beta * x;
    }
    default: return x;
  }
}
