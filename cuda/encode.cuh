// Tail-biting trellis search on the GPU (quantizer spec 7; QTIP, arXiv 2406.11235).
//
// A node is the overlap of two neighbouring states; each position tries all 65536 states and each node keeps its cheapest way in. One
// block of 512 threads searches one tile: the 65536 code values stay in registers for all tiles and both passes (128 a thread, as 64
// half2), costs are fp16 in shared memory. Two groups of nodes with neighbouring predecessors share a half2, so an edge pair costs an
// add, a multiply-add and a minimum; no predecessor is kept. Instead the cost vector of every few steps goes to memory, and the traceback,
// one warp a tile, tries all ways through the steps between.
#pragma once
#include <cuda_fp16.h>

#include "encode.h"
#include "ptx.cuh"

namespace exl3 {

__device__ __forceinline__ __half code_half(uint32_t state, int codebook, uint32_t multiplier) {
  if (codebook == EXL3_MUL1) return __float2half_rn((float)__dp4a(state * multiplier, 0x01010101u, 1024u) * kMul1Scale + kMul1Shift);
  const uint32_t p = half_pair(state, multiplier, codebook == EXL3_3INST ? k3instAddend : 0u);
  return __hadd(__ushort_as_half((unsigned short)p), __ushort_as_half((unsigned short)(p >> 16)));
}

// Costs are squares of differences times this: at many bits they would fall below the normal range of fp16.
inline constexpr __host__ __device__ float unit_of(int k2) { return k2 <= 7 ? 1.f : (float)(1 << (k2 / 2 - 3)); }

// How the 64 half2 of a thread cover the trellis of a whole rate.
template <int K>
struct Search {
  static constexpr int kNodes = 65536 >> K, kWays = 1 << K;   // ways into a node
  static constexpr int kGroups = (kNodes >> K) > 0 ? (kNodes >> K) : 1;  // nodes o with one o >> K share their predecessors
  static constexpr int kShare = K == 8 ? 4 : K == 7 ? 2 : 1;  // threads that share the ways into a node
  static constexpr int kMine = kWays / kShare;
  static constexpr int kOuts = K <= 3 ? kWays : 64 / kMine;    // nodes of a group a thread serves
  static constexpr int kPairs = 64 / (kOuts * kMine);          // pairs of groups a thread serves
  static constexpr int kThreadsAGroup = kWays / kOuts;
  static constexpr bool kByNode = K == 8;                      // one group only: the half2 is a pair of nodes, costs are stored twice
  static constexpr int kCostBytes = kNodes * (kByNode ? 4 : 2);
  // Threads that share a node take ways next to each other: their costs lie in different banks.
  static __device__ __forceinline__ int way(int share, int i) { return i / 2 * 2 * kShare + share * 2 + i % 2; }
};

// Every eighth step, once all nodes can be reached, the least cost of the first nodes is taken off all: differences matter alone, and fp16
// stays fine near zero.
__device__ __forceinline__ bool lowers(int step) { return step >= 23 && (step & 7) == 7; }
__device__ __forceinline__ __half2 lowering(const __half2* cost) {  // of 32 halves
  __half2 least = cost[0];
#pragma unroll
  for (int i = 1; i < 16; i++) least = __hmin2(least, cost[i]);
  return __half2half2(__hneg(__hmin(__low2half(least), __high2half(least))));
}

// Near 7 bits and above the rounding of a target to fp16 would show in the result: the rest is carried beside it.
inline constexpr __host__ __device__ bool splits_target(int k2) { return k2 >= 14; }

struct SearchShared {
  __half2 target[256];  // minus the target, twice; or minus the target and what its rounding left
  float best[kSearchThreads / 32];
  int node[kSearchThreads / 32];
};

__device__ __forceinline__ int steps_of(const EncodeParams& p) { return p.pass ? 256 : p.window; }
__device__ __forceinline__ int position_of(const EncodeParams& p, int step) { return p.pass ? step : (256 - p.window / 2 + step) & 255; }
// A cost vector is kept at boundaries (steps done) of whole strides from the end; in the first pass from just before the seam on.
__device__ __forceinline__ bool keeps(const EncodeParams& p, int done, int steps, int stride) {
  return done < steps && (steps - done) % stride == 0 && (p.pass || done >= p.window / 2 - stride);
}
__device__ __forceinline__ int64_t slot_of(int done, int steps, int stride) { return (steps - done) / stride - 1; }

template <class CostOf>
__device__ __forceinline__ void store_end(const EncodeParams& p, SearchShared& s, int tile, int nodes, CostOf cost) {
  float best = 3e38f;
  int node = 0;
  for (int i = threadIdx.x; i < nodes; i += kSearchThreads) {
    const float c = cost(i);
    if (c < best) {
      best = c;
      node = i;
    }
  }
  for (int m = 16; m; m >>= 1) {
    const float other = __shfl_xor_sync(~0u, best, m);
    const int other_node = __shfl_xor_sync(~0u, node, m);
    if (other < best || (other == best && other_node < node)) {
      best = other;
      node = other_node;
    }
  }
  if (threadIdx.x % 32 == 0) {
    s.best[threadIdx.x / 32] = best;
    s.node[threadIdx.x / 32] = node;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kSearchThreads / 32; w++)
      if (s.best[w] < best || (s.best[w] == best && s.node[w] < node)) {
        best = s.best[w];
        node = s.node[w];
      }
    p.end[tile] = node;
  }
}

// TILES tiles at a time: more work between two barriers, the same code values.
template <int K, int TILES>
__global__ void __launch_bounds__(kSearchThreads, 1) search(const __grid_constant__ EncodeParams p) {
#if __CUDA_ARCH__ >= 800
  using S = Search<K>;
  constexpr int kStride = stride_of(2 * K);
  constexpr float kUnit = unit_of(2 * K);
  constexpr bool kSplit = splits_target(2 * K);
  ptx::wait_for_previous();
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ SearchShared space[TILES];
  const int lin = threadIdx.x / S::kShare, share = threadIdx.x % S::kShare;
  const int pair0 = S::kByNode ? 0 : lin / S::kThreadsAGroup, out0 = S::kByNode ? 2 * lin : lin % S::kThreadsAGroup * S::kOuts;
  constexpr int kPairStep = kSearchThreads / S::kShare / S::kThreadsAGroup;

  __half2 value[S::kPairs][S::kOuts][S::kMine];
  auto fill = [&](auto code) {
#pragma unroll
    for (int a = 0; a < S::kPairs; a++)
#pragma unroll
      for (int j = 0; j < S::kOuts; j++)
#pragma unroll
        for (int i = 0; i < S::kMine; i++) {
          const uint32_t way = (uint32_t)S::way(share, i) << (16 - K);
          const uint32_t o = S::kByNode ? out0 : 2 * (pair0 + a * kPairStep) * S::kWays + out0 + j;
          const __half2 two = __hmul2(__halves2half2(code(way | o), code(way | (o + (S::kByNode ? 1 : S::kWays)))), __float2half2_rn(kUnit));
          uint32_t bits = *(const uint32_t*)&two;
          asm volatile("" : "+r"(bits));  // one register: the compiler would keep, and spill, the halves apart
          value[a][j][i] = *(const __half2*)&bits;
        }
  };
  if (p.codebook == EXL3_MUL1)
    fill([&](uint32_t state) { return code_half(state, EXL3_MUL1, p.multiplier); });
  else {
    const uint32_t addend = p.codebook == EXL3_3INST ? k3instAddend : 0u;
    fill([&](uint32_t state) {
      const uint32_t pair = half_pair(state, p.multiplier, addend);
      return __hadd(__ushort_as_half((unsigned short)pair), __ushort_as_half((unsigned short)(pair >> 16)));
    });
  }

  const int steps = steps_of(p);
  for (int tile0 = blockIdx.x * TILES; tile0 < p.count; tile0 += gridDim.x * TILES) {
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 256; i += kSearchThreads) {
      const int tile = tile0 + i / 256;
      const float target = tile < p.count ? -p.tiles[(int64_t)tile * 256 + i % 256] * kUnit : 0.f;
      const __half rounded = __float2half_rn(target);
      space[i / 256].target[i % 256] = __halves2half2(rounded, kSplit ? __float2half_rn(target - __half2float(rounded)) : rounded);
    }
    constexpr int kCopies = S::kByNode ? 2 : 1;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      __half* cost = (__half*)(shared + t * S::kCostBytes);
      const int seam = p.pass && tile0 + t < p.count ? p.seam[tile0 + t] : 0;
      for (int i = threadIdx.x; i < S::kNodes * kCopies; i += kSearchThreads)
        cost[i] = __ushort_as_half(p.pass && i / kCopies != seam ? 0x7c00 : 0);  // infinite: not reachable
    }
    __syncthreads();
    int current = 0;
    for (int step = 0; step < steps; step++) {
      const int position = position_of(p, step);
      const bool kept = keeps(p, step + 1, steps, kStride);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const __half2* from = (const __half2*)(shared + (current * TILES + t) * S::kCostBytes);
        uint8_t* to = shared + ((current ^ 1) * TILES + t) * S::kCostBytes;
        const __half2 stored = space[t].target[position];
        const __half2 target = kSplit ? __low2half2(stored) : stored, rest = __high2half2(stored);
        const __half2 down = lowers(step) ? lowering(from) : __half2half2(__ushort_as_half(0));
#pragma unroll
        for (int a = 0; a < S::kPairs; a++) {
          const int pair = pair0 + a * kPairStep;
          __half2 least[S::kOuts];
#pragma unroll
          for (int i = 0; i < S::kMine; i += 2) {
            const int way = S::way(share, i);
            __half2 c0, c1;
            if constexpr (S::kByNode) {
              const uint2 both = *(const uint2*)(from + way);
              c0 = *(const __half2*)&both.x;
              c1 = *(const __half2*)&both.y;
            } else {
              c0 = from[way * (S::kGroups / 2) + pair];
              c1 = from[(way + 1) * (S::kGroups / 2) + pair];
            }
#pragma unroll
            for (int j = 0; j < S::kOuts; j++) {
              __half2 x = __hadd2(value[a][j][i], target), y = __hadd2(value[a][j][i + 1], target);
              if constexpr (kSplit) {
                x = __hadd2(x, rest);
                y = __hadd2(y, rest);
              }
              x = __hfma2(x, x, c0);
              y = __hfma2(y, y, c1);
              least[j] = i == 0 ? __hmin2(x, y) : __hmin2(__hmin2(least[j], x), y);
            }
          }
#pragma unroll
          for (int j = 0; j < S::kOuts; j++) {
#pragma unroll
            for (int m = 1; m < S::kShare; m <<= 1) {
              const uint32_t other = __shfl_xor_sync(~0u, *(const uint32_t*)&least[j], m);
              least[j] = __hmin2(least[j], *(const __half2*)&other);
            }
            least[j] = __hadd2(least[j], down);
          }
          if constexpr (S::kByNode) {
            if (share == 0) *(uint2*)(to + out0 * 4) = [&] {
              const __half2 low = __low2half2(least[0]), high = __high2half2(least[0]);
              return make_uint2(*(const uint32_t*)&low, *(const uint32_t*)&high);
            }();
          } else {
            // low halves: nodes of the even group; high halves: of the odd one
            __half* even = (__half*)to + 2 * pair * S::kWays + out0;
            __half* odd = even + S::kWays;
            if constexpr (S::kOuts == 1) {
              if (share == 0) {
                *even = __low2half(least[0]);
                *odd = __high2half(least[0]);
              }
            } else {
              uint32_t low[S::kOuts / 2], high[S::kOuts / 2];
#pragma unroll
              for (int j = 0; j < S::kOuts; j += 2) {
                const __half2 l = __lows2half2(least[j], least[j + 1]), h = __highs2half2(least[j], least[j + 1]);
                low[j / 2] = *(const uint32_t*)&l;
                high[j / 2] = *(const uint32_t*)&h;
              }
              if constexpr (K == 1) {
                *(uint2*)even = make_uint2(low[0], high[0]);
              } else if constexpr (K == 2) {
                *(uint4*)even = make_uint4(low[0], low[1], high[0], high[1]);
              } else if constexpr (S::kOuts == 8) {
                *(uint4*)even = make_uint4(low[0], low[1], low[2], low[3]);
                *(uint4*)odd = make_uint4(high[0], high[1], high[2], high[3]);
              } else if constexpr (S::kOuts == 4) {
                *(uint2*)even = make_uint2(low[0], low[1]);
                *(uint2*)odd = make_uint2(high[0], high[1]);
              } else {
                *(uint32_t*)even = low[0];
                *(uint32_t*)odd = high[0];
              }
            }
          }
        }
      }
      __syncthreads();
      current ^= 1;
      if (kept) {  // the next step reads this buffer and writes the other
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          if (tile0 + t >= p.count) continue;
          const uint8_t* now = shared + (current * TILES + t) * S::kCostBytes;
          uint16_t* out = p.history + (tile0 + t) * p.tile_history + slot_of(step + 1, steps, kStride) * S::kNodes;
          if constexpr (S::kByNode) {
            if (threadIdx.x < S::kNodes) out[threadIdx.x] = *(const uint16_t*)(now + threadIdx.x * 4);
          } else {
            for (int i = threadIdx.x; i < S::kNodes / 8; i += kSearchThreads) __stcs((uint4*)out + i, ((const uint4*)now)[i]);
          }
        }
      }
    }
    if (!p.pass)
      for (int t = 0; t < TILES && tile0 + t < p.count; t++) {
        const __half* cost = (const __half*)(shared + (current * TILES + t) * S::kCostBytes);
        store_end(p, space[t], tile0 + t, S::kNodes, [&](int i) { return __half2float(cost[S::kByNode ? 2 * i : i]); });
      }
  }
#endif
}

// Values of state and state + 1, times `unit`.
template <bool BYTES>
__device__ __forceinline__ __half2 two_codes(uint32_t state, uint32_t multiplier, uint32_t addend, __half2 unit) {
  const uint32_t p = state * multiplier + addend, n = p + multiplier;
  if constexpr (BYTES) {
    const uint32_t sums = __byte_perm(__dp4a(p, 0x01010101u, 0x6400u), __dp4a(n, 0x01010101u, 0x6400u), 0x5410);
    return __hmul2(__hfma2(*(const __half2*)&sums, __float2half2_rn(kMul1Scale), __float2half2_rn(kMul1Shift)), unit);
  } else {
    const uint32_t a = (p & 0x8fff8fffu) ^ 0x3b603b60u, b = (n & 0x8fff8fffu) ^ 0x3b603b60u;
    const uint32_t low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
    return __hmul2(__hadd2(*(const __half2*)&low, *(const __half2*)&high), unit);
  }
}

// One step for every rate: DI fresh bits now, DO at the next position. Values are computed on the way and costs replaced in place, so it
// needs half the shared memory and takes two to three times as long. `cost` holds 2^(16-DI) nodes, afterwards 2^(16-DO).
template <int DI, int DO, bool BYTES>
__device__ __forceinline__ void step_in_place(__half* cost, __half2 target, bool lower, __half2 unit, uint32_t multiplier, uint32_t addend) {
  constexpr int kOut = 1 << (16 - DO), kEach = kOut / 2 / kSearchThreads;
  __half2 least[kEach];
  const __half2 down = lower ? lowering((const __half2*)cost) : __half2half2(__ushort_as_half(0));
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    const uint32_t o = 2 * (threadIdx.x + e * kSearchThreads);  // this node and the next: the same predecessors
#pragma unroll
    for (uint32_t way = 0; way < 1u << DO; way++) {
      const uint32_t state = way << (16 - DO) | o;
      __half2 x = __hadd2(two_codes<BYTES>(state, multiplier, addend, unit), target);
      x = __hfma2(x, x, __half2half2(cost[state >> DI]));
      least[e] = way == 0 ? x : __hmin2(least[e], x);
    }
    least[e] = __hadd2(least[e], down);
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEach; e++) *(__half2*)(cost + 2 * (threadIdx.x + e * kSearchThreads)) = least[e];
  __syncthreads();
}

template <int K2, bool BYTES>
__global__ void __launch_bounds__(kSearchThreads, 1) search_in_place(const __grid_constant__ EncodeParams p) {
#if __CUDA_ARCH__ >= 800
  constexpr int kEven = K2 / 2, kOdd = K2 / 2 + (K2 & 1), kStride = stride_of(K2);
  ptx::wait_for_previous();
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ SearchShared space;
  __half* cost = (__half*)shared;
  const int steps = steps_of(p);
  const __half2 unit = __float2half2_rn(unit_of(K2));
  const uint32_t addend = p.codebook == EXL3_3INST ? k3instAddend : 0u;
  for (int tile = blockIdx.x; tile < p.count; tile += gridDim.x) {
    __syncthreads();
    if (threadIdx.x < 256) space.target[threadIdx.x] = __half2half2(__float2half_rn(-p.tiles[(int64_t)tile * 256 + threadIdx.x] * unit_of(K2)));
    const int seam = p.pass ? p.seam[tile] : 0, nodes_at_start = 1 << (16 - (position_of(p, 0) & 1 ? kOdd : kEven));
    for (int i = threadIdx.x; i < nodes_at_start; i += kSearchThreads) cost[i] = __ushort_as_half(p.pass && i != seam ? 0x7c00 : 0);
    __syncthreads();
    int nodes = nodes_at_start;
    for (int step = 0; step < steps; step++) {
      const int position = position_of(p, step);
      if (position & 1) {
        step_in_place<kOdd, kEven, BYTES>(cost, space.target[position], lowers(step), unit, p.multiplier, addend);
        nodes = 1 << (16 - kEven);
      } else {
        step_in_place<kEven, kOdd, BYTES>(cost, space.target[position], lowers(step), unit, p.multiplier, addend);
        nodes = 1 << (16 - kOdd);
      }
      if (keeps(p, step + 1, steps, kStride)) {
        uint16_t* out = p.history + tile * p.tile_history + slot_of(step + 1, steps, kStride) * most_nodes(K2);
        for (int i = threadIdx.x; i < nodes / 8; i += kSearchThreads) __stcs((uint4*)out + i, ((const uint4*)shared)[i]);
      }
    }
    if (!p.pass) store_end(p, space, tile, nodes, [&](int i) { return __half2float(cost[i]); });
  }
#endif
}

constexpr __host__ __device__ int ways_of(int k2) { return 1 << (stride_of(k2) * k2 / 2); }  // through a whole stride
constexpr __host__ __device__ int trace_threads(int k2) { return ways_of(k2) > 128 ? ways_of(k2) : 128; }

// Walks back from the end, one block a tile, a stride of steps at a time: every thread tries one way through them, from the stored costs
// before them. Which cost vectors come next is known, so they stream through a ring in shared memory.
template <int K2, bool BYTES>
__device__ __forceinline__ void trace_tile(const EncodeParams& p, int tile) {
  constexpr int kStride = stride_of(K2), kThreads = trace_threads(K2), kNodes = most_nodes(K2);
  constexpr float kUnit = unit_of(K2);
  extern __shared__ __align__(16) uint8_t shared[];  // [p.depth][nodes] fp16
  __shared__ float targets[256];
  __shared__ unsigned long long least[2][kThreads / 32];
  __shared__ uint32_t next_node[2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, way = threadIdx.x;
  for (int i = threadIdx.x; i < 256; i += kThreads) {
    const float target = p.tiles[(int64_t)tile * 256 + i];
    targets[i] = splits_target(K2) ? target : __half2float(__float2half_rn(target));
  }
  const int steps = steps_of(p), stop = p.pass ? 0 : p.window / 2;
  const uint32_t seam = p.pass ? (uint32_t)p.seam[tile] : 0u;
  const uint16_t* history = p.history + tile * p.tile_history;
  auto fetch = [&](int chunk) {  // the vector before chunk `chunk`, counted from the end
    if (steps - (chunk + 1) * kStride > 0 && steps - chunk * kStride > stop) {
      const uint8_t* from = (const uint8_t*)(history + (int64_t)chunk * kNodes);
      uint8_t* to = shared + chunk % p.depth * kNodes * 2;
      for (int i = threadIdx.x * 16; i < kNodes * 2; i += kThreads * 16) ptx::copy16(to + i, from + i);
    }
    ptx::copy_commit();
  };
  for (int i = 0; i < p.depth; i++) fetch(i);
  uint32_t node = p.pass ? seam : (uint32_t)p.end[tile];
  int done = steps;
  for (int chunk = 0; done > stop; chunk++) {
    const int start = max(0, done - kStride), turn = chunk & 1;
    switch (p.depth) {  // the oldest copy has arrived
      case 1: ptx::copy_wait<0>(); break;
      case 2: ptx::copy_wait<1>(); break;
      case 3: ptx::copy_wait<2>(); break;
      default: ptx::copy_wait<3>(); break;
    }
    __syncthreads();
    uint16_t state[kStride];
    float error = 0.f;
    uint32_t at = node, rest = way, passed = node;  // passed: the node at the seam, should this chunk reach beyond it
    int bits = 0;
#pragma unroll
    for (int i = 0; i < kStride; i++) {
      const int s = done - 1 - i;
      state[i] = 0;
      if (s < start) continue;
      const int position = position_of(p, s), fresh = fresh_bits(K2, position + 1);
      state[i] = (uint16_t)((rest & ((1u << fresh) - 1)) << (16 - fresh) | at);
      rest >>= fresh;
      bits += fresh;
      const float d = __half2float(code_half(state[i], BYTES ? EXL3_MUL1 : p.codebook, p.multiplier)) - targets[position];
      error += d * d;
      at = state[i] >> fresh_bits(K2, position);
      if (s >= stop) passed = at;
    }
    float cost = 3e38f;
    if (way < 1 << bits) {
      const float before = start ? __half2float(__ushort_as_half(((const uint16_t*)shared)[chunk % p.depth * kNodes + at])) : p.pass && at != seam ? 1e30f : 0.f;
      cost = before + error * (kUnit * kUnit);
    }
    // the cheapest way, the lowest among equals: costs as unsigned numbers in the same order, the way below them
    const uint32_t raw = __float_as_uint(cost), key = raw & 0x80000000u ? ~raw : raw | 0x80000000u;
    const uint32_t best = ptx::warp_least(key), best_way = ptx::warp_least(key == best ? (uint32_t)way : ~0u);
    if (lane == 0) least[turn][warp] = (unsigned long long)best << 32 | best_way;
    __syncthreads();
    unsigned long long all = least[turn][0];
#pragma unroll
    for (int w = 1; w < kThreads / 32; w++) all = min(all, least[turn][w]);
    if ((uint32_t)all == (uint32_t)way) {
      next_node[turn] = passed;
#pragma unroll
      for (int i = 0; i < kStride; i++)
        if (p.pass && done - 1 - i >= start) p.states[(int64_t)tile * 256 + done - 1 - i] = state[i];
    }
    fetch(chunk + p.depth);
    __syncthreads();
    node = next_node[turn];
    done = start;
  }
  if (!p.pass) {
    if (threadIdx.x == 0) p.seam[tile] = (int32_t)node;
  } else if (p.values) {
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += kThreads)
      p.values[(int64_t)tile * 256 + i] = __half2float(code_half(p.states[(int64_t)tile * 256 + i], BYTES ? EXL3_MUL1 : p.codebook, p.multiplier));
  }
}

template <int K2>
__global__ void __launch_bounds__(trace_threads(K2)) trace_back(const __grid_constant__ EncodeParams p) {
#if __CUDA_ARCH__ >= 800
  ptx::wait_for_previous();
  if (p.codebook == EXL3_MUL1)
    trace_tile<K2, true>(p, blockIdx.x);
  else
    trace_tile<K2, false>(p, blockIdx.x);
#endif
}

}  // namespace exl3
