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
// block waits before it has sent. Other warps add up, send, receive and finish (finish_parts) while those which multiply go on. Weights are
// fetched before the wait for the previous kernel.
//
// Results depend on shapes and the number of multiprocessors only: integer sums are exact, floating-point sums have one fixed order.
#pragma once
#include <type_traits>

#include "product_finish.cuh"
#include "trellis.cuh"

namespace exl3 {

template <int K2, int MODE>
struct ProductShape {
  static constexpr int kRow = 16 * K2 * kTiles, kPitch = ring_pitch(K2), kIn = rows_in_slot(kRoomy, K2, MODE);  // bytes of a warp's row of tiles; rows in a slot
  static constexpr int kLanes = kRow / 16, kFit = 32 / kLanes, kTogether = kFit < 1 ? 1 : kFit < kIn ? kFit : kIn;  // rows one copy brings
  static constexpr int kOperands = kIn * kRows * column_bytes(MODE);  // most bytes of operands in a slot
  static constexpr int kSlots = ring_slots(kRoomy, MODE);
};

// Rows of tiles of a part that one of 1 << shift warps has: each part is shared out evenly, in pairs of rows.
struct WarpRows {
  int row, end;
  __device__ __forceinline__ WarpRows(const Part& part, int down, int shift) {
    row = part.from + (part.count / 2 * down >> shift) * 2;
    end = part.from + (part.count / 2 * (down + 1) >> shift) * 2;
  }
};

// The steps of a warp along the block's run: up to kIn rows, never across a multiple of kIn.
template <class S>
struct Feed {
  int row, end, part;
  int64_t pitch;
  const uint8_t* next;    // the lane's own 16 bytes
  const uint8_t* inputs;  // and of the operands that go with them

  // Of the lane in a slot's weights: which row, and where.
  static __device__ __forceinline__ int row_of_lane() { return S::kTogether > 1 ? threadIdx.x % 32 / S::kLanes : 0; }
  static __device__ __forceinline__ int place_of_lane() {
    const int lane = threadIdx.x % 32;
    return S::kTogether > 1 ? lane / S::kLanes * S::kPitch + lane % S::kLanes * 16 : lane * 16;
  }
  __device__ __forceinline__ int rows() const { return min(S::kIn - (row & (S::kIn - 1)), end - row); }
  // The first part from `part` on of which the warp has something.
  __device__ __forceinline__ void open(const ProductParams& p, const Part* parts, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (row = end = 0; part < count; part++) {
      const WarpRows mine(parts[part], warp / kAcross, p.row_shift);
      if (mine.row >= mine.end) continue;
      row = mine.row, end = mine.end;
      pitch = parts[part].pitch;
      next = parts[part].weights + warp % kAcross * S::kRow + (row + row_of_lane()) * pitch + (S::kTogether > 1 ? lane % S::kLanes : lane) * 16;
      inputs = p.image + (int64_t)((p.rotations > 1 ? parts[part].matrix : 0) * p.blocks * 8 + row) * p.row_bytes + lane * 16;
      return;
    }
  }
  __device__ __forceinline__ void row_of_weights(uint32_t to, const uint8_t* from) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < S::kRow; b += 512)
      if (S::kTogether > 1 ? S::kTogether * S::kLanes == 32 || lane < S::kTogether * S::kLanes : b + 512 <= S::kRow || lane * 16 < S::kRow - b)
        ptx::copy16(to + b, from + b);
  }
  // Copies the weights of n = rows() rows; `to` is the lane's own place in the slot. Moves `next` on.
  __device__ __forceinline__ void weights(uint32_t to, int n) {
    if (n == S::kIn) {
#pragma unroll
      for (int r = 0; r < S::kIn; r += S::kTogether) {
        row_of_weights(to + r * S::kPitch, next);
        next += S::kTogether * pitch;
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < n; r += S::kTogether)
        if (r + row_of_lane() < n) row_of_weights(to + r * S::kPitch, next + r * pitch);
      next += n * pitch;
    }
  }
  __device__ __forceinline__ void operands(const ProductParams& p, uint32_t to, int n) {
    const int bytes = n * p.row_bytes - threadIdx.x % 32 * 16;
#pragma unroll
    for (int b = 0; b < S::kOperands; b += 512)
      if (b < bytes) ptx::copy16(to + S::kIn * S::kPitch + b, inputs + b);
    inputs += n * p.row_bytes;
  }
  __device__ __forceinline__ void advance(const ProductParams& p, const Part* parts, int count, int n) {
    row += n;
    if (row >= end && part < count) {
      part++;
      open(p, parts, count);
    }
  }
};

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

// Rotates what the block needs of the input into shared memory. `meanwhile()`: what each warp does while its first part of it is on its way.
template <int MODE, class Meanwhile>
__device__ __forceinline__ void rotate_inputs(const ProductParams& p, uint8_t* shared, const ProductShared& layout, const FusedInputs& inputs,
                                              const Part* parts, int parts_count, Meanwhile meanwhile) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, chunks = chunks_of(p);
  const int first = p.rotations == 1 || p.segments > 1 ? 0 : parts[parts_count - 1].matrix;
  const int rotations = p.rotations == 1 ? 1 : p.segments > 1 ? 2 : parts[0].matrix - first + 1;  // that the block needs
  const int tasks = inputs.chunks * p.rows * rotations;  // rows of a chunk one after the other, then chunks, then rotations
  struct Task {
    int row, chunk, rotation;
  };
  auto task_at = [&](int i) {
    Task t{0, i, 0};
    if (p.rows > 1) t.chunk = i / p.rows, t.row = i - t.chunk * p.rows;
    if (rotations > 1) t.rotation = t.chunk / inputs.chunks, t.chunk -= t.rotation * inputs.chunks;
    t.rotation += first;
    t.chunk += inputs.first;
    if (t.chunk >= chunks) t.chunk -= chunks;
    return t;
  };
  Task task = task_at(warp);
  ChunkWeights weights;
  if (warp < tasks) weights.load(p, p.matrix[task.rotation].suh, task.chunk);
#pragma unroll 1
  for (int i = warp + warps; i < tasks; i += warps) {  // for later, into the cache
    const Task t = task_at(i);
    const int lane = threadIdx.x % 32, at = t.chunk * kScaleBlocks * 128;
    if (lane < kScaleBlocks * 2) ptx::prefetch(p.matrix[t.rotation].suh + at + lane * 64);
    if (p.norm_weight && lane < kScaleBlocks * 4) ptx::prefetch(p.norm_weight + min(at + lane * 32, p.in_features - 1));
  }
  float* squares = (float*)(shared + layout.squares);
  ptx::wait_for_previous();
  RawChunk raw;
  if (warp < tasks) raw.load(p, task.row, task.chunk);
  meanwhile();
#pragma unroll 1
  for (int i = warp; i < tasks;) {
    float v[kScaleBlocks][4];
    raw.get(p, v);
    if (p.norm_weight && task.rotation == first) {
      const float sum = squares_of(v);
      if (threadIdx.x % 32 == 0) squares[task.chunk * kRows + task.row] = sum;
    }
    rotate_chunk<MODE>(p, weights, task.row, task.chunk, v,
                       shared + layout.image + task.rotation * layout.image_bytes + image_row(p, inputs, task.chunk * kScaleBlocks * 8) * p.row_bytes,
                       (float*)(shared + layout.scales) + (task.rotation * chunks + task.chunk) * kRows + task.row);
    i += warps;
    if (i >= tasks) break;
    task = task_at(i);
    raw.load(p, task.row, task.chunk);
    weights.load(p, p.matrix[task.rotation].suh, task.chunk);
  }
  if (p.norm_weight)  // of the other chunks only the squares
    #pragma unroll 1
    for (int i = warp; i < (chunks - inputs.chunks) * p.rows; i += warps) {
      const int chunk = (inputs.first + inputs.chunks + i / p.rows) % chunks, row = i % p.rows;
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
  using S = ProductShape<K2, MODE>;
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

  __device__ __forceinline__ void multiply(Sums<MODE>& sums, const uint8_t* weights, const uint8_t* operands, uint32_t multiplier,
                                           uint32_t addend) const {
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
      uint32_t s[16];
      read_states((const uint32_t*)(weights + t * 16 * K2), run, s);
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

template <int K2, int MODE>
__global__ void __launch_bounds__((kMostWarps + kFinishers) * 32, 1) product_kernel(const __grid_constant__ ProductParams p) {
#if __CUDA_ARCH__ >= 800
  using S = ProductShape<K2, MODE>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, across = warp % kAcross, down = warp / kAcross;
  const ProductShared layout = product_shared(p, kRoomy, K2, MODE);
  const int begin = first_work(p, blockIdx.x), end = first_work(p, blockIdx.x + 1), length = p.segments * p.blocks * 8;
  const int parts_count = ((end - 1) / length - begin / length + 1) * p.segments;
  Part* parts = (Part*)(shared + layout.parts);
  ptx::launch_dependents();
  {  // each warp brings another line of the parameters into the constant cache
    const int word = *(const int*)((const char*)&p + min(warp * 64, (int)sizeof(ProductParams) - 4));
    asm volatile("" ::"r"(word));
  }
  for (int i = threadIdx.x; i < parts_count; i += blockDim.x) {
    const Part part = part_of_run(p, K2, begin, end, i);
    const uint16_t* svh = p.matrix[part.matrix].svh + (part.unit - (p.segments > 1 ? 0 : p.first_group[part.matrix])) * 128;
    ptx::prefetch(svh);
    ptx::prefetch(svh + 64);
    parts[i] = part;
  }
  __syncthreads();

  const uint8_t* ring = shared + warp * S::kSlots * layout.slot;
  const uint32_t copies = ptx::shared_address(ring) + Feed<S>::place_of_lane(), operand_copies = ptx::shared_address(ring) + threadIdx.x % 32 * 16;
  const bool multiplies = warp < kAcross << p.row_shift;
  Feed<S> feed;
  feed.part = multiplies ? 0 : parts_count;
  feed.open(p, parts, parts_count);
  Feed<S> behind = feed;
  int filled = 0;
  auto fill = [&](int slots) {  // one group of copies a step, empty ones too
#pragma unroll 1
    for (; filled < slots; filled++) {
      const int n = feed.rows();
      feed.weights(copies + filled * layout.slot, n);
      if (p.fused) ptx::copy_commit();
      feed.advance(p, parts, parts_count, n);
    }
  };
  fill(p.fused ? 1 : S::kSlots);  // the others while the first part of the input is on its way
  FusedInputs inputs{};
  const float* scales = p.fused ? (const float*)(shared + layout.scales) : p.scales;
  if (p.fused) {
    inputs = fused_inputs(p, begin, end);
    rotate_inputs<MODE>(p, shared, layout, inputs, parts, parts_count, [&] { fill(S::kSlots); });
  } else {
    ptx::wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < S::kSlots; i++) {  // the operands of each step are copied with it
      const int n = behind.rows();
      behind.operands(p, operand_copies + i * layout.slot, n);
      ptx::copy_commit();
      behind.advance(p, parts, parts_count, n);
    }
    feed.inputs = behind.inputs;
  }
  if (!multiplies) {
    const float* squares = p.fused ? (const float*)(shared + layout.squares) : p.squares;
    finish_parts(p, parts, parts_count, begin, end, (const float*)(shared + layout.exchange), squares);
    return;
  }

  const RowPair<K2, MODE> pair(p);
  Sums<MODE> sums;
  sums.clear();
  int slot = 0, used = 0;  // bytes; parts with products
  for (int i = 0; i < parts_count; i++) {
    const Part& part = parts[i];
    if (part.count > 0) {
      const uint32_t multiplier = p.matrix[part.matrix].multiplier, addend = p.matrix[part.matrix].addend;
      const int rotation = p.rotations > 1 ? part.matrix : 0;
      WarpRows at(part, down, p.row_shift);
      sums.clear_totals();
      while (at.row < at.end) {  // chunks
        const int chunk = at.row / (kScaleBlocks * 8), chunk_end = min(at.end, (chunk + 1) * kScaleBlocks * 8);
        const uint8_t* operand = shared + layout.image + rotation * layout.image_bytes + image_row(p, inputs, at.row) * p.row_bytes;
        while (at.row < chunk_end) {  // steps
          const int n = min(S::kIn - (at.row & (S::kIn - 1)), chunk_end - at.row);
          ptx::copy_wait<S::kSlots - 1>();
          __syncwarp();
          const uint8_t* weights = ring + slot;
          if (!p.fused) operand = weights + S::kIn * S::kPitch;
          if (n == S::kIn) {
#pragma unroll
            for (int r = 0; r < S::kIn; r += 2)
              pair.multiply(sums, weights + r * S::kPitch, operand + r * p.row_bytes, multiplier, addend);
          } else {
#pragma unroll 1
            for (int r = 0; r < n; r += 2)
              pair.multiply(sums, weights + r * S::kPitch, operand + r * p.row_bytes, multiplier, addend);
          }
          operand += n * p.row_bytes;
          at.row += n;
          __syncwarp();
          const int more = feed.rows();
          feed.weights(copies + slot, more);
          if (!p.fused) feed.operands(p, operand_copies + slot, more);
          ptx::copy_commit();
          feed.advance(p, parts, parts_count, more);
          slot += layout.slot;
          if (slot == S::kSlots * layout.slot) slot = 0;
        }
        sums.flush(scales + (rotation * chunks_of(p) + chunk) * kRows, p.rows);
      }
      const int buffer = used & 1;
      if (used > 1) ptx::named_sync(kEmptyBarrier + buffer, product_threads(p));
      float* exchange = (float*)(shared + layout.exchange) + (buffer * (p.rows << p.row_shift) + down * p.rows) * kPitch;
      sums.write(exchange + across * kTiles * 16, p.rows);
      ptx::named_arrive(kFullBarrier + buffer, product_threads(p));
      used++;
    }
  }
#endif
}

}  // namespace exl3
