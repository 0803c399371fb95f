// The trellis search of half rates.
#pragma once
#include "encode.cuh"

namespace exl3 {

// Half rates: E and E + 1 fresh bits in turn. A state is way (E + 1 bits) | q | b | a (1 bit each) | j (E bits). The half2 is a pair over b
// for both kinds of step: where E bits go out, the way's lowest bit belongs to the node.
template <int E>
struct HalfSearch {
  static constexpr int kMostNodes = 65536 >> E, kWays = 2 << E;
  static constexpr int kSplit = E == 3 ? 4 : 1;           // threads that share a q, each with its own j
  static constexpr int kOuts = (1 << E) / kSplit;         // j of a thread
  static constexpr int kQs = 64 / (2 * kOuts * kWays);    // q of a thread
  static constexpr int kFewBytes = kMostNodes, kManyBytes = 2 * kMostNodes;  // cost vectors by how many nodes they have
};

// `count` (1, 2, 4 or 8) halves of 32-bit pairs to shared memory, low and high ones apart.
template <int COUNT>
__device__ __forceinline__ void store_halves(__half* low, __half* high, const __half2* pairs) {
  uint32_t l[COUNT / 2], h[COUNT / 2];
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    const __half2 a = __lows2half2(pairs[i], pairs[i + 1]), b = __highs2half2(pairs[i], pairs[i + 1]);
    l[i / 2] = *(const uint32_t*)&a;
    h[i / 2] = *(const uint32_t*)&b;
  }
  if constexpr (COUNT == 2) {
    *(uint32_t*)low = l[0];
    *(uint32_t*)high = h[0];
  } else if constexpr (COUNT == 4) {
    *(uint2*)low = make_uint2(l[0], l[1]);
    *(uint2*)high = make_uint2(h[0], h[1]);
  } else {
    *(uint4*)low = make_uint4(l[0], l[1], l[2], l[3]);
    *(uint4*)high = make_uint4(h[0], h[1], h[2], h[3]);
  }
}

// From 2^(16-E) nodes to half as many: all ways into a node are this thread's.
template <int E>
__device__ __forceinline__ void step_to_few(const __half2 (&value)[HalfSearch<E>::kQs][2][HalfSearch<E>::kOuts][HalfSearch<E>::kWays],
                                            const __half* from, __half* to, int q0, int j0, __half2 target, __half2 down) {
  using S = HalfSearch<E>;
#pragma unroll
  for (int n = 0; n < S::kQs; n++) {
    const int q = q0 + n * (kSearchThreads / S::kSplit);
    __half2 least[2][S::kOuts];
#pragma unroll
    for (int way = 0; way < S::kWays; way++) {
      const uint2 four = *(const uint2*)(from + (way << (15 - 2 * E)) + 4 * q);  // b, a = 00, 01, 10, 11
      const uint32_t pairs[2] = {__byte_perm(four.x, four.y, 0x5410), __byte_perm(four.x, four.y, 0x7632)};
#pragma unroll
      for (int a = 0; a < 2; a++)
#pragma unroll
        for (int j = 0; j < S::kOuts; j++) {
          __half2 x = __hadd2(value[n][a][j][way], target);
          x = __hfma2(x, x, *(const __half2*)&pairs[a]);
          least[a][j] = way == 0 ? x : __hmin2(least[a][j], x);
        }
    }
#pragma unroll
    for (int a = 0; a < 2; a++)
#pragma unroll
      for (int j = 0; j < S::kOuts; j++) least[a][j] = __hadd2(least[a][j], down);
    __half* out = to + (q << (E + 2)) + j0;  // b | a | j
    if constexpr (S::kSplit == 1) {
      store_halves<2 * S::kOuts>(out, out + (2 << E), least[0]);
    } else {
      store_halves<S::kOuts>(out, out + (2 << E), least[0]);
      store_halves<S::kOuts>(out + (1 << E), out + (3 << E), least[1]);
    }
  }
}

// From 2^(15-E) nodes to twice as many.
template <int E>
__device__ __forceinline__ void step_to_many(const __half2 (&value)[HalfSearch<E>::kQs][2][HalfSearch<E>::kOuts][HalfSearch<E>::kWays],
                                             const __half* from, __half* to, int q0, int j0, __half2 target, __half2 down) {
  using S = HalfSearch<E>;
#pragma unroll
  for (int n = 0; n < S::kQs; n++) {
    const int q = q0 + n * (kSearchThreads / S::kSplit);
#pragma unroll
    for (int low = 0; low < 2; low++) {  // the way's lowest bit
      __half2 least[2][S::kOuts];
#pragma unroll
      for (int way = low; way < S::kWays; way += 2) {
        const __half2 cost = *(const __half2*)(from + (way << (14 - 2 * E)) + 2 * q);
#pragma unroll
        for (int a = 0; a < 2; a++)
#pragma unroll
          for (int j = 0; j < S::kOuts; j++) {
            __half2 x = __hadd2(value[n][a][j][way], target);
            x = __hfma2(x, x, cost);
            least[a][j] = way == low ? x : __hmin2(least[a][j], x);
          }
      }
#pragma unroll
      for (int a = 0; a < 2; a++)
#pragma unroll
        for (int j = 0; j < S::kOuts; j++) least[a][j] = __hadd2(least[a][j], down);
      __half* out = to + (low << (15 - E)) + (q << (E + 2)) + j0;
      if constexpr (S::kSplit == 1) {
        store_halves<2 * S::kOuts>(out, out + (2 << E), least[0]);
      } else {
        store_halves<S::kOuts>(out, out + (2 << E), least[0]);
        store_halves<S::kOuts>(out + (1 << E), out + (3 << E), least[1]);
      }
    }
  }
}

// As `search`, for E + 1/2 bits (mul1 alone). An even position brings E bits: its states come from 2^(16-E) nodes.
template <int E, int TILES>
__global__ void __launch_bounds__(kSearchThreads, 1) search_half(const __grid_constant__ EncodeParams p) {
#if __CUDA_ARCH__ >= 800
  using S = HalfSearch<E>;
  constexpr int kStride = stride_of(2 * E + 1), kTileBytes = S::kFewBytes + S::kManyBytes;
  constexpr float kUnit = unit_of(2 * E + 1);
  ptx::wait_for_previous();
  extern __shared__ __align__(16) uint8_t shared[];  // a tile: many nodes, then few
  __shared__ SearchShared space[TILES];
  const int q0 = threadIdx.x / S::kSplit, j0 = threadIdx.x % S::kSplit * S::kOuts;
  __half2 value[S::kQs][2][S::kOuts][S::kWays];
#pragma unroll
  for (int n = 0; n < S::kQs; n++)
#pragma unroll
    for (int a = 0; a < 2; a++)
#pragma unroll
      for (int j = 0; j < S::kOuts; j++)
#pragma unroll
        for (int way = 0; way < S::kWays; way++) {
          const uint32_t state = (uint32_t)way << (15 - E) | (uint32_t)(q0 + n * (kSearchThreads / S::kSplit)) << (E + 2) | a << E | (j0 + j);
          const __half2 two = __hmul2(__halves2half2(code_half(state, EXL3_MUL1, p.multiplier), code_half(state + (2 << E), EXL3_MUL1, p.multiplier)),
                                      __float2half2_rn(kUnit));
          uint32_t bits = *(const uint32_t*)&two;
          asm volatile("" : "+r"(bits));
          value[n][a][j][way] = *(const __half2*)&bits;
        }
  const int steps = steps_of(p);
  for (int tile0 = blockIdx.x * TILES; tile0 < p.count; tile0 += gridDim.x * TILES) {
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 256; i += kSearchThreads) {
      const int tile = tile0 + i / 256;
      const float target = tile < p.count ? p.tiles[(int64_t)tile * 256 + i % 256] : 0.f;
      space[i / 256].target[i % 256] = __half2half2(__float2half_rn(-target * kUnit));
    }
    const bool odd_start = position_of(p, 0) & 1;
    const int start_nodes = S::kMostNodes >> (odd_start ? 1 : 0);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      __half* cost = (__half*)(shared + t * kTileBytes + (odd_start ? S::kManyBytes : 0));
      const int seam = p.pass && tile0 + t < p.count ? p.seam[tile0 + t] : 0;
      for (int i = threadIdx.x; i < start_nodes; i += kSearchThreads) cost[i] = __ushort_as_half(p.pass && i != seam ? 0x7c00 : 0);
    }
    __syncthreads();
    for (int step = 0; step < steps; step++) {
      const int position = position_of(p, step);
      const bool odd = position & 1, kept = keeps(p, step + 1, steps, kStride);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        __half *many = (__half*)(shared + t * kTileBytes), *few = many + S::kManyBytes / 2;
        const __half2 target = space[t].target[position];
        const __half2 down = lowers(step) ? lowering((const __half2*)(odd ? few : many)) : __half2half2(__ushort_as_half(0));
        if (odd)
          step_to_many<E>(value, few, many, q0, j0, target, down);
        else
          step_to_few<E>(value, many, few, q0, j0, target, down);
      }
      __syncthreads();
      if (kept) {  // the next step writes the other vector
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          if (tile0 + t >= p.count) continue;
          const uint8_t* now = shared + t * kTileBytes + (odd ? 0 : S::kManyBytes);
          uint16_t* out = p.history + (tile0 + t) * p.tile_history + slot_of(step + 1, steps, kStride) * S::kMostNodes;
          for (int i = threadIdx.x; i < (S::kMostNodes >> (odd ? 0 : 1)) / 8; i += kSearchThreads) __stcs((uint4*)out + i, ((const uint4*)now)[i]);
        }
      }
    }
    const bool ends_many = position_of(p, steps - 1) & 1;
    if (!p.pass)
      for (int t = 0; t < TILES && tile0 + t < p.count; t++) {
        const __half* cost = (const __half*)(shared + t * kTileBytes + (ends_many ? 0 : S::kManyBytes));
        store_end(p, space[t], tile0 + t, S::kMostNodes >> (ends_many ? 0 : 1), [&](int i) { return __half2float(cost[i]); });
      }
  }
#endif
}

}  // namespace exl3
