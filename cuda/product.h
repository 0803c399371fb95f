// The fast product's argument blocks and launch plan, shared by host and device code. See product.cuh for how it works.
#pragma once
#include <cuda_runtime.h>

#include "exl3/codec.h"
#include "exl3/ops.h"

namespace exl3 {

#define EXL3_RATES(X) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(10) X(12) X(14) X(16)

// What multiplies: the hash itself (here), or weights decoded to fp16 (even.h and wide.h).
enum ProductMode {
  kBytes = 0,        // mul1: four unsigned bytes whose sum is the weight, times int8 activations in one or two planes
  kPairs = 1,        // mcg, 3inst: two halves whose sum is the weight, times fp16 activations
  kDecodeBytes = 2,  // mul1 decoded, times fp16 activations
  kDecodePairs = 3,  // mcg, 3inst decoded
};

constexpr int kRows = 8;        // most rows of the product here, and operand columns
constexpr int kScaleBlocks = 2;  // blocks of 128 inputs with one scale
constexpr int kMostWarps = 16;   // of a block, that multiply
constexpr int kFinishers = 4;    // and those that finish
constexpr int kTiles = 4, kAcross = 8 / kTiles;   // of a warp, side by side; warps across the 128 columns
constexpr int kMostDown = kMostWarps / kAcross;  // and one below the other
constexpr int kPartBytes = 32, kRangeBytes = 16;
constexpr int kPitch = 136;      // words of 128 sums in shared memory, free of bank conflicts

struct ProductMatrix {
  const uint8_t* trellis;
  const uint16_t* suh;
  const uint16_t* svh;
  const float* bias;
  void* y;
  int64_t y_stride;
  int32_t out_features, columns;  // columns of tiles
  uint32_t multiplier, addend;
};

struct ProductShared {  // offsets in dynamic shared memory
  int slot;             // bytes from one slot of a ring to the next
  int image, image_bytes, scales, squares, exchange, begun, parts, ranges, total;
};

struct ProductParams {
  int32_t share, rest;     // work of a thread block: `share` rows of eight tiles, the first `rest` blocks kGrain more
  int32_t length;          // rows of tiles of a unit
  uint32_t length_inverse, rows_inverse;  // see unit_of, by_rows
  int32_t blocks;          // in_padded / 128
  int32_t segments;        // 2: a unit is a column group of gate and of up, then act(gate) * up; else it is a column group
  int32_t count;           // matrices in the work list
  int32_t rows;
  int32_t planes;
  int32_t in_features, x_dtype, y_dtype, activation, accumulate;
  int32_t rotations;    // 1: all matrices take the same rotated input
  int32_t fused;        // the kernel rotates the inputs it needs itself; else it reads image, scales and squares
  int32_t columns;      // of operands in the image
  int32_t row_bytes;    // of it, 16 inputs
  int32_t row_shift;    // log2 of the warps that share the rows of tiles
  const void* x;
  const float* norm_weight;
  int64_t x_stride;
  float norm_eps;
  uint8_t* image;       // [rotation][row of tiles][column] operands in fragment order
  float* scales;        // [rotation][chunk of kScaleBlocks blocks][kRows]
  float* squares;       // [chunk][kRows] sums of squares of x, for the norm
  float* inbox;         // [block][segment][kRows][128]: sums on their way to the block that finishes a unit; zero means not yet there
  ProductShared shared;
  uint32_t power[8];    // of two, see states_by_products
  int32_t first_group[EXL3_MAX_GROUP + 1];
  ProductMatrix matrix[EXL3_MAX_GROUP];
  int64_t* stamps;      // see stamps.cuh
};

// Work is counted in rows of eight tiles (16 inputs by 128 output columns), unit after unit; each thread block has one run of it, and of that each
// warp a run of each part, in multiples of kGrain rows: then all steps are whole ones.
constexpr int kGrain = 8;
inline __host__ __device__ int first_work(const ProductParams& p, int block) { return block * p.share + kGrain * (block < p.rest ? block : p.rest); }
inline __host__ __device__ int chunks_of(const ProductParams& p) { return (p.blocks + kScaleBlocks - 1) / kScaleBlocks; }

// Divisions in a kernel's first instructions, all of which every step waits for, are products with inverses.
inline __host__ __device__ int unit_of(const ProductParams& p, int work) {
  const int unit = (int)((uint64_t)(uint32_t)work * p.length_inverse >> 32);  // or one more
  return unit - (unit * p.length > work ? 1 : 0);
}
inline __host__ __device__ int by_rows(const ProductParams& p, int i) { return (int)((uint32_t)i * p.rows_inverse >> 16); }  // i < 8192

// A thread block's run of work, and the units that it begins and ends in.
struct BlockRun {
  int begin, end, first, last;
  __device__ __forceinline__ BlockRun(const ProductParams& p, int block)
      : begin(first_work(p, block)), end(first_work(p, block + 1)), first(unit_of(p, begin)), last(unit_of(p, end - 1)) {}
  __device__ __forceinline__ int parts(const ProductParams& p) const { return (last - first + 1) * p.segments; }
};

// The operand image: for each 16 inputs and column four words, one a lane q. int8 of inputs 2q, 2q+1, 2q+8, 2q+9; or fp16 of the same,
// eight bytes. Bytes: columns 2r and 2r+1 are the high and low plane of row r. fp16: column r is row r.
inline constexpr __host__ __device__ int column_bytes(int mode) { return mode == kBytes ? 16 : 32; }
inline __host__ __device__ int operand_columns(int mode, int rows) { return mode == kBytes ? 2 * rows : rows; }
inline __host__ __device__ int most_rows(int mode) { return kRows / operand_columns(mode, 1); }

// Whether a block may have 163 KiB of shared memory or more, by the architecture of the code.
inline constexpr __host__ __device__ bool roomy(int architecture) {
  return architecture == 80 || architecture == 90 || architecture == 100 || architecture == 103;
}
#ifdef __CUDA_ARCH__
constexpr bool kRoomy = roomy(__CUDA_ARCH__ / 10);
#else
constexpr bool kRoomy = true;
#endif

// Of a warp's ring: 16 inputs by 64 columns are a row. A slot is a step, and fewer steps cost less, where the operands leave the room.
inline constexpr __host__ __device__ bool large_slots(bool room, int mode) { return room && mode == kBytes; }
inline constexpr __host__ __device__ int rows_in_slot(bool room, int k2, int mode) { return (k2 <= 8 ? 4 : 2) << (int)large_slots(room, mode); }
inline constexpr __host__ __device__ int ring_slots(bool room, int mode) { return !large_slots(room, mode) && (room || mode == kBytes) ? 3 : 2; }
// Bytes from one row to the next: a warp reads two rows at a time, which then lie in different banks.
inline constexpr __host__ __device__ int ring_pitch(int k2) { return 64 * k2 + (k2 % 2 ? 0 : 64); }

// The inputs a thread block rotates itself: chunks from `first` on, round the end of the inputs; the image begins with them.
struct FusedInputs {
  int first, chunks;
};
inline __host__ __device__ FusedInputs fused_inputs(const ProductParams& p, int from, int count) {  // rows of tiles of a matrix
  const int length = p.blocks * 8, chunk = kScaleBlocks * 8, all = chunks_of(p), to = from + count;
  FusedInputs f{from / chunk, 0};
  f.chunks = to <= length ? (to + chunk - 1) / chunk - f.first : all - f.first + (to - length + chunk - 1) / chunk;
  if (f.chunks > all) f.chunks = all;
  return f;
}

// Where a row of tiles lies in that image.
inline __host__ __device__ int image_row(const ProductParams& p, const FusedInputs& inputs, int row) {
  const int at = row - inputs.first * kScaleBlocks * 8;
  return at < 0 ? at + p.blocks * 8 : at;
}

inline __host__ __device__ int product_threads(const ProductParams& p) { return (kAcross << p.row_shift) * 32 + kFinishers * 32; }

inline ProductShared product_shared(const ProductParams& p, bool room, int k2, int mode) {
  ProductShared s;
  const int warps = kAcross << p.row_shift;
  const int most = p.share + (p.rest > 0 ? kGrain : 0), chunk = kScaleBlocks * 8, all = chunks_of(p);
  s.slot = rows_in_slot(room, k2, mode) * (ring_pitch(k2) + (p.fused ? 0 : p.row_bytes));
  s.image = warps * ring_slots(room, mode) * s.slot;
  const int bound = (most + 3 * chunk - 2) / chunk, chunks = bound < all ? bound : all;  // one of them may be short
  s.image_bytes = p.fused ? chunks * chunk * p.row_bytes : 0;  // of a rotation
  s.scales = s.image + (p.fused ? p.rotations : 0) * s.image_bytes;
  s.squares = s.scales + (p.fused ? p.rotations * all * kRows * 4 : 0);
  s.exchange = s.squares + (p.fused ? all * kRows * 4 : 0);
  s.begun = s.exchange + 2 * (p.rows << p.row_shift) * kPitch * 4;
  s.parts = s.begun + (kMostWarps + 2) * 8;  // see free_sums
  const int parts = ((most - 1) / (p.segments * p.blocks * 8) + 2) * p.segments;
  s.ranges = (s.parts + parts * kPartBytes + kRangeBytes - 1) / kRangeBytes * kRangeBytes;
  s.total = s.ranges + parts * kMostDown * kRangeBytes;
  return s;
}

// Shares `work` out over so many thread blocks.
inline void share_out(ProductParams& p, int work, int blocks) {
  p.share = work / kGrain / blocks * kGrain;
  p.rest = work / kGrain % blocks;
}

// What follows from the other parameters.
inline void complete(ProductParams& p, bool room, int k2, int mode) {
  p.length = p.segments * p.blocks * 8;
  p.length_inverse = (uint32_t)(((uint64_t)1 << 32) / p.length) + 1;
  p.rows_inverse = 65536 / p.rows + 1;
  p.shared = product_shared(p, room, k2, mode);
  for (int i = 0; i < 8; i++) p.power[i] = 1u << i;
}

using ProductKernel = void (*)(ProductParams);
struct ProductEntry {
  ProductKernel kernel;
  int mode, fused;
};
// Entries of one rate; defined once for each in product_<k2>.cu.
struct ProductEntries {
  const ProductEntry* first;
  int count;
};

}  // namespace exl3
