// The scalar tier: plain C++ in the words of the format. Products are fp32 with the format's own fp16 weights, whatever `planes` asks for.
#include <math.h>
#include <string.h>

#include "cpu/half.h"
#include "cpu/isa.h"
#include "cpu/trellis.h"

namespace exl3::cpu {

namespace {

void load(float* out, const void* x, int dtype, int64_t n) {
  if (dtype == EXL3_F32) memcpy(out, x, (size_t)n * 4);
  else if (dtype == EXL3_F16) for (int64_t i = 0; i < n; i++) out[i] = half_to_float(((const uint16_t*)x)[i]);
  else for (int64_t i = 0; i < n; i++) out[i] = bfloat_to_float(((const uint16_t*)x)[i]);
}

void store(void* y, const float* x, int dtype, int64_t n) {
  if (dtype == EXL3_F32) memcpy(y, x, (size_t)n * 4);
  else if (dtype == EXL3_F16) for (int64_t i = 0; i < n; i++) ((uint16_t*)y)[i] = float_to_half(x[i]);
  else for (int64_t i = 0; i < n; i++) ((uint16_t*)y)[i] = float_to_bfloat(x[i]);
}

void hadamard(float* v) {
  for (int h = 1; h < kBlock; h *= 2)
    for (int i = 0; i < kBlock; i += 2 * h)
      for (int j = i; j < i + h; j++) {
        const float a = v[j], b = v[j + h];
        v[j] = a + b, v[j + h] = a - b;
      }
  for (int i = 0; i < kBlock; i++) v[i] *= 0.08838834764831845f;
}

void activate(float* gate, const float* up, int activation, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float g = gate[i];
    float a = g;
    switch (activation) {
      case EXL3_ACT_SILU: a = g / (1 + expf(-g)); break;
      case EXL3_ACT_GELU: a = 0.5f * g * (1 + erff(g * 0.70710678f)); break;
      case EXL3_ACT_GELU_TANH: a = 0.5f * g * (1 + tanhf(0.7978845608f * (g + 0.044715f * g * g * g))); break;
      case EXL3_ACT_RELU2: a = g > 0 ? g * g : 0; break;
      case EXL3_ACT_RELU: a = g > 0 ? g : 0; break;
      default: break;
    }
    gate[i] = a * up[i];
  }
}

void decode(const uint8_t* tile, int k2, int codebook, uint32_t multiplier, float* out) {
  for (int i = 0; i < kTileWeights; i++) out[i] = codebook_value(packed_state(tile, k2, i), codebook, multiplier);
}

void column(const Column& c) {
  const Operand& x = *c.x;
  for (int r = 0; r < x.rows; r++)
    for (int o = 0; o < kTile; o++) c.y[r * c.y_stride + o] = 0;
  float w[kTileWeights];
  for (int b = 0; b < x.blocks; b++)
    for (int t = 0; t < 8; t++) {
      decode(c.tiles + (size_t)(8 * b + t) * tile_stride(c.k2), c.k2, c.codebook, c.multiplier, w);
      for (int r = 0; r < x.rows; r++) {
        const float* a = x.exact + ((size_t)b * x.rows + r) * kBlock + kTile * t;
        float* y = c.y + r * c.y_stride;
        for (int i = 0; i < kTileWeights; i++) y[tile_col(i)] += a[tile_row(i)] * w[i];
      }
    }
}

void dense(const exl3_dense_args& a, int64_t first, int64_t last) {
  const size_t size[] = {4, 2, 2};
  for (int64_t o = first; o < last; o++)
    for (int r = 0; r < a.rows; r++) {
      double sum = 0;
      for (int i = 0; i < a.in_features; i++) {
        float x, w;
        load(&x, (const char*)a.x + (size_t)(r * a.x_stride + i) * size[a.x_dtype], a.x_dtype, 1);
        load(&w, (const char*)a.weight + (size_t)(o * a.in_features + i) * size[a.weight_dtype], a.weight_dtype, 1);
        sum += (double)x * w;
      }
      float y = (float)sum + (a.bias ? a.bias[o] : 0);
      char* out = (char*)a.y + (size_t)(r * a.y_stride + o) * size[a.y_dtype];
      if (a.accumulate) y += *(float*)out;
      store(out, &y, a.y_dtype, 1);
    }
}

}  // namespace

const Kernels& scalar_kernels() {
  static const Kernels k = {load, store, hadamard, nullptr, activate, column, nullptr, column, decode, dense};
  return k;
}

const Kernels& kernels() {
#if EXL3_X86
  static const Kernels& chosen = isa() == Isa::avx512 ? avx512_kernels() : isa() == Isa::avx2 ? avx2_kernels() : scalar_kernels();
  return chosen;
#else
  return scalar_kernels();
#endif
}

}  // namespace exl3::cpu
