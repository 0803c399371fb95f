// The AVX-512 tier of the trellis search: 32 costs a register, or 16 in fp32.
#include "cpu/isa.h"
#if EXL3_X86
#if defined(__GNUC__) && !defined(__clang__)
// gcc's own headers read an undefined register on purpose (gcc bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace exl3::cpu {

namespace {

struct V16 {
  using T = __m512i;
  using Cost = uint16_t;
  static constexpr int lanes = 32;
  static T load(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static void store(uint16_t* p, T v) { _mm512_storeu_si512(p, v); }
  static T set(float v) { return _mm512_set1_epi16((short)(int)v); }
  static T spread(const uint16_t* p) { return _mm512_set1_epi16((short)*p); }
  static T zero() { return _mm512_setzero_si512(); }
  static T worst() { return _mm512_set1_epi16(-1); }
  static T min(T a, T b) { return _mm512_min_epu16(a, b); }
  static T edge(T value, T target, T cost) {
    const T d = _mm512_subs_epi16(value, target);
    return _mm512_add_epi16(_mm512_mulhrs_epi16(d, d), cost);
  }
  static T settle(T v, T minus) { return _mm512_min_epu16(_mm512_sub_epi16(v, minus), _mm512_set1_epi16(32767)); }
  static T either(T a, T b) { return _mm512_or_si512(a, b); }
  static T different(T a, T b) { return _mm512_xor_si512(a, b); }
  static bool none(T v) { return _mm512_test_epi64_mask(v, v) == 0; }
  static float smallest(T v) {
    const __m256i h = _mm256_min_epu16(_mm512_extracti64x4_epi64(v, 0), _mm512_extracti64x4_epi64(v, 1));
    return (float)_mm_extract_epi16(_mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1))), 0);
  }
  static T interleave_low(T a, T b) { return _mm512_unpacklo_epi16(a, b); }
  static T interleave_high(T a, T b) { return _mm512_unpackhi_epi16(a, b); }
  static T load_parts(const uint16_t* p, int apart) {
    const __m256i low = _mm256_loadu2_m128i((const __m128i*)(p + apart), (const __m128i*)p);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_loadu2_m128i((const __m128i*)(p + 3 * apart), (const __m128i*)(p + 2 * apart)), 1);
  }
  static void store_parts(uint16_t* p, int apart, T v) {
    _mm256_storeu2_m128i((__m128i*)(p + apart), (__m128i*)p, _mm512_extracti64x4_epi64(v, 0));
    _mm256_storeu2_m128i((__m128i*)(p + 3 * apart), (__m128i*)(p + 2 * apart), _mm512_extracti64x4_epi64(v, 1));
  }
  static void pin(T&) {}
};

struct V32 {
  using T = __m512;
  using Cost = float;
  static constexpr int lanes = 16;
  static T load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, T v) { _mm512_storeu_ps(p, v); }
  static T set(float v) { return _mm512_set1_ps(v); }
  static T spread(const float* p) { return _mm512_set1_ps(*p); }
  static T zero() { return _mm512_setzero_ps(); }
  static T worst() { return _mm512_set1_ps(3e38f); }
  static T min(T a, T b) { return _mm512_min_ps(a, b); }
  static T edge(T value, T target, T cost) {
    const T d = _mm512_sub_ps(value, target);
    return _mm512_fmadd_ps(d, d, cost);
  }
  static T settle(T v, T minus) { return _mm512_sub_ps(v, minus); }
  static T either(T a, T b) { return _mm512_or_ps(a, b); }
  static T different(T a, T b) { return _mm512_xor_ps(a, b); }
  static bool none(T v) { return _mm512_test_epi32_mask(_mm512_castps_si512(v), _mm512_castps_si512(v)) == 0; }
  static float smallest(T v) { return _mm512_reduce_min_ps(v); }
  static void pin(T&) {}
};

}  // namespace

}  // namespace exl3::cpu

#include "cpu/encode_kernel.h"

namespace exl3::cpu {

const EncodeTier& avx512_encode() {
  static const EncodeTier t = {64, step, choose_avx2};
  return t;
}

}  // namespace exl3::cpu
#endif
