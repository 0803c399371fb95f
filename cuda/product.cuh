// The product of few rows with trellis weights: up to four with mul1, up to eight with the other codebooks.
//
// The matrix operand is the hash product itself (its four bytes, or its two halves, sum to the weight), so nothing is decoded. int8 activations
// come in two planes, which makes 16 bits. Weights are the A operand (output columns are its rows), the input is B.
//
// One block on each multiprocessor. The work, rows of eight tiles, is one long list that the thread blocks share out evenly: each has one run of
// it, which may end in the middle of a column group. Each of the warps that multiply streams its own tiles through a private ring of asynchronous
// copies, without barriers between them, and multiplies two rows of tiles at a time: a lane then has the positions of two neighbouring lanes of one
// tile, whose windows share words. The block with the end of a column group finishes it; blocks with earlier parts send it their sums through
// memory, without flags or fences: a word that is zero has not arrived. Each block works first on the group that it does not finish, so no
// block waits before it has sent. Other warps begin the rings (Beginning), then add up, send, receive and finish (finish_parts) while those which
// multiply go on. Weights are fetched before the wait for the previous kernel.
//
// Results depend on shapes and the number of multiprocessors only: integer sums are exact, floating-point sums have one fixed order.
#pragma once
#include <type_traits>

#include "product_ring.cuh"
#include "trellis.cuh"

namespace exl3 {

// One lane's sums, of a chunk in the tensor cores' units and of the part.
template <int MODE>
struct Sums {
  static constexpr bool kWhole = MODE == kBytes;  // numbers
  static constexpr int kEach = kWhole ? 2 : 4;    // results of a tile in a lane
  using Sum = typename std::conditional<kWhole, int, float>::type;
  Sum of[kTiles][4];
  float total[kTiles][kEach];
  int inputs;    // kBytes: of a chunk, of the operands of column g that the lane read
  float weight;  // and of all chunks, times their scales

  __device__ __forceinline__ void clear() {
    inputs = 0;
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) of[t][e] = 0;
  }
  __device__ __forceinline__ void clear_totals() {
    weight = 0.f;
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int e = 0; e < kEach; e++) total[t][e] = 0.f;
  }
  // Ends a chunk; scales: [kRows] of it.
  __device__ __forceinline__ void flush(const float* scales, int rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if constexpr (kWhole) {
      const float scale = scales[min(q, rows - 1)];
      int all = inputs;  // whole numbers: which lane had which row of tiles leaves no trace
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      weight = fmaf(scales[min(g / 2, rows - 1)], (float)all, weight);
#pragma unroll
      for (int t = 0; t < kTiles; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) total[t][h] = fmaf(scale, fmaf(256.f, (float)of[t][2 * h], (float)of[t][2 * h + 1]), total[t][h]);
    } else {
      const float a = scales[min(2 * q, rows - 1)], b = scales[min(2 * q + 1, rows - 1)];
#pragma unroll
      for (int t = 0; t < kTiles; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) total[t][e] = fmaf(e & 1 ? b : a, of[t][e], total[t][e]);
    }
    clear();
  }
  // To [row][kPitch] of this warp, from its first column on.
  __device__ __forceinline__ void write(float* to, int rows) const {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if constexpr (kWhole) {
      float sum = g & 1 ? weight : 256.f * weight;  // of row g / 2: both planes
      sum += __shfl_xor_sync(~0u, sum, 4);
      const float shift = (1024.f * kMul1Scale + kMul1Shift) * __shfl_sync(~0u, sum, 8 * q);
      if (q < rows)
#pragma unroll
        for (int t = 0; t < kTiles; t++)
#pragma unroll
          for (int h = 0; h < 2; h++) to[q * kPitch + t * 16 + g + 8 * h] = fmaf(kMul1Scale, total[t][h], shift);
    } else {
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (2 * q + e < rows)
#pragma unroll
          for (int t = 0; t < kTiles; t++)
#pragma unroll
            for (int h = 0; h < 2; h++) to[(2 * q + e) * kPitch + t * 16 + g + 8 * h] = total[t][2 * h + e];
    }
  }
};

// What a block rotates of the input, in tasks of one warp: rows of a chunk one after the other, then chunks, then rotations.
struct InputTasks {
  int first, count;  // rotation; tasks
  FusedInputs inputs;
  struct Task {
    int row, chunk, rotation;
  };
  __device__ __forceinline__ InputTasks(const ProductParams& p, const BlockRun& run) : first(0) {
    const int height = p.blocks * 8, from = run.begin - run.first * p.length;
    inputs = fused_inputs(p, from < height ? from : from - height, run.end - run.begin);
    int rotations = p.rotations == 1 ? 1 : 2;  // that the block needs
    if (p.rotations > 1 && p.segments == 1) {
      first = matrix_of_unit(p, run.first);
      rotations = matrix_of_unit(p, run.last) - first + 1;
    }
    count = inputs.chunks * p.rows * rotations;
  }
  __device__ __forceinline__ Task at(const ProductParams& p, int i) const {
    Task t{0, by_rows(p, i), first};
    t.row = i - t.chunk * p.rows;
    for (; t.chunk >= inputs.chunks; t.chunk -= inputs.chunks) t.rotation++;
    t.chunk += inputs.first;
    if (t.chunk >= chunks_of(p)) t.chunk -= chunks_of(p);
    return t;
  }
};

// A warp's task and what it multiplies by.
struct TaskWeights {
  InputTasks::Task task;
  ChunkWeights weights;
  __device__ __forceinline__ void load(const ProductParams& p, const InputTasks& tasks, int i) {
    task = tasks.at(p, i);
    weights.load(p, p.matrix[task.rotation].suh, task.chunk);
  }
  // Of the warp's first task, before anything else: it would otherwise stand behind the matrices' weights. Those of later tasks come to the cache.
  __device__ __forceinline__ void start(const ProductParams& p, const InputTasks& tasks) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (warp < tasks.count) load(p, tasks, warp);
#pragma unroll 1
    for (int i = warp + warps; i < tasks.count; i += warps) {
      const InputTasks::Task t = tasks.at(p, i);
      const int at = t.chunk * kScaleBlocks * 128;
      if (lane < kScaleBlocks * 2 && at + lane * 64 < p.blocks * 128) ptx::prefetch(p.matrix[t.rotation].suh + at + lane * 64);
      if (p.norm_weight && lane < kScaleBlocks * 4) ptx::prefetch(p.norm_weight + min(at + lane * 32, p.in_features - 1));
    }
  }
};

// Rotates what the block needs of the input into shared memory. `meanwhile()`: what each warp does while its first part of it is on its way.
template <int MODE, class Meanwhile>
__device__ __forceinline__ void rotate_inputs(const ProductParams& p, uint8_t* shared, const InputTasks& tasks, TaskWeights& now,
                                              Meanwhile meanwhile) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, chunks = chunks_of(p);
  const InputTasks::Task& task = now.task;
  float* squares = (float*)(shared + p.shared.squares);
  stamp(p.stamps, kWaits);
  ptx::wait_for_previous();
  stamp(p.stamps, kGoesOn);
  RawChunk raw;
  if (warp < tasks.count) raw.load(p, task.row, task.chunk);
  meanwhile();
#pragma unroll 1
  for (int i = warp; i < tasks.count;) {
    float v[kScaleBlocks][4];
    raw.get(p, v);
    if (p.norm_weight && task.rotation == tasks.first) {
      const float sum = squares_of(v);
      if (threadIdx.x % 32 == 0) squares[task.chunk * kRows + task.row] = sum;
    }
    uint8_t* image = shared + p.shared.image + task.rotation * p.shared.image_bytes;
    rotate_chunk<MODE>(p, now.weights, task.row, task.chunk, v, image + image_row(p, tasks.inputs, task.chunk * kScaleBlocks * 8) * p.row_bytes,
                       (float*)(shared + p.shared.scales) + (task.rotation * chunks + task.chunk) * kRows + task.row);
    i += warps;
    if (i >= tasks.count) break;
    now.load(p, tasks, i);
    raw.load(p, task.row, task.chunk);
  }
  if (p.norm_weight)  // of the other chunks only the squares
    #pragma unroll 1
    for (int i = warp; i < (chunks - tasks.inputs.chunks) * p.rows; i += warps) {
      int chunk = tasks.inputs.first + tasks.inputs.chunks + by_rows(p, i);
      const int row = i - by_rows(p, i) * p.rows;
      if (chunk >= chunks) chunk -= chunks;
      float v[kScaleBlocks][4];
      raw.load(p, row, chunk);
      raw.get(p, v);
      const float sum = squares_of(v);
      if (threadIdx.x % 32 == 0) squares[chunk * kRows + row] = sum;
    }
  __syncthreads();
}

// Multiplies two rows of tiles: lanes 4g, 4g+1 have weights of the first, 4g+2, 4g+3 of the second.
template <int K2, int MODE>
struct RowPair {
  using S = ProductShape<K2, MODE, true>;
  Run<K2, 16> run;
  int operand;  // where the lane's operands lie

  __device__ __forceinline__ explicit RowPair(const ProductParams& p) : run(threadIdx.x % 32 / 4 * 2 + threadIdx.x % 2) {
    const int row = threadIdx.x >> 1 & 1;  // of the two the lane's own
#pragma unroll
    for (int j = 0; j < Run<K2, 16>::kRead; j++) run.word[j] += row * S::kPitch / 4;
    // columns past the last repeat it: their products are not used
    const int column = min((int)(threadIdx.x % 32) / 4, p.columns - 1);
    operand = row * p.row_bytes + column * column_bytes(MODE) + (threadIdx.x & 1) * (column_bytes(MODE) / 2);
  }

  __device__ __forceinline__ void multiply(const ProductParams& p, Sums<MODE>& sums, const uint8_t* weights, const uint8_t* operands,
                                           uint32_t multiplier, uint32_t addend) const {
    uint32_t b[8];
    if constexpr (MODE == kBytes) {
      const uint2 v = *(const uint2*)(operands + operand);
      sums.inputs = __dp4a((int)v.x, 0x01010101, __dp4a((int)v.y, 0x01010101, sums.inputs));
#pragma unroll
      for (int e = 0; e < 8; e++) b[e] = __byte_perm(e < 4 ? v.x : v.y, 0, 0x1111 * (e & 3));
    } else {
      const uint4 v = *(const uint4*)(operands + operand);
      const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; e++) b[e] = __byte_perm(pairs[e >> 1], 0, e & 1 ? 0x3232 : 0x1010);
    }
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
      uint32_t words[Run<K2, 16>::kRead], s[16];
      read_words((const uint32_t*)(weights + t * 16 * K2), run, words);
      states_by_products(words, run, p.power, MODE == kBytes, s);
#pragma unroll
      for (int j = 0; j < 16; j++) s[j] = MODE == kBytes ? s[j] * multiplier : half_pair_of(s[j], multiplier, addend);
#pragma unroll
      for (int h = 0; h < 2; h++) {  // of the two lanes' positions; (g; low k), (g+8; low k), (g; high k), (g+8; high k)
        const uint32_t* own = s + 8 * h;
        ptx::mma(sums.of[t], own[0], own[4], own[1], own[5], b[4 * h], b[4 * h + 1]);
        ptx::mma(sums.of[t], own[2], own[6], own[3], own[7], b[4 * h + 2], b[4 * h + 3]);
      }
    }
  }
};

template <int K2, int MODE, bool FUSED>
__global__ void __launch_bounds__((kMostWarps + kFinishers) * 32, 1) product_kernel(const __grid_constant__ ProductParams p) {
#if __CUDA_ARCH__ >= 800
  using S = ProductShape<K2, MODE, FUSED>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, across = warp % kAcross, down = warp / kAcross;
  const bool multiplies = warp < kAcross << p.row_shift;
  stamp(p.stamps, kBegins);
  stamp(p.stamps, kBeginsNs);
  ptx::launch_dependents();
  // Until the wait a block that starts last holds up all others of this kernel: what can be done later or by other warps is.
  const BlockRun run(p, blockIdx.x);
  const int parts_count = run.parts(p);
  Beginning<K2, S> beginning;
  if (!multiplies) beginning.start(p, run, shared, parts_count);
  const InputTasks tasks(p, run);
  TaskWeights first;
  if constexpr (FUSED) first.start(p, tasks);
  Part* parts = (Part*)(shared + p.shared.parts);
  const WarpRows* ranges = (const WarpRows*)(shared + p.shared.ranges);
  uint8_t* ring = shared + warp * S::kSlots * p.shared.slot;
  stamp(p.stamps, kFetches);
  const float* scales = FUSED ? (const float*)(shared + p.shared.scales) : p.scales;
  auto rest = [&] {
    if (!multiplies) beginning.rest(p, shared);
  };
  if constexpr (FUSED) {
    rotate_inputs<MODE>(p, shared, tasks, first, rest);
  } else {
    ptx::wait_for_previous();
    rest();
    __syncthreads();
  }
  stamp(p.stamps, kHasInput);
  if (!multiplies) {
    Beginning<K2, S>::prefetch_scales(p, parts, parts_count);
    const float* squares = FUSED ? (const float*)(shared + p.shared.squares) : p.squares;
    finish_parts(p, parts, parts_count, run, shared, squares);
    stamp(p.stamps, kEnds);
    stamp(p.stamps, kEndsNs);
    return;
  }

  const RowPair<K2, MODE> pair(p);
  Sums<MODE> sums;
  sums.clear();
  Feed<S> feed;
  feed.open(p, parts, ranges, parts_count);
  const bool begun = feed.more();
  feed.advance(p, parts, ranges, parts_count);
  constexpr int kCopied = S::kIn < 4 ? S::kIn : 4;  // rows begun at a time: more would hold up the warps
  int slot = 0, free = p.shared.slot, used = 0;  // bytes; parts with products
#pragma unroll
  for (int i = 1; i < S::kSlots - 1; i++, free += p.shared.slot) {
    feed.weights(ring + free, 0, S::kIn);
    if constexpr (!FUSED) feed.operands(p, ring + free);
    ptx::copy_commit();
    feed.advance(p, parts, ranges, parts_count);
  }
  if (begun) ptx::barrier_wait((uint64_t*)(shared + p.shared.begun) + warp, 0);
  for (int i = 0; i < parts_count; i++) {
    const Part& part = parts[i];
    if (part.count > 0) {
      const uint32_t multiplier = p.matrix[part.matrix].multiplier, addend = p.matrix[part.matrix].addend;
      const int rotation = p.rotations > 1 ? part.matrix : 0;
      WarpRows at = ranges[i * kMostDown + down];
      sums.clear_totals();
      while (at.row < at.end) {  // chunks
        const int chunk = at.row / (kScaleBlocks * 8), chunk_end = min(at.end, (chunk + 1) * kScaleBlocks * 8);
        const uint8_t* operand = shared + p.shared.image + rotation * p.shared.image_bytes + image_row(p, tasks.inputs, at.row) * p.row_bytes;
        for (; at.row < chunk_end; at.row += S::kIn) {  // steps
          ptx::copy_wait<S::kSlots - 2>();
          __syncwarp();
          const uint8_t* weights = ring + slot;
          if constexpr (!FUSED) operand = weights + S::kIn * S::kPitch;
#pragma unroll
          for (int r = 0; r < S::kIn; r += 2) {
            if (r % kCopied == 0) feed.weights(ring + free, r, r + kCopied);  // to the slot of the step before
            pair.multiply(p, sums, weights + r * S::kPitch, operand + r * p.row_bytes, multiplier, addend);
          }
          if constexpr (!FUSED) feed.operands(p, ring + free);
          ptx::copy_commit();
          feed.advance(p, parts, ranges, parts_count);
          operand += S::kIn * p.row_bytes;
          free = slot;
          slot += p.shared.slot;
          if (slot == S::kSlots * p.shared.slot) slot = 0;
          __syncwarp();
        }
        sums.flush(scales + (rotation * chunks_of(p) + chunk) * kRows, p.rows);
      }
      const int buffer = used & 1;
      if (used > 1) ptx::barrier_wait(free_sums(p, shared, buffer), (used / 2 - 1) & 1);
      float* exchange = (float*)(shared + p.shared.exchange) + (buffer * (p.rows << p.row_shift) + down * p.rows) * kPitch;
      sums.write(exchange + across * kTiles * 16, p.rows);
      ptx::named_arrive(kFullBarrier + buffer, product_threads(p));
      used++;
    }
  }
  stamp(p.stamps, kEnds);
  stamp(p.stamps, kEndsNs);
#endif
}

}  // namespace exl3
