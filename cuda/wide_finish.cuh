// What follows the sums of a tile of many rows, laid out as halves: the Hadamard transform of the 128 columns, scales, bias, activation, store.
//
// A warp takes eight rows at a time. The transform of 128 columns is one of 16 neighbours, by the tensor cores (its matrix is 1 and -1, exact), and one
// of eight such blocks, in registers. Other blocks' sums of a tile come as the tensor cores' operands and are added by them.
#pragma once
#include "rotate.cuh"
#include "wide.h"

namespace exl3 {

#ifdef __CUDACC__
constexpr int kFinishRows = 8;

// Where a row's sums of eight columns lie: [row][16 pieces of 16 bytes, swapped by row].
template <class Byte>
__device__ __forceinline__ Byte* staged_piece(Byte* staged, int row, int piece) {
  return staged + row * 256 + (piece ^ (row & 7)) * 16;
}
// Eight rows of two blocks of 16 columns as operands, two words each.
__device__ __forceinline__ void load_sums(uint32_t (&b)[4], const uint8_t* staged, int row, int pair, int lane) {
  ptx::load_matrices(b, staged_piece(staged, row + lane % 8, 4 * pair + lane / 8));
}

// The transform of 16 columns as the other operand. Its rows are in an order by which a lane's two results of a row are neighbours.
struct Hadamard16 {
  uint32_t of[4];
  __device__ __forceinline__ explicit Hadamard16(int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int after = lane / 4 * 2 + i % 2, before = lane % 4 * 2 + i / 2 * 8;
      of[i] = 0x3c003c00u | (__popc(before & after) & 1) << 15 | (uint32_t)(__popc((before + 1) & after) & 1) << 31;
    }
  }
};

// A lane's sums of two rows (2q and the next) and 128 columns, of each block 2g and the next: [block][first column of both rows, second].
struct FinishedRows {
  float of[8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < 8; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) of[b][i] = 0.f;
  }
  __device__ __forceinline__ void add(int pair, const uint32_t (&b)[4], const Hadamard16& h) {
#pragma unroll
    for (int k = 0; k < 2; k++) ptx::mma(of[2 * pair + k], h.of[0], h.of[1], h.of[2], h.of[3], b[2 * k], b[2 * k + 1]);
  }
  __device__ __forceinline__ void turn_blocks() {
#pragma unroll
    for (int step = 1; step < 8; step <<= 1)
#pragma unroll
      for (int b = 0; b < 8; b++)
        if (!(b & step))
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float x = of[b][i], y = of[b | step][i];
            of[b][i] = x + y;
            of[b | step][i] = x - y;
          }
  }
};

// What other blocks have of a tile, in the order of operands: `count` of them, `stride` bytes from one to the next.
struct OtherShares {
  const uint8_t* from;
  int64_t stride;
  int count;
  __device__ __forceinline__ const uint4* operand(int share, int row, int lane) const {
    return (const uint4*)(from + share * stride) + row / kFinishRows * 4 * 32 + lane;
  }
};

// How results go to y: as 16-bit numbers; as those, times silu(y); as fp32, or added to it; and whatever else there is.
enum WideStore { kHalves, kGated, kFloats, kAnyhow };

// `column`: of the lane's first two. Old values come for some blocks at a time: stores stand in the way of later loads.
template <int HOW>
__device__ __forceinline__ void store_rows(const WideParams& p, const ProductMatrix& w, int column, int row0, int first, int rows, int stored,
                                           const float* row_scales, const __half2 (&svh)[8], const FinishedRows& r) {
  constexpr int kTogether = 4;
  char* y[2];
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = min(first + i, rows - 1);
    y[i] = (char*)row_of(w.y, (int64_t)(row0 + row) * w.y_stride + column, p.y_dtype);
    if (stored == 0) y[i] = (char*)w.trellis;  // in a rehearsal: y's lines could stay in the L1 cache while another block writes them
    scale[i] = stored == 0 ? 0.f : row_scales[row];
  }
#pragma unroll
  for (int from = 0; from < 8; from += kTogether) {
    float2 old[kTogether][2], bias[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; k++) bias[k] = w.bias ? *(const float2*)(w.bias + column + 16 * (from + k)) : make_float2(0.f, 0.f);
    if (HOW == kGated || (HOW == kFloats && p.accumulate))
#pragma unroll
      for (int k = 0; k < kTogether; k++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (HOW == kFloats)
            old[k][i] = *(const float2*)(y[i] + 64 * (from + k));
          else
            old[k][i].x = *(const float*)(y[i] + 32 * (from + k));  // as it lies there
        }
#pragma unroll
    for (int k = 0; k < kTogether; k++) {
      const int b = from + k;
      const float2 factor = __half22float2(svh[b]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float2 v = make_float2(fmaf(r.of[b][i], scale[i] * factor.x, bias[k].x), fmaf(r.of[b][2 + i], scale[i] * factor.y, bias[k].y));
        if (HOW == kGated) {
          const uint32_t h = __float_as_uint(old[k][i].x);
          const float2 gate = p.y_dtype == EXL3_F16 ? __half22float2(*(const __half2*)&h) : make_float2(__uint_as_float(h << 16), __uint_as_float(h & 0xffff0000));
          v.x *= __fdividef(gate.x, 1.f + fast_exp(-gate.x));
          v.y *= __fdividef(gate.y, 1.f + fast_exp(-gate.y));
        }
        if (HOW == kFloats && p.accumulate) v.x += old[k][i].x, v.y += old[k][i].y;
        if (first + i >= stored) continue;
        if (HOW == kFloats)
          *(float2*)(y[i] + 64 * b) = v;
        else
          *(uint32_t*)(y[i] + 32 * b) = p.y_dtype == EXL3_F16 ? ptx::pack(v.x, v.y) : ptx::pack_bfloats(v.x, v.y);
      }
    }
  }
}

// The rare ways in a loop, for which the sums go to local memory.
static __device__ __noinline__ void store_anyhow(const WideParams& p, const ProductMatrix& w, int column, int row0, int first, int rows,
                                                 const float* row_scales, const FinishedRows& r) {
  for (int i = 0; i < 8 * 4; i++) {
    const int row = first + i % 2, c = column + i / 4 * 16 + i / 2 % 2;
    if (row >= rows || c >= w.out_features) continue;
    void* y = row_of(w.y, (int64_t)(row0 + row) * w.y_stride + c, p.y_dtype);
    float v = r.of[i / 4][i % 4] * row_scales[row] * half_to_float(w.svh[c]);
    if (w.bias) v += w.bias[c];
    if (p.activation)
      v *= activate(load(y, 0, p.y_dtype), p.activation, nullptr);
    else if (p.accumulate)
      v += load(y, 0, p.y_dtype);
    store(y, 0, p.y_dtype, v);
  }
}

// Rows of a tile, eight at a time, `first` the first eight and `stride` eights on from there; those below `stored` are stored. By one warp. Where none is,
// in a rehearsal, nothing is read that another warp may be writing.
static __device__ __forceinline__ void finish_rows(const WideParams& p, const ProductMatrix& w, int group, int row0, int rows, int stored,
                                                   const uint8_t* staged, const OtherShares& others, const float* row_sums, const float* row_scales,
                                                   int first, int stride, int lane) {
  const bool whole = (group + 1) * 128 <= w.out_features && w.y_stride % 2 == 0 && ((uintptr_t)w.y & 7) == 0 && ((uintptr_t)w.bias & 7) == 0;
  int how = kAnyhow;
  if (whole && p.y_dtype == EXL3_F32 && !p.activation) how = kFloats;
  if (whole && p.y_dtype != EXL3_F32 && !p.accumulate) how = !p.activation ? kHalves : p.activation == EXL3_ACT_SILU ? kGated : kAnyhow;
  const Hadamard16 hadamard(lane);
  __half2 svh[8];
#pragma unroll
  for (int b = 0; b < 8; b++) svh[b] = *(const __half2*)(w.svh + group * 128 + lane / 4 * 2 + 16 * b);
#pragma unroll 1
  for (int r0 = kFinishRows * first; r0 < rows; r0 += kFinishRows * stride) {
    int column = group * 128 + lane / 4 * 2, row = r0 + lane % 4 * 2;
    asm volatile("" : "+r"(column));  // else all addresses that follow from it are kept from round to round, in local memory
    FinishedRows r;
    r.clear();
#pragma unroll 1
    for (int share = 0; share < others.count; share++) {
      uint4 other[4];
#pragma unroll
      for (int pair = 0; pair < 4; pair++) other[pair] = __ldcg(others.operand(share, r0, lane) + pair * 32);
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        const uint32_t b[4] = {other[pair].x, other[pair].y, other[pair].z, other[pair].w};
        r.add(pair, b, hadamard);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      uint32_t b[4] = {};
      if (stored > 0) load_sums(b, staged, r0, pair, lane);
      r.add(pair, b, hadamard);
    }
    r.turn_blocks();
    if (lane < 4 && stored > 0)  // what all columns have in common is in the first of the transform
#pragma unroll
      for (int i = 0; i < 2; i++) r.of[0][i] += 128.f * row_sums[row + i];
    if (how == kHalves) {
      store_rows<kHalves>(p, w, column, row0, row, rows, stored, row_scales, svh, r);
    } else if (how == kGated) {
      store_rows<kGated>(p, w, column, row0, row, rows, stored, row_scales, svh, r);
    } else if (how == kFloats) {
      store_rows<kFloats>(p, w, column, row0, row, rows, stored, row_scales, svh, r);
    } else {
      const FinishedRows copy = r;
      store_anyhow(p, w, column, row0, row, stored, row_scales, copy);
    }
  }
}
#endif

}  // namespace exl3
