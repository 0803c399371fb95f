// The evenly shared product's argument block and shapes, for host and device code. See even.cuh for how it works.
#pragma once
#include "product.h"

namespace exl3::even {

constexpr int kWarps = 16;        // of a block
constexpr int kMostColumns = 64;  // rows of one pass
constexpr int kPitch = 132;       // words of 128 sums in shared memory, free of bank conflicts
constexpr int kPartBytes = 40;
constexpr int kRingSlots = 4;

// What a row's operands are worth. Thread blocks of the input's kernel share a row; each has a sum of its part.
constexpr int kRowParts = 7, kPrepareWarps = 8;
struct alignas(16) RowInput {
  float scale, sums[kRowParts];
};

struct EvenParams {
  ProductMatrix matrix[EXL3_MAX_GROUP];
  int32_t first_group[EXL3_MAX_GROUP + 1];
  int32_t count;        // matrices in the work list
  int32_t segments;     // 2: a unit is a column group of gate and of up, then act(gate) * up; else it is a column group
  int32_t rows, row0;   // of this pass; the first one of it
  int32_t all_rows;     // of the call
  int32_t blocks;       // in_padded / 128
  int32_t share, rest;  // work of a block: `share` blocks of 128 inputs x 128 columns, the first `rest` thread blocks one more
  int32_t in_features, x_dtype, y_dtype, activation, accumulate;
  int32_t rotations;  // 1: all matrices take the same rotated input
  int32_t columns;    // live operand columns
  const void* x;
  const float* norm_weight;
  int64_t x_stride;
  float norm_eps;
  uint8_t* image;        // [rotation][pass] operands in fragment order
  int64_t image_stride;  // bytes of a rotation
  RowInput* inputs;      // [rotation][row]
  float* inbox;          // [block][segment][row][128]: sums on their way to the block that finishes a unit; zero means not yet there
};

// Work is counted in blocks of 128 inputs by 128 columns, unit after unit; each thread block has one run of it.
inline __host__ __device__ int first_work(const EvenParams& p, int block) { return block * p.share + (block < p.rest ? block : p.rest); }

// The operand image: for each 16 inputs and column (a row of x) four times four halves, one a lane q: inputs 2q, 2q+1, 2q+8, 2q+9.
inline constexpr __host__ __device__ int warps_across(int nb) { return nb >= 4 ? 4 : 2; }  // share the 128 columns; the others the rows of tiles
inline constexpr __host__ __device__ int ring_slot(int k2) { return 64 * k2; }             // bytes of a warp: four tiles
// Row warps that write their sums side by side.
inline constexpr __host__ __device__ int exchange_slots(int nb) { return nb == 2 ? 4 : nb == 4 ? 2 : 1; }

struct EvenShared {  // offsets in dynamic shared memory
  int image, parts, scales, exchange, held, total;
};
inline __host__ __device__ EvenShared even_shared(const EvenParams& p, int k2, int nb) {
  EvenShared s;
  s.image = kWarps * kRingSlots * ring_slot(k2);
  s.parts = s.image + kRingSlots * 8 * p.columns * 32;
  const int most = p.share + (p.rest > 0);
  s.scales = s.parts + ((most - 1) / (p.segments * p.blocks) + 2) * p.segments * kPartBytes;
  s.scales = (s.scales + 15) / 16 * 16;
  s.exchange = s.scales + 2 * p.segments * p.rows * (int)sizeof(RowInput);
  s.held = s.exchange + exchange_slots(nb) * p.columns * kPitch * 4;
  s.total = s.held + p.segments * p.rows * 512;
  return s;
}

using EvenKernel = void (*)(EvenParams);
struct EvenEntry {
  EvenKernel kernel;
  int mode, blocks;  // blocks of 8 operand columns
};
// Entries of one rate; defined once for each in product_<k2>.cu.
struct EvenEntries {
  const EvenEntry* first;
  int count;
};

}  // namespace exl3::even
