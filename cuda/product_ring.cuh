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
struct WarpRows {
  int row, end;
  __device__ __forceinline__ WarpRows(const Part& part, int down, int shift) {
    const int warps = 1 << shift, all = part.count / kGrain, each = all >> shift, more = all & (warps - 1);
    const int rank = (down - part.before / kGrain) & (warps - 1);
    row = part.from + kGrain * (rank * each + min(rank, more));
    end = row + kGrain * (each + (rank < more ? 1 : 0));
  }
};

// The steps of a warp along the block's run, kIn rows each. `part_at(i)`: part i.
template <class S>
struct Feed {
  int row = 0, end = 0, part = 0;
  int64_t pitch;
  const uint8_t* next;    // what the lane copies of the weights
  const uint8_t* inputs;  // and of the operands that go with them, where they do

  // Of the lane: which row of those that one copy brings, and where in it.
  static __device__ __forceinline__ int row_of_lane() { return S::kTogether > 1 ? threadIdx.x % 32 / S::kLanes : 0; }
  static __device__ __forceinline__ int byte_of_lane() { return (S::kTogether > 1 ? threadIdx.x % 32 % S::kLanes : threadIdx.x % 32) * 16; }

  __device__ __forceinline__ bool more() const { return row < end; }
  // The first part from `part` on of which the warp has something.
  template <class PartAt>
  __device__ __forceinline__ void open(const ProductParams& p, PartAt part_at, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (row = end = 0; part < count; part++) {
      const Part now = part_at(part);
      const WarpRows mine(now, warp / kAcross, p.row_shift);
      if (mine.row >= mine.end) continue;
      row = mine.row, end = mine.end;
      pitch = now.pitch;
      next = now.weights + warp % kAcross * S::kRow + (row + row_of_lane()) * pitch + byte_of_lane();
      if constexpr (!S::kFused)
        inputs = p.image + (int64_t)((p.rotations > 1 ? now.matrix : 0) * p.blocks * 8 + row) * p.row_bytes + lane * 16;
      return;
    }
  }
  // Begins copies of the weights of rows first .. last - 1 of a step, if there is one, to a slot.
  __device__ __forceinline__ void weights(uint8_t* slot, int first, int last) const {
    if (!more()) return;
    const int lane = threadIdx.x % 32;
    uint8_t* to = slot + row_of_lane() * S::kPitch + byte_of_lane();
#pragma unroll
    for (int r = first; r < last; r++) {
      if (r % S::kTogether) continue;  // came with an earlier one
#pragma unroll
      for (int b = 0; b < S::kRow; b += 512)
        if (S::kTogether > 1 ? S::kTogether * S::kLanes == 32 || lane < S::kTogether * S::kLanes : b + 512 <= S::kRow || lane * 16 < S::kRow - b)
          ptx::copy16(to + r * S::kPitch + b, next + r * pitch + b);
    }
  }
  __device__ __forceinline__ void operands(const ProductParams& p, uint8_t* slot) const {
    if (!more()) return;
    const int bytes = S::kIn * p.row_bytes - threadIdx.x % 32 * 16;
    uint8_t* to = slot + S::kIn * S::kPitch + threadIdx.x % 32 * 16;
#pragma unroll
    for (int b = 0; b < S::kOperands; b += 512)
      if (b < bytes) ptx::copy16(to + b, inputs + b);
  }
  template <class PartAt>
  __device__ __forceinline__ void advance(const ProductParams& p, PartAt part_at, int count) {
    row += S::kIn;
    next += S::kIn * pitch;
    if constexpr (!S::kFused) inputs += S::kIn * p.row_bytes;
    if (row >= end && part < count) {
      part++;
      open(p, part_at, count);
    }
  }
};

}  // namespace exl3
