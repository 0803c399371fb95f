// Enough of CUDA for kernels of cuda/ to run on the CPU emulator: threads are fibers, tensor core instructions are loops, asynchronous copies
// happen at once, barriers in shared memory count. test_cuda_on_cpu.py makes C++ of a kernel's source first: __shared__ becomes static,
// the few lines of assembly in it become calls. Order between threads is one of many: a race may hide, a wrong index does not.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "../../cpp/gpu/numbers.h"
#include "exl3/codec.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 800
#endif
using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct Place {
  int x, y, z;
};
inline Place cuda_block, cuda_grid, cuda_threads;
#define threadIdx (Place{exl3::emulator::current->thread, 0, 0})
#define blockIdx cuda_block
#define gridDim cuda_grid
#define blockDim cuda_threads

// ------------------------------------------------------------------------------------------------ numbers
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int __float_as_int(float f) { return as_int(f); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __int_as_float(int i) { return as_float(i); }
inline uint32_t __float_as_uint(float f) { return (uint32_t)as_int(f); }
inline float __uint_as_float(uint32_t i) { return as_float((int)i); }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline int __float2int_rn(float f) { return isnan(f) ? 0 : (int)lrintf(f); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    const int k = (selector >> (4 * i)) & 7;
    r |= ((k < 4 ? a >> (8 * k) : b >> (8 * (k - 4))) & 255) << (8 * i);
  }
  return r;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return (uint32_t)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; i++) c += ((a >> (8 * i)) & 255) * ((b >> (8 * i)) & 255);
  return c;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int8_t)(a >> (8 * i)) * (int8_t)(b >> (8 * i));
  return c;
}
struct __half2 {
  uint16_t x, y;
};
struct __half {
  uint16_t x;
};
inline __half __float2half_rn(float a) { return {float_to_half(a)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {float_to_half(a), float_to_half(b)}; }
inline __half2 __float2half2_rn(float a) { return __floats2half2_rn(a, a); }
inline float __low2float(__half2 h) { return half_to_float(h.x); }
inline float __high2float(__half2 h) { return half_to_float(h.y); }
inline float2 __half22float2(__half2 h) { return {half_to_float(h.x), half_to_float(h.y)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return __floats2half2_rn(__low2float(a) + __low2float(b), __high2float(a) + __high2float(b)); }
inline __half2 __hsub2(__half2 a, __half2 b) { return __floats2half2_rn(__low2float(a) - __low2float(b), __high2float(a) - __high2float(b)); }
inline __half2 __hmul2(__half2 a, __half2 b) { return __floats2half2_rn(__low2float(a) * __low2float(b), __high2float(a) * __high2float(b)); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __floats2half2_rn(__low2float(a) * __low2float(b) + __low2float(c), __high2float(a) * __high2float(b) + __high2float(c));
}

// ------------------------------------------------------------------------------------------------ threads
inline void __syncthreads() { exl3::emulator::barrier(); }
inline void __syncwarp() { exl3::emulator::exchange(0, 0); }
inline void __threadfence() {}
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  int words[sizeof(T) / 4];
  memcpy(words, &v, sizeof v);
  for (int& w : words) w = lane_xor(w, mask);
  memcpy(&v, words, sizeof v);
  return v;
}
inline unsigned __ballot_sync(unsigned, bool v) {
  int all = v ? 1 << lane_id() : 0;
  for (int m = 1; m < 32; m <<= 1) all |= lane_xor(all, m);
  return (unsigned)all;
}
inline bool __any_sync(unsigned, bool v) { return __ballot_sync(~0u, v) != 0; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
template <class T>
T __shfl_up_sync(unsigned, T v, int by) {
  int bits;
  memcpy(&bits, &v, 4);
  bits = exl3::emulator::exchange(bits, lane_id() >= by ? lane_id() - by : lane_id());
  memcpy(&v, &bits, 4);
  return v;
}
template <class T>
T __shfl_sync(unsigned, T v, int from) {
  int words[sizeof(T) / 4];
  memcpy(words, &v, sizeof v);
  for (int& w : words) w = exl3::emulator::exchange(w, from);
  memcpy(&v, words, sizeof v);
  return v;
}
inline int atomicMax(int* p, int v) {
  const int old = *p;
  *p = max(old, v);
  return old;
}
inline int atomicAdd(int* p, int v) {
  const int old = *p;
  *p += v;
  return old;
}

namespace exl3 {

alignas(1024) inline uint8_t shared_space[232448];
constexpr int kMostThreads = 1024;
inline bool waiting[kMostThreads], named[kMostThreads];  // at a barrier in shared memory; at the one of the first 256 threads

inline void named_barrier() {
  named[emulator::current->thread] = true;
  emulator::give_way(emulator::State::Barrier);
}

namespace ptx {
inline void launch_dependents() {}
inline void wait_for_previous() {}
inline void prefetch(const void*) {}
inline float4 load_relaxed(const float* from) { return *(const float4*)from; }
inline void store_relaxed(float* to, float4 v) { *(float4*)to = v; }
template <class F>
int over_lanes(int v, F f) {
  for (int m = 1; m < 32; m <<= 1) v = f(v, exl3::emulator::exchange(v, lane_id() ^ m));
  return v;
}
inline int warp_most(int v) { return over_lanes(v, [](int a, int b) { return max(a, b); }); }
inline void aligned(const void* a, const void* b, int bytes) {
  if (((uintptr_t)a | (uintptr_t)b) % bytes) emulator::fail("a misaligned copy");
}
template <int BYTES>
void copy_now(void* to, const void* from) {
  aligned(to, from, BYTES);
  memcpy(to, from, BYTES);
}
// Asynchronous copies of 16 bytes are done when they are waited for, no sooner.
struct Copy {
  void* to;
  const void* from;
};
inline std::vector<std::vector<Copy>> copies[1024];  // by thread: groups, the last one open
inline std::vector<std::vector<Copy>>& own_copies() {
  auto& own = copies[emulator::current->thread];
  if (own.empty()) own.emplace_back();
  return own;
}
inline void copy16(void* to, const void* from) {
  aligned(to, from, 16);
  own_copies().back().push_back({to, from});
}
inline void copy16(uint32_t to, const void* from) { copy16(shared_space + to, from); }
inline void finish(std::vector<Copy>& of) {
  for (const Copy& c : of) memcpy(c.to, c.from, 16);
  of.clear();
}
template <int BYTES>
void copy_or_zero(void* to, const void* from, bool there) {
  aligned(to, from, BYTES);
  if (there)
    memcpy(to, from, BYTES);
  else
    memset(to, 0, BYTES);
}
template <int BYTES>
void copy_or_zero_of_all(void* to, const void* from, bool there) {
  copy_or_zero<BYTES>(to, from, there);
}
inline void copy_commit() { own_copies().emplace_back(); }
template <int LEFT>
void copy_wait() {
  auto& own = own_copies();
  for (; own.size() > LEFT + 1; own.erase(own.begin())) finish(own.front());
}
inline uint32_t shared_address(const void* p) { return (uint32_t)((const uint8_t*)p - shared_space); }

struct Barrier {
  int arrivals = 0, missing = 0, bytes = 0, done = 0;
  std::vector<Copy> copies;  // whose end it is told
};
inline std::vector<std::pair<uint64_t*, Barrier>> barriers;
inline Barrier& barrier_at(uint64_t* b) {
  for (auto& [key, value] : barriers)
    if (key == b) return value;
  barriers.push_back({b, {}});
  return barriers.back().second;
}
inline void barrier_change(uint64_t* b, int arrivals, int bytes) {
  Barrier& x = barrier_at(b);
  x.missing -= arrivals;
  x.bytes += bytes;
  if (x.missing < 0) emulator::fail("more arrivals than a barrier expects");
  if (x.missing == 0 && x.bytes == 0) {
    x.done++;
    x.missing = x.arrivals;
  }
}
inline void barrier_init(uint64_t* b, int arrivals) { barrier_at(b) = {arrivals, arrivals, 0, 0, {}}; }
inline void barrier_init_done() {}
inline void barrier_expect(uint64_t* b, int bytes) { barrier_change(b, 1, bytes); }
inline void barrier_arrive(uint64_t* b) { barrier_change(b, 1, 0); }
inline void copies_arrive(uint64_t* b) {
  for (auto& group : own_copies()) {
    for (const Copy& c : group) barrier_at(b).copies.push_back(c);
    group.clear();
  }
  barrier_change(b, 1, 0);
}
inline void barrier_wait(uint64_t* b, int phase) {
  while ((barrier_at(b).done & 1) == phase) {
    waiting[emulator::current->thread] = true;
    emulator::give_way(emulator::State::Barrier);
  }
  finish(barrier_at(b).copies);
}
inline void bulk_load(void* to, const void* from, int bytes, uint64_t* b) {
  aligned(to, from, 16);
  memcpy(to, from, bytes);
  barrier_change(b, 0, -bytes);
}

// Barriers by number: a phase ends when as many have come as it takes.
struct NamedBarrier {
  int arrived = 0, done = 0;
};
inline NamedBarrier named_barriers[16];
inline void named_arrive(int id, int threads) {
  NamedBarrier& x = named_barriers[id];
  if (++x.arrived == threads) x.arrived = 0, x.done++;
}
inline void named_sync(int id, int threads) {
  const int before = named_barriers[id].done;
  named_arrive(id, threads);
  while (named_barriers[id].done == before) {
    waiting[emulator::current->thread] = true;
    emulator::give_way(emulator::State::Barrier);
  }
}

inline float half_of(uint32_t r, int i) { return half_to_float((uint16_t)(r >> (16 * i))); }
// Layouts as the PTX manual draws them.
inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const int lane = lane_id(), g = lane / 4, q = lane % 4;
  emulator::with_peers(mine, [&](auto peer) {
    auto at = [&](int l, int r) { return ((const uint32_t*)peer(l))[r]; };
    for (int e = 0; e < 4; e++) {
      const int row = g + 8 * (e / 2), column = 2 * q + e % 2;
      for (int k = 0; k < 16; k++)
        d[e] += half_of(at((row % 8) * 4 + (k % 8) / 2, row / 8 + 2 * (k / 8)), k % 2) * half_of(at(column * 4 + (k % 8) / 2, 4 + k / 8), k % 2);
    }
  });
}
inline void mma(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const int lane = lane_id(), g = lane / 4, q = lane % 4;
  emulator::with_peers(mine, [&](auto peer) {
    auto at = [&](int l, int r, int i) { return ((const uint32_t*)peer(l))[r] >> (8 * i) & 255; };
    for (int e = 0; e < 4; e++) {
      const int row = g + 8 * (e / 2), column = 2 * q + e % 2;
      for (int k = 0; k < 32; k++)
        d[e] += (int)at((row % 8) * 4 + (k % 16) / 4, row / 8 + 2 * (k / 16), k % 4) * (int8_t)at(column * 4 + (k % 16) / 4, 4 + k / 16, k % 4);
    }
  });
}
inline void matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  aligned(row, row, 16);
  const int lane = lane_id(), g = lane / 4, q = lane % 4;
  emulator::with_peers(row, [&](auto peer) {
    for (int m = 0; m < 4; m++) {
      uint16_t h[2];
      for (int i = 0; i < 2; i++)
        h[i] = transposed ? ((const uint16_t*)peer(8 * m + 2 * q + i))[g] : ((const uint16_t*)peer(8 * m + g))[2 * q + i];
      r[m] = h[0] | (uint32_t)h[1] << 16;
    }
  });
}
inline void load_matrices(uint32_t (&r)[4], const void* row) { matrices(r, row, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) { matrices(r, row, true); }
inline uint32_t transpose(uint32_t m) {
  const int lane = lane_id(), g = lane / 4, q = lane % 4;
  uint16_t h[2];
  emulator::with_peers(&m, [&](auto peer) {
    for (int i = 0; i < 2; i++) h[i] = (uint16_t)(*(const uint32_t*)peer((2 * q + i) * 4 + g / 2) >> (16 * (g % 2)));
  });
  return h[0] | (uint32_t)h[1] << 16;
}
inline float exp2(float x) { return exp2f(x); }
inline uint32_t pack(float low, float high) { return float_to_half(low) | (uint32_t)float_to_half(high) << 16; }
inline uint32_t pack_bfloats(float low, float high) { return float_to_bfloat(low) | (uint32_t)float_to_bfloat(high) << 16; }
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  return pack(half_of(a, 0) * half_of(b, 0) + half_of(c, 0), half_of(a, 1) * half_of(b, 1) + half_of(c, 1));
}
inline uint32_t add(uint32_t a, uint32_t b) { return pack(half_of(a, 0) + half_of(b, 0), half_of(a, 1) + half_of(b, 1)); }
inline uint32_t subtract(uint32_t a, uint32_t b) { return pack(half_of(a, 0) - half_of(b, 0), half_of(a, 1) - half_of(b, 1)); }
inline uint32_t multiply(uint32_t a, uint32_t b) { return pack(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1)); }
}  // namespace ptx

// Runs one block to its end.
inline void run_cuda_block(int threads, const std::function<void()>& f) {
  using namespace emulator;
  body = &f;
  cuda_threads = {threads, 1, 1};
  arrays.clear();
  ptx::barriers.clear();
  for (auto& x : ptx::named_barriers) x = {};
  for (auto& own : ptx::copies) own.clear();
  memset(shared_space, 0xff, sizeof shared_space);
  memset(waiting, 0, sizeof waiting);
  memset(named, 0, sizeof named);
  while ((int)fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  for (int t = 0; t < threads; t++) {
    constexpr int kStack = 256 * 1024;
    Fiber& b = *fibers[t];
    if (!b.stack) b.stack = std::make_unique<char[]>(kStack);
    b.thread = t;
    b.state = State::Ready;
    getcontext(&b.context);
    b.context.uc_stack.ss_sp = b.stack.get();
    b.context.uc_stack.ss_size = kStack;
    b.context.uc_link = nullptr;
    makecontext(&b.context, entry, 0);
  }
  for (int idle = 0; idle < 1000; idle++) {
    for (int t = 0; t < threads; t++)
      while (fibers[t]->state == State::Ready) {
        current = fibers[t].get();
        swapcontext(&scheduler, &current->context);
        if (!waiting[t]) idle = 0;
      }
    for (int w = 0; w < threads; w += 32) {
      int here = 0;
      for (int t = w; t < w + 32; t++) here += fibers[t]->state == State::Exchange;
      if (here == 32 && exchange_warp(w, threads)) idle = 0;
    }
    int all = 0, first = 0, done = 0;
    for (int t = 0; t < threads; t++) {
      const bool at_barrier = fibers[t]->state == State::Barrier && !waiting[t];
      all += at_barrier && !named[t];
      first += at_barrier && named[t];
      done += fibers[t]->state == State::Done;
    }
    if (done == threads) return;
    for (int t = 0; t < threads; t++)
      if (waiting[t] || (first == 256 && named[t]) || all == threads) {
        waiting[t] = named[t] = false;
        fibers[t]->state = State::Ready;
      }
  }
  fail("no thread goes on");
}

}  // namespace exl3
