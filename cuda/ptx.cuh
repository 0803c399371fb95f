// The PTX instructions the kernels use, each as a function.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace exl3::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ------------------------------------------------------------------------------------------------ programmatic dependent launch
// The next kernel's blocks may take free places from here on.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Everything the kernels before wrote is visible after it. Weights may be read earlier.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Barrier `id` of a block, of `threads` in all: some wait, some only say that they have come.
__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Over the lanes of a warp; one instruction from sm_80 on.
__device__ __forceinline__ int warp_most(int v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
  for (int m = 16; m; m >>= 1) v = max(v, __shfl_xor_sync(~0u, v, m));
  return v;
#endif
}
__device__ __forceinline__ int warp_total(int v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, v);
#else
  for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
  return v;
#endif
}
__device__ __forceinline__ uint32_t warp_least(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(~0u, v);
#else
  for (int m = 16; m; m >>= 1) v = min(v, __shfl_xor_sync(~0u, v, m));
  return v;
#endif
}
// To and from other blocks: each word is seen whole, in no order with others.
__device__ __forceinline__ void store_relaxed(float* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ float4 load_relaxed(const float* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ------------------------------------------------------------------------------------------------ barriers in shared memory, from 8.0 on
__device__ __forceinline__ void barrier_init(uint64_t* b, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}
#if __CUDA_ARCH__ >= 900
#define EXL3_BARRIER_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define EXL3_BARRIER_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
__device__ __forceinline__ void barrier_wait(uint64_t* b, int phase) {
  asm volatile("{\n.reg .pred done;\nagain:\n" EXL3_BARRIER_WAIT " done, [%0], %1;\n@done bra finished;\nbra again;\nfinished:\n}" ::"r"(
                   shared_address(b)),
               "r"(phase)
               : "memory");
}
#undef EXL3_BARRIER_WAIT
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(b)) : "memory");
}
// The lane arrives when all its copies so far have.
__device__ __forceinline__ void copies_arrive(uint64_t* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

#if __CUDA_ARCH__ >= 900
// ------------------------------------------------------------------------------------------------ bulk copies
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// 16-byte aligned, a multiple of 16 bytes.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(b))
               : "memory");
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A warpgroup's registers a thread, up or down.
template <int N>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
#endif

// ------------------------------------------------------------------------------------------------ copies on sm_80
__device__ __forceinline__ void copy16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
template <int BYTES>
__device__ __forceinline__ void copy_now(void* shared, const void* global) {
  if constexpr (BYTES == 16)
    copy16(shared, global);
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES) : "memory");
}
// The same, or BYTES (4, 8, 16) zeros where `there` is false; the address must be readable all the same.
template <int BYTES>
__device__ __forceinline__ void copy_or_zero(void* shared, const void* global, bool there) {
  const int n = there ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(n) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES), "r"(n) : "memory");
}
// The same, and the 256 bytes around it go to the L2 cache: other blocks take the rest.
template <int BYTES>
__device__ __forceinline__ void copy_or_zero_of_all(void* shared, const void* global, bool there) {
  const int n = there ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(n) : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES), "r"(n)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ------------------------------------------------------------------------------------------------ matrix products of one warp
// d += a b: a 16 x 32 unsigned bytes, b 32 x 8 signed bytes.
__device__ __forceinline__ void mma(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// d += a b: a 16 x 16 halves, b 16 x 8 halves.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared)));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared)));
}
// The transpose of a matrix of 8 x 8 halves, a row's two columns in each lane.
__device__ __forceinline__ uint32_t transpose(uint32_t m) {
  uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
  return t;
}

// ------------------------------------------------------------------------------------------------ numbers
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Pairs of halves in a register.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *(const uint32_t*)&h;
}
__device__ __forceinline__ uint32_t pack_bfloats(float low, float high) {
  uint32_t h = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
#endif
  return h;
}
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  const __half2 h = __hfma2(*(const __half2*)&a, *(const __half2*)&b, *(const __half2*)&c);
  return *(const uint32_t*)&h;
}
__device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
  const __half2 h = __hadd2(*(const __half2*)&a, *(const __half2*)&b);
  return *(const uint32_t*)&h;
}
__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b) {
  const __half2 h = __hsub2(*(const __half2*)&a, *(const __half2*)&b);
  return *(const uint32_t*)&h;
}
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  const __half2 h = __hmul2(*(const __half2*)&a, *(const __half2*)&b);
  return *(const uint32_t*)&h;
}

}  // namespace exl3::ptx
