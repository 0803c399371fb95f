// rotary_table and rotary: positions.
#include "cpu/small.h"

EXL3_TIER_BEGIN

int rotary_table(const exl3_rotary_table_args* a, void* stream) {
  for_rows(stream, a->tokens, (int64_t)a->tokens * a->half * 16, [&](int64_t t) {
    const float* freq = a->inv_freq;
    double scale = a->scale;
    if (a->inv_freq_long) {
      const int row = a->token_row[t];
      if (row >= 0 && a->lengths[row] > a->threshold) { freq = a->inv_freq_long; scale = a->scale_long; }
    }
    const double position = a->positions[t];
    float* c = a->cos + t * a->half;
    float* s = a->sin + t * a->half;
    for (int i = 0; i < a->half; i++) {  // fp64: at position 100,000 an fp32 angle is off by 4e-3
      const double angle = position * (double)freq[i];
      c[i] = (float)(::cos(angle) * scale);
      s[i] = (float)(::sin(angle) * scale);
    }
  });
  return EXL3_OK;
}

static const int kMaxHead = 1024;

template <class T>
static void rotate_head(T* x, const float* norm, const float* c, const float* s, const exl3_rotary_args& a) {
  float v[kMaxHead];
  const int n = a.head_dim, half = a.rotary_dim / 2;
  for (int i = 0; i < n; i++) v[i] = load(x[i]);
  if (norm) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += v[i] * v[i];
    const float scale = 1.0f / sqrtf(sum / (float)n + a.eps);
    for (int i = 0; i < n; i++) v[i] = v[i] * scale * norm[i];
  }
  if (c && a.interleaved) {
    for (int i = 0; i < half; i++) {
      const float p = v[2 * i], q = v[2 * i + 1];
      v[2 * i] = p * c[i] - q * s[i];
      v[2 * i + 1] = q * c[i] + p * s[i];
    }
  } else if (c) {
    float* w = v + half;
    for (int i = 0; i < half; i++) {
      const float p = v[i], q = w[i];
      v[i] = p * c[i] - q * s[i];
      w[i] = q * c[i] + p * s[i];
    }
  }
  for (int i = 0; i < n; i++) store(&x[i], v[i]);
}

int rotary(const exl3_rotary_args* a, void* stream) {
  if (a->head_dim > kMaxHead || a->head_dim < 1) return fail(EXL3_UNSUPPORTED, "rotary: head_dim %d, up to %d are served", a->head_dim, kMaxHead);
  const int half = a->rotary_dim / 2, heads = a->q_heads + (a->k ? a->k_heads : 0);
  return with_dtype(a->dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for_rows(stream, a->tokens, (int64_t)a->tokens * heads * a->head_dim, [&](int64_t t) {
      const float* c = a->cos ? a->cos + t * half : nullptr;
      const float* s = a->sin ? a->sin + t * half : nullptr;
      for (int h = 0; h < a->q_heads; h++) rotate_head((T*)a->q + t * a->q_stride + (int64_t)h * a->head_dim, a->q_norm, c, s, *a);
      if (a->k)
        for (int h = 0; h < a->k_heads; h++) rotate_head((T*)a->k + t * a->k_stride + (int64_t)h * a->head_dim, a->k_norm, c, s, *a);
    });
  });
}

EXL3_TIER_END
