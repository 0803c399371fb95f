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
  static void store(uint16_t* p, T v) { _mm256_store_si256((__m256i*)p, v); }
  static T set(short v) { return _mm256_set1_epi16(v); }
  static T subs(T a, T b) { return _mm256_subs_epi16(a, b); }
  static T add(T a, T b) { return _mm256_add_epi16(a, b); }
  static T square(T a) { return _mm256_mulhrs_epi16(a, a); }
  static T mullo(T a, T b) { return _mm256_mullo_epi16(a, b); }
  static T min(T a, T b) { return _mm256_min_epi16(a, b); }
  static T max(T a, T b) { return _mm256_max_epi16(a, b); }
  static T minu(T a, T b) { return _mm256_min_epu16(a, b); }
  static int smallest(T v) {
    return _mm_extract_epi16(_mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1))), 0);
  }
};

}  // namespace

}  // namespace exl3::cpu

#include "cpu/encode_kernel.h"

namespace exl3::cpu {

const EncodeTier& avx2_encode() {
  static const EncodeTier t = {V::lanes, step};
  return t;
}

}  // namespace exl3::cpu
#endif
