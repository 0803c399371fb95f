// The product of up to 64 rows with trellis weights decoded in registers, multiplied by mma.sync, or by wgmma on sm_90a from 17 rows on.
//
// One block on each multiprocessor. The work, steps of 128 or 256 inputs by 128 output columns, is one long list that the thread blocks share out evenly:
// each has one run of it, which may end in the middle of a column group. Of a block eight warps multiply, each 16 of the columns: a warp turns
// bits into the A operand in registers (output columns are its rows); the input is B. Four others keep a ring of stages full by bulk copies;
// below sm_90a the multiplying warps copy. Weights are fetched before the wait for the previous kernel.
//
// The block with the end of a column group finishes it: rotates, scales, stores. Blocks with earlier parts send it their sums through
// memory, without flags or fences: a word that is zero has not arrived (a sum of zero travels as -0). Each block works first on the group that
// it does not finish, so sums travel while it works on, and no block waits before it has sent. Floating-point sums have one fixed order: results
// depend on shapes and the number of multiprocessors only.
#pragma once
#include "even_finish.cuh"
#include "even_input.cuh"
#include "trellis.cuh"
#include "wgmma.cuh"

namespace exl3::even {

// A lane's weights of two products in two steps: hashes (mul1: 1024 + byte sum of each; else two halves each), then operands.
template <int K2>
using PairRun = Run<K2, 16>;
template <int K2, int MODE>
__device__ __forceinline__ void hash_pair(const uint32_t (&words)[PairRun<K2>::kRead], const PairRun<K2>& run, uint32_t multiplier, uint32_t addend,
                                          uint32_t (&h)[16]) {
  states_of(words, run, h);
#pragma unroll
  for (int j = 0; j < 16; j++) h[j] = MODE == kDecodeBytes ? __dp4a(h[j] * multiplier, 0x01010101u, 0x6400u) : half_pair_of(h[j], multiplier, addend);
}
template <int MODE>
__device__ __forceinline__ void pack_tile(const uint32_t* h, uint32_t (&a)[4]) {
#pragma unroll
  for (int e = 0; e < 4; e++) {  // (g; low k), (g+8; low k), (g; high k), (g+8; high k)
    const int j = 4 * (e & 1) + 2 * (e >> 1);
    a[e] = __byte_perm(h[j], h[j + 1], 0x5410);
    if (MODE != kDecodeBytes) a[e] = ptx::add(a[e], __byte_perm(h[j], h[j + 1], 0x7632));
  }
}

// Tiles whose decoding overlaps, and sets of sums: as far as there are registers.
inline constexpr __host__ __device__ int group_tiles(int nb) { return nb < (kLongSteps ? 8 : 4) ? 4 : 2; }
constexpr int kSums = kLongSteps ? 2 : 1;

// The words of some tiles of the warp, on their way.
template <int K2, int TILES>
struct Words {
  uint32_t of[TILES / 2][PairRun<K2>::kRead];
  __device__ __forceinline__ void read(const uint8_t* weights, const PairRun<K2>& run, int first) {
#pragma unroll
    for (int r = 0; r < TILES / 2; r++) read_words((const uint32_t*)(weights + (first + 2 * r) * row_pitch(K2)), run, of[r]);
  }
};

// The input of a group of tiles, two words for each 8 columns; `in`: the lane's own 16 bytes of the first four matrices of 8 x 8.
template <int NB>
struct Operands {
  static constexpr int kTile = NB * 256;  // bytes of one row of tiles
  uint32_t of[group_tiles(NB) * NB / 2][4];
  static __device__ __forceinline__ int place_of_lane() {
    const int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
    return (NB == 1 ? matrix : matrix % 2 * NB + matrix / 2) * 128 + row * 16;
  }
  __device__ __forceinline__ void load(const uint8_t* in) {
#pragma unroll
    for (int n = 0; n < group_tiles(NB) * NB / 2; n++)
      ptx::load_matrices(of[n], in + (NB == 1 ? n * 2 * kTile : n / (NB / 2) * kTile + n % (NB / 2) * 256));
  }
  __device__ __forceinline__ const uint32_t* get(int tile, int n) const {
    return NB == 1 ? of[tile / 2] + tile % 2 * 2 : of[(tile * NB + n) / 2] + n % 2 * 2;
  }
};

// A part's sums. Two sets of them: of the first products of pairs of tiles and of the second ones, as a product that waits for the one before holds up the
// decoding.
template <int NB>
struct PartSums {
  float of[kSums][4 * NB];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kSums; s++)
#pragma unroll
      for (int k = 0; k < 4 * NB; k++) of[s][k] = 0.f;
  }
  __device__ __forceinline__ float (&get())[4 * NB] {
#pragma unroll
    for (int s = 1; s < kSums; s++)
#pragma unroll
      for (int k = 0; k < 4 * NB; k++) of[0][k] += of[s][k];
    return of[0];
  }
};

// sums += weights x input, `count` steps. Groups of tiles: the words of the next are on their way while one is decoded; `words`: of the first, then of
// what comes after these steps.
template <int K2, int MODE, int NB>
__device__ __forceinline__ void multiply(const EvenParams& p, RingReader<K2, NB>& ring, const PairRun<K2>& run, int count, uint32_t multiplier,
                                         uint32_t addend, Words<K2, group_tiles(NB)>& words, PartSums<NB>& sums) {
  using S = Stage<K2, NB>;
  constexpr int kGroup = group_tiles(NB);
  constexpr bool kEarly = NB < 8;  // as far as there are registers
  const int place = Operands<NB>::place_of_lane();
#pragma unroll 1
  for (int left = count; left > 0; left--) {
    const uint8_t* weights = ring.ring + ring.stage + S::kImage;
    const uint8_t* in = ring.ring + ring.stage + place;
#pragma unroll
    for (int at = 0; at < kStepTiles; at += kGroup) {
      uint32_t h[kGroup / 2][16];
      Words<K2, kGroup> next;
      Operands<NB> b;
      b.load(in + at * Operands<NB>::kTile);
      if (at + kGroup < kStepTiles) {
        next.read(weights, run, at + kGroup);
      } else if (kEarly) {  // all of the stage is in registers
        ring.release();
        ring.wait(p);
        next.read(ring.ring + ring.stage + S::kImage, run, 0);
      }
#pragma unroll
      for (int r = 0; r < kGroup / 2; r++) hash_pair<K2, MODE>(words.of[r], run, multiplier, addend, h[r]);
      if (kEarly || at + kGroup < kStepTiles) words = next;
#pragma unroll
      for (int r = 0; r < kGroup; r++) {
        float(&d)[4 * NB] = sums.of[r % kSums];
        uint32_t a[4];
        pack_tile<MODE>(h[r / 2] + r % 2 * 8, a);
#pragma unroll
        for (int n = 0; n < NB; n++) ptx::mma(*(float(*)[4])(d + 4 * n), a[0], a[1], a[2], a[3], b.get(r, n)[0], b.get(r, n)[1]);
      }
    }
    if (!kEarly) {
      ring.release();
      ring.wait(p);
      words.read(ring.ring + ring.stage + S::kImage, run, 0);
    }
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kAsyncBlocks = 4;  // from so many on it is used
// The same with wgmma, to the same bits: it leaves the warps free, but takes as long for few columns as for 16. Up to 16 rows it is slower. While a group
// is decoded the tensor cores multiply the one before; while it is packed the words of the next are on their way. Tensor cores read a stage's input till
// then, so it is given back a group later.
template <int K2, int MODE, int NB>
__device__ __forceinline__ void multiply_async(const EvenParams& p, RingReader<K2, NB>& ring, const PairRun<K2>& run, int count, uint32_t multiplier,
                                               uint32_t addend, Words<K2, group_tiles(NB)>& words, PartSums<NB>& sums) {
  using S = Stage<K2, NB>;
  constexpr int kGroup = group_tiles(NB), kGroups = kStepTiles / kGroup;
  uint32_t a[2][kGroup][4] = {};
#pragma unroll 1
  for (int left = count; left > 0; left--) {
    const uint8_t* stage = ring.ring + ring.stage;
    const uint64_t in = wgmma_columns(stage, 8 * NB);
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      uint32_t h[kGroup / 2][16];
#pragma unroll
      for (int r = 0; r < kGroup / 2; r++) hash_pair<K2, MODE>(words.of[r], run, multiplier, addend, h[r]);
      if (g + 1 < kGroups) {
        words.read(stage + S::kImage, run, (g + 1) * kGroup);
      } else {
        ring.next();
        ring.wait(p);
        words.read(ring.ring + ring.stage + S::kImage, run, 0);
      }
#pragma unroll
      for (int r = 0; r < kGroup; r++) pack_tile<MODE>(h[r / 2] + r % 2 * 8, a[g % 2][r]);
      wgmma_fence();
#pragma unroll
      for (int r = 0; r < kGroup; r++) wgmma(sums.of[r % kSums], a[g % 2][r], in + (g * kGroup + r) * (NB * 256 >> 4));
      wgmma_commit();
      wgmma_wait<1>();
      // the products before have read their operands: till here no register of theirs may serve for anything else
#pragma unroll
      for (int r = 0; r < kGroup; r++)
        asm volatile("" ::"r"(a[(g + 1) % 2][r][0]), "r"(a[(g + 1) % 2][r][1]), "r"(a[(g + 1) % 2][r][2]), "r"(a[(g + 1) % 2][r][3]));
      if (g == 0 && left < count) ring.release_before();
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int k = 0; k < 4 * NB; k++) asm volatile("" : "+f"(sums.of[0][k]), "+f"(sums.of[1][k]));  // not read before
  if (count > 0) ring.release_before();
}
#endif

// Keeps a value in its register: else threads compute it again in every step.
__device__ __forceinline__ void keep(int& v) { asm volatile("" : "+r"(v)); }

// On 9.0 at most 128 registers a thread, so that the next rotation's blocks find room beside the product; the warps that fetch give theirs to
// those that multiply.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kBound = 512;
#else
constexpr int kBound = kThreads;
#endif
constexpr int kFetching = 32, kMultiplying = 176;

template <int K2, int MODE, int NB>
__global__ void __launch_bounds__(kBound, 1) even_kernel(const __grid_constant__ EvenParams p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32;
  stamp(p.stamps, kBegins);
  stamp(p.stamps, kBeginsNs);
  const Share share = share_of(p, blockIdx.x);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  RingReader<K2, NB> ring(p, share, shared);
  if (warp >= kWarps) {
    ptx::fewer_registers<kFetching>();
    if (threadIdx.x % 32 == 0) feed<K2, NB>(p, share, shared, warp - kWarps);
    return;
  }
  ptx::more_registers<kMultiplying>();
#else
  if (warp >= kWarps) return;
  RingReader<K2, NB> ring(p, share, shared);
#endif
  PairRun<K2> run(threadIdx.x % 32 / 4 * 2 + threadIdx.x % 2);  // in the weights of a stage
#pragma unroll
  for (int j = 0; j < PairRun<K2>::kRead; j++) {
    run.word[j] += warp * 4 * K2 + (threadIdx.x >> 1 & 1) * row_pitch(K2) / 4;
    keep(run.word[j]);
  }
  stamp(p.stamps, kWaits);
  ring.start(p);
  stamp(p.stamps, kGoesOn);
  Words<K2, group_tiles(NB)> words;
  ring.wait(p);
  words.read(shared + Stage<K2, NB>::kImage, run, 0);
  for (int i = 0; i < share.parts; i++) {
    const Part work = part_of(p, share, i);
    const uint32_t multiplier = p.matrix[work.matrix].multiplier, addend = p.matrix[work.matrix].addend;
    PartSums<NB> sums;
    sums.clear();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (NB >= kAsyncBlocks)
      multiply_async<K2, MODE, NB>(p, ring, run, work.count, multiplier, addend, words, sums);
    else
#endif
      multiply<K2, MODE, NB>(p, ring, run, work.count, multiplier, addend, words, sums);
    keep(i);  // what finishing needs is computed again: the loop has the registers to itself
    float* area = (float*)(shared + even_shared(p, ring_shape(kLongSteps, NB), K2).sums);
    if (i == 0) stamp(p.stamps, kHasInput);  // of the first part, its sums
    finish_part<MODE, NB>(p, part_of(p, share_of(p, blockIdx.x), i), i, sums.get(), area);
  }
  stamp(p.stamps, kEnds);
  stamp(p.stamps, kEndsNs);
#endif
}

}  // namespace exl3::even
