// Elementwise operations and the gather of embeddings.
#pragma once
#include "decode.h"

// One block a row and 1024 columns.
GPU_FN void act_mul(const exl3_act_mul_args& a) {
  begin_kernel();
  const int64_t row = block_y();
  const void* gate = row_of(a.gate, row * a.gate_stride, a.dtype);
  const void* up = a.up ? row_of(a.up, row * a.up_stride, a.dtype) : nullptr;
  void* y = row_of(a.y, row * a.y_stride, a.dtype);
  const int i = block_x() * 1024 + thread_id() * 4;
  if (i >= a.n) return;
  float g[4], u[4];
  load4(gate, i, a.n, a.dtype, g);
  if (up) load4(up, i, a.n, a.dtype, u);
  for (int e = 0; e < 4; e++) {
    const float v = activate(g[e], a.activation, a.params);
    g[e] = up ? v * u[e] : v;
  }
  store4(y, i, a.n, a.dtype, g);
}

GPU_FN void add(const exl3_add_args& a) {
  begin_kernel();
  const int64_t i = ((int64_t)block_x() * 256 + thread_id()) * 4;
  for (int e = 0; e < 4; e++)
    if (i + e < a.n) a.y[i + e] += a.scale * load(a.x, i + e, a.x_dtype);
}

GPU_FN void softcap(const exl3_softcap_args& a) {
  begin_kernel();
  const int64_t i = ((int64_t)block_x() * 256 + thread_id()) * 4;
  for (int e = 0; e < 4; e++)
    if (i + e < a.n) {
      const float v = a.x[i + e] * a.scale;
      a.x[i + e] = a.cap != 0.f ? a.cap * hyperbolic_tangent(v / a.cap) : v;
    }
}

// One block a token and 1024 columns.
GPU_FN void embedding(const exl3_embedding_args& a) {
  begin_kernel();
  const int64_t token = block_y();
  const int id = a.ids[token], i = block_x() * 1024 + thread_id() * 4;
  if (i >= a.n) return;
  float v[4] = {0.f, 0.f, 0.f, 0.f};
  if (id >= 0 && id < a.vocab) load4(row_of(a.table, (int64_t)id * a.n, a.table_dtype), i, a.n, a.table_dtype, v);
  void* y = row_of(a.y, token * a.y_stride, a.y_dtype);
  for (int e = 0; e < 4; e++) v[e] *= a.scale;
  store4(y, i, a.n, a.y_dtype, v);
}

// A ring-quantized table (format 4.8): one block of 256 threads a token and ring, one thread a value.
GPU_FN void embedding_ring(const exl3_embedding_args& a) {
  GPU_SHARED(float, values, 256);
  begin_kernel();
  const int64_t token = block_y();
  const int ring = block_x(), t = thread_id(), id = a.ids[token], bits = a.trellis_bits, words = 1 + 16 * bits;
  const int rings = (a.n + 255) / 256;
  const bool known = id >= 0 && id < a.vocab;
  const uint16_t* w = (const uint16_t*)a.table + ((int64_t)(known ? id : 0) * rings + ring) * words;
  uint32_t state = 0;
  for (int m = 0; m * bits < 16; m++) {  // symbol t - m counts from the end of the ring where t < m
    const int b = ((t - m) & 255) * bits;
    uint32_t symbol = w[1 + (b >> 4)] >> (b & 15);
    if ((b & 15) + bits > 16) symbol |= (uint32_t)w[2 + (b >> 4)] << (16 - (b & 15));
    state |= (symbol & ((1u << bits) - 1)) << (m * bits);
  }
  float v = code_value(state & 0xffff, EXL3_MUL1, 0x83DCD12Du) * half_to_float(w[0]);
  for (int m = 1; m < 32; m <<= 1) {
    const float other = lane_xor(v, m);
    v = t & m ? other - v : v + other;
  }
  values[t] = v;
  block_sync();
  float sum = 0.f;  // the three levels across warps at once
  for (int k = 0; k < 8; k++) {
    const int sign = (k & (t >> 5));
    const float u = values[k * 32 + (t & 31)];
    sum += ((sign ^ (sign >> 1) ^ (sign >> 2)) & 1) ? -u : u;
  }
  const int i = ring * 256 + t;
  if (i >= a.n) return;
  v = sum * 0.0625f * half_to_float(((const uint16_t*)a.signs)[ring * 256 + t]) * a.scale;
  store(row_of(a.y, token * a.y_stride, a.y_dtype), i, a.y_dtype, known ? v : 0.f);
}
