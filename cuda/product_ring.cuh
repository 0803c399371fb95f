// How a warp of the product of few rows gets its weights: a private ring of slots, a step of rows of tiles each, filled by asynchronous copies
// of 16 bytes a lane. (Bulk copies of these short rows take twice as long to start: 18 cycles of the card's unit for each.)
#pragma once
#include "product_finish.cuh"

namespace exl3 {

// FUSED: the kernel rotates the input itself; else its operands are copied with the weights.
template <int K2, int MODE, bool FUSED>
struct ProductShape {
  static constexpr bool kFused = FUSED;
  static constexpr int kRow = 16 * K2 * kTiles, kPitch = ring_pitch(K2), kIn = rows_in_slot(kRoomy, K2, MODE);  // bytes of a warp's row of tiles; rows in a slot
  static constexpr int kLanes = kRow / 16, kFit = 32 / kLanes, kTogether = kFit < 1 ? 1 : kFit < kIn ? kFit : kIn;  // rows one copy of all lanes brings
  static_assert(kGrain % kIn == 0, "");
  static constexpr int kOperands = kIn * kRows * column_bytes(MODE);  // most bytes of operands in a slot
  static constexpr int kSlots = ring_slots(kRoomy, MODE);
};

// Rows of tiles of a part that one of 1 << shift warps has. Who has one share more goes round from part to part, so that warps, and the quarters of
// a multiprocessor they are in, have the same of a run.
__device__ __forceinline__ WarpRows rows_of_warps(const Part& part, int down, int shift) {
  const int warps = 1 << shift, all = part.count / kGrain, each = all >> shift, more = all & (warps - 1);
  const int rank = (down - part.before / kGrain) & (warps - 1);
  const int row = part.from + kGrain * (rank * each + min(rank, more));
  return {part.weights + (int64_t)row * part.pitch, row, row + kGrain * (each + (rank < more ? 1 : 0))};
}

// Of the lane: which row of those that one copy brings, and where in it.
template <class S>
__device__ __forceinline__ int row_of_lane() {
  return S::kTogether > 1 ? threadIdx.x % 32 / S::kLanes : 0;
}
template <class S>
__device__ __forceinline__ int byte_of_lane() {
  return (S::kTogether > 1 ? threadIdx.x % 32 % S::kLanes : threadIdx.x % 32) * 16;
}
template <class S>
__device__ __forceinline__ const uint8_t* of_lane(const uint8_t* rows, int64_t pitch) {
  return rows + row_of_lane<S>() * pitch + byte_of_lane<S>();
}

// All lanes of a warp begin copies of rows first .. last - 1 of a step to a slot; `from`: what the lane has of row 0.
template <class S>
__device__ __forceinline__ void copy_rows(uint8_t* slot, const uint8_t* from, int64_t pitch, int first, int last) {
  const int lane = threadIdx.x % 32;
  uint8_t* to = slot + row_of_lane<S>() * S::kPitch + byte_of_lane<S>();
#pragma unroll
  for (int r = first; r < last; r++) {
    if (r % S::kTogether) continue;  // came with an earlier one
#pragma unroll
    for (int b = 0; b < S::kRow; b += 512)
      if (S::kTogether > 1 ? S::kTogether * S::kLanes == 32 || lane < S::kTogether * S::kLanes : b + 512 <= S::kRow || lane * 16 < S::kRow - b)
        ptx::copy16(to + r * S::kPitch + b, from + r * pitch + b);
  }
}
// And the operands that go with a step.
template <class S>
__device__ __forceinline__ void copy_operands(const ProductParams& p, uint8_t* slot, const uint8_t* from) {
  const int at = threadIdx.x % 32 * 16, bytes = S::kIn * p.row_bytes - at;
#pragma unroll
  for (int b = 0; b < S::kOperands; b += 512)
    if (b < bytes) ptx::copy16(slot + S::kIn * S::kPitch + at + b, from + at + b);
}
__device__ __forceinline__ const uint8_t* operands_of(const ProductParams& p, int matrix, int row) {
  return p.image + (int64_t)((p.rotations > 1 ? matrix : 0) * p.blocks * 8 + row) * p.row_bytes;
}

// What the warps that finish do first, once for the block: they describe the run's parts and what each warp has of them, and fill the first slots, a
// few rings each. All others could not turn to the input before they had. A lane for a warp's part.
template <int K2, class S>
struct Beginning {
  static constexpr int kBefore = S::kIn / 2;  // rows fetched before any of the input, which more would hold up
  int ring, each;                             // the first of the rings that this warp fills, and how many
  const uint8_t* from;                        // of the lane's ring: the weights of its first row,
  int pitch, matrix, row = -1;                // which row that is, and where

  __device__ __forceinline__ void start(const ProductParams& p, const BlockRun& run, uint8_t* shared, int count) {
    Part* parts = (Part*)(shared + p.shared.parts);
    WarpRows* ranges = (WarpRows*)(shared + p.shared.ranges);
    const int lane = threadIdx.x % 32, together = 64 >> p.row_shift;  // parts at a time
    each = (1 << p.row_shift) / 2;
    ring = (threadIdx.x / 32 - (kAcross << p.row_shift)) * each;
    uint64_t* begun = (uint64_t*)(shared + p.shared.begun);
    if (lane < each) ptx::barrier_init(begun + ring + lane, 32);
    if (ring == 0 && lane < 2) ptx::barrier_init(begun + kMostWarps + lane, kFinishers * 32);
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < count; first += together) {
      const int i = first + lane % together, warp = ring + lane / together;
      Part part{};
      WarpRows mine{};
      if (i < count) {
        part = part_of_run(p, K2, run, i);
        mine = rows_of_warps(part, warp / kAcross, p.row_shift);
        if (warp % kAcross == 0) ranges[i * kMostDown + warp / kAcross] = mine;
        if (warp == 0) parts[i] = part;
      }
      const uint8_t* weights = mine.weights + warp % kAcross * S::kRow;
      const uint32_t has = __ballot_sync(~0u, mine.row < mine.end);
#pragma unroll 1
      for (int k = 0; k < each; k++) {
        const uint32_t of = has >> k * together << (32 - together);
        if (__shfl_sync(~0u, row, k) >= 0 || !of) continue;
        const int its = k * together + __ffs(of) - 1 - (32 - together);
        const uint8_t* begin = (const uint8_t*)__shfl_sync(~0u, (long long)weights, its);
        const int its_pitch = __shfl_sync(~0u, part.pitch, its), its_matrix = __shfl_sync(~0u, part.matrix, its), its_row = __shfl_sync(~0u, mine.row, its);
        if (lane == k) from = begin, pitch = its_pitch, matrix = its_matrix, row = its_row;
        copy_rows<S>(slot_of(p, shared, k), of_lane<S>(begin, its_pitch), its_pitch, 0, kBefore);
      }
    }
  }
  __device__ __forceinline__ uint8_t* slot_of(const ProductParams& p, uint8_t* shared, int k) const {
    return shared + (ring + k) * S::kSlots * p.shared.slot;
  }
  // The rest of the slots, with their operands.
  __device__ __forceinline__ void rest(const ProductParams& p, uint8_t* shared) const {
#pragma unroll 1
    for (int k = 0; k < each; k++) {
      const int its_row = __shfl_sync(~0u, row, k), its_pitch = __shfl_sync(~0u, pitch, k), its_matrix = __shfl_sync(~0u, matrix, k);
      const uint8_t* begin = (const uint8_t*)__shfl_sync(~0u, (long long)from, k);
      if (its_row < 0) continue;
      copy_rows<S>(slot_of(p, shared, k), of_lane<S>(begin, its_pitch), its_pitch, kBefore, S::kIn);
      if constexpr (!S::kFused) copy_operands<S>(p, slot_of(p, shared, k), operands_of(p, its_matrix, its_row));
      ptx::copies_arrive((uint64_t*)(shared + p.shared.begun) + ring + k);
    }
  }
  // Of the parts what finishing needs.
  static __device__ __forceinline__ void prefetch_scales(const ProductParams& p, const Part* parts, int count) {
    for (int i = threadIdx.x - (kAcross << p.row_shift) * 32; i < count; i += kFinishers * 32) {
      const Part& part = parts[i];
      const uint16_t* svh = p.matrix[part.matrix].svh + (part.unit - (p.segments > 1 ? 0 : p.first_group[part.matrix])) * 128;
      ptx::prefetch(svh);
      ptx::prefetch(svh + 64);
    }
  }
};

// The steps of a warp along the block's run, kIn rows each.
template <class S>
struct Feed {
  int row = 0, end = 0, part = 0;
  int64_t pitch;
  const uint8_t* next;    // what the lane copies of the weights
  const uint8_t* inputs;  // and the operands that go with them, where they do

  __device__ __forceinline__ bool more() const { return row < end; }
  // The first part from `part` on of which the warp has something.
  __device__ __forceinline__ void open(const ProductParams& p, const Part* parts, const WarpRows* ranges, int count) {
    const int warp = threadIdx.x / 32;
    for (row = end = 0; part < count; part++) {
      const WarpRows now = ranges[part * kMostDown + warp / kAcross];
      if (now.row >= now.end) continue;
      row = now.row, end = now.end;
      pitch = parts[part].pitch;
      next = of_lane<S>(now.weights + warp % kAcross * S::kRow, pitch);
      if constexpr (!S::kFused) inputs = operands_of(p, parts[part].matrix, row);
      return;
    }
  }
  __device__ __forceinline__ void weights(uint8_t* slot, int first, int last) const {
    if (more()) copy_rows<S>(slot, next, pitch, first, last);
  }
  __device__ __forceinline__ void operands(const ProductParams& p, uint8_t* slot) const {
    if (more()) copy_operands<S>(p, slot, inputs);
  }
  __device__ __forceinline__ void advance(const ProductParams& p, const Part* parts, const WarpRows* ranges, int count) {
    row += S::kIn;
    next += S::kIn * pitch;
    if constexpr (!S::kFused) inputs += S::kIn * p.row_bytes;
    if (row >= end && part < count) {
      part++;
      open(p, parts, ranges, count);
    }
  }
};

}  // namespace exl3
