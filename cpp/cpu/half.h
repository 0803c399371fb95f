// fp16 and bf16 by hand, for tiers without conversion instructions.
#pragma once
#include <stdint.h>
#include <string.h>

namespace exl3::cpu {

static inline float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline float bfloat_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

// Round to nearest even; NaN stays NaN.
static inline uint16_t float_to_bfloat(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(u >> 16 | 64);
  return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF;
  if (rest >= 0x7C00) return bits_to_float(sign | 0x7F800000 | (rest & 0x3FF) << 13);
  // the fields of fp16 in fp32's place are the value times 2^-112; subnormals come out right as well
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}

static inline uint16_t float_to_half(float f) {
  const uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000, rest = u & 0x7FFFFFFF;
  if (rest > 0x7F800000) return (uint16_t)(sign | 0x7E00);
  if (rest >= 0x477FF000) return (uint16_t)(sign | 0x7C00);                        // rounds past 65504
  if (rest < 0x38800000) {                                                         // below 2^-14: adding 1/2 rounds to units of 2^-24
    const float shifted = bits_to_float(rest) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(shifted) - 0x3F000000));
  }
  return (uint16_t)(sign | (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13);
}

}  // namespace exl3::cpu
