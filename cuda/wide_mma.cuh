// The product of many rows with mma.sync: for cards from 8.0 on without wgmma. Input, scales and finish are those with wgmma.
//
// A block of eight warps owns 128 output columns and 128 rows of x; a warp 32 columns, whose two tiles are its A operands once decoded, and 64 rows.
// A ring of asynchronous copies brings stages of 64 inputs.
#pragma once
#include "wide.cuh"

namespace exl3 {

inline constexpr __host__ __device__ int mma_wide_stage(int k2) { return kMmaRows * 128 + 4 * 128 * k2; }
// Two blocks a multiprocessor where it has 164 KiB, one where it has 100.
inline constexpr __host__ __device__ int mma_wide_shared(int k2) { return kMmaStages * mma_wide_stage(k2) + kMmaRows * 8; }

#ifdef __CUDACC__
template <int K2, int MODE>
__global__ void __launch_bounds__(kMmaThreads, 2) mma_wide_kernel(const __grid_constant__ WideParams p) {
#if __CUDA_ARCH__ >= 800
  constexpr int kImage = kMmaRows * 128, kTileRow = 128 * K2, kStage = mma_wide_stage(K2);
  extern __shared__ __align__(1024) uint8_t raw[];
  uint8_t* const shared = raw;
  float *sums = (float*)(shared + kMmaStages * kStage), *scales = sums + kMmaRows;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row_tile = blockIdx.x, pair = blockIdx.y / 2;
  int m = 0;
  while (m + 1 < p.count && pair >= p.first_pair[m + 1]) m++;
  const ProductMatrix& w = p.matrix[m];
  const int group = 2 * (pair - p.first_pair[m]) + (blockIdx.y & 1), rotation = p.rotations > 1 ? m : 0;
  if (group * 8 >= w.columns) return;
  ptx::launch_dependents();
  ptx::wait_for_previous();

  const int64_t pitch = (int64_t)w.columns * 16 * K2, step_bytes = (int64_t)p.row_tiles * kImage;
  const uint8_t* weights = w.trellis + group * kTileRow;
  const uint8_t* image = p.image + rotation * p.steps * step_bytes + (int64_t)row_tile * kImage;
  auto fetch = [&](int step) {
    if (step < p.steps) {
      uint8_t* to = shared + step % kMmaStages * kStage;
#pragma unroll
      for (int i = thread * 16; i < kImage; i += kMmaThreads * 16) ptx::copy16(to + i, image + step * step_bytes + i);
#pragma unroll
      for (int i = thread * 16; i < 4 * kTileRow; i += kMmaThreads * 16)
        ptx::copy16(to + kImage + i, weights + (step * 4 + i / kTileRow) * pitch + i % kTileRow);
    }
    ptx::copy_commit();
  };
  for (int i = 0; i < kMmaStages - 1; i++) fetch(i);

  const Run<K2> run(lane);
  const int columns = warp % 4 * 32, rows = warp / 4 * 64;  // of this warp
  float d[2][8][4] = {};
  for (int step = 0; step < p.steps; step++) {
    ptx::copy_wait<kMmaStages - 2>();
    __syncthreads();  // the stage is there for all, and the one before it is free
    fetch(step + kMmaStages - 1);
    const uint8_t* in = shared + step % kMmaStages * kStage;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      uint32_t a[2][4], b[8][2];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        uint32_t s[8];
        read_states<K2>((const uint32_t*)(in + kImage + r * kTileRow + (columns / 16 + t) * 16 * K2), run, s);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int j = 4 * (e & 1) + 2 * (e >> 1);
          a[t][e] = MODE == kDecodeBytes ? decode_centred(s[j], s[j + 1], w.multiplier) : decode_pairs(s[j], s[j + 1], w.multiplier, w.addend);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j += 2) {  // rows 8j .. 8j+15, 16 inputs
        uint32_t f[4];
        const int row = rows + (j + lane / 16) * 8 + lane % 8, piece = 2 * r + lane / 8 % 2;
        ptx::load_matrices(f, in + row * 128 + (piece ^ (row & 7)) * 16);
        b[j][0] = f[0];
        b[j][1] = f[1];
        b[j + 1][0] = f[2];
        b[j + 1][1] = f[3];
      }
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int j = 0; j < 8; j++) ptx::mma(d[t][j], a[t][0], a[t][1], a[t][2], a[t][3], b[j][0], b[j][1]);
    }
  }
  ptx::copy_wait<0>();
  if (thread < kMmaRows) {
    const int row = row_tile * kMmaRows + thread;
    const SliceScale s = row < p.rows ? p.scales[(int64_t)rotation * p.rows + row] : SliceScale{};
    sums[thread] = s.sum * p.shrink_shift;
    scales[thread] = s.scale * p.grow;
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = rows + 8 * j + lane % 4 * 2 + e % 2, column = columns + 16 * t + lane / 4 + e / 2 * 8;
        *(__half*)(staged_piece(shared, row, column / 8) + column % 8 * 2) = __float2half_rn(d[t][j][e] * p.shrink);
      }
  __syncthreads();
  const int row0 = row_tile * kMmaRows;
  const int live = min(kMmaRows, p.rows - row0);
  finish_rows(p, w, group, row0, live, live, shared, OtherShares{}, sums, scales, warp, kMmaThreads / 32, lane);
#endif
}
#endif

}  // namespace exl3
