// The two products of decode attention over one warp's 16 positions.
//
// Positions are the rows of both and query rows their columns: scores (positions x rows) = keys x queries, sums (dims x rows) = values x weights.
#pragma once
#include "attention_fresh.cuh"

namespace exl3 {

template <int D>
struct Queries {
  uint32_t operand[D / 16][2];  // 16 dims by 8 rows each
  uint32_t offset[2];           // of row g, groups 2q and 2q + 1: what each adds to a score times its scale; rounded, and the rest
  float start[D / 32][2];       // plain codes: what rows 2q and 2q + 1 have of the middle of the codes, taken off
};

template <int D>
__device__ __forceinline__ void read_scales(const uint16_t* from, float (&scale)[D / 32]) {
  if constexpr (D % 64 == 0) {  // aligned: words
    constexpr int kWords = D / 64;
    uint32_t w[kWords];
    read_words<kWords>((const uint8_t*)from, kWords != 3, w);
#pragma unroll
    for (int i = 0; i < D / 32; i++) scale[i] = half_to_float((uint16_t)(w[i / 2] >> 16 * (i % 2)));
  } else {
#pragma unroll
    for (int i = 0; i < D / 32; i++) scale[i] = half_to_float(from[i]);
  }
}

// Scores of positions g and g + 8 against query rows 2q and 2q + 1. The products are of halves 1 + code ..; what is too much is subtracted by
// a product of scales and offsets.
template <int D, int BITS>
__device__ __forceinline__ void scores_of_codes(const uint8_t* tile, const AttentionSide& s, const Queries<D>& queries, const uint16_t* scale0,
                                                const uint16_t* scale1, float compand, uint32_t ones, int g, int q, float (&score)[4]) {
  float of0[D / 32], of1[D / 32];
  read_scales<D>(scale0, of0);
  read_scales<D>(scale1, of1);
  uint32_t pair0 = 0, pair1 = 0;
  if (2 * q < D / 32) {
    const bool two = D % 64 == 0 || 2 * q + 1 < D / 32;
    pair0 = scale0[2 * q] | (two ? (uint32_t)scale0[2 * q + 1] << 16 : 0);
    pair1 = scale1[2 * q] | (two ? (uint32_t)scale1[2 * q + 1] << 16 : 0);
  }
  ptx::mma(score, pair0, pair1, pair0, pair1, queries.offset[0], queries.offset[1]);
#pragma unroll
  for (int group = 0; group < D / 32; group++) {
    uint32_t a[4], b[4];
    key_codes<BITS>(tile + g * s.pitch + group * 4 * BITS, q, ones, a);
    key_codes<BITS>(tile + (g + 8) * s.pitch + group * 4 * BITS, q, ones, b);
    if (compand > 0.f)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[i] = code_level<BITS>(a[i], compand);
        b[i] = code_level<BITS>(b[i], compand);
      }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; h++)
      ptx::mma(sum, a[2 * h], b[2 * h], a[2 * h + 1], b[2 * h + 1], queries.operand[2 * group + h][0], queries.operand[2 * group + h][1]);
    score[0] += sum[0] * of0[group];
    score[1] += sum[1] * of0[group];
    score[2] += sum[2] * of1[group];
    score[3] += sum[3] * of1[group];
  }
}
// The same of codes as they are, times 2^-17; the tile's matrices of 8 positions by 16 bytes go straight into registers.
template <int D, int BITS>
__device__ __forceinline__ void scores_of_plain(const uint8_t* tile, const Queries<D>& queries, const uint16_t* scale0, const uint16_t* scale1,
                                                int lane, float (&score)[4]) {
  constexpr int kPitch = make_side(D, BITS, 32, 32).pitch, kMatrices = D * BITS / 128, kSteps = kPairs<BITS> / 2;
  float of0[D / 32], of1[D / 32], sum[4];
  read_scales<D>(scale0, of0);
  read_scales<D>(scale1, of1);
  const uint8_t* at = tile + (lane & 15) * kPitch + (lane >> 4) * 16;
#pragma unroll
  for (int first = 0; first < kMatrices; first += 2) {
    uint32_t words[4];  // positions g and g + 8 of matrix `first`, and of the next
    ptx::load_matrices(words, at + first * 16);
#pragma unroll
    for (int m = first; m < first + 2 && m < kMatrices; m++) {
      const int group = m * 4 / BITS;
      uint32_t a[kPairs<BITS>], b[kPairs<BITS>];
      plain_codes<BITS>(words[2 * (m - first)], a);
      plain_codes<BITS>(words[2 * (m - first) + 1], b);
      if (m * 4 % BITS == 0)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] = queries.start[group][e & 1];
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const uint32_t(&operand)[2] = queries.operand[m * kSteps + s];
        ptx::mma(sum, a[2 * s], b[2 * s], a[2 * s + 1], b[2 * s + 1], operand[0], operand[1]);
      }
      if ((m + 1) * 4 % BITS == 0) {
        score[0] += sum[0] * of0[group];
        score[1] += sum[1] * of0[group];
        score[2] += sum[2] * of1[group];
        score[3] += sum[3] * of1[group];
      }
    }
  }
}
template <int D>
__device__ __forceinline__ void scores_of_halves(const uint8_t* tile, const Queries<D>& queries, int lane, float (&score)[4]) {
#pragma unroll
  for (int step = 0; step < D / 16; step++) {
    uint32_t a[4];
    ptx::load_matrices(a, tile + (lane & 15) * half_pitch(D) * 2 + step * 32 + (lane >> 4) * 16);
    ptx::mma(score, a[0], a[1], a[2], a[3], queries.operand[step][0], queries.operand[step][1]);
  }
}

// Adds 16 positions' values by their weights. Rows g and g + 8 of out[t] are dims value_dim(.., g, t, 0) and (.., 1).
template <int D>
__device__ __forceinline__ int value_dim(int bits, bool plain, int g, int t, int high) {
  if (plain) return t / (8 / bits) * (128 / bits) + g * (16 / bits) + 2 * (t % (8 / bits)) + high;
  constexpr int kTiles = 2 * kSuper<D>;  // of a super group
  return bits == 16 ? 16 * t + g + 8 * high : t / kTiles * 32 * kSuper<D> + g * 4 * kSuper<D> + 2 * (t % kTiles) + high;
}
// One multiply-add a pair: h * scale + offset, offset = -centre * scale rounded; what its rounding took is added up by a product of its own,
// rest[super], whose row g holds the group that the dims of row g belong to. `factor` of the level is left to the end.
template <int D, int BITS>
__device__ __forceinline__ void sums_of_codes(const uint8_t* tile, const AttentionSide& s, const uint16_t* const (&scale)[4], float compand,
                                              uint32_t ones, int g, int q, const uint32_t (&weights)[2], float (&out)[D / 16][4],
                                              float (&rest)[D / 32 / kSuper<D>][4]) {
  constexpr int S = kSuper<D>;
  const float centre = code_add(BITS) / code_factor(BITS);
#pragma unroll
  for (int super = 0; super < D / 32 / S; super++) {
    const int group = super * S + g * S / 8, in = g * 4 * S % 32;
    uint32_t v[2][4 * S], residue[2];
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const uint8_t* at = tile + (2 * q + 8 * p) * s.pitch + group * 4 * BITS;
      value_codes<BITS, S>(at, at + s.pitch, in, ones, v[p]);
      const uint32_t both = scale[2 * p][group] | (uint32_t)scale[2 * p + 1][group] << 16;
      if (compand > 0.f) {
        residue[p] = 0;
#pragma unroll
        for (int n = 0; n < 4 * S; n++) v[p][n] = ptx::multiply(code_level<BITS>(v[p][n], compand), both);
      } else {
        const uint32_t c = ptx::pack(centre, centre), offset = ptx::multiply(both, c);
        residue[p] = ptx::multiply_add(both, c, offset ^ 0x80008000u);
#pragma unroll
        for (int n = 0; n < 4 * S; n++) v[p][n] = ptx::multiply_add(v[p][n], both, offset);
      }
    }
#pragma unroll
    for (int t = 0; t < 2 * S; t++)
      ptx::mma(out[super * 2 * S + t], v[0][2 * t], v[0][2 * t + 1], v[1][2 * t], v[1][2 * t + 1], weights[0], weights[1]);
    ptx::mma(rest[super], residue[0], 0, residue[1], 0, weights[0], weights[1]);
  }
}
// Codes as they are: transposed matrices have two positions in a register, whose codes belong to one group, so the scales go into the weights.
// Row g of `rest` is the sum of group g's weights, of which the middle of the codes is taken off in the end.
template <int D, int BITS>
__device__ __forceinline__ void sums_of_plain(const uint8_t* tile, const uint16_t* const (&scale)[4], int lane, const uint32_t (&weights)[2],
                                              float (&out)[D / 16][4], float (&rest)[4]) {
  constexpr int kPitch = make_side(D, BITS, 32, 32).pitch, kGroups = D / 32, kMatrices = D * BITS / 128, kTiles = kPairs<BITS> / 2;
  uint32_t scaled[kGroups][2], mine[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {  // positions 2q and 2q + 1, then 8 further
    if constexpr (D % 64 == 0) {
      uint32_t w[D / 32];  // one position's, then the other's
      if constexpr (D == 128) {
        read_words<4>((const uint8_t*)scale[2 * h], true, w);
      } else {
#pragma unroll
        for (int i = 0; i < D / 32; i += 2) *(uint2*)(w + i) = *(const uint2*)(scale[2 * h] + 2 * i);
      }
#pragma unroll
      for (int i = 0; i < kGroups; i++) scaled[i][h] = ptx::multiply(weights[h], __byte_perm(w[i / 2], w[D / 64 + i / 2], i % 2 ? 0x7632 : 0x5410));
    } else {
#pragma unroll
      for (int i = 0; i < kGroups; i++) scaled[i][h] = ptx::multiply(weights[h], scale[2 * h][i] | (uint32_t)scale[2 * h + 1][i] << 16);
    }
    const int group = min(lane / 4, kGroups - 1);
    mine[h] = scale[2 * h][group] | (uint32_t)scale[2 * h + 1][group] << 16;
  }
  ptx::mma(rest, mine[0], 0, mine[1], 0, weights[0], weights[1]);
  const uint8_t* at = tile + (lane & 15) * kPitch + (lane >> 4) * 16;
#pragma unroll
  for (int first = 0; first < kMatrices; first += 2) {
    uint32_t words[4];
    ptx::load_matrices_transposed(words, at + first * 16);
#pragma unroll
    for (int m = first; m < first + 2 && m < kMatrices; m++) {
      const uint32_t(&w)[2] = scaled[m * 4 / BITS];
      uint32_t a[kPairs<BITS>], b[kPairs<BITS>];
      plain_codes<BITS>(words[2 * (m - first)], a);
      plain_codes<BITS>(words[2 * (m - first) + 1], b);
#pragma unroll
      for (int t = 0; t < kTiles; t++) ptx::mma(out[m * kTiles + t], a[2 * t], a[2 * t + 1], b[2 * t], b[2 * t + 1], w[0], w[1]);
    }
  }
}
template <int D>
__device__ __forceinline__ void sums_of_halves(const uint8_t* tile, int lane, const uint32_t (&weights)[2], float (&out)[D / 16][4]) {
#pragma unroll
  for (int t = 0; t < D / 16; t++) {
    uint32_t a[4];  // dims 0-7 and 8-15 of positions 0-7, then of positions 8-15
    ptx::load_matrices_transposed(a, tile + ((lane & 7) + (lane >> 4) * 8) * half_pitch(D) * 2 + t * 32 + ((lane >> 3) & 1) * 16);
    ptx::mma(out[t], a[0], a[1], a[2], a[3], weights[0], weights[1]);
  }
}

}  // namespace exl3
