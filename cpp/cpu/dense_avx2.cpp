// AVX2 tier of `dense`: each output of each row is one chain of 8 fp32 sums along the input, whatever the tiling, so that a row's
// result does not depend on the others.
#include "cpu/isa.h"
#include "cpu/trellis.h"
#if EXL3_X86
#include <immintrin.h>

#include "cpu/simd_avx2.h"

namespace exl3::cpu {

namespace {

template <int Dtype> inline __m256 load8(const void* p, int64_t i) {
  if (Dtype == EXL3_F32) return _mm256_loadu_ps((const float*)p + i);
  return Dtype == EXL3_F16 ? load_f16((const uint16_t*)p + i) : load_bf16((const uint16_t*)p + i);
}

// The last n % 8 values, zeros behind.
template <int Dtype> inline __m256 load_tail(const void* p, int64_t i, int64_t n) {
  float v[8] = {0};
  load_row(v, (const char*)p + i * (Dtype == EXL3_F32 ? 4 : 2), Dtype, n - i);
  return _mm256_loadu_ps(v);
}

inline float add_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

template <int X, int W, int R, int O> inline void block(const exl3_dense_args& a, int64_t row, int64_t out) {
  constexpr int x_size = X == EXL3_F32 ? 4 : 2, w_size = W == EXL3_F32 ? 4 : 2;
  const int64_t n = a.in_features;
  const char* x[R];
  const char* w[O];
  __m256 sum[R][O];
  for (int r = 0; r < R; r++) x[r] = (const char*)a.x + (row + r) * a.x_stride * x_size;
  for (int o = 0; o < O; o++) w[o] = (const char*)a.weight + (out + o) * n * w_size;
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) sum[r][o] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 v[O];
    for (int o = 0; o < O; o++) v[o] = load8<W>(w[o], i);
    for (int r = 0; r < R; r++) {
      const __m256 u = load8<X>(x[r], i);
      for (int o = 0; o < O; o++) sum[r][o] = _mm256_fmadd_ps(u, v[o], sum[r][o]);
    }
  }
  if (i < n)
    for (int r = 0; r < R; r++)
      for (int o = 0; o < O; o++) sum[r][o] = _mm256_fmadd_ps(load_tail<X>(x[r], i, n), load_tail<W>(w[o], i, n), sum[r][o]);
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) {
      float y = add_lanes(sum[r][o]) + (a.bias ? a.bias[out + o] : 0);
      char* to = (char*)a.y + ((row + r) * a.y_stride + out + o) * (a.y_dtype == EXL3_F32 ? 4 : 2);
      if (a.accumulate) y += *(const float*)to;
      store_row(to, &y, a.y_dtype, 1);
    }
}

template <int X, int W> void dense(const exl3_dense_args& a, int64_t first, int64_t last) {
  int64_t row = 0;
  for (; row + 4 <= a.rows; row += 4) {
    int64_t o = first;
    for (; o + 2 <= last; o += 2) block<X, W, 4, 2>(a, row, o);
    for (; o < last; o++) block<X, W, 4, 1>(a, row, o);
  }
  for (; row < a.rows; row++) {
    int64_t o = first;
    for (; o + 8 <= last; o += 8) block<X, W, 1, 8>(a, row, o);
    for (; o < last; o++) block<X, W, 1, 1>(a, row, o);
  }
}

template <int X> void dense_of(const exl3_dense_args& a, int64_t first, int64_t last) {
  if (a.weight_dtype == EXL3_F32) dense<X, EXL3_F32>(a, first, last);
  else if (a.weight_dtype == EXL3_F16) dense<X, EXL3_F16>(a, first, last);
  else dense<X, EXL3_BF16>(a, first, last);
}

}  // namespace

void dense_avx2(const exl3_dense_args& a, int64_t first, int64_t last) {
  if (a.x_dtype == EXL3_F32) dense_of<EXL3_F32>(a, first, last);
  else if (a.x_dtype == EXL3_F16) dense_of<EXL3_F16>(a, first, last);
  else dense_of<EXL3_BF16>(a, first, last);
}

}  // namespace exl3::cpu
#endif
