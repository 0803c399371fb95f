// The fast product's argument blocks and launch plan, shared by host and device code. See product.cuh for how it works.
#pragma once
#include <cuda_runtime.h>

#include "exl3/codec.h"
#include "exl3/ops.h"

namespace exl3 {

#define EXL3_RATES(X) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(10) X(12) X(14) X(16)

// What multiplies: the hash itself, or weights decoded to fp16.
enum ProductMode {
  kBytes = 0,        // mul1: four unsigned bytes whose sum is the weight, times int8 activations in one or two planes
  kPairs = 1,        // mcg, 3inst: two halves whose sum is the weight, times fp16 activations
  kDecodeBytes = 2,  // mul1 decoded, times fp16 activations: more rows than 8, or floating-point operands asked for
  kDecodePairs = 3,  // mcg, 3inst decoded
};

constexpr int kWarps = 8;
constexpr int kRows = 8;         // most rows of the modes that keep the input in shared memory
constexpr int kMaxSlices = 8;    // blocks of one cluster
constexpr int kRingSlots = 3;

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

// Scale and sums of the quantized input of one (rotation, row, slice). value = scale * q.
struct SliceScale {
  float scale;
  int32_t sum_high, sum_low;  // of the int8 planes
  float sum;                  // of the fp16 values
};

struct ProductParams {
  ProductMatrix matrix[EXL3_MAX_GROUP];
  int32_t first_group[EXL3_MAX_GROUP + 1];
  int32_t count;        // matrices in the work list
  int32_t segments;     // 2: gate and up of one column group in one block, then act(gate) * up
  int32_t rows;         // of the whole call
  int32_t blocks;       // in_padded / 128
  int32_t slices;       // the inner dimension is shared by so many blocks: each has slice_blocks of it, the first slice_rest one more
  int32_t slice_blocks, slice_rest;
  int32_t ring_slots;   // at most kRingSlots
  int32_t planes;
  int32_t in_features, x_dtype, y_dtype, activation, accumulate;
  int32_t rotations;    // 1: all matrices take the same rotated input
  int32_t fused;        // the kernel rotates its slice itself; else it reads image and scales
  int32_t image_columns;
  const void* x;
  const float* norm_weight;
  int64_t x_stride;
  float norm_eps;
  uint8_t* image;       // operands in fragment order, see image_offset
  SliceScale* scales;   // [rotation][row][slice]
  float* partial;       // without clusters: [unit][slice][segment][row][128]
  int32_t* counters;    // [unit], zero before and after
};

// First block of 128 inputs of a slice.
inline __host__ __device__ int slice_begin(const ProductParams& p, int slice) {
  return slice * p.slice_blocks + (slice < p.slice_rest ? slice : p.slice_rest);
}
inline __host__ __device__ int widest_slice(const ProductParams& p) { return p.slice_blocks + (p.slice_rest > 0); }

// The operand image: for each 16 inputs and column (a row of x, or one int8 plane of it) four words, one a lane q: int8 of inputs
// 2q, 2q+1, 2q+8, 2q+9; or fp16 of the same, eight bytes.
inline __host__ __device__ int image_column_bytes(int mode) { return mode == kBytes ? 16 : 32; }

inline constexpr __host__ __device__ int rows_in_slot(int k2) { return k2 <= 4 ? 4 : k2 <= 8 ? 2 : 1; }
inline __host__ __device__ int tile_rows_bytes(int k2) { return 128 * k2; }  // eight tiles of one row of tiles
inline __host__ __device__ int slot_bytes(int k2, int mode, int columns) {
  return rows_in_slot(k2) * (tile_rows_bytes(k2) + (mode >= kDecodeBytes ? columns * 32 : 0));
}

struct ProductShared {  // offsets in dynamic shared memory
  int image, exchange, received, total;
};
inline __host__ __device__ int operand_pairs(int columns) { return (columns + 1) & ~1; }  // columns go in pairs
// Warps that write their sums side by side; more of them, fewer rounds.
// fp16 rows have one number of slots, so that their order of adding does not depend on how many there are.
inline __host__ __device__ int exchange_slots(int columns, int mode) { return columns > 8 ? 2 : columns > 4 || mode != kBytes ? 4 : 8; }
// columns: live operand columns; rows: of x in this block.
inline __host__ __device__ ProductShared product_shared(const ProductParams& p, int k2, int mode, int columns, int rows) {
  ProductShared s;
  s.image = kWarps * p.ring_slots * slot_bytes(k2, mode, columns);
  const int inputs = widest_slice(p) * 8;  // rows of tiles
  const bool resident = mode < kDecodeBytes;
  s.exchange = s.image + (resident ? p.rotations > 1 && p.segments > 1 ? 2 : 1 : 0) * inputs * columns * image_column_bytes(mode);
  const int stage = p.fused ? rows * widest_slice(p) * 512 : 0;  // the exchange area holds the rotated input first
  int exchange = exchange_slots(columns, mode) * 128 * operand_pairs(columns) * 4;
  if (exchange < stage) exchange = stage;
  s.received = s.exchange + exchange;
  const int each = (rows + p.slices - 1) / p.slices;
  s.total = s.received + p.slices * p.segments * each * 512;
  return s;
}

using ProductKernel = void (*)(ProductParams);
struct ProductEntry {
  ProductKernel kernel;
  int k2, mode, blocks;  // blocks of 8 operand columns
};
// Entries of one rate; defined once for each in product_<k2>.cu.
struct ProductEntries {
  const ProductEntry* first;
  int count;
};

}  // namespace exl3
