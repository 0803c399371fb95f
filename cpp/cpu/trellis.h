// What the trellis product is made of. A batch of rows is rotated and quantized once (Operand); then each thread takes columns of tiles
// (16 outputs, all inputs), decodes them 128 inputs at a time to 16-bit integers and multiplies these with every row; the last
// thread to finish 128 outputs rotates, scales and stores them (linear.cpp).
//
// Everything between the two rotations is integer arithmetic: a weight is a byte sum 0 .. 1020 (mul1) or a multiple of 2^-13 that fits
// 16 bits (3inst, mcg), both exact; an activation is a 16-bit integer with one fp32 scale for every row and 128 inputs. So results
// depend neither on the thread count nor on the other rows.
//
// Packed layout (layout 1): tile columns one after another, in a column the tiles from input 0 on. A tile is its ring as one
// little-endian integer (the 32-bit words of the file in reverse order), so that the state of position i is the 16 bits at bit
// ring_bits - ring_end(i), followed by its first two bytes again, for the states that wrap round. 64 bytes of slack at the end.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "exl3/codec.h"
#include "exl3/ops.h"

namespace exl3::cpu {

constexpr int kMaxRows = 64;        // rows of one batch
constexpr int kUnitLimit = 32767;   // largest quantized activation for mul1: 16 products of 1020 * 32767 fit 32 bits
constexpr int kByteLimit = 127;        // for mul1 with planes = 1
constexpr int kUnitLimitHalf = 4095;  // for 3inst and mcg: 16 products of 32752 * 4095 fit 32 bits

static inline size_t tile_stride(int k2) { return (size_t)tile_bytes(k2) + 2; }
static inline size_t packed_bytes(const exl3_weight& w) { return (size_t)(w.in_padded / 16) * (w.out_padded / 16) * tile_stride(w.k2) + 64; }

// One tile of the packed layout.
static inline uint32_t packed_state(const uint8_t* tile, int k2, int i) {
  const int bit = ring_bits(k2) - ring_end(k2, i);
  const uint8_t* p = tile + bit / 8;
  const uint32_t low = (uint32_t)p[0] | (uint32_t)p[1] << 8;
  return bit % 8 == 0 ? low : ((low | (uint32_t)p[2] << 16) >> bit % 8) & 0xFFFF;
}

// How a tier extracts states: byte shuffles and shift counts for every register of windows, made once per rate.
struct Avx2Tables {               // 16 windows a register, 8 in each half of it
  int32_t offset[32];             // first byte of each half
  alignas(32) uint8_t even[16][32], odd[16][32];
  alignas(32) uint32_t right[16][8], left[16][8];
  explicit Avx2Tables(int k2);
};
struct Avx512Tables {             // 32 windows a register, 4 in each 64-bit lane
  int32_t offset[8];
  alignas(64) uint8_t bytes[8][64], shifts[8][64];
  explicit Avx512Tables(int k2);
};
const Avx2Tables& avx2_tables(int k2);
const Avx512Tables& avx512_tables(int k2);

// Rows after the input rotation. `units` holds a tile's 16 inputs in stream order, 32 numbers, word i for tile_row(i), as the decoded
// states come; blocks are outermost, so that the rows of one block lie together.
struct Operand {
  int rows, blocks;
  int16_t* units;    // [blocks][rows][8][32]
  int32_t* offset;   // [blocks][rows][16]: -510 * the sum of each pair of words over the 8 tiles, for mul1's byte sums
  float* scale;      // [blocks][rows]
  float* exact;      // [blocks][rows][128], natural order: operands of the floating-point product and of the scalar tier
  float* total;      // [rows]: sum of the dequantized activations
};

struct Column {
  const uint8_t* tiles;     // one packed tile column
  int k2, codebook;
  uint32_t multiplier;
  const Operand* x;
  float* y;                 // 16 outputs of every row, in the rotated basis
  int64_t y_stride;
};

struct Kernels {
  void (*load)(float* out, const void* x, int dtype, int64_t n);           // to fp32
  void (*store)(void* y, const float* x, int dtype, int64_t n);            // from fp32
  void (*hadamard)(float* block);                                          // 128 values in place, orthonormal
  void (*quantize)(const float* block, int limit, int16_t* units, int32_t* offset, float* scale, float* total);
  void (*activate)(float* gate, const float* up, int activation, int64_t n);   // gate = act(gate) * up
  void (*column)(const Column&);                                           // 16-bit integers
  void (*column_byte)(const Column&);                                      // one row, mul1, units as byte pairs (planes = 1); null: none
  void (*column_float)(const Column&);                                     // fp32 with the format's fp16 weights (planes = 0)
  void (*decode)(const uint8_t* tile, int k2, int codebook, uint32_t multiplier, float* out);   // 256 fp16-rounded values, stream order
  void (*dense)(const exl3_dense_args&, int64_t first, int64_t last);      // outputs first .. last-1 of every row
};

const Kernels& scalar_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& kernels();           // of this process' tier

}  // namespace exl3::cpu
