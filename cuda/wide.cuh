// The product of many rows on sm_90a: weights decoded in registers, straight into wgmma's A operand.
//
// A cluster of two blocks owns 256 output columns, 128 a block, and ROWS rows of x at a time. The cluster only keeps them side by side, as both read
// the same input: one fetch for both (multicast) measured no faster, and its signals across blocks cost.
// One tile of weights is one A fragment of one warp, with output columns as its rows; x is the B operand: the more rows, the less a decoded
// weight costs. The input is rotated once by prepare_wide and laid out in the very order, swizzle included, that wgmma reads, so plain
// bulk copies fetch it. Of twelve warps eight multiply, one keeps a ring of stages of 64 inputs full, and three finish the tile before:
// they turn each row's 128 sums, passed on as halves, by the Hadamard transform and store them, while the tensor cores go on.
//
// mul1 weights go in as byte sum - 510, exact in fp16; scale and what is left of the shift come later. Blocks stay for the whole call. Where the tiles don't fill
// whole rounds of the card, the first ones are cut along the inner dimension into equal shares (WideWalk). Sums of a share go the same way, and
// from the finishing warps to memory; who finishes the tile, the block with its beginning, adds the other shares in their order, so results repeat
// bit for bit.
#pragma once
#include "ptx.cuh"
#include "rotate.cuh"
#include "trellis.cuh"
#include "wgmma.cuh"
#include "wide.h"

namespace exl3 {

#ifdef __CUDACC__
constexpr int kManyRegisters = 192, kFewRegisters = 120;  // of a multiplier and of the others; 2 x 192 + 120 is 3 x 168, what a launch gets

// Where a row's sums of eight columns lie: [row][16 pieces of 16 bytes, swapped by row].
template <class Byte>
__device__ __forceinline__ Byte* staged_piece(Byte* staged, int row, int piece) {
  return staged + row * 256 + (piece ^ (row & 7)) * 16;
}

// What is rare, or large, stands once in a kernel.
static __device__ __noinline__ float activate_one(float x, int activation) { return activate(x, activation, nullptr); }
static __device__ __noinline__ float load_one(const void* y, int c, int n, int dtype) { return c < n ? load(y, c, dtype) : 0.f; }
static __device__ __noinline__ void store_one(void* y, int c, int n, int dtype, float v) {
  if (c < n) store(y, c, dtype, v);
}

struct alignas(16) EightHalves {
  __half2 pairs[4];
};
static __device__ __forceinline__ void unpack_eight(const EightHalves& h, float* v) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 f = __half22float2(h.pairs[e]);
    v[2 * e] = f.x;
    v[2 * e + 1] = f.y;
  }
}
static __device__ __forceinline__ void load_eight(const void* from, float* v) { unpack_eight(*(const EightHalves*)from, v); }
static __device__ __forceinline__ void add_eight(const uint4& of, float* v) {
  float other[8];
  unpack_eight(*(const EightHalves*)&of, other);
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] += other[e];
}

// The 16 columns of a row that a lane has, eight from c on and eight from c + 64 on; those past n are zero.
static __device__ __forceinline__ void load_columns(const void* y, int c, int n, int dtype, bool whole, float (&v)[16]) {
  if (!whole) {
#pragma unroll
    for (int e = 0; e < 16; e++) v[e] = load_one(y, c + e % 8 + e / 8 * 64, n, dtype);
  } else if (dtype == EXL3_F32) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 f = *(const float4*)((const float*)y + c + i / 2 * 64 + i % 2 * 4);
      v[4 * i] = f.x;
      v[4 * i + 1] = f.y;
      v[4 * i + 2] = f.z;
      v[4 * i + 3] = f.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint16_t* from = (const uint16_t*)y + c + i * 64;
      if (dtype == EXL3_F16) {
        load_eight(from, v + 8 * i);
        continue;
      }
      const uint4 h = *(const uint4*)from;
      const uint32_t words[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
      for (int e = 0; e < 8; e++) v[8 * i + e] = __uint_as_float(e % 2 ? words[e / 2] & 0xffff0000 : words[e / 2] << 16);
    }
  }
}
static __device__ __forceinline__ void store_columns(void* y, int c, int n, int dtype, bool whole, const float (&v)[16]) {
  if (!whole) {
#pragma unroll
    for (int e = 0; e < 16; e++) store_one(y, c + e % 8 + e / 8 * 64, n, dtype, v[e]);
  } else if (dtype == EXL3_F32) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      *(float4*)((float*)y + c + i / 2 * 64 + i % 2 * 4) = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float a = v[8 * i + 2 * e], b = v[8 * i + 2 * e + 1];
        words[e] = dtype == EXL3_F16 ? ptx::pack(a, b) : float_to_bfloat(a) | (uint32_t)float_to_bfloat(b) << 16;
      }
      *(uint4*)((uint16_t*)y + c + i * 64) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Unscaled 128-point Hadamard transform over eight lanes of 16 values each. FIRST: 1; or 2 where pairs of columns eight apart, of neighbouring lanes, have
// become their sum and their difference already.
template <int FIRST>
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
  for (int m = FIRST; m < 8; m <<= 1) {
    const float sign = lane & m ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], m));
  }
}

// What other blocks have of a tile, laid out as their `staged` was: `count` of them, `stride` bytes from one to the next.
struct OtherShares {
  const uint8_t* from;
  int64_t stride;
  int count;
};

// Rows of a tile, four at a time, `first` the first four and `stride` fours on from there: sum of the shares, transform, scales, bias, activation, store.
// One warp, eight lanes a row: two steps of the transform through shuffles, which are few a cycle, four in registers, one is done.
static __device__ __forceinline__ void finish_rows(const WideParams& p, const ProductMatrix& w, int group, int row0, int rows, const uint8_t* staged,
                                                   const OtherShares& others, const float* row_scales, int first, int stride, int lane) {
  const int c = group * 128 + lane % 8 * 8, n = w.out_features;
  const bool whole = (group + 1) * 128 <= n && w.y_stride % 8 == 0 && ((uintptr_t)w.y & 15) == 0;
  float svh[16];
#pragma unroll
  for (int e = 0; e < 16; e++) svh[e] = half_to_float(w.svh[c + e % 8 + e / 8 * 64]);
  auto row_at = [&](int r0) { return min(r0 + lane / 8, rows - 1); };
  uint4 other[2];  // of the first of the others, fetched a round ahead
  auto fetch_other = [&](int share, int r0) {
#pragma unroll
    for (int i = 0; i < 2; i++) other[i] = __ldcg((const uint4*)staged_piece(others.from + share * others.stride, row_at(r0), lane % 8 + 8 * i));
  };
  if (others.count > 0) fetch_other(0, 4 * first);
#pragma unroll 1
  for (int r0 = 4 * first; r0 < rows; r0 += 4 * stride) {
    const int row = row_at(r0);
    void* y = row_of(w.y, (int64_t)(row0 + row) * w.y_stride, p.y_dtype);
    float v[16], o[16];
    if (p.activation || p.accumulate) load_columns(y, c, n, p.y_dtype, whole, o);
#pragma unroll
    for (int i = 0; i < 2; i++) load_eight(staged_piece(staged, row, lane % 8 + 8 * i), v + 8 * i);
#pragma unroll 1
    for (int share = 0; share < others.count; share++) {
      if (share > 0) fetch_other(share, r0);
#pragma unroll
      for (int i = 0; i < 2; i++) add_eight(other[i], v + 8 * i);
    }
    if (others.count > 0) fetch_other(0, r0 + 4 * stride);
    turn16<2>(v, lane);
    const float scale = row_scales[row];
#pragma unroll
    for (int e = 0; e < 16; e++) v[e] *= scale * svh[e];
    if (w.bias)
#pragma unroll
      for (int e = 0; e < 16; e++) v[e] += load_one(w.bias, c + e % 8 + e / 8 * 64, n, EXL3_F32);
    if (p.activation) {
#pragma unroll
      for (int e = 0; e < 16; e++) v[e] *= activate_one(o[e], p.activation);
    } else if (p.accumulate) {
#pragma unroll
      for (int e = 0; e < 16; e++) v[e] += o[e];
    }
    if (r0 + lane / 8 < rows) store_columns(y, c, n, p.y_dtype, whole, v);
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Read again where it is needed: it would be kept in local memory from one part of the kernel to the next.
__device__ __forceinline__ int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
__device__ __forceinline__ void sync_multipliers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// What lies where in shared memory.
template <int K2, int ROWS>
struct WideSpace {
  static constexpr int kStages = wide_stages(K2, ROWS), kStage = wide_stage(K2, ROWS);
  uint8_t *ring, *staged;
  float *sums, *scales;  // of the rows of the tile being finished
  uint64_t *full, *empty, *staged_full, *staged_empty;
  __device__ __forceinline__ explicit WideSpace(uint8_t* raw) {
    ring = raw;
    staged = ring + kStages * kStage;
    sums = (float*)(staged + ROWS * 256);
    scales = sums + ROWS;
    full = (uint64_t*)(scales + ROWS);
    empty = full + kStages;
    staged_full = empty + kStages;
    staged_empty = staged_full + 1;
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
      const int ahead = min(kStages, piece.last - piece.first);
#pragma unroll 1
      for (; i < ahead; i++) fetch_weights(step + i, i);
      ptx::wait_for_previous();
#pragma unroll 1
      for (i = 0; i < ahead; i++) fetch_image(step + i, i);
      step += ahead;
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

// A warpgroup's sums as halves to the finishers, [row][column]; columns eight apart, which a thread has, as their sum and their difference: a step of the
// transform.
template <int ROWS>
__device__ __forceinline__ void hand_over(const WideParams& p, const float (&d)[ROWS / 2], uint8_t* staged, const float* sums, int warp, int lane) {
  const int q = lane % 4, row = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j += 2) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 sum = *(const float2*)(sums + (j + i) * 8 + 2 * q);
      const float* v = d + 4 * (j + i);
      const float2 a = make_float2(fmaf(v[0], p.shrink, sum.x), fmaf(v[1], p.shrink, sum.y));
      const float2 b = make_float2(fmaf(v[2], p.shrink, sum.x), fmaf(v[3], p.shrink, sum.y));
      const __half2 low = __floats2half2_rn(a.x + b.x, a.y + b.y), high = __floats2half2_rn(a.x - b.x, a.y - b.y);
      r[2 * i] = *(const uint32_t*)&low;
      r[2 * i + 1] = *(const uint32_t*)&high;
    }
    store_matrices_transposed(staged_piece(staged, j * 8 + row, piece), r);
  }
}

template <int K2, int MODE, int ROWS>
__device__ __forceinline__ void wide_multiply(const WideParams& p, const WideSpace<K2, ROWS>& space, int cluster, int clusters, int rank) {
  constexpr int kStages = WideSpace<K2, ROWS>::kStages, kStage = WideSpace<K2, ROWS>::kStage, kImage = ROWS * 128, kTileRow = 128 * K2;
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const Run<K2> run(lane);
  float d[ROWS / 2];
  uint32_t a[2][2][4] = {};
  int stage = 0, phase = 0, handed = 0;
  auto release = [&](int which) {
    __syncwarp();  // one arrives for all
    if (lane == 0) ptx::barrier_arrive(space.empty + which);
  };
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
    sync_multipliers();
    hand_over<ROWS>(p, d, space.staged, space.sums, warp, lane);
    ptx::barrier_arrive(space.staged_full);
    handed++;
  }
}

// The sums of a share to memory, then a word that says so. `first`: which of `warps` warps.
template <int ROWS>
__device__ __forceinline__ void pass_on(const WideParams& p, const uint8_t* staged, int rows, int first, int warps, int lane) {
  uint4* to = (uint4*)(p.partial + (int64_t)blockIdx.x * ROWS * 256);
#pragma unroll 4
  for (int i = first * 32 + lane; i < rows * 16; i += warps * 32) __stcg(to + i, *(const uint4*)(staged + i * 16));
  __threadfence();
  ptx::named_sync(2, warps * 32);
  if (first == 0 && lane == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(p.arrived + blockIdx.x) : "memory");
}
// The shares of the clusters that follow, as far as the tile goes, once they are there.
template <int ROWS>
__device__ __forceinline__ OtherShares others_of(const WideParams& p, int tile, int cluster, int clusters, int rank, int lane) {
  OtherShares others{p.partial + (int64_t)(2 * (cluster + 1) + rank) * ROWS * 256, (int64_t)2 * ROWS * 256, 0};
  for (; wide_share(p, cluster + 1 + others.count, clusters) < (tile + 1) * p.steps; others.count++) {
    int there = lane;
    if (lane == 0) do
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(p.arrived + 2 * (cluster + 1 + others.count) + rank) : "memory");
      while (!there);
    __syncwarp();
  }
  return others;
}

// All but the last piece: warps 9 .. 11. The last: all warps but the one that fetched, which has not followed those before; nobody has anything else to do.
template <int K2, int ROWS>
__device__ __forceinline__ void wide_finish(const WideParams& p, const WideSpace<K2, ROWS>& space, int cluster, int clusters, int rank) {
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  WideWalk walk(p, cluster, clusters);
  WidePiece next;
  bool more = walk.step(p, clusters, next);
  for (int n = 0; more; n++) {
    const WidePiece piece = next;
    more = walk.step(p, clusters, next);
    if (more ? warp <= 8 : warp == 8) continue;
    const int warps = more ? kWideFinishers : kWideThreads / 32 - 1, first = more ? warp - 9 : warp < 8 ? warp : warp - 1;
    const WidePlace place = wide_place(p, piece.tile);
    const ProductMatrix& w = p.matrix[place.matrix];
    const int group = place.group + rank, row0 = place.row_tile * ROWS, rows = min(ROWS, p.rows - row0);
    ptx::barrier_wait(space.staged_full, n & 1);
    if (piece.first > 0) {
      pass_on<ROWS>(p, space.staged, rows, first, warps, lane);
    } else {
      OtherShares others{};
      if (piece.last < p.steps) others = others_of<ROWS>(p, piece.tile, cluster, clusters, rank, lane);
      if (group * 8 < w.columns) finish_rows(p, w, group, row0, rows, space.staged, others, space.scales, first, warps, lane);
      if (others.count > 0) {
        ptx::named_sync(2, warps * 32);  // all have seen the words
        for (int i = first * 32 + lane; i < others.count; i += warps * 32) p.arrived[2 * (cluster + 1 + i) + rank] = 0;
      }
    }
    if (more) ptx::barrier_arrive(space.staged_empty);
  }
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
      ptx::barrier_init(space.empty + i, 8);
    }
    ptx::barrier_init(space.staged_full, 256);
    ptx::barrier_init(space.staged_empty, 32 * kWideFinishers);
    ptx::barrier_init_done();
  }
  __syncthreads();
  ptx::launch_dependents();
  if (warp >= 8) {
    ptx::fewer_registers<kFewRegisters>();
    if (warp == 8) {
      if (thread_index() % 32 == 0) wide_fetch<K2, ROWS>(p, space, cluster, clusters, rank);
      __syncwarp();
    }
    ptx::wait_for_previous();
  } else {
    ptx::more_registers<kManyRegisters>();
    ptx::wait_for_previous();
    wide_multiply<K2, MODE, ROWS>(p, space, cluster, clusters, rank);
    ptx::fewer_registers<kFewRegisters>();
  }
  wide_finish<K2, ROWS>(p, space, cluster, clusters, rank);
#endif
}
#endif

}  // namespace exl3
