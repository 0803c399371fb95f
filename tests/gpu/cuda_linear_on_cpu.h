// The arguments of `linear` as the kernels of few rows and of even shares take them; for their drivers on the CPU.
#pragma once

namespace exl3 {

template <class Params>
Params params_of(const exl3_linear_args* a) {
  const exl3_weight& w = *a->weights[0];
  Params p{};
  p.segments = a->activation ? 2 : 1;
  p.count = a->activation ? 1 : a->count;
  p.rows = a->rows;
  p.blocks = w.in_padded / 128;
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
  return p;
}

}  // namespace exl3
