// AVX2 pieces that several tiers' files share. Everything is static: these files are compiled with different flags.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "cpu/half.h"
#include "exl3/ops.h"

namespace exl3::cpu {

static inline __m256 load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline __m256 load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

static inline void load_row(float* out, const void* x, int dtype, int64_t n) {
  if (dtype == EXL3_F32) {
    memcpy(out, x, (size_t)n * 4);
    return;
  }
  const uint16_t* p = (const uint16_t*)x;
  int64_t i = 0;
  if (dtype == EXL3_F16) {
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, load_f16(p + i));
    for (; i < n; i++) out[i] = half_to_float(p[i]);
  } else {
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, load_bf16(p + i));
    for (; i < n; i++) out[i] = bfloat_to_float(p[i]);
  }
}

static inline void store_row(void* y, const float* x, int dtype, int64_t n) {
  if (dtype == EXL3_F32) {
    memcpy(y, x, (size_t)n * 4);
    return;
  }
  uint16_t* p = (uint16_t*)y;
  int64_t i = 0;
  if (dtype == EXL3_F16) {
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i*)(p + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
    for (; i < n; i++) p[i] = float_to_half(x[i]);
  } else {
    for (; i < n; i++) p[i] = float_to_bfloat(x[i]);
  }
}

// Orthonormal 128-point Hadamard transform in natural order, in place.
static inline void hadamard128(float* x) {
  __m256 v[16];
  const __m256 scale = _mm256_set1_ps(0.08838834764831845f);
  const __m256 sign1 = _mm256_setr_ps(0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f), sign2 = _mm256_setr_ps(0.f, 0.f, -0.f, -0.f, 0.f, 0.f, -0.f, -0.f),
               sign4 = _mm256_setr_ps(0.f, 0.f, 0.f, 0.f, -0.f, -0.f, -0.f, -0.f);
  for (int i = 0; i < 16; i++) {
    __m256 a = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), scale);
    a = _mm256_add_ps(_mm256_xor_ps(a, sign1), _mm256_permute_ps(a, 0xB1));
    a = _mm256_add_ps(_mm256_xor_ps(a, sign2), _mm256_permute_ps(a, 0x4E));
    v[i] = _mm256_add_ps(_mm256_xor_ps(a, sign4), _mm256_permute2f128_ps(a, a, 1));
  }
  for (int h = 1; h < 16; h *= 2)
    for (int i = 0; i < 16; i += 2 * h)
      for (int j = i; j < i + h; j++) {
        const __m256 a = v[j], b = v[j + h];
        v[j] = _mm256_add_ps(a, b), v[j + h] = _mm256_sub_ps(a, b);
      }
  for (int i = 0; i < 16; i++) _mm256_storeu_ps(x + 8 * i, v[i]);
}

// e^x, relative error below 2e-7; 0 below -87.3.
static inline __m256 exp_ps(__m256 x) {
  const __m256 c = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(88.0f)), _mm256_set1_ps(-87.3f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(c, _mm256_set1_ps(1.44269504f)), 8);
  const __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), c));
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float q : terms) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(q));
  const __m256 e = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.3f), _CMP_LT_OQ), e);
}

}  // namespace exl3::cpu
