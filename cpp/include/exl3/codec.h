// The arithmetic of the format, one value at a time: bit ring, tile order, codebooks (format spec 2, 3). Shared by host and device code;
// fast kernels are held to these few lines.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__HIP__)
#define EXL3_CODEC static constexpr __host__ __device__ inline
#else
#define EXL3_CODEC static constexpr inline
#endif

namespace exl3 {

constexpr int kTile = 16;           // a tile is 16 x 16 weights
constexpr int kTileWeights = 256;   // positions of its ring
constexpr int kBlock = 128;         // size of the Hadamard rotation
constexpr uint32_t k3instMultiplier = 89226354u, k3instAddend = 64248484u;

// Rates come as k2 = 2K, so that half rates are whole numbers.
EXL3_CODEC bool valid_k2(int k2) { return k2 >= 2 && k2 <= 16 && (k2 <= 8 || k2 % 2 == 0); }
EXL3_CODEC int tile_bytes(int k2) { return 16 * k2; }
EXL3_CODEC int ring_bits(int k2) { return 128 * k2; }

// New bits of position i: K, or for K = KA + 1/2 KA at even and KA + 1 at odd positions; ring_end is their running sum.
EXL3_CODEC int fresh_bits(int k2, int i) { return k2 / 2 + (k2 & i & 1); }
EXL3_CODEC int ring_end(int k2, int i) { return ((i + 1) * k2) >> 1; }

// Position i of the stream stands at (tile_row, tile_col) of the tile.
EXL3_CODEC int tile_row(int i) { return 2 * ((i >> 3) & 3) + (i & 1) + 8 * ((i >> 1) & 1); }
EXL3_CODEC int tile_col(int i) { return (i >> 5) + 8 * ((i >> 2) & 1); }

// The 16-bit state of position i. words: the tile as 4 * k2 little-endian 32-bit words; ring bit p is bit 31 - p % 32 of word p / 32.
EXL3_CODEC uint32_t ring_state(const uint32_t* words, int k2, int i) {
  const int count = 4 * k2;
  int start = ring_end(k2, i) - 16;
  if (start < 0) start += ring_bits(k2);
  const int word = start >> 5;
  const uint64_t pair = (uint64_t)words[word] << 32 | words[word + 1 == count ? 0 : word + 1];
  return (uint32_t)(pair >> (48 - (start & 31))) & 0xFFFFu;
}

// 3inst and mcg: two fp16 numbers, packed, whose sum is the value.
EXL3_CODEC uint32_t half_pair(uint32_t state, uint32_t multiplier, uint32_t addend) {
  return ((state * multiplier + addend) & 0x8FFF8FFFu) ^ 0x3B603B60u;
}

// mul1: the value is affine in the sum of four bytes, 0 .. 1020.
EXL3_CODEC uint32_t byte_sum(uint32_t state, uint32_t multiplier) {
  const uint32_t p = state * multiplier;
  return (p & 255) + (p >> 8 & 255) + (p >> 16 & 255) + (p >> 24);
}
constexpr float kMul1Scale = 0.00676727294921875f, kMul1Shift = -10.3828125f;  // value = (1024 + byte_sum) * scale + shift

// One half of a half_pair as an integer, exact in units of 2^-13: its exponent field is 12 .. 15.
EXL3_CODEC int32_t half_units(uint32_t half) {
  const int32_t magnitude = (int32_t)((half & 0x3FF) | 0x400) << (half >> 10 & 3);
  return half & 0x8000 ? -magnitude : magnitude;
}

// The value before its one rounding to fp16; exact in fp32.
EXL3_CODEC float codebook_exact(uint32_t state, int codebook, uint32_t multiplier) {
  if (codebook == 2) return (float)(1024 + byte_sum(state, multiplier)) * kMul1Scale + kMul1Shift;
  const uint32_t pair = half_pair(state, multiplier, codebook == 0 ? k3instAddend : 0u);
  return (float)(half_units(pair & 0xFFFF) + half_units(pair >> 16)) * (1.0f / 8192);
}

// Rounds to fp16 and back, to nearest even; |x| below 65504. Every codebook value is a multiple of 2^-24, so the integer path is exact.
EXL3_CODEC float round_to_half(float x) {
  const float magnitude = x < 0 ? -x : x;
  float step = 1.0f / 16777216;  // 2^-24: spacing of fp16 below 2^-14
  for (float top = 1.0f / 8192; magnitude >= top && step < 32; top *= 2) step *= 2;
  const float scaled = magnitude / step;
  uint32_t whole = (uint32_t)scaled;
  const float rest = scaled - (float)whole;
  if (rest > 0.5f || (rest == 0.5f && (whole & 1))) whole++;
  const float rounded = (float)whole * step;
  return x < 0 ? -rounded : rounded;
}

EXL3_CODEC float codebook_value(uint32_t state, int codebook, uint32_t multiplier) {
  return round_to_half(codebook_exact(state, codebook, multiplier));
}

}  // namespace exl3
