// The AVX2 tier of the trellis search: 16 costs a register.
#include "cpu/isa.h"
#if EXL3_X86
#include <immintrin.h>
#include <stdint.h>

namespace exl3::cpu {

namespace {

struct V {
  using T = __m256i;
  static constexpr int lanes = 16;
  static T load(const uint16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static void store(uint16_t* p, T v) { _mm256_storeu_si256((__m256i*)p, v); }
  static T set(short v) { return _mm256_set1_epi16(v); }
  static T subs(T a, T b) { return _mm256_subs_epi16(a, b); }
  static T sub(T a, T b) { return _mm256_sub_epi16(a, b); }
  static T add(T a, T b) { return _mm256_add_epi16(a, b); }
  static T square(T a) { return _mm256_mulhrs_epi16(a, a); }
  static T mullo(T a, T b) { return _mm256_mullo_epi16(a, b); }
  static T abs(T a) { return _mm256_abs_epi16(a); }
  static T half(T a) { return _mm256_srli_epi16(a, 1); }
  static T minu(T a, T b) { return _mm256_min_epu16(a, b); }
  static T either(T a, T b) { return _mm256_or_si256(a, b); }
  static T different(T a, T b) { return _mm256_xor_si256(a, b); }
  static bool none(T v) { return _mm256_testz_si256(v, v); }
  // a and b interleaved word by word
  static void zip(T a, T b, T& first, T& second) {
    const T low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    first = _mm256_permute2x128_si256(low, high, 0x20), second = _mm256_permute2x128_si256(low, high, 0x31);
  }
#if defined(__GNUC__)
  static void pin(T& v) { asm volatile("" : "+x"(v)); }
#else
  static void pin(T&) {}
#endif
  static int smallest(T v) {
    return _mm_extract_epi16(_mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1))), 0);
  }
};

}  // namespace

}  // namespace exl3::cpu

#include "cpu/encode_kernel.h"

namespace exl3::cpu {

int choose_avx2(const StepTable& t, const uint16_t* from, int node, int16_t target) {
  const int count = 1 << t.next_fresh, groups = kStates >> (t.fresh + t.next_fresh);
  if (count < 16) return choose_scalar(t, from, node, target);
  alignas(32) uint16_t cost[256];
  for (int c = 0; c < count; c++) cost[c] = from[(ptrdiff_t)c * groups];
  const uint16_t* value = (const uint16_t*)t.candidates + (ptrdiff_t)node * count;
  const T w = V::set(target), far = V::set((short)t.far);
  T least = V::set(-1);
  for (int c = 0; c < count; c += 16) {
    const T v = V::load(value + c), from_c = V::load(cost + c);
    const T sum = t.clamped ? edge<true>(v, w, from_c, far) : edge<false>(v, w, from_c, far);
    V::store(cost + c, sum);
    least = V::minu(least, sum);
  }
  const T best = V::set((short)V::smallest(least));
  for (int c = 0;; c += 16) {
    const int hit = _mm256_movemask_epi8(_mm256_cmpeq_epi16(V::load(cost + c), best));
    if (hit) return c + __builtin_ctz((unsigned)hit) / 2;
  }
}

const EncodeTier& avx2_encode() {
  static const EncodeTier t = {V::lanes, step, choose_avx2};
  return t;
}

}  // namespace exl3::cpu
#endif
