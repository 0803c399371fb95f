// The evenly shared product's argument block and shapes, for host and device code. See even.cuh for how it works.
#pragma once
#include "product.h"

namespace exl3::even {

constexpr int kWarps = 8, kFeeders = 4;  // of a block: those that multiply, 16 of the 128 output columns each, and those that fetch
constexpr int kThreads = (kWarps + kFeeders) * 32;
constexpr int kMostColumns = 64;    // rows of one pass
constexpr int kPitch = 132;         // words of 128 sums in shared memory, free of bank conflicts

// The ring: rows of tiles of a step, the unit of work and a stage; the most stages; bytes of a stage's barriers. Code for sm_90a waits half as often, which
// takes more shared memory than all cards have. `blocks`: of eight operand columns.
struct RingShape {
  int step_tiles, stages, barriers;
};
inline constexpr __host__ __device__ RingShape ring_shape(bool hopper, int blocks) {
  return hopper ? RingShape{16, 3, 16} : RingShape{8, blocks < 8 ? 4 : 3, 0};
}
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(EXL3_TEST_LONG_STEPS)
constexpr bool kLongSteps = true;
#else
constexpr bool kLongSteps = false;
#endif
constexpr int kStepTiles = ring_shape(kLongSteps, 1).step_tiles;

// What a row's operands are worth. Thread blocks of the input's kernel share a row; each has a sum of its part. Sums of halves below 2^29 are exact
// in 53 bits, so how many blocks there were leaves no trace.
constexpr int kMostParts = 7, kPrepareWarps = 8;
struct alignas(16) RowInput {
  double sums[kMostParts];
  float scale;
};

struct EvenParams {
  ProductMatrix matrix[EXL3_MAX_GROUP];
  int32_t first_group[EXL3_MAX_GROUP + 1];
  int32_t count;        // matrices in the work list
  int32_t segments;     // 2: a unit is a column group of gate and of up, then act(gate) * up; else it is a column group
  int32_t rows, row0;   // of this pass; the first one of it
  int32_t all_rows;     // of the call
  int32_t row_parts;    // thread blocks of the input's kernel that share a row
  int32_t blocks;       // in_padded / 128
  int32_t step_tiles;   // of the code that runs: see ring_shape
  int32_t stages;       // on sm_90a two where there is no room for all
  int32_t steps;        // of a column group; the last one may be in part beyond the inputs, and has zeros there
  int32_t share, rest;  // work of a block: `share` steps, the first `rest` thread blocks one more
  int32_t in_features, x_dtype, y_dtype, activation, accumulate;
  int32_t rotations;  // 1: all matrices take the same rotated input
  int32_t columns;    // live operand columns
  const void* x;
  const float* norm_weight;
  int64_t x_stride;
  float norm_eps;
  uint8_t* image;        // [rotation][pass] operands, see below
  int64_t image_stride;  // bytes of a rotation
  RowInput* inputs;      // [rotation][row]
  float* inbox;          // [block][segment][eight rows][thread]: sums on their way to the block that finishes a unit; zero means not yet there
  int64_t* stamps;       // see stamps.cuh
};

// Work is counted in steps, unit after unit; each thread block has one run of it.
inline __host__ __device__ int first_work(const EvenParams& p, int block) { return block * p.share + (block < p.rest ? block : p.rest); }

// The operand image: for each 32 inputs, two rows of tiles, the operands of two products of 16. A lane has the positions of two neighbouring ones, lanes
// 4g, 4g+1 those of the first row of tiles and 4g+2, 4g+3 those of the second; so of each row the first product takes inputs 0, 1, 4, 5, 8, 9, 12, 13,
// the second the others. Of a product two halves, the inputs below 8 of both rows and those from 8 on, in each the columns (rows of x) with 8 inputs,
// 16 bytes, each. Eight columns are a matrix of 8 x 8 as ldmatrix takes it.
inline constexpr __host__ __device__ int image_bytes(int tiles, int columns) { return tiles * columns * 32; }
inline __host__ __device__ int64_t image_bytes(const EvenParams& p) { return (int64_t)p.steps * image_bytes(p.step_tiles, p.columns); }  // of a pass

// Bytes from one row of tiles to the next: a warp reads two rows at a time, which then lie in different banks.
inline constexpr __host__ __device__ int row_pitch(int k2) { return 128 * k2 + 64; }
// A stage of the ring: the operands, the weights, on sm_90a two barriers: full, empty.
inline constexpr __host__ __device__ int stage_bytes(RingShape ring, int columns, int k2) {
  return ring.step_tiles * (columns * 32 + row_pitch(k2)) + ring.barriers;
}

struct EvenShared {  // dynamic shared memory: the ring, then the sums
  int sums, total;   // offset, bytes
};
inline __host__ __device__ EvenShared even_shared(const EvenParams& p, RingShape ring, int k2) {
  EvenShared s;
  s.sums = p.stages * stage_bytes(ring, p.columns, k2);
  s.total = s.sums + p.segments * p.columns * kPitch * 4;
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
