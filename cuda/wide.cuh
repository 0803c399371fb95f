// The product of many rows on sm_90a: weights decoded in registers, straight into wgmma's A operand.
//
// A cluster of two blocks owns 256 output columns, 128 a block, and ROWS rows of x at a time. The cluster only keeps them side by side, as both read
// the same input: one fetch for both (multicast) measured no faster, and its signals across blocks cost.
// One tile of weights is one A fragment of one warp, with output columns as its rows; x is the B operand: the more rows, the less a decoded
// weight costs. The input is rotated once by prepare_wide and laid out in the very order, swizzle included, that wgmma reads, so plain
// bulk copies fetch it. Of twelve warps eight multiply, one keeps a ring of stages of 64 inputs full, and three finish the tile before, whose sums
// they get as halves (wide_finish.cuh), while the others go on.
//
// mul1 weights go in as byte sum - 510, exact in fp16; scale and what is left of the shift come later. Blocks stay for the whole call. Where the tiles don't fill
// whole rounds of the card, the first ones are cut along the inner dimension into equal shares (WideWalk). Sums of a share go the same way, and
// from the finishing warps to memory; who finishes the tile, the block with its beginning, adds the other shares in their order, so results repeat
// bit for bit.
#pragma once
#include "trellis.cuh"
#include "wgmma.cuh"
#include "wide_finish.cuh"

namespace exl3 {

#ifdef __CUDACC__
constexpr int kManyRegisters = 192, kFewRegisters = 120;  // of a multiplier and of the others; 2 x 192 + 120 is 3 x 168, what a launch gets

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Read again where it is needed: it would be kept in local memory from one part of the kernel to the next.
__device__ __forceinline__ int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}

// A piece whose sums are there: whose they are, and what is to be done.
struct WideSpot {
  int matrix, group, row_tile;
  int slot, others;  // -1: they go to this slot of `partial`; else so many shares are there, from this slot on
};
// What lies where in shared memory.
template <int K2, int ROWS>
struct WideSpace {
  static constexpr int kStages = wide_stages(K2, ROWS), kStage = wide_stage(K2, ROWS);
  uint8_t *ring, *staged;
  float *sums, *scales;  // of the rows of the tile being finished
  uint64_t *full, *empty, *staged_full, *staged_empty, *last_known;
  WideSpot* last;
  __device__ __forceinline__ explicit WideSpace(uint8_t* raw) {
    ring = raw;
    staged = ring + kStages * kStage;
    sums = (float*)(staged + ROWS * 256);
    scales = sums + ROWS;
    full = (uint64_t*)(scales + ROWS);
    empty = full + kStages;
    staged_full = empty + kStages;
    staged_empty = staged_full + 1;
    last_known = staged_empty + 1;
    last = (WideSpot*)(last_known + 2);  // aligned to 16 bytes
  }
};

// One thread: keeps the ring full. Weights may be fetched before the kernel before has ended.
template <int K2, int ROWS>
__device__ __forceinline__ void wide_fetch(const WideParams& p, const WideSpace<K2, ROWS>& space, int cluster, int clusters, int rank) {
  constexpr int kStages = WideSpace<K2, ROWS>::kStages, kStage = WideSpace<K2, ROWS>::kStage, kImage = ROWS * 128, kTileRow = 128 * K2;
  const int64_t step_bytes = (int64_t)p.row_tiles * kImage;
  WideWalk walk(p, cluster, clusters);
  WidePiece piece;
  for (int i = 0; walk.step(p, clusters, piece);) {
    const WidePlace place = wide_place(p, piece.tile);
    const ProductMatrix& w = p.matrix[place.matrix];
    const int64_t pitch = (int64_t)w.columns * 16 * K2;
    const uint8_t* weights = w.trellis + min(place.group + rank, w.columns / 8 - 1) * kTileRow;
    const uint8_t* image = p.image + (int64_t)(p.rotations > 1 ? place.matrix : 0) * p.steps * step_bytes + (int64_t)place.row_tile * kImage;
    auto fetch_weights = [&](int step, int stage) {
      ptx::barrier_expect(space.full + stage, kImage + 4 * kTileRow);
#pragma unroll
      for (int r = 0; r < 4; r++)
        ptx::bulk_load(space.ring + stage * kStage + kImage + r * kTileRow, weights + (step * 4 + r) * pitch, kTileRow, space.full + stage);
    };
    auto fetch_image = [&](int step, int stage) {
      ptx::bulk_load(space.ring + stage * kStage, image + step * step_bytes, kImage, space.full + stage);
    };
    int step = piece.first;
    if (i == 0) {
      fetch_weights(step, 0);
      ptx::wait_for_previous();
      fetch_image(step++, i++);
    }
#pragma unroll 1
    for (; step < piece.last; step++, i++) {
      const int stage = i % kStages;
      if (i >= kStages) ptx::barrier_wait(space.empty + stage, (i / kStages - 1) & 1);
      fetch_weights(step, stage);
      fetch_image(step, stage);
    }
  }
}

// A warpgroup's sums as halves to the finishers, [row][column].
template <int ROWS>
__device__ __forceinline__ void hand_over(const WideParams& p, const float (&d)[ROWS / 2], uint8_t* staged, int warp, int lane) {
  const int row = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j += 2) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = ptx::pack(d[4 * j + 2 * i] * p.shrink, d[4 * j + 2 * i + 1] * p.shrink);
    store_matrices_transposed(staged_piece(staged, j * 8 + row, piece), r);
  }
}

template <int K2, int MODE, int ROWS>
__device__ __forceinline__ int wide_multiply(const WideParams& p, const WideSpace<K2, ROWS>& space, int cluster, int clusters) {
  constexpr int kStages = WideSpace<K2, ROWS>::kStages, kStage = WideSpace<K2, ROWS>::kStage, kImage = ROWS * 128, kTileRow = 128 * K2;
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const Run<K2> run(lane);
  float d[ROWS / 2];
  uint32_t a[2][2][4] = {};
  int stage = 0, phase = 0, handed = 0;
  auto release = [&](int which) { ptx::barrier_arrive(space.empty + which); };
  WideWalk walk(p, cluster, clusters);
  WidePiece piece;
  while (walk.step(p, clusters, piece)) {
    const WidePlace place = wide_place(p, piece.tile);
    const uint32_t multiplier = p.matrix[place.matrix].multiplier, addend = p.matrix[place.matrix].addend;
    SliceScale row_scale{};
    const int row = place.row_tile * ROWS + thread;
    if (piece.first == 0 && thread < ROWS && row < p.rows) row_scale = p.scales[(int64_t)(p.rotations > 1 ? place.matrix : 0) * p.rows + row];
    for (int step = piece.first; step < piece.last; step++) {
      ptx::barrier_wait(space.full + stage, phase);
      const uint8_t* in = space.ring + stage * kStage;
      const uint64_t b = wgmma_operand(in);
#pragma unroll
      for (int half = 0; half < 2; half++) {  // two products at a time keep the tensor cores busy while the next operands are made
#pragma unroll
        for (int r = 0; r < 2; r++) {
          uint32_t s[8];
          read_states<K2>((const uint32_t*)(in + kImage + (2 * half + r) * kTileRow + warp * 16 * K2), run, s);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int j = 4 * (e & 1) + 2 * (e >> 1);
            a[half][r][e] = MODE == kDecodeBytes ? decode_centred(s[j], s[j + 1], multiplier) : decode_pairs(s[j], s[j + 1], multiplier, addend);
          }
        }
        wgmma_fence();
        wgmma(d, a[half][0], b + half * 4, half > 0 || step > piece.first);
        wgmma(d, a[half][1], b + half * 4 + 2, 1);
        wgmma_commit();
        wgmma_wait<1>();
        // the products before have read their operands: till here no register of theirs may serve for anything else
        asm volatile("" ::"r"(a[half ^ 1][0][0]), "r"(a[half ^ 1][0][1]), "r"(a[half ^ 1][0][2]), "r"(a[half ^ 1][0][3]), "r"(a[half ^ 1][1][0]),
                     "r"(a[half ^ 1][1][1]), "r"(a[half ^ 1][1][2]), "r"(a[half ^ 1][1][3]));
        if (half == 0 && step > piece.first) release(stage ? stage - 1 : kStages - 1);  // the stage before is consumed
      }
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    wgmma_wait<0>();
    release(stage ? stage - 1 : kStages - 1);
    ptx::barrier_wait(space.staged_empty, (handed & 1) ^ 1);
    if (thread < ROWS) {
      space.sums[thread] = row_scale.sum * p.shrink_shift;
      space.scales[thread] = row_scale.scale * p.grow;
    }
    hand_over<ROWS>(p, d, space.staged, warp, lane);
    ptx::barrier_arrive(space.staged_full);
    handed++;
  }
  return handed;
}

// The sums of a share to memory, then a word that says so. `first`: which of `warps` warps.
template <int ROWS>
__device__ __forceinline__ void pass_on(const WideParams& p, const uint8_t* staged, int rows, int slot, int first, int warps, int lane) {
  uint4* to = (uint4*)(p.partial + (int64_t)slot * ROWS * 256) + lane;
#pragma unroll 1
  for (int r0 = kFinishRows * first; r0 < rows; r0 += kFinishRows * warps)
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      uint32_t b[4];
      load_sums(b, staged, r0, pair, lane);
      __stcg(to + (r0 / kFinishRows * 4 + pair) * 32, make_uint4(b[0], b[1], b[2], b[3]));
    }
  __threadfence();
  ptx::named_sync(2, warps * 32);
  if (first == 0 && lane == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(p.arrived + slot) : "memory");
}
__device__ __forceinline__ WideSpot spot_of(const WideParams& p, const WidePiece& piece, int cluster, int clusters, int rank) {
  const WidePlace place = wide_place(p, piece.tile);
  const WideShares shares = shares_of(p, piece, cluster, clusters);
  return {place.matrix, place.group + rank, place.row_tile, 2 * shares.slot + rank, shares.count};
}

// By `warps` warps, of which this is number `first`. `rehearses`: one row of it, and nothing is kept.
template <int ROWS>
__device__ __forceinline__ void finish_piece(const WideParams& p, const WideSpot& spot, const uint8_t* staged, const float* sums, const float* scales,
                                             bool rehearses, int first, int warps, int lane) {
  const ProductMatrix& w = p.matrix[spot.matrix];
  const int row0 = spot.row_tile * ROWS, rows = min(ROWS, p.rows - row0);
  if (spot.others < 0 && !rehearses) {
    pass_on<ROWS>(p, staged, rows, spot.slot, first, warps, lane);
    return;
  }
  const OtherShares others{p.partial + (rehearses ? 0 : (int64_t)spot.slot * ROWS * 256), (int64_t)2 * ROWS * 256,
                           rehearses ? min(p.tail + p.split_tiles, 1) : spot.others};
  if (!rehearses)
    for (int i = 0; i < others.count; i++) {
      int there = lane;
      if (lane == 0) do
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(p.arrived + spot.slot + 2 * i) : "memory");
        while (!there);
      __syncwarp();
    }
  if (spot.group * 8 < w.columns)
    finish_rows(p, w, spot.group, row0, rehearses ? 1 : rows, rehearses ? 0 : rows, staged, others, sums, scales, rehearses ? 0 : first, warps, lane);
  if (others.count > 0 && !rehearses) {
    ptx::named_sync(2, warps * 32);  // all have seen the words
    for (int i = first * 32 + lane; i < others.count; i += warps * 32) p.arrived[spot.slot + 2 * i] = 0;
  }
}

// Warps 9 .. 11. The last piece they share with those that multiplied, and tell them where it belongs: finding that out takes a while.
// Before anything else they finish a row for nothing: instructions come from memory first, which takes longer than the work.
constexpr int kLastWarps = kWideThreads / 32 - 1;
template <int K2, int ROWS>
__device__ __forceinline__ void wide_finish(const WideParams& p, const WideSpace<K2, ROWS>& space, int cluster, int clusters, int rank) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  WideWalk walk(p, cluster, clusters);
  WidePiece piece;
  bool more = walk.step(p, clusters, piece);
  for (int n = -1; more; n++) {
    const WideSpot spot = spot_of(p, piece, cluster, clusters, rank);
    if (n >= 0) {
      more = walk.step(p, clusters, piece);
      if (!more && warp == 9 && lane == 0) {
        *space.last = spot;
        ptx::barrier_arrive(space.last_known);
      }
      ptx::barrier_wait(space.staged_full, n & 1);
    }
    finish_piece<ROWS>(p, spot, space.staged, space.sums, space.scales, n < 0, more ? warp - 9 : warp - 1, more ? kWideFinishers : kLastWarps, lane);
    if (n < 0)
      ptx::wait_for_previous();
    else if (more)
      ptx::barrier_arrive(space.staged_empty);
  }
}
// Warps 0 .. 7; `handed`: pieces they have multiplied.
template <int K2, int ROWS>
__device__ __forceinline__ void wide_finish_last(const WideParams& p, const WideSpace<K2, ROWS>& space, int handed) {
  ptx::barrier_wait(space.last_known, 0);
  const WideSpot spot = *space.last;
  ptx::barrier_wait(space.staged_full, (handed - 1) & 1);
  finish_piece<ROWS>(p, spot, space.staged, space.sums, space.scales, false, thread_index() / 32, kLastWarps, thread_index() % 32);
}
#endif

template <int K2, int MODE, int ROWS>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const __grid_constant__ WideParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];  // the swizzle counts on it
  const WideSpace<K2, ROWS> space(raw);
  const int rank = blockIdx.x & 1, cluster = blockIdx.x / 2, clusters = gridDim.x / 2, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < space.kStages; i++) {
      ptx::barrier_init(space.full + i, 1);
      ptx::barrier_init(space.empty + i, 256);
    }
    ptx::barrier_init(space.staged_full, 256);
    ptx::barrier_init(space.staged_empty, 32 * kWideFinishers);
    ptx::barrier_init(space.last_known, 1);
    ptx::barrier_init_done();
  }
  __syncthreads();
  ptx::launch_dependents();
  if (warp >= 8) {
    ptx::fewer_registers<kFewRegisters>();
    if (warp > 8)
      wide_finish<K2, ROWS>(p, space, cluster, clusters, rank);
    else if (thread_index() % 32 == 0)
      wide_fetch<K2, ROWS>(p, space, cluster, clusters, rank);
  } else {
    ptx::more_registers<kManyRegisters>();
    ptx::wait_for_previous();
    const int handed = wide_multiply<K2, MODE, ROWS>(p, space, cluster, clusters);
    ptx::fewer_registers<kFewRegisters>();
    if (handed) wide_finish_last<K2, ROWS>(p, space, handed);
  }
#endif
}
#endif

}  // namespace exl3
