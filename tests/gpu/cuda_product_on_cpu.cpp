// cuda/product.cuh as a function on the CPU, without clusters; source.inc is made of it and what it includes by test_cuda_on_cpu.py.
#include "cuda_on_cpu.h"
#include "source.inc"

using namespace exl3;

template <int K2, int MODE, int NB>
static int run(ProductParams p, int slices) {
  p.slices = min(slices, p.blocks);
  p.slice_blocks = p.blocks / p.slices;
  p.slice_rest = p.blocks % p.slices;
  p.fused = p.rows <= 2;
  const int steps = (widest_slice(p) + rows_in_slot(K2) - 1) / rows_in_slot(K2) * p.segments, units = p.first_group[p.count];
  p.ring_slots = min(steps, kRingSlots);
  const size_t image_bytes = (size_t)p.rotations * p.blocks * 8 * p.image_columns * image_column_bytes(MODE);
  std::vector<uint8_t> image(image_bytes + 64, 0x7f);  // NaNs where nothing is written
  p.image = (uint8_t*)(((uintptr_t)image.data() + 63) & ~(uintptr_t)63);
  std::vector<SliceScale> scales((size_t)p.rotations * p.rows * p.slices);
  p.scales = scales.data();
  std::vector<float> partial((size_t)units * p.slices * p.segments * NB * 8 * 128);
  p.partial = partial.data();
  std::vector<int32_t> counters(units);
  p.counters = counters.data();
  for (int rotation = 0; rotation < p.rotations && !p.fused; rotation++)
    for (int row = 0; row < p.rows; row++)
      for (int slice = 0; slice < p.slices; slice++) {
        cuda_block = {slice, row, rotation};
        run_cuda_block(kWarps * 32, [&] { prepare_input<MODE>(p); });
      }
  for (int unit = 0; unit < units; unit++)
    for (int slice = 0; slice < p.slices; slice++) {
      cuda_block = {slice, unit, 0};
      run_cuda_block(kWarps * 32, [&] { product_kernel<K2, MODE, NB>(p); });
    }
  for (int32_t c : counters)
    if (c) return -1;
  return EXL3_OK;
}

EXL3_EXPORT int on_cpu(const exl3_linear_args* a, int slices) {
  const exl3_weight& w = *a->weights[0];
  const bool bytes = w.codebook == EXL3_MUL1;
  ProductParams p{};
  p.segments = a->activation ? 2 : 1;
  p.count = a->activation ? 1 : a->count;
  p.rows = a->rows;
  p.blocks = w.in_padded / 128;
  p.planes = a->planes;
  p.in_features = w.in_features;
  p.x_dtype = a->x_dtype;
  p.y_dtype = a->y_dtype;
  p.accumulate = a->accumulate;
  p.activation = a->activation;
  p.rotations = a->shared_suh ? 1 : a->count;
  p.x = a->x;
  p.x_stride = a->x_stride;
  p.norm_weight = a->norm_weight;
  p.norm_eps = a->norm_eps;
  for (int i = 0; i < a->count; i++) {
    const exl3_weight& v = *a->weights[i];
    const int y = a->activation ? 0 : i;
    p.matrix[i] = {(const uint8_t*)v.trellis, (const uint16_t*)v.suh, (const uint16_t*)v.svh, v.bias, a->y[y], a->y_stride[y],
                   v.out_features, v.out_padded / 16, v.multiplier, v.codebook == EXL3_3INST ? k3instAddend : 0u};
    p.first_group[i + 1] = p.first_group[i] + v.out_padded / 128;
  }
  p.image_columns = (bytes ? p.planes : 1) * a->rows;
  if (p.image_columns > 8) p.image_columns = 16;
  if (w.k2 == 8 && bytes) return p.image_columns > 8 ? run<8, kBytes, 2>(p, slices) : run<8, kBytes, 1>(p, slices);
  if (w.k2 == 3 && bytes && p.image_columns <= 8) return run<3, kBytes, 1>(p, slices);
  if (w.k2 == 14 && !bytes) return run<14, kPairs, 1>(p, slices);
  return EXL3_UNSUPPORTED;
}
