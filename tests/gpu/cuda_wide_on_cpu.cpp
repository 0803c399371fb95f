// cuda/wide.cuh as a function on the CPU; source.inc is made of it and what it includes by test_cuda_on_cpu.py.
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#include "cuda_on_cpu.h"
#include "source.inc"

using namespace exl3;

template <int K2, int MODE, int ROWS>
static int run(WideParams p, int units) {
  p.tile_rows = ROWS;
  p.row_tiles = (p.rows + ROWS - 1) / ROWS;
  std::vector<uint8_t> image((size_t)p.steps * p.row_tiles * ROWS * 128 + 1024, 0x7f);  // NaNs where nothing is written
  p.image = (uint8_t*)(((uintptr_t)image.data() + 1023) & ~(uintptr_t)1023);
  std::vector<SliceScale> scales(p.rows);
  p.scales = scales.data();
  for (int r = 0; r < p.rows; r++) {
    cuda_block = {r, 0, 0};
    run_cuda_block(256, [&] { prepare_wide(p); });
  }
  for (int b = 0; b < units * p.row_tiles; b++) {
    cuda_block = {b, 0, 0};
    run_cuda_block(kWideThreads, [&] { wide_kernel<K2, MODE, ROWS>(p); });
  }
  return EXL3_OK;
}

// One matrix; with an activation y holds the gate.
EXL3_EXPORT int on_cpu(const exl3_linear_args* a, int tile_rows) {
  const exl3_weight& w = *a->weights[0];
  WideParams p{};
  p.count = p.rotations = 1;
  p.rows = a->rows;
  p.steps = w.in_padded / 64;
  p.in_features = w.in_features;
  p.x_dtype = a->x_dtype;
  p.y_dtype = a->y_dtype;
  p.accumulate = a->accumulate;
  p.activation = a->activation;
  p.x = a->x;
  p.x_stride = a->x_stride;
  p.norm_weight = a->norm_weight;
  p.norm_eps = a->norm_eps;
  p.matrix[0] = {(const uint8_t*)w.trellis, (const uint16_t*)w.suh, (const uint16_t*)w.svh, w.bias, a->y[0], a->y_stride[0],
                 w.out_features, w.out_padded / 16, w.multiplier, w.codebook == EXL3_3INST ? k3instAddend : 0u};
  const int units = w.out_padded / 128;
  for (int i = 1; i <= EXL3_MAX_GROUP; i++) p.first_group[i] = units;
  const bool bytes = w.codebook == EXL3_MUL1;
  if (w.k2 == 3 && bytes) return tile_rows == 256 ? run<3, kDecodeBytes, 256>(p, units) : run<3, kDecodeBytes, 128>(p, units);
  if (w.k2 == 8 && bytes) return tile_rows == 256 ? run<8, kDecodeBytes, 256>(p, units) : run<8, kDecodeBytes, 128>(p, units);
  if (w.k2 == 14 && !bytes) return tile_rows == 256 ? run<14, kDecodePairs, 256>(p, units) : run<14, kDecodePairs, 128>(p, units);
  return EXL3_UNSUPPORTED;
}
