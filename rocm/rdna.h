// The words of RDNA that the kernels of this folder add to exl3/gpu.h: packed halves, 16-bit multiplies, byte sums, dot products and the
// matrix product of one wave. Under CUDA and on the CPU they are emulated, so that the same kernel source can be tested there.
//
// GPU_WMMA says how a wave holds the operands of its matrix product. 11: RDNA3 and 3.5, 12: RDNA4, 0: it has none (RDNA2).
#pragma once
#include "exl3/gpu.h"

#if !defined(GPU_WMMA)
#if defined(__GFX11__)
#define GPU_WMMA 11
#elif defined(__GFX12__)
#define GPU_WMMA 12
#elif GPU_HIP
#define GPU_WMMA 0
#else
#define GPU_WMMA 11
#endif
#endif

// ------------------------------------------------------------------------------------------------ pairs of halves, in a register
#if GPU_HIP
typedef _Float16 half2_t __attribute__((ext_vector_type(2)));
#endif

// (hi : lo) >> shift, the low 32 bits; shift is taken modulo 32.
GPU_FN uint32_t funnel(uint32_t hi, uint32_t lo, int shift) {
#if GPU_HIP
  return __builtin_amdgcn_alignbit(hi, lo, shift);
#else
  return (uint32_t)((((uint64_t)hi << 32) | lo) >> (shift & 31));
#endif
}
// The product of a 16-bit half of x (high or low) with a 32-bit constant, plus an addend, modulo 2^32. A 32-bit multiplication runs at a
// quarter of the rate of others on RDNA; these two 16-bit ones at full rate, and both pick their half of the register themselves.
struct Hash {
  uint32_t low, high, add;  // the constant's low half; its high half << 16; the addend
};
GPU_FN Hash make_hash(uint32_t multiplier, uint32_t addend) { return {multiplier & 0xffffu, multiplier & 0xffff0000u, addend}; }
template <bool HIGH>
GPU_FN uint32_t hash_add(uint32_t x, const Hash& h) {
#if GPU_HIP
  uint32_t top, p;
  if constexpr (HIGH) {
    asm("v_pk_mad_u16 %0, %1, %2, %3 op_sel:[1,0,0] op_sel_hi:[1,1,1]" : "=v"(top) : "v"(x), "v"(h.high), "v"(h.add));
    asm("v_mad_u32_u16 %0, %1, %2, %3 op_sel:[1,0,0,0]" : "=v"(p) : "v"(x), "v"(h.low), "v"(top));
  } else {
    asm("v_pk_mad_u16 %0, %1, %2, %3 op_sel:[0,0,0] op_sel_hi:[0,1,1]" : "=v"(top) : "v"(x), "v"(h.high), "v"(h.add));
    asm("v_mad_u32_u16 %0, %1, %2, %3" : "=v"(p) : "v"(x), "v"(h.low), "v"(top));
  }
  return p;
#else
  return (HIGH ? x >> 16 : x & 0xffffu) * (h.high | h.low) + h.add;
#endif
}
// The same without addend.
template <bool HIGH>
GPU_FN uint32_t hash_plain(uint32_t x, const Hash& h) {
#if GPU_HIP
  uint32_t top, p;
  if constexpr (HIGH) {
    asm("v_pk_mul_lo_u16 %0, %1, %2 op_sel:[1,0] op_sel_hi:[1,1]" : "=v"(top) : "v"(x), "v"(h.high));
    asm("v_mad_u32_u16 %0, %1, %2, %3 op_sel:[1,0,0,0]" : "=v"(p) : "v"(x), "v"(h.low), "v"(top));
  } else {
    asm("v_pk_mul_lo_u16 %0, %1, %2 op_sel_hi:[0,1]" : "=v"(top) : "v"(x), "v"(h.high));
    asm("v_mad_u32_u16 %0, %1, %2, %3" : "=v"(p) : "v"(x), "v"(h.low), "v"(top));
  }
  return p;
#else
  return (HIGH ? x >> 16 : x & 0xffffu) * (h.high | h.low);
#endif
}
GPU_FN uint32_t bytes_sum(uint32_t p) { return (p & 255) + (p >> 8 & 255) + (p >> 16 & 255) + (p >> 24); }
// base + sum of the four bytes of p, and base + that sum << 16
GPU_FN uint32_t add_bytes(uint32_t p, uint32_t base) {
#if GPU_HIP
  return __builtin_amdgcn_sad_u8(p, 0u, base);
#else
  return base + bytes_sum(p);
#endif
}
GPU_FN uint32_t add_bytes_high(uint32_t p, uint32_t base) {
#if GPU_HIP
  return __builtin_amdgcn_sad_hi_u8(p, 0u, base);
#else
  return base + (bytes_sum(p) << 16);
#endif
}
// (a's halves added, b's halves added), each rounded to fp16
GPU_FN uint32_t add_halves(uint32_t a, uint32_t b) {
#if GPU_HIP
  union {
    uint32_t u;
    half2_t h;
  } x, y;
  x.u = a;
  y.u = b;
  const half2_t sum = {(_Float16)(x.h.x + x.h.y), (_Float16)(y.h.x + y.h.y)};
  x.h = sum;
  return x.u;
#else
  const uint16_t lo = float_to_half(half_to_float((uint16_t)a) + half_to_float((uint16_t)(a >> 16)));
  const uint16_t hi = float_to_half(half_to_float((uint16_t)b) + half_to_float((uint16_t)(b >> 16)));
  return lo | (uint32_t)hi << 16;
#endif
}
// a * scale + shift in each half, one rounding; scale and shift must be fp16 numbers
GPU_FN uint32_t scale_halves(uint32_t a, float scale, float shift) {
#if GPU_HIP
  union {
    uint32_t u;
    half2_t h;
  } x;
  x.u = a;
  const half2_t s = {(_Float16)scale, (_Float16)scale}, t = {(_Float16)shift, (_Float16)shift};
  x.h = __builtin_elementwise_fma(x.h, s, t);
  return x.u;
#else
  const uint16_t lo = float_to_half(half_to_float((uint16_t)a) * scale + shift);  // 11 bits times 11 bits: exact in fp32
  const uint16_t hi = float_to_half(half_to_float((uint16_t)(a >> 16)) * scale + shift);
  return lo | (uint32_t)hi << 16;
#endif
}
// c + the dot product of two pairs of halves, in fp32
GPU_FN float dot2(uint32_t a, uint32_t b, float c) {
#if GPU_HIP
  union {
    uint32_t u;
    half2_t h;
  } x, y;
  x.u = a;
  y.u = b;
  return __builtin_amdgcn_fdot2(x.h, y.h, c, false);
#else
  return half_to_float((uint16_t)a) * half_to_float((uint16_t)b) + half_to_float((uint16_t)(a >> 16)) * half_to_float((uint16_t)(b >> 16)) + c;
#endif
}

struct alignas(16) Words4 {
  uint32_t v[4];
};

// ------------------------------------------------------------------------------------------------ barriers, order of memory
// A number that is the same in all lanes of a wave, known as such to the compiler: what is addressed by it is loaded once a wave.
GPU_FN int uniform(int v) {
#if GPU_HIP
  return __builtin_amdgcn_readfirstlane(v);
#else
  return v;
#endif
}
GPU_FN int uniform_warp() { return uniform(warp_id()); }
// A barrier for shared memory alone: loads from global memory stay in flight across it.
GPU_FN void shared_sync() {
#if GPU_HIP
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
  block_sync();
#endif
}
// The same among the lanes of one wave, which run in step.
GPU_FN void wave_sync() {
#if GPU_HIP
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
#elif GPU_CUDA
  __syncwarp();
#else
  exl3::emulator::exchange(0, 0);
#endif
}
// Publishes what this block wrote and takes a number of `counter`; sees all that blocks with smaller numbers wrote before theirs.
// Called by all threads; `space` is one int of shared memory.
GPU_FN int take_number(int* counter, int* space) {
#if GPU_HIP
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  block_sync();
  if (thread_id() == 0) *space = __hip_atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
  block_sync();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
#elif GPU_CUDA
  __threadfence();
  block_sync();
  if (thread_id() == 0) *space = atomicAdd(counter, 1);
  block_sync();
  __threadfence();
#else
  block_sync();
  if (thread_id() == 0) *space = (*counter)++;
  block_sync();
#endif
  return *space;
}

// ------------------------------------------------------------------------------------------------ the matrix product of one wave
#if GPU_WMMA
// c += A B with A 16 x 16 and B 16 x 16 of halves. Lane l holds row l % 16 of A and column l % 16 of B, and of C the values
// (fragment_row(i), l % 16). Layout 11: all 16 values of k in every lane, lanes 16 to 31 the same as 0 to 15. Layout 12: eight a lane.
constexpr int kFragment = GPU_WMMA == 12 ? 4 : 8;  // registers of A and B
GPU_FN int fragment_row(int i) { return GPU_WMMA == 12 ? (lane_id() >> 4) * 8 + i : 2 * i + (lane_id() >> 4); }

struct Fragment {
  uint32_t v[kFragment];
};
// This lane's part of a row (of A) or column (of B), 16 halves in shared memory from `line` on.
GPU_FN Fragment read_fragment(const uint16_t* line) {
  Fragment f;
#if GPU_WMMA == 12
  const Words4 p = *(const Words4*)(line + 8 * (lane_id() >> 4));
#pragma unroll
  for (int i = 0; i < 4; i++) f.v[i] = p.v[i];
#else
  const Words4 p = *(const Words4*)line, q = *(const Words4*)(line + 8);
#pragma unroll
  for (int i = 0; i < 4; i++) f.v[i] = p.v[i], f.v[4 + i] = q.v[i];
#endif
  return f;
}
struct Sums {
  float v[8];
};
GPU_FN void wave_product(const Fragment& a, const Fragment& b, Sums& c) {
#if GPU_HIP
  typedef _Float16 operand __attribute__((ext_vector_type(2 * kFragment)));
  typedef uint32_t words __attribute__((ext_vector_type(kFragment)));
  typedef float result __attribute__((ext_vector_type(8)));
  union {
    words w;
    operand h;
  } x, y;
  result r;
#pragma unroll
  for (int i = 0; i < kFragment; i++) x.w[i] = a.v[i], y.w[i] = b.v[i];
#pragma unroll
  for (int i = 0; i < 8; i++) r[i] = c.v[i];
#if GPU_WMMA == 12
  r = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(x.h, y.h, r);
#else
  r = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x.h, y.h, r);
#endif
#pragma unroll
  for (int i = 0; i < 8; i++) c.v[i] = r[i];
#else
  // The layouts are written out here a second time, as the hardware has them (AMD's matrix instruction calculator): an error in
  // fragment_row or in how a kernel fills its fragments shows in the result.
  const int lane = lane_id(), column = lane & 15;
#if GPU_CPU
  struct Both {
    Fragment a, b;
  } mine{a, b};
  exl3::emulator::with_peers(&mine, [&](auto peer) {
    auto at = [&](int l) { return (const Both*)peer(l); };
    if (GPU_WMMA == 11 && memcmp(at(lane), at(lane ^ 16), sizeof(Both))) exl3::emulator::fail("lanes 16 to 31 of a matrix product differ from 0 to 15");
    auto half_of = [](const Fragment& f, int e) { return half_to_float((uint16_t)(f.v[e / 2] >> (e % 2 * 16))); };
    for (int k = 0; k < 16; k++) {
      const int e = GPU_WMMA == 12 ? (k & 3) | (k >> 3) << 2 : k, source = GPU_WMMA == 12 ? (k >> 2 & 1) * 16 : 0;
      for (int i = 0; i < 8; i++) {
        const int row = GPU_WMMA == 12 ? (lane >> 4) * 8 + i : 2 * i + (lane >> 4);
        c.v[i] += half_of(at(source + row)->a, e) * half_of(at(source + column)->b, e);
      }
    }
  });
#elif GPU_CUDA
  for (int k = 0; k < 16; k++) {
    const int e = GPU_WMMA == 12 ? (k & 3) | (k >> 3) << 2 : k, source = GPU_WMMA == 12 ? (k >> 2 & 1) * 16 : 0;
    const float bk = half_to_float((uint16_t)(__shfl_sync(~0u, b.v[e / 2], source + column) >> (e % 2 * 16)));
    for (int i = 0; i < 8; i++) {
      const int row = GPU_WMMA == 12 ? (lane >> 4) * 8 + i : 2 * i + (lane >> 4);
      c.v[i] += half_to_float((uint16_t)(__shfl_sync(~0u, a.v[e / 2], source + row) >> (e % 2 * 16))) * bk;
    }
  }
#endif
#endif
}
#endif
