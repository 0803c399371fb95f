// The portable product y = epilogue(norm(x) @ W): right on every card, and the measure of the faster ones. Also dense products.
#pragma once
#include "decode.h"

struct LinearOutput {
  exl3_weight w;
  void* y;
  int64_t y_stride;
};

// The end of a product for one row and 128 columns: sums of rotated weights -> values of y. Lane l holds columns 4l .. 4l+3 of group
// `group`; with `up` the result is act(gate) * up.
GPU_FN void finish_columns(const LinearOutput& o, float (&sum)[4], const LinearOutput* up_out, float (*up)[4], int64_t row, int group,
                           int y_dtype, int activation, int accumulate) {
  const int c = group * 128 + 4 * lane_id();
  hadamard128(sum);
  if (up) hadamard128(*up);
  const uint16_t* svh = (const uint16_t*)o.w.svh;
  void* y = row_of(o.y, row * o.y_stride, y_dtype);
  for (int e = 0; e < 4; e++) {
    if (c + e >= o.w.out_features) continue;
    float v = sum[e] * HADAMARD128_SCALE * half_to_float(svh[c + e]);
    if (o.w.bias) v += o.w.bias[c + e];
    if (up) {
      float u = (*up)[e] * HADAMARD128_SCALE * half_to_float(((const uint16_t*)up_out->w.svh)[c + e]);
      if (up_out->w.bias) u += up_out->w.bias[c + e];
      v = activate(v, activation, nullptr) * u;
    }
    if (accumulate) v += ((const float*)y)[c + e];
    store(y, c + e, y_dtype, v);
  }
}

struct RotateInputArgs {
  const void* x;
  const float* norm_weight;
  const void* suh[EXL3_MAX_GROUP];
  float* out;  // [rotations][rows][in_padded] fp32
  int64_t x_stride;
  int32_t rows, in_features, in_padded, x_dtype;
  float eps;
};

// One block a row and rotation: H128((norm(x)) * suh), scaled.
GPU_FN void rotate_input(const RotateInputArgs& a) {
  constexpr int kThreads = 256;
  GPU_SHARED(float, space, kThreads / 32);
  begin_kernel();
  const int64_t row = block_x();
  const void* x = row_of(a.x, row * a.x_stride, a.x_dtype);
  const uint16_t* suh = (const uint16_t*)a.suh[block_y()];
  float* out = a.out + ((int64_t)block_y() * a.rows + row) * a.in_padded;
  float scale = 1.f;
  if (a.norm_weight) {
    float sum = 0.f;
    for (int i = thread_id(); i < a.in_features; i += kThreads) {
      const float v = load(x, i, a.x_dtype);
      sum += v * v;
    }
    scale = 1.f / root(block_sum<kThreads>(sum, space) / (float)a.in_features + a.eps);
  }
  for (int b = warp_id(); b < a.in_padded / 128; b += kThreads / 32) {
    const int i = b * 128 + 4 * lane_id();
    float v[4];
    load4(x, i, a.in_features, a.x_dtype, v);
    for (int e = 0; e < 4; e++) {
      if (i + e < a.in_features && a.norm_weight) v[e] *= scale * a.norm_weight[i + e];
      v[e] *= half_to_float(suh[i + e]);
    }
    hadamard128(v);
    for (int e = 0; e < 4; e++) out[i + e] = v[e] * HADAMARD128_SCALE;
  }
}

struct ProductArgs {
  const float* x;  // [rotations][rows][in_padded] fp32
  LinearOutput out[EXL3_MAX_GROUP];
  int32_t first_group[EXL3_MAX_GROUP + 1];  // column groups of 128 before each matrix
  int32_t rows, count, rotations, y_dtype, activation, accumulate;
};

constexpr int kProductRows = 4;

// Sums of 128 columns for up to four rows: eight warps share the inner dimension; `sums` is [rows][128], complete in every thread after it.
GPU_FN void product_sums(const ProductArgs& a, const exl3_weight& w, const float* x, int group, int row0, float* sums) {
  const int lane = lane_id(), warp = warp_id(), columns = w.out_padded / 16;
  float acc[kProductRows][8][2];
  for (int r = 0; r < kProductRows; r++)
    for (int t = 0; t < 8; t++) acc[r][t][0] = acc[r][t][1] = 0.f;
  for (int k16 = warp; k16 < w.in_padded / 16; k16 += 8) {
    float v[kProductRows][4];
    for (int r = 0; r < kProductRows; r++)
      for (int j = 0; j < 4; j++)
        v[r][j] = row0 + r < a.rows ? x[(int64_t)(row0 + r) * w.in_padded + k16 * 16 + 2 * (lane & 3) + (j & 1) + 8 * (j >> 1)] : 0.f;
    for (int t = 0; t < 8; t++) {
      const uint32_t* tile = (const uint32_t*)w.trellis + ((int64_t)k16 * columns + group * 8 + t) * 4 * w.k2;
      for (int j = 0; j < 8; j++) {
        const float value = code_value(exl3::ring_state(tile, w.k2, 8 * lane + j), w.codebook, w.multiplier);
        for (int r = 0; r < kProductRows; r++) acc[r][t][j >> 2] += value * v[r][j & 3];
      }
    }
  }
  for (int r = 0; r < kProductRows; r++)
    for (int t = 0; t < 8; t++)
      for (int h = 0; h < 2; h++) {
        acc[r][t][h] += lane_xor(acc[r][t][h], 1);
        acc[r][t][h] += lane_xor(acc[r][t][h], 2);
      }
  for (int turn = 0; turn < 8; turn++) {  // one warp after the other: the same order of adding every time
    block_sync();
    if (turn == warp && (lane & 3) == 0)
      for (int r = 0; r < kProductRows; r++)
        for (int t = 0; t < 8; t++)
          for (int h = 0; h < 2; h++) {
            float* s = sums + r * 128 + t * 16 + (lane >> 2) + 8 * h;
            *s = turn ? *s + acc[r][t][h] : acc[r][t][h];
          }
  }
  block_sync();
}

// One block of 256 threads: 128 columns (of gate and of up, where an activation follows) by four rows.
GPU_FN void product(const ProductArgs& a) {
  GPU_SHARED(float, first, kProductRows * 128);
  GPU_SHARED(float, second, kProductRows * 128);
  begin_kernel();
  int m = 0;
  while (m + 1 < a.count && block_x() >= a.first_group[m + 1]) m++;
  const int group = block_x() - a.first_group[m], row0 = block_y() * kProductRows, lane = lane_id(), r = warp_id();
  const exl3_weight& w = a.out[m].w;
  const int64_t step = (int64_t)a.rows * w.in_padded;
  product_sums(a, w, a.x + (a.rotations > 1 ? m : 0) * step, group, row0, first);
  if (a.activation) product_sums(a, a.out[1].w, a.x + (a.rotations > 1 ? 1 : 0) * step, group, row0, second);
  if (r >= kProductRows || row0 + r >= a.rows) return;
  float sum[4], up[4];
  for (int e = 0; e < 4; e++) {
    sum[e] = first[r * 128 + 4 * lane + e];
    up[e] = second[r * 128 + 4 * lane + e];
  }
  finish_columns(a.out[m], sum, &a.out[1], a.activation ? &up : nullptr, row0 + r, group, a.y_dtype, a.activation, a.accumulate);
}

// y = x @ W^T + bias of an unquantized weight: one warp a column, eight rows a block.
GPU_FN void dense(const exl3_dense_args& a) {
  constexpr int kRows = 8;
  begin_kernel();
  const int column = block_x() * 8 + warp_id(), row0 = block_y() * kRows, lane = lane_id();
  if (column >= a.out_features) return;
  const void* w = row_of(a.weight, (int64_t)column * a.in_features, a.weight_dtype);
  const int rows = a.rows - row0 < kRows ? a.rows - row0 : kRows;
  float acc[kRows];
  for (int r = 0; r < kRows; r++) acc[r] = 0.f;
  for (int i = lane * 4; i < a.in_features; i += 128) {
    float u[4], v[4];
    load4(w, i, a.in_features, a.weight_dtype, u);
    for (int r = 0; r < kRows; r++) {
      if (r >= rows) continue;
      load4(row_of(a.x, (int64_t)(row0 + r) * a.x_stride, a.x_dtype), i, a.in_features, a.x_dtype, v);
      for (int e = 0; e < 4; e++) acc[r] += u[e] * v[e];
    }
  }
  for (int r = 0; r < kRows; r++) {
    float v = warp_sum(acc[r]);
    if (r >= rows || lane != 0) continue;
    if (a.bias) v += a.bias[column];
    void* y = row_of(a.y, (int64_t)(row0 + r) * a.y_stride, a.y_dtype);
    if (a.accumulate) v += ((const float*)y)[column];
    store(y, column, a.y_dtype, v);
  }
}
