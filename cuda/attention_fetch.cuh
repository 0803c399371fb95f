// Keys and values of the paged cache on their way to shared memory.
#pragma once
#include "attention_codes.cuh"

#include "../cpp/gpu/numbers.h"

namespace exl3 {

constexpr float kNothing = -1e30f, kLog2e = 1.4426950408889634f;
constexpr float kSlack = 6.f;  // weights may reach 2^kSlack before the sums are rescaled

// One thread's part of copying tiles of a side: in each pass one piece of a row, `pass_rows` rows further each time.
struct SideCopy {
  const uint8_t* from;  // of position 0
  int to, row;          // in the tile; rows beyond a pass: none

  __device__ __forceinline__ SideCopy(const AttentionSide& s, const exl3_cache_layer& c, int side, int kv_head, int thread) {
    row = thread / s.pieces;
    const int piece = (thread - row * s.pieces) * s.piece;
    from = (const uint8_t*)(side ? c.v : c.k) + (int64_t)(row * c.kv_heads + kv_head) * s.row_bytes + piece;
    to = row * s.pitch + piece;
    if (row >= s.pass_rows) row = 1 << 20;
  }
  // ROWS positions from one of a page on; those from `valid` on are zeros.
  template <int BYTES, int ROWS>
  __device__ __forceinline__ void pieces(uint8_t* tile, const AttentionSide& s, int page, int in_page, int stride, int valid) const {
    const uint8_t* source = from + (int64_t)page * (EXL3_PAGE * stride) + in_page * stride;
    uint8_t* target = tile + to;
    const int step = s.pass_rows * stride, target_step = s.pass_rows * s.pitch;
#pragma unroll 1
    for (int r = row; r < ROWS; r += s.pass_rows) {
      ptx::copy_or_zero<BYTES>(target, source, r < valid);
      source += step;
      target += target_step;
    }
  }
  template <int D, int ROWS>
  __device__ __forceinline__ void operator()(uint8_t* tile, const AttentionSide& s, int page, int in_page, int kv_heads, int valid) const {
    const int stride = kv_heads * s.row_bytes;
    if (D % 128 == 0 || s.piece == 16)
      pieces<16, ROWS>(tile, s, page, in_page, stride, valid);
    else if (s.piece == 8)
      pieces<8, ROWS>(tile, s, page, in_page, stride, valid);
    else
      pieces<4, ROWS>(tile, s, page, in_page, stride, valid);
  }
};
// Rows of PIECES copies of BYTES each, from `from` on, `stride` and PITCH bytes apart; rows from `valid` on are zeros. ODD: a row starts at the
// whole word before it.
template <int BYTES, int PIECES, int PITCH, int ROWS, int THREADS, bool ODD = false>
__device__ __forceinline__ void copy_rows(uint8_t* tile, const uint8_t* from, int stride, int valid, int thread) {
  auto all = [&](auto copy) {
    if constexpr (!ODD && THREADS % PIECES == 0 && ROWS % (THREADS / PIECES) == 0) {
      constexpr int kRows = THREADS / PIECES;
      const int row = thread / PIECES, piece = thread % PIECES * BYTES;
      const uint8_t* source = from + row * stride + piece;
#pragma unroll
      for (int r = 0; r < ROWS; r += kRows) {
        copy(tile + row * PITCH + piece + r * PITCH, source, row + r);
        source += kRows * stride;
      }
    } else {
      for (int i = thread; i < ROWS * PIECES; i += THREADS) {
        const int r = i / PIECES, piece = i % PIECES * BYTES;
        const uint8_t* source = from + r * stride;
        if (ODD) source = (const uint8_t*)((uintptr_t)source & ~(uintptr_t)3);
        copy(tile + r * PITCH + piece, source + piece, r);
      }
    }
  };
  if (valid >= ROWS)
    all([](uint8_t* to, const uint8_t* source, int) { ptx::copy_now<BYTES>(to, source); });
  else
    all([&](uint8_t* to, const uint8_t* source, int r) { ptx::copy_or_zero<BYTES>(to, source, r < valid); });
}
// ROWS positions of a side of BITS (16: fp16) without scales, from one of a page on.
template <int D, int BITS, int ROWS, int THREADS>
__device__ __forceinline__ void copy_side(uint8_t* tile, const void* data, int page, int in_page, int kv_heads, int kv_head, int valid, int thread) {
  constexpr AttentionSide kSide = make_side(D, BITS, ROWS, THREADS);
  const int stride = kv_heads * kSide.row_bytes;
  const uint8_t* from = (const uint8_t*)data + (int64_t)page * (EXL3_PAGE * stride) + in_page * stride + kv_head * kSide.row_bytes;
  copy_rows<kSide.piece, kSide.pieces, kSide.pitch, ROWS, THREADS>(tile, from, stride, valid, thread);
}
// A warp's copies of ROWS positions of PIECES pieces of BYTES each, PITCH bytes apart in shared memory.
template <int BYTES, int PIECES, int PITCH, int ROWS>
struct RowCopy {
  static constexpr int kRows = 32 / PIECES;  // at once
  const uint8_t* from;                       // of position 0
  int to, row, stride;

  __device__ __forceinline__ RowCopy(const void* data, int kv_heads, int kv_head, int lane) {
    row = lane / PIECES;
    stride = kv_heads * (PIECES * BYTES);
    from = (const uint8_t*)data + (int64_t)(row * kv_heads + kv_head) * (PIECES * BYTES) + lane % PIECES * BYTES;
    to = row * PITCH + lane % PIECES * BYTES;
    if (row >= kRows) row = 1 << 20;
  }
  // From position `place` of the cache on; rows from `valid` on are zeros.
  __device__ __forceinline__ void operator()(uint8_t* tile, int place, int valid) const {
    const uint8_t* source = from + (int64_t)place * stride;
    uint8_t* target = tile + to;
#pragma unroll
    for (int r = 0; r < ROWS; r += kRows) {
      if ((kRows * PIECES == 32 && ROWS % kRows == 0) || row + r < ROWS)
        ptx::copy_or_zero_of_all<BYTES>(target + r * PITCH, source, row + r < valid);
      source += kRows * stride;
    }
  }
};
// Of a side of BITS (16: fp16), and of its scales where they are whole words.
template <int D, int BITS, int ROWS>
using SideRows = RowCopy<make_side(D, BITS, ROWS, 32).piece, make_side(D, BITS, ROWS, 32).pieces, make_side(D, BITS, ROWS, 32).pitch, ROWS>;
template <int D, int ROWS>
using ScaleRows = RowCopy<D % 128 == 64 ? 4 : D / 16 < 16 ? D / 16 : 16, D % 128 == 64 ? D / 64 : D / 16 < 16 ? 1 : D / 256, D / 16, ROWS>;

// The scales of a quantized side's ROWS positions.
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void copy_scales(uint8_t* tile, const AttentionSide& s, const void* scales, int page, int in_page, int kv_heads,
                                            int kv_head, int valid, int thread) {
  constexpr int kBytes = D / 32 * 2, kPitch = scale_pitch(D), kPiece = D % 64 ? 4 : kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : 4;
  const int stride = kv_heads * kBytes;
  const uint8_t* from = (const uint8_t*)scales + (int64_t)page * (EXL3_PAGE * stride) + in_page * stride + kv_head * kBytes;
  copy_rows<kPiece, kPitch / kPiece, kPitch, ROWS, THREADS, D % 64 != 0>(tile + s.scales, from, stride, valid, thread);
}
// Where the scales of row r start, in shared memory.
template <int D>
__device__ __forceinline__ const uint16_t* scales_of(const uint8_t* tile, const AttentionSide& s, int r, int64_t place, int kv_heads, int kv_head) {
  const int odd = D % 64 ? (int)((place + r) * kv_heads + kv_head) * (D / 32) & 1 : 0;
  return (const uint16_t*)(tile + s.scales + r * scale_pitch(D)) + odd;
}

}  // namespace exl3
