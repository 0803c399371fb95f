// From trellis bits to weights (format 2 and 3), and whole matrices out of it.
#pragma once
#include "numbers.h"

#include "exl3/codec.h"

// The value of a 16-bit state, rounded to fp16 as the format defines it.
GPU_FN float code_value(uint32_t state, int codebook, uint32_t multiplier) {
  if (codebook == EXL3_MUL1)  // exact in fp32 (11 bits times 11 bits), so one rounding, to fp16
    return half_to_float(float_to_half((float)(1024 + exl3::byte_sum(state, multiplier)) * exl3::kMul1Scale + exl3::kMul1Shift));
  const uint32_t p = exl3::half_pair(state, multiplier, codebook == EXL3_3INST ? exl3::k3instAddend : 0u);
  return half_to_float(float_to_half(half_to_float((uint16_t)p) + half_to_float((uint16_t)(p >> 16))));
}

// Place of (row, column) of a tile in stream order (format 2.1): the inverse of exl3::tile_row and tile_col.
GPU_FN int stream_position(int r, int c) {
  const int j = (r & 1) + 2 * (r >> 3) + 4 * (c >> 3), t = ((r & 7) >> 1) + 4 * (c & 7);
  return 8 * t + j;
}

struct ReconstructArgs {
  exl3_weight weight;
  void* out;
  int32_t dtype, original_basis;
};

// Rotated basis: one warp a tile, eight values a lane.
GPU_FN void reconstruct(const ReconstructArgs& a) {
  begin_kernel();
  const exl3_weight& w = a.weight;
  const int columns = w.out_padded / 16, lane = lane_id();
  const int64_t tile = (int64_t)block_x() * 8 + warp_id();
  if (tile >= (int64_t)(w.in_padded / 16) * columns) return;
  const uint32_t* words = (const uint32_t*)w.trellis + tile * 4 * w.k2;
  const int64_t row0 = tile / columns * 16, column0 = tile % columns * 16;
  for (int j = 0; j < 8; j++) {
    const int64_t r = row0 + exl3::tile_row(8 * lane + j), c = column0 + exl3::tile_col(8 * lane + j);
    store(a.out, r * w.out_padded + c, a.dtype, code_value(exl3::ring_state(words, w.k2, 8 * lane + j), w.codebook, w.multiplier));
  }
}

// Original basis: one block of 256 threads a square of 128. Warp w holds columns 16w .. 16w+15, lane l rows 4l .. 4l+3 of them.
GPU_FN void reconstruct_original(const ReconstructArgs& a) {
  constexpr int kPass = 4;  // columns a warp shows to the others at a time
  GPU_SHARED(float, space, 8 * kPass * 128);
  begin_kernel();
  const exl3_weight& w = a.weight;
  const int lane = lane_id(), warp = warp_id(), columns = w.out_padded / 16;
  const uint32_t* words = (const uint32_t*)w.trellis + ((int64_t)(block_y() * 8 + lane / 4) * columns + block_x() * 8 + warp) * 4 * w.k2;
  float v[16][4];
#pragma unroll
  for (int c = 0; c < 16; c++) {
#pragma unroll
    for (int e = 0; e < 4; e++)
      v[c][e] = code_value(exl3::ring_state(words, w.k2, stream_position((4 * lane + e) & 15, c)), w.codebook, w.multiplier);
    hadamard128(v[c]);  // down the rows
  }
#pragma unroll
  for (int m = 1; m < 16; m <<= 1)  // along the columns of this warp
#pragma unroll
    for (int c = 0; c < 16; c++)
      if (!(c & m))
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float p = v[c][e], q = v[c | m][e];
          v[c][e] = p + q;
          v[c | m][e] = p - q;
        }
  const uint16_t* suh = (const uint16_t*)w.suh;
  const uint16_t* svh = (const uint16_t*)w.svh;
#pragma unroll
  for (int pass = 0; pass < 16; pass += kPass) {  // and across the eight warps
    block_sync();
#pragma unroll
    for (int c = 0; c < kPass; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) space[(warp * kPass + c) * 128 + 4 * lane + e] = v[pass + c][e];
    block_sync();
    for (int c = 0; c < kPass; c++)
      for (int e = 0; e < 4; e++) {
        float sum = 0.f;
        for (int k = 0; k < 8; k++) {
          const int s = k & warp;
          const float u = space[(k * kPass + c) * 128 + 4 * lane + e];
          sum += ((s ^ (s >> 1) ^ (s >> 2)) & 1) ? -u : u;
        }
        const int row = block_y() * 128 + 4 * lane + e, column = block_x() * 128 + 16 * warp + pass + c;
        if (row < w.in_features && column < w.out_features)
          store(a.out, (int64_t)row * w.out_features + column, a.dtype,
                sum * 0.0078125f * half_to_float(suh[row]) * half_to_float(svh[column]));
      }
  }
}
