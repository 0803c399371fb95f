// The AVX2 tier of the trellis search: 16 costs a register, or 8 in fp32.
#include "cpu/isa.h"
#if EXL3_X86
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace exl3::cpu {

namespace {

struct V16 {
  using T = __m256i;
  using Cost = uint16_t;
  static constexpr int lanes = 16;
  static T load(const uint16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static void store(uint16_t* p, T v) { _mm256_storeu_si256((__m256i*)p, v); }
  static T set(float v) { return _mm256_set1_epi16((short)(int)v); }
  static T spread(const uint16_t* p) { return _mm256_set1_epi16((short)*p); }
  static T zero() { return _mm256_setzero_si256(); }
  static T worst() { return _mm256_set1_epi16(-1); }
  static T min(T a, T b) { return _mm256_min_epu16(a, b); }
  static T edge(T value, T target, T cost) {
    const T d = _mm256_subs_epi16(value, target);
    return _mm256_add_epi16(_mm256_mulhrs_epi16(d, d), cost);
  }
  static T settle(T v, T minus) { return _mm256_min_epu16(_mm256_sub_epi16(v, minus), _mm256_set1_epi16(32767)); }
  static T either(T a, T b) { return _mm256_or_si256(a, b); }
  static T different(T a, T b) { return _mm256_xor_si256(a, b); }
  static bool none(T v) { return _mm256_testz_si256(v, v); }
  static float smallest(T v) {
    return (float)_mm_extract_epi16(_mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1))), 0);
  }
  static T interleave_low(T a, T b) { return _mm256_unpacklo_epi16(a, b); }
  static T interleave_high(T a, T b) { return _mm256_unpackhi_epi16(a, b); }
  static T load_parts(const uint16_t* p, int apart) { return _mm256_loadu2_m128i((const __m128i*)(p + apart), (const __m128i*)p); }
  static void store_parts(uint16_t* p, int apart, T v) { _mm256_storeu2_m128i((__m128i*)(p + apart), (__m128i*)p, v); }
#if defined(__GNUC__)
  static void pin(T& v) { asm volatile("" : "+x"(v)); }
#else
  static void pin(T&) {}
#endif
};

struct V32 {
  using T = __m256;
  using Cost = float;
  static constexpr int lanes = 8;
  static T load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, T v) { _mm256_storeu_ps(p, v); }
  static T set(float v) { return _mm256_set1_ps(v); }
  static T spread(const float* p) { return _mm256_broadcast_ss(p); }
  static T zero() { return _mm256_setzero_ps(); }
  static T worst() { return _mm256_set1_ps(3e38f); }
  static T min(T a, T b) { return _mm256_min_ps(a, b); }
  static T edge(T value, T target, T cost) {
    const T d = _mm256_sub_ps(value, target);
    return _mm256_fmadd_ps(d, d, cost);
  }
  static T settle(T v, T minus) { return _mm256_sub_ps(v, minus); }
  static T either(T a, T b) { return _mm256_or_ps(a, b); }
  static T different(T a, T b) { return _mm256_xor_ps(a, b); }
  static bool none(T v) { return _mm256_testz_si256(_mm256_castps_si256(v), _mm256_castps_si256(v)); }
  static float smallest(T v) {
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
#if defined(__GNUC__)
  static void pin(T& v) { asm volatile("" : "+x"(v)); }
#else
  static void pin(T&) {}
#endif
};

}  // namespace

}  // namespace exl3::cpu

#include "cpu/encode_kernel.h"

namespace exl3::cpu {

namespace {

// The first of `count` candidates with the smallest cost: registers of sums, then the place of their minimum.
template <class V> inline int first_best(const StepTable& t, const typename V::Cost* from, int node, float target) {
  const int count = 1 << t.next_fresh, groups = kStates >> (t.fresh + t.next_fresh);
  const typename V::Cost* value = (const typename V::Cost*)t.candidates + (ptrdiff_t)node * count;
  alignas(32) typename V::Cost cost[256];
  if (groups > 1) {
    for (int c = 0; c < count; c++) cost[c] = from[(ptrdiff_t)c * groups];
    from = cost;
  }
  const typename V::T w = V::set(target);
  typename V::T least = V::worst();
  for (int c = 0; c < count; c += V::lanes) {
    const typename V::T sum = V::edge(V::load(value + c), w, V::load(from + c));
    V::store(cost + c, sum);
    least = V::min(least, sum);
  }
  const float best = V::smallest(least);
  int c = 0;
  while (cost[c] != (typename V::Cost)best) c++;
  return c;
}

}  // namespace

int choose_avx2(const StepTable& t, const void* from, int node, float target) {
  if (t.fp32) return first_best<V32>(t, (const float*)from, node, target);
  return t.next_fresh < 4 ? scalar_encode().choose(t, from, node, target) : first_best<V16>(t, (const uint16_t*)from, node, target);
}

const EncodeTier& avx2_encode() {
  static const EncodeTier t = {32, step, choose_avx2};
  return t;
}

}  // namespace exl3::cpu
#endif
