// Rotary position embedding: the table of a step, and its application with per-head norms.
#pragma once
#include "numbers.h"

// One thread a (token, frequency). Angles in double: position 100,000 times a float frequency is wrong in the third digit in fp32.
GPU_FN void rotary_table(const exl3_rotary_table_args& a) {
  begin_kernel();
  const int64_t i = (int64_t)block_x() * 256 + thread_id();
  if (i >= (int64_t)a.tokens * a.half) return;
  const int token = (int)(i / a.half), f = (int)(i % a.half);
  bool is_long = false;
  if (a.inv_freq_long) {
    const int row = a.token_row[token];
    is_long = row >= 0 && a.lengths[row] > a.threshold;
  }
  const double angle = (double)a.positions[token] * (double)(is_long ? a.inv_freq_long : a.inv_freq)[f];
  const float scale = is_long ? a.scale_long : a.scale;
  a.cos[i] = (float)wide_cos(angle) * scale;
  a.sin[i] = (float)wide_sin(angle) * scale;
}

// One value of a head: `other` is its partner, `second` whether it is the second of the pair.
GPU_FN float rotated(float v, float other, float cos, float sin, bool second) {
  return second ? v * cos + other * sin : v * cos - other * sin;
}

// One warp a (token, head), q's heads before k's; head_dim at most 512.
GPU_FN void rotary(const exl3_rotary_args& a) {
  constexpr int kWarps = 4, kDim = 512;
  GPU_SHARED(float, space, kWarps * kDim);
  begin_kernel();
  const int heads = a.q_heads + (a.k ? a.k_heads : 0), lane = lane_id();
  const int64_t unit = (int64_t)block_x() * kWarps + warp_id();
  const bool live = unit < (int64_t)a.tokens * heads;
  const int64_t token = live ? unit / heads : 0;
  const int head = live ? (int)(unit % heads) : 0;
  const bool is_q = head < a.q_heads;
  void* x = is_q ? row_of(a.q, token * a.q_stride + (int64_t)head * a.head_dim, a.dtype)
                 : row_of(a.k, token * a.k_stride + (int64_t)(head - a.q_heads) * a.head_dim, a.dtype);
  const float* weight = is_q ? a.q_norm : a.k_norm;
  float* h = space + warp_id() * kDim;
  float sum = 0.f;
  for (int i = lane; i < a.head_dim; i += 32) {
    const float v = live ? load(x, i, a.dtype) : 0.f;
    sum += v * v;
    h[i] = v;
  }
  sum = warp_sum(sum);
  if (weight) {
    const float scale = 1.f / root(sum / (float)a.head_dim + a.eps);
    for (int i = lane; i < a.head_dim; i += 32) h[i] *= scale * weight[i];
  }
  block_sync();
  if (!live) return;
  const int half = a.rotary_dim / 2;
  const float* cos = a.cos + token * half;
  const float* sin = a.sin + token * half;
  for (int i = lane; i < a.head_dim; i += 32) {
    float v = h[i];
    if (a.cos && i < a.rotary_dim) {
      const int f = a.interleaved ? i / 2 : i % half;
      const bool second = a.interleaved ? i & 1 : i >= half;
      const float other = h[a.interleaved ? i ^ 1 : second ? i - half : i + half];
      v = rotated(v, other, cos[f], sin[f], second);
    }
    store(x, i, a.dtype, v);
  }
}
