// The few words in which CUDA, HIP and the CPU emulator differ, so that one kernel source serves all three (DESIGN 3.4).
//
// Kernels written on it use constant block sizes, warps of 32 lanes, and only what is declared here: no blockDim or gridDim (HIP passes
// them as hidden arguments), no warp functions in divergent code. Halves travel as uint16 bit patterns.
#pragma once
#include <stdint.h>

#if defined(__HIP__)
#define GPU_HIP 1
#ifndef __global__  // the HIP headers, where included first, define these too
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#endif
#define GPU_FN static __attribute__((device)) __attribute__((always_inline)) inline
#define GPU_KERNEL(threads) extern "C" __global__ void __attribute__((launch_bounds(threads))) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define GPU_SHARED(T, name, n) __shared__ T name[n]
#elif defined(__CUDACC__)
#define GPU_CUDA 1
#include <cuda_fp16.h>
#define GPU_FN static __device__ __forceinline__
#define GPU_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define GPU_SHARED(T, name, n) __shared__ T name[n]
#else
#define GPU_CPU 1
#include "../../gpu/emulator.h"
#define GPU_FN static inline
#define GPU_KERNEL(threads) extern "C" void
#define GPU_SHARED(T, name, n) T* name = exl3::emulator::shared<T>(__COUNTER__, n)
#endif

// ------------------------------------------------------------------------------------------------ places and barriers
#if GPU_HIP
GPU_FN int thread_id() { return __builtin_amdgcn_workitem_id_x(); }
GPU_FN int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
GPU_FN int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
GPU_FN void block_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
GPU_FN void begin_kernel() {}
#elif GPU_CUDA
GPU_FN int thread_id() { return threadIdx.x; }
GPU_FN int block_x() { return blockIdx.x; }
GPU_FN int block_y() { return blockIdx.y; }
GPU_FN void block_sync() { __syncthreads(); }
// Every kernel calls this before its first access to memory: with programmatic launch the next kernel's blocks may take their places
// already, and this one waits until all before it has been written.
GPU_FN void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#else
GPU_FN int thread_id() { return exl3::emulator::current->thread; }
GPU_FN int block_x() { return exl3::emulator::block[0]; }
GPU_FN int block_y() { return exl3::emulator::block[1]; }
GPU_FN void block_sync() { exl3::emulator::barrier(); }
GPU_FN void begin_kernel() {}
#endif
GPU_FN int lane_id() { return thread_id() & 31; }
GPU_FN int warp_id() { return thread_id() >> 5; }

// ------------------------------------------------------------------------------------------------ bits and numbers
GPU_FN int as_int(float f) {
  union {
    float f;
    int i;
  } u;
  u.f = f;
  return u.i;
}
GPU_FN float as_float(int i) {
  union {
    int i;
    float f;
  } u;
  u.i = i;
  return u.f;
}
GPU_FN float half_to_float(uint16_t h) {
#if GPU_CUDA
  return __half2float(__ushort_as_half(h));
#else
  union {
    uint16_t u;
    _Float16 h;
  } v;
  v.u = h;
  return (float)v.h;
#endif
}
GPU_FN uint16_t float_to_half(float f) {
#if GPU_CUDA
  return __half_as_ushort(__float2half_rn(f));
#else
  union {
    uint16_t u;
    _Float16 h;
  } v;
  v.h = (_Float16)f;
  return v.u;
#endif
}
GPU_FN float bfloat_to_float(uint16_t b) { return as_float((int)((uint32_t)b << 16)); }
GPU_FN uint16_t float_to_bfloat(float f) {
  const uint32_t u = (uint32_t)as_int(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);  // NaN stays NaN
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

#if GPU_HIP
GPU_FN float fast_exp(float x) { return __builtin_expf(x); }
GPU_FN float fast_log(float x) { return __builtin_logf(x); }
GPU_FN float root(float x) { return __builtin_sqrtf(x); }
GPU_FN float floor_(float x) { return __builtin_floorf(x); }
// Without a device library there are no double-precision functions: quarter turns and Taylor series, below 1e-13 for |x| < 1e9.
GPU_FN double quarter_turn(double x, int& quarter) {
  const double turns = __builtin_rint(x * 0.63661977236758134308);
  quarter = (int)((int64_t)turns & 3);
  return (x - turns * 1.57079632673412561417) - turns * 6.07710050650619224932e-11;
}
GPU_FN double short_sin(double x) {
  const double s = x * x;
  return x * (1 - s / 6 * (1 - s / 20 * (1 - s / 42 * (1 - s / 72 * (1 - s / 110 * (1 - s / 156))))));
}
GPU_FN double short_cos(double x) {
  const double s = x * x;
  return 1 - s / 2 * (1 - s / 12 * (1 - s / 30 * (1 - s / 56 * (1 - s / 90 * (1 - s / 132 * (1 - s / 182))))));
}
GPU_FN double wide_sin(double x) {
  int quarter;
  const double r = quarter_turn(x, quarter), v = quarter & 1 ? short_cos(r) : short_sin(r);
  return quarter & 2 ? -v : v;
}
GPU_FN double wide_cos(double x) {
  int quarter;
  const double r = quarter_turn(x, quarter), v = quarter & 1 ? short_sin(r) : short_cos(r);
  return (quarter + 1) & 2 ? -v : v;
}
GPU_FN double wide_root(double x) { return __builtin_sqrt(x); }
GPU_FN double cube_root(double x) {  // of a number above 0: a single-precision start, two steps of Newton
  double t = (double)__builtin_exp2f(__builtin_log2f((float)x) * (1.f / 3.f));
  for (int i = 0; i < 2; i++) t -= (t * t * t - x) / (3 * t * t);
  return t;
}
GPU_FN float hyperbolic_tangent(float x) {
  const float e = __builtin_expf(-2.f * __builtin_fabsf(x)), t = (1.f - e) / (1.f + e);
  return x < 0.f ? -t : t;
}
GPU_FN float exp_minus_one(float x) { return __builtin_fabsf(x) < 1e-3f ? x * (1.f + 0.5f * x) : __builtin_expf(x) - 1.f; }
GPU_FN float error_function(float x) {  // Abramowitz and Stegun 7.1.26, |error| < 1.5e-7
  const float a = __builtin_fabsf(x), t = 1.f / (1.f + 0.3275911f * a);
  const float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const float r = 1.f - p * __builtin_expf(-a * a);
  return x < 0.f ? -r : r;
}
#else
#if GPU_CPU
#include <math.h>
#endif
GPU_FN float fast_exp(float x) { return expf(x); }
GPU_FN float fast_log(float x) { return logf(x); }
GPU_FN float root(float x) { return sqrtf(x); }
GPU_FN float floor_(float x) { return floorf(x); }
GPU_FN double wide_cos(double x) { return cos(x); }
GPU_FN double wide_sin(double x) { return sin(x); }
GPU_FN double wide_root(double x) { return sqrt(x); }
GPU_FN double cube_root(double x) { return cbrt(x); }
GPU_FN float hyperbolic_tangent(float x) { return tanhf(x); }
GPU_FN float exp_minus_one(float x) { return expm1f(x); }
GPU_FN float error_function(float x) { return erff(x); }
#endif
// The same number, of which the compiler knows nothing: tests of it stay where they are instead of being drawn out of loops, each with a
// register of its own. It must be the same in all lanes, and from kernel arguments.
GPU_FN int fresh(int x) {
#if GPU_HIP
  asm volatile("" : "+s"(x));
#endif
  return x;
}
GPU_FN float absolute(float x) { return as_float(as_int(x) & 0x7fffffff); }
GPU_FN float larger(float a, float b) { return a > b ? a : b; }

// ------------------------------------------------------------------------------------------------ lanes of a warp
// `lane_xor` is called by all 32 lanes with one mask. On AMD a mask known at compile time costs one move between registers.
#if GPU_HIP
template <int MASK>
GPU_FN int lane_xor_known(int v) {
  if constexpr (MASK < 16) return __builtin_amdgcn_update_dpp(0, v, 0x160 | MASK, 0xf, 0xf, true);  // row_xmask
  return __builtin_amdgcn_permlanex16(v, v, 0x76543210, 0xfedcba98, true, false);
}
#endif
GPU_FN int lane_xor(int v, int mask) {
#if GPU_HIP
  switch (mask) {
    case 1: return lane_xor_known<1>(v);
    case 2: return lane_xor_known<2>(v);
    case 4: return lane_xor_known<4>(v);
    case 8: return lane_xor_known<8>(v);
    case 16: return lane_xor_known<16>(v);
    default: return __builtin_amdgcn_ds_bpermute((lane_id() ^ mask) << 2, v);
  }
#elif GPU_CUDA
  return __shfl_xor_sync(~0u, v, mask);
#else
  return exl3::emulator::exchange(v, lane_id() ^ mask);
#endif
}
GPU_FN float lane_xor(float v, int mask) { return as_float(lane_xor(as_int(v), mask)); }
GPU_FN float warp_sum(float v) {
  for (int m = 16; m; m >>= 1) v += lane_xor(v, m);
  return v;
}
GPU_FN int warp_sum(int v) {
  for (int m = 16; m; m >>= 1) v += lane_xor(v, m);
  return v;
}
GPU_FN float warp_max(float v) {
  for (int m = 16; m; m >>= 1) v = larger(v, lane_xor(v, m));
  return v;
}

// ------------------------------------------------------------------------------------------------ atomics
GPU_FN void shared_add(unsigned* p, unsigned v) {
#if GPU_CUDA
  atomicAdd(p, v);
#elif GPU_HIP
  __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#else
  *p += v;
#endif
}
// The same, and what was there before.
GPU_FN unsigned shared_fetch_add(unsigned* p, unsigned v) {
#if GPU_CUDA
  return atomicAdd(p, v);
#elif GPU_HIP
  return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#else
  const unsigned old = *p;
  *p += v;
  return old;
#endif
}
GPU_FN void shared_add(unsigned long long* p, unsigned long long v) {
#if GPU_CUDA
  atomicAdd(p, v);
#elif GPU_HIP
  __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#else
  *p += v;
#endif
}
GPU_FN void global_add(int* p, int v) {
#if GPU_CUDA
  atomicAdd(p, v);
#elif GPU_HIP
  __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
  *p += v;
#endif
}
GPU_FN int global_exchange(int* p, int v) {
#if GPU_CUDA
  return atomicExch(p, v);
#elif GPU_HIP
  return __hip_atomic_exchange(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
  const int old = *p;
  *p = v;
  return old;
#endif
}
