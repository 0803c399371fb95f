// RMSNorm and the 128-point rotation of rows.
#pragma once
#include "numbers.h"

// One block a row. residual += x first where given; then y = norm, or y += norm.
GPU_FN void rms_norm(const exl3_rms_norm_args& a) {
  constexpr int kThreads = 256;
  GPU_SHARED(float, space, kThreads / 32);
  begin_kernel();
  const int t = thread_id();
  const int64_t row = block_x();
  const void* x = row_of(a.x, row * a.x_stride, a.x_dtype);
  float* residual = a.residual ? a.residual + row * a.residual_stride : nullptr;
  void* y = row_of(a.y, row * a.y_stride, a.y_dtype);
  auto values = [&](int i, float(&v)[4]) { residual ? load4(residual, i, a.n, EXL3_F32, v) : load4(x, i, a.n, a.x_dtype, v); };
  float sum = 0.f, mean = 0.f;
  for (int i = 4 * t; i < a.n; i += 4 * kThreads) {
    float v[4];
    load4(x, i, a.n, a.x_dtype, v);
    if (residual) {
      float r[4];
      load4(residual, i, a.n, EXL3_F32, r);
      for (int e = 0; e < 4; e++) v[e] += r[e];
      store4(residual, i, a.n, EXL3_F32, v);  // each thread reads back only what it wrote
    }
    for (int e = 0; e < 4; e++) sum += a.subtract_mean ? v[e] : v[e] * v[e];
  }
  sum = block_sum<kThreads>(sum, space);
  if (a.subtract_mean) {
    mean = sum / (float)a.n;
    sum = 0.f;
    for (int i = 4 * t; i < a.n; i += 4 * kThreads) {
      float v[4];
      values(i, v);
      for (int e = 0; e < 4 && i + e < a.n; e++) sum += (v[e] - mean) * (v[e] - mean);
    }
    sum = block_sum<kThreads>(sum, space);
  }
  const float scale = 1.f / root(sum / (float)a.n + a.eps);
  for (int i = 4 * t; i < a.n; i += 4 * kThreads) {
    float v[4], w[4];
    values(i, v);
    if (a.weight) load4(a.weight, i, a.n, EXL3_F32, w);
    for (int e = 0; e < 4; e++) {
      v[e] = (v[e] - mean) * scale;
      if (a.weight) v[e] *= w[e];
    }
    if (a.accumulate) {
      load4(y, i, a.n, EXL3_F32, w);
      for (int e = 0; e < 4; e++) v[e] += w[e];
    }
    store4(y, i, a.n, a.y_dtype, v);
  }
}

// One warp a block of 128 values of a row.
GPU_FN void rotate(const exl3_rotate_args& a) {
  begin_kernel();
  const int blocks = a.n_padded / 128;
  const int64_t unit = (int64_t)block_x() * 8 + warp_id();
  if (unit >= (int64_t)a.rows * blocks) return;
  const int64_t row = unit / blocks;
  const int i = (int)(unit % blocks) * 128 + 4 * lane_id();
  const void* x = row_of(a.x, row * a.x_stride, a.x_dtype);
  void* y = row_of(a.y, row * a.y_stride, a.y_dtype);
  float v[4];
  load4(x, i, a.n, a.x_dtype, v);
  if (a.pre)
    for (int e = 0; e < 4; e++) v[e] *= i + e < a.n ? a.pre[i + e] : 0.f;
  hadamard128(v);
  for (int e = 0; e < 4; e++) {
    v[e] *= HADAMARD128_SCALE;
    if (a.post) v[e] *= a.post[i + e];
    store(y, i + e, a.y_dtype, v[e]);
  }
}
