// A block's run of work, and the ring of stages through which its steps come to shared memory.
#pragma once
#include "even.h"
#include "ptx.cuh"
#include "stamps.cuh"

namespace exl3::even {

// A block's run of steps, and how many parts of matrices and column groups it has.
struct Share {
  int begin, end, last, parts;  // last: unit that the run ends in
};
__device__ __forceinline__ Share share_of(const EvenParams& p, int block) {
  Share s;
  const int length = p.segments * p.steps;
  s.begin = first_work(p, block);
  s.end = first_work(p, block + 1);
  s.last = (s.end - 1) / length;
  s.parts = (s.last - s.begin / length + 1) * p.segments;
  return s;
}

struct Part {
  int from, count;  // steps
  int unit, matrix;
  bool sends;       // another block finishes the unit
};
// Part i of a run: units from the last to the first, in each the segments in turn. Some may be empty.
__device__ __forceinline__ Part part_of(const EvenParams& p, const Share& share, int i) {
  const int segment = p.segments > 1 ? i & 1 : 0;
  Part part;
  part.unit = share.last - (p.segments > 1 ? i >> 1 : i);
  const int start = (part.unit * p.segments + segment) * p.steps;
  part.from = max(share.begin - start, 0);
  part.count = max(min(share.end - start, p.steps) - part.from, 0);
  part.matrix = segment;
  if (p.segments == 1)
    while (part.matrix + 1 < p.count && part.unit >= p.first_group[part.matrix + 1]) part.matrix++;
  part.sends = share.end < (part.unit + 1) * p.segments * p.steps;
  return part;
}

// A place in the run: a step of part i, from its row of tiles `row` on.
template <int K2>
struct Walk {
  const uint8_t *weights, *inputs;
  int64_t pitch;  // bytes from one row of tiles to the next
  int i, left, row;
  int tiles;      // rows from the step's first to the matrix's last

  __device__ __forceinline__ Walk(const EvenParams& p, const Share& share, int row) : i(-1), left(0), row(row) { open(p, share); }
  __device__ __forceinline__ void open(const EvenParams& p, const Share& share) {
    while (left == 0 && ++i < share.parts) {
      const Part part = part_of(p, share, i);
      const ProductMatrix& w = p.matrix[part.matrix];
      const int group = part.unit - (p.segments > 1 ? 0 : p.first_group[part.matrix]);
      left = part.count;
      pitch = w.columns * 16 * K2;
      weights = w.trellis + (int64_t)(part.from * kStepTiles + row) * pitch + (int64_t)group * 128 * K2;
      tiles = p.blocks * 8 - part.from * kStepTiles;
      inputs = p.image + (p.rotations > 1 ? part.matrix : 0) * p.image_stride + (int64_t)part.from * image_bytes(kStepTiles, p.columns);
    }
  }
  __device__ __forceinline__ void next(const EvenParams& p, const Share& share) {
    weights += kStepTiles * pitch;
    inputs += image_bytes(kStepTiles, p.columns);
    tiles -= kStepTiles;
    left--;
    open(p, share);
  }
};

template <int K2, int NB>
struct Stage {
  static constexpr RingShape kRing = ring_shape(kLongSteps, NB);
  static constexpr int kImage = image_bytes(kStepTiles, 8 * NB), kPitch = row_pitch(K2);
  static constexpr int kFull = kImage + kStepTiles * kPitch, kEmpty = kFull + 8;
  static constexpr int kBytes = stage_bytes(kRing, 8 * NB, K2);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// One thread of each feeder: keeps the ring full. Feeder r fetches a quarter of each step's rows of tiles, the last one the operands, too: a single thread
// would be too slow.
template <int K2, int NB>
__device__ __forceinline__ void feed(const EvenParams& p, const Share& share, uint8_t* ring, int r) {
  using S = Stage<K2, NB>;
  constexpr int kEach = kStepTiles / kFeeders;
  const int all = share.end - share.begin, ahead = min(p.stages, all), before = p.stages - 1;  // stages whose weights come before the input
  auto put_weights = [&](const Walk<K2>& from, uint8_t* stage) {
    uint64_t* full = (uint64_t*)(stage + S::kFull);
    if (r == 0) ptx::barrier_expect(full, S::kImage + min(kStepTiles, from.tiles) * 128 * K2);
    if (r * kEach >= from.tiles) return;
#pragma unroll
    for (int k = 0; k < kEach; k++) ptx::bulk_load(stage + S::kImage + (r * kEach + k) * S::kPitch, from.weights + k * from.pitch, 128 * K2, full);
  };
  auto put_inputs = [&](const Walk<K2>& from, uint8_t* stage) {
    if (r == kFeeders - 1) ptx::bulk_load(stage, from.inputs, S::kImage, (uint64_t*)(stage + S::kFull));
  };
  Walk<K2> weights(p, share, r * kEach), inputs = weights;
  for (int n = 0; n < min(ahead, before); n++) {
    put_weights(weights, ring + n * S::kBytes);
    weights.next(p, share);
  }
  ptx::wait_for_previous();
  for (int n = 0; n < ahead; n++) {
    put_inputs(inputs, ring + n * S::kBytes);
    inputs.next(p, share);
    if (n < before) continue;
    put_weights(weights, ring + n * S::kBytes);
    weights.next(p, share);
  }
  int stage = 0, phase = 0;
  for (int n = ahead; n < all; n++) {
    uint8_t* to = ring + stage * S::kBytes;
    ptx::barrier_wait((uint64_t*)(to + S::kEmpty), phase);
    put_weights(weights, to);
    put_inputs(weights, to);
    weights.next(p, share);
    if (++stage == p.stages) stage = 0, phase ^= 1;
  }
  if (r > 0) return;  // a last stage with nothing in it: who multiplies looks for one more
  uint8_t* to = ring + (all < p.stages ? all : stage) * S::kBytes;
  if (all >= p.stages) ptx::barrier_wait((uint64_t*)(to + S::kEmpty), phase);
  ptx::barrier_arrive((uint64_t*)(to + S::kFull));
}

// What a multiplying warp knows of the ring.
template <int K2, int NB>
struct RingReader {
  using S = Stage<K2, NB>;
  uint8_t* ring;
  int stage = 0, phase = 0, last;  // bytes

  __device__ __forceinline__ RingReader(const EvenParams& p, const Share&, uint8_t* ring) : ring(ring), last((p.stages - 1) * S::kBytes) {
    if (threadIdx.x < p.stages) {
      uint64_t* full = (uint64_t*)(ring + threadIdx.x * S::kBytes + S::kFull);
      ptx::barrier_init(full, 1);
      ptx::barrier_init(full + 1, 32 * kWarps);
      ptx::barrier_init_done();
    }
    __syncthreads();
    ptx::launch_dependents();
  }
  __device__ __forceinline__ void start(const EvenParams&) { ptx::wait_for_previous(); }
  __device__ __forceinline__ void wait(const EvenParams&) { ptx::barrier_wait((uint64_t*)(ring + stage + S::kFull), phase); }
  __device__ __forceinline__ void next() {
    if (stage == last) phase ^= 1;
    stage = stage == last ? 0 : stage + S::kBytes;
  }
  // The thread is done with the stage.
  __device__ __forceinline__ void release() {
    ptx::barrier_arrive((uint64_t*)(ring + stage + S::kEmpty));
    next();
  }
  // It is done with the one before.
  __device__ __forceinline__ void release_before() {
    ptx::barrier_arrive((uint64_t*)(ring + (stage ? stage - S::kBytes : last) + S::kEmpty));
  }
};
#else
// The multiplying warps copy themselves, all threads 16 bytes at a time; one barrier a step.
template <int K2, int NB>
struct RingReader {
  using S = Stage<K2, NB>;
  static constexpr int kCopiers = 32 * kWarps, kBytes = S::kBytes;
  uint8_t* ring;
  int stage = 0, free = 0;  // bytes
  const Share& share;
  Walk<K2> walk;

  __device__ __forceinline__ RingReader(const EvenParams& p, const Share& share, uint8_t* ring) : ring(ring), share(share), walk(p, share, 0) {
    ptx::launch_dependents();
  }
  __device__ __forceinline__ void put_weights(const Walk<K2>& from, int to) {
    for (int i = threadIdx.x; i < min(kStepTiles, from.tiles) * 8 * K2; i += kCopiers)
      ptx::copy16(ring + to + S::kImage + i / (8 * K2) * S::kPitch + i % (8 * K2) * 16, from.weights + i / (8 * K2) * from.pitch + i % (8 * K2) * 16);
  }
  __device__ __forceinline__ void put_inputs(const Walk<K2>& from, int to) {
    for (int i = threadIdx.x; i < S::kImage / 16; i += kCopiers) ptx::copy16(ring + to + i * 16, from.inputs + i * 16);
  }
  __device__ __forceinline__ void start(const EvenParams& p) {
    const Walk<K2> first = walk;
    for (int n = 0; n < S::kRing.stages - 1 && walk.left > 0; n++) {
      put_weights(walk, n * kBytes);
      walk.next(p, share);
    }
    ptx::wait_for_previous();
    walk = first;
    for (; free < (S::kRing.stages - 1) * kBytes; free += kBytes) {
      if (walk.left > 0) {
        put_inputs(walk, free);
        walk.next(p, share);
      }
      ptx::copy_commit();
    }
  }
  __device__ __forceinline__ void wait(const EvenParams& p) {
    ptx::copy_wait<S::kRing.stages - 2>();
    ptx::named_sync(1, kCopiers);  // and everyone has read the step before
    if (walk.left > 0) {
      put_weights(walk, free);
      put_inputs(walk, free);
      walk.next(p, share);
    }
    ptx::copy_commit();
    free = free == (S::kRing.stages - 1) * kBytes ? 0 : free + kBytes;
  }
  __device__ __forceinline__ void release() { stage = stage == (S::kRing.stages - 1) * kBytes ? 0 : stage + kBytes; }
};
#endif

}  // namespace exl3::even
