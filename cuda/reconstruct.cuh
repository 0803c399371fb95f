// A whole matrix in its original basis as halves: what the product of very many rows gives to a plain matrix product.
//
// A block makes 128 x 128 weights. The Hadamard transform of 128 points is one of 8 times one of 16 points, so each side takes two steps:
// over the eight tiles that a warp holds of a column, by additions in fp16 (exact for mul1: sums of eight integers up to 510); within a
// tile on both sides by products with the 16-point matrix; and, through shared memory, over the tiles of a row by a product again. A lane's
// weights of a tile are the second operand of the first product as they come, and its result the first operand of the next.
#pragma once
#include "product.h"
#include "ptx.cuh"
#include "trellis.cuh"

#include "../cpp/gpu/numbers.h"

namespace exl3 {

constexpr int kReconstructThreads = 256;

struct ReconstructParams {
  const uint8_t* trellis;
  const uint16_t *suh, *svh;
  uint16_t* out;  // fp16, dense
  int32_t in_features, out_features, columns;  // columns: of tiles; out_features is even
  uint32_t multiplier, addend;
  float scale, shift;  // of a sum; shift for the first of each 128 x 128: what mul1's integers lack
};
using ReconstructKernel = void (*)(ReconstructParams);

inline ReconstructParams reconstruct_params(const exl3_weight& w, uint16_t* out) {
  const bool bytes = w.codebook == EXL3_MUL1;
  // sums over 128 x 128 come times 1/16, the transforms' own factor is 1/128
  return {(const uint8_t*)w.trellis, (const uint16_t*)w.suh, (const uint16_t*)w.svh, out, w.in_features, w.out_features, w.out_padded / 16,
          w.multiplier, w.codebook == EXL3_3INST ? k3instAddend : 0u, (bytes ? kMul1Scale : 1.f) / 8,
          bytes ? (kMul1Shift / kMul1Scale + kMul1Middle) * 1024.f : 0.f};
}

#ifdef __CUDACC__
template <int K2, int MODE>
__global__ void __launch_bounds__(kReconstructThreads, 4) reconstruct_kernel(const __grid_constant__ ReconstructParams p) {
#if __CUDA_ARCH__ >= 800
  constexpr int kPitch = 72;  // words: rows 8 banks apart
  __shared__ uint32_t space[128 * kPitch];  // [input][tile of its row][pair of columns]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  ptx::launch_dependents();
  const uint32_t* tiles = (const uint32_t*)p.trellis + ((int64_t)blockIdx.y * 8 * p.columns + blockIdx.x * 8 + warp) * 4 * K2;
  const Run<K2> run(lane);
  uint32_t words[8][Run<K2>::kRead], v[8][4];
  const int pitch = p.columns * 4 * K2;
#pragma unroll
  for (int t = 0; t < 8; t++, tiles += pitch) read_words<K2>(tiles, run, words[t]);
#pragma unroll
  for (int t = 0; t < 8; t++) {
    uint32_t s[8];
    states_of<K2>(words[t], run, s);
#pragma unroll
    for (int e = 0; e < 4; e++) {  // columns g, g + 8 of inputs 2q, 2q + 1, then of inputs 2q + 8, 2q + 9
      const int j = 4 * (e & 1) + 2 * (e >> 1);
      v[t][e] = MODE == kDecodeBytes ? decode_bytes(s[j], s[j + 1], p.multiplier) : decode_pairs(s[j], s[j + 1], p.multiplier, p.addend);
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
          // mul1 comes as 1024 and a sum of bytes: 510 and less remain of it where 1534 is taken off each, -3068 at once
          v[t][e] = ptx::add(a, MODE == kDecodeBytes && m == 1 ? ptx::add(b, 0xe9fee9feu) : b);
          v[t | m][e] = ptx::subtract(a, b);
        }
  // a quarter with the signs of row g and columns 2q, 2q + 1 of the 16-point matrix; its other three quarters are the same, the last negative
  constexpr uint32_t kMinus = 0x80008000u;
  auto signs = [](int a, int b) { return __popc(a & b) & 1 ? kMinus : 0u; };
  const uint32_t quarter = 0x34003400u ^ signs(g, 2 * q) ^ (g & 1 ? 0x80000000u : 0u), negative = quarter ^ kMinus;
  // and as second operand, with columns in such an order that a lane gets 4q .. 4q + 3 of the result
  const int column = 4 * (g >> 1) + (g & 1);
  const uint32_t second = 0x34003400u ^ signs(column, 2 * q) ^ (g & 1 ? 0x80000000u : 0u), below = second ^ signs(g, 4), flip = signs(q, 1);
#pragma unroll
  for (int t = 0; t < 8; t++) {
    float d[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) ptx::mma(d[n], quarter, quarter, quarter, negative, v[t][n], v[t][n + 2]);
    uint32_t a[4];
#pragma unroll
    for (int e = 0; e < 4; e++) a[e] = ptx::pack(d[e >> 1][2 * (e & 1)], d[e >> 1][2 * (e & 1) + 1]);
    float f[2][4] = {};
    ptx::mma(f[0], a[0], a[1], a[2], a[3], second, below);
    ptx::mma(f[1], a[0], a[1], a[2], a[3], second ^ flip, below ^ flip);
#pragma unroll
    for (int h = 0; h < 2; h++)
      *(uint2*)(space + (t * 16 + g + 8 * h) * kPitch + warp * 8 + 2 * q) = {ptx::pack(f[0][2 * h], f[0][2 * h + 1]), ptx::pack(f[1][2 * h], f[1][2 * h + 1])};
  }
  // inner: (tile, column of the pair); lane q has tiles q and q + 4, and of the result column g & 1 of tiles g / 2 and g / 2 + 4.
  // Rows of the product: pairs 2 (g & 3) of rows g / 4, then the pairs after them
  const uint32_t one = (signs(q, g >> 1) & 0x8000u ? 0xbc00u : 0x3c00u) << (g & 1 ? 16 : 0), minus = one ^ (g & 1 ? 0x80000000u : 0x8000u);
  const int column0 = blockIdx.x * 128 + 16 * q + 4 * (g & 3), row0 = blockIdx.y * 128 + warp * 16 + (g >> 2);
  float svh[2][4];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) svh[n][e] = half_to_float(p.svh[column0 + 64 * n + e]) * p.scale;
  float suh[8];  // of rows row0, row0 + 2 ...; read here, as stores would hold them up
#pragma unroll
  for (int r = 0; r < 8; r++) suh[r] = half_to_float(p.suh[row0 + 2 * r]);
  ptx::wait_for_previous();  // it may still read what `out` held
  __syncthreads();
  const uint32_t* from = space + (warp * 16 + (g >> 2)) * kPitch + q * 8 + 2 * (g & 3);
  auto rows = [&](auto store) {
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const uint2 low = *(const uint2*)(from + 2 * r * kPitch), high = *(const uint2*)(from + 2 * r * kPitch + 32);
      float f[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; n++) ptx::mma(f[n], low.x, low.y, high.x, high.y, one, n ? minus : one);
      if (r == 0 && threadIdx.x == 0) f[0][0] += p.shift;
#pragma unroll
      for (int n = 0; n < 2; n++)
        store(2 * r, n, {ptx::pack(f[n][0] * (suh[r] * svh[n][0]), f[n][1] * (suh[r] * svh[n][1])),
                         ptx::pack(f[n][2] * (suh[r] * svh[n][2]), f[n][3] * (suh[r] * svh[n][3]))});
    }
  };
  uint16_t* out = p.out + (int64_t)row0 * p.out_features + column0;
  if (p.out_features % 4 == 0 && (blockIdx.x + 1) * 128 <= p.out_features && (blockIdx.y + 1) * 128 <= p.in_features) {
    const int64_t step = 2 * (int64_t)p.out_features;  // the warp's rows come in pairs
    rows([&](int, int n, uint2 four) {
      *(uint2*)(out + 64 * n) = four;
      if (n) out += step;
    });
  } else {
    rows([&](int r, int n, uint2 four) {
      const int c = column0 + 64 * n;
      if (row0 + r >= p.in_features) return;
      uint16_t* to = out + (int64_t)r * p.out_features + 64 * n;
      if (c < p.out_features) *(uint32_t*)to = four.x;
      if (c + 2 < p.out_features) *(uint32_t*)(to + 2) = four.y;
    });
  }
#endif
}
#endif

}  // namespace exl3
