// A whole matrix in its original basis as halves: what the product of very many rows gives to a plain matrix product.
//
// A block makes 128 x 128 weights. The Hadamard transform of 128 points is one of 8 times one of 16 points, so each side takes two steps:
// over the eight tiles that a warp holds of a column, by additions in fp16 (exact for mul1: sums of eight integers up to 510); within a
// tile on both sides by products with the 16-point matrix; and, through shared memory, over the tiles of a row by a product again. A lane's
// weights of a tile are the second operand of the first product as they come, and its result the first operand of the next.
#pragma once
#include "ptx.cuh"
#include "trellis.cuh"
#include "wide.h"

#include "../cpp/gpu/numbers.h"

namespace exl3 {

constexpr int kReconstructThreads = 256;

inline ReconstructParams reconstruct_params(const exl3_weight& w, uint16_t* out) {
  const bool bytes = w.codebook == EXL3_MUL1;
  // sums over 128 x 128 come times 1/16, the transforms' own factor is 1/128
  return {(const uint8_t*)w.trellis, (const uint16_t*)w.suh, (const uint16_t*)w.svh, out, w.in_features, w.out_features, w.out_padded / 16,
          w.multiplier, w.codebook == EXL3_3INST ? k3instAddend : 0u, (bytes ? kMul1Scale : 1.f) / 8,
          bytes ? (kMul1Shift / kMul1Scale + 1534.f) * 1024.f : 0.f};
}

#ifdef __CUDACC__
template <int K2, int MODE>
__global__ void __launch_bounds__(kReconstructThreads, 3) reconstruct_kernel(const __grid_constant__ ReconstructParams p) {
#if __CUDA_ARCH__ >= 800
  constexpr int kPitch = 68;  // words: rows 4 banks apart
  __shared__ uint32_t space[128 * kPitch];  // [input][tile of its row][pair of columns]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  ptx::launch_dependents();
  const uint32_t* tiles = (const uint32_t*)p.trellis + ((int64_t)blockIdx.y * 8 * p.columns + blockIdx.x * 8 + warp) * 4 * K2;
  const Run<K2> run(lane);
  uint32_t words[8][Run<K2>::kRead], v[8][4];
#pragma unroll
  for (int t = 0; t < 8; t++) read_words<K2>(tiles + (int64_t)t * p.columns * 4 * K2, run, words[t]);
#pragma unroll
  for (int t = 0; t < 8; t++) {
    uint32_t s[8];
    states_of<K2>(words[t], run, s);
#pragma unroll
    for (int e = 0; e < 4; e++) {  // columns g, g + 8 of inputs 2q, 2q + 1, then of inputs 2q + 8, 2q + 9
      const int j = 4 * (e & 1) + 2 * (e >> 1);
      if (MODE == kDecodeBytes)
        v[t][e] = ptx::add(decode_bytes(s[j], s[j + 1], p.multiplier), 0xe5fee5feu);  // -1534: byte sums less 510
      else
        v[t][e] = decode_pairs(s[j], s[j + 1], p.multiplier, p.addend);
    }
  }
#pragma unroll
  for (int m = 1; m < 8; m <<= 1)
#pragma unroll
    for (int t = 0; t < 8; t++)
      if (!(t & m))
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const uint32_t a = v[t][e], b = v[t | m][e];
          v[t][e] = ptx::add(a, b);
          v[t | m][e] = ptx::subtract(a, b);
        }
  // a quarter with the signs of row g and columns 2q, 2q + 1 of the 16-point matrix; its other three quarters are the same, the last negative
  const uint32_t quarter = 0x34003400u ^ (__popc(g & (2 * q)) & 1 ? 0x80008000u : 0u) ^ (g & 1 ? 0x80000000u : 0u), negative = quarter ^ 0x80008000u;
#pragma unroll
  for (int t = 0; t < 8; t++) {
    float d[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) ptx::mma(d[n], quarter, quarter, quarter, negative, v[t][n], v[t][n + 2]);
    uint32_t a[4];
#pragma unroll
    for (int e = 0; e < 4; e++) a[e] = ptx::pack(d[e >> 1][2 * (e & 1)], d[e >> 1][2 * (e & 1) + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float f[4] = {};
      ptx::mma(f, a[0], a[1], a[2], a[3], quarter, n ? negative : quarter);
      uint32_t* to = space + (t * 16 + g) * kPitch + warp * 8 + n * 4 + q;
      to[0] = ptx::pack(f[0], f[1]);
      to[8 * kPitch] = ptx::pack(f[2], f[3]);
    }
  }
  // inner: (tile, column of the pair); lane q has tiles q and q + 4, and of the result column g & 1 of tiles g / 2 and g / 2 + 4
  const uint32_t one = (__popc(q & (g >> 1)) & 1 ? 0xbc00u : 0x3c00u) << (g & 1 ? 16 : 0), minus = one ^ (g & 1 ? 0x80000000u : 0x8000u);
  const int column0 = blockIdx.x * 128 + 16 * q + 2 * g, row0 = blockIdx.y * 128 + warp * 16;
  float svh[2][2];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) svh[n][e] = half_to_float(p.svh[column0 + 64 * n + e]) * p.scale;
  ptx::wait_for_previous();  // it may still read what `out` held
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 8; r++) {
    const uint32_t* from = space + (warp * 16 + r) * kPitch + q * 8 + g;
    const uint32_t a[4] = {from[0], from[8 * kPitch], from[32], from[8 * kPitch + 32]};
    float f[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) ptx::mma(f[n], a[0], a[1], a[2], a[3], one, n ? minus : one);
    if (r == 0 && threadIdx.x == 0) f[0][0] += p.shift;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = row0 + r + 8 * h;
      if (row >= p.in_features) continue;
      const float suh = half_to_float(p.suh[row]);
#pragma unroll
      for (int n = 0; n < 2; n++)
        if (column0 + 64 * n < p.out_features)
          *(uint32_t*)(p.out + (int64_t)row * p.out_features + column0 + 64 * n) =
              ptx::pack(f[n][2 * h] * suh * svh[n][0], f[n][2 * h + 1] * suh * svh[n][1]);
    }
  }
#endif
}
#endif

}  // namespace exl3
