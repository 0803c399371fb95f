// rms_norm, add, softcap: the residual stream.
#include "cpu/small.h"

EXL3_TIER_BEGIN

template <class X>
static float mean_of(const X* x, int n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < n; i++) sum += load(x[i]);
  return sum / (float)n;
}

template <class X>
static float mean_square(const X* x, int n, float mean) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < n; i++) {
    const float v = load(x[i]) - mean;
    sum += v * v;
  }
  return sum / (float)n;
}

template <class X, class Y>
static void norm_row(const X* x, Y* y, const exl3_rms_norm_args& a) {
  const int n = a.n;
  const float mean = a.subtract_mean ? mean_of(x, n) : 0.0f;
  const float scale = 1.0f / sqrtf(mean_square(x, n, mean) + a.eps);
  const float* w = a.weight;
  if (a.accumulate) {
    float* sum = (float*)y;
    for (int i = 0; i < n; i++) sum[i] += (load(x[i]) - mean) * scale * (w ? w[i] : 1.0f);
  } else if (w) {
    for (int i = 0; i < n; i++) store(&y[i], (load(x[i]) - mean) * scale * w[i]);
  } else {
    for (int i = 0; i < n; i++) store(&y[i], (load(x[i]) - mean) * scale);
  }
}

int rms_norm(const exl3_rms_norm_args* a, void* stream) {
  if (a->rows < 0 || a->n < 1) return fail(EXL3_BAD_ARGUMENT, "rms_norm: %d rows of %d", a->rows, a->n);
  if (a->accumulate && a->y_dtype != EXL3_F32) return fail(EXL3_BAD_ARGUMENT, "rms_norm: accumulate needs a float32 result");
  int status = EXL3_OK;
  const int outer = with_dtype(a->x_dtype, [&](auto* x_tag) {
    using X = std::remove_pointer_t<decltype(x_tag)>;
    status = with_dtype(a->y_dtype, [&](auto* y_tag) {
      using Y = std::remove_pointer_t<decltype(y_tag)>;
      for_rows(stream, a->rows, (int64_t)a->rows * a->n, [&](int64_t r) {
        const X* x = (const X*)a->x + r * a->x_stride;
        Y* y = (Y*)a->y + r * a->y_stride;
        if (a->residual) {
          float* sum = a->residual + r * a->residual_stride;
          for (int i = 0; i < a->n; i++) sum[i] += load(x[i]);
          norm_row(sum, y, *a);
        } else {
          norm_row(x, y, *a);
        }
      });
    });
  });
  return outer ? outer : status;
}

int add(const exl3_add_args* a, void* stream) {
  return with_dtype(a->x_dtype, [&](auto* tag) {
    using X = std::remove_pointer_t<decltype(tag)>;
    const X* x = (const X*)a->x;
    float* y = a->y;
    const int64_t blocks = (a->n + 4095) / 4096;
    for_rows(stream, blocks, a->n, [&](int64_t b) {
      const int64_t end = b * 4096 + 4096 < a->n ? b * 4096 + 4096 : a->n;
      for (int64_t i = b * 4096; i < end; i++) y[i] += a->scale * load(x[i]);
    });
  });
}

int softcap(const exl3_softcap_args* a, void* stream) {
  const int64_t blocks = (a->n + 4095) / 4096;
  const float scale = a->scale, cap = a->cap, inverse = cap != 0 ? scale / cap : 0;
  for_rows(stream, blocks, 4 * a->n, [&](int64_t b) {
    float* x = a->x + b * 4096;
    const int64_t n = a->n - b * 4096 < 4096 ? a->n - b * 4096 : 4096;
    if (cap != 0)
      for (int64_t i = 0; i < n; i++) x[i] = cap * tanh_fast(inverse * x[i]);
    else
      for (int64_t i = 0; i < n; i++) x[i] *= scale;
  });
  return EXL3_OK;
}

EXL3_TIER_END
