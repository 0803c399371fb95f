// Helpers of the small operations. Included by files that are compiled once per tier (EXL3_TIER): everything lies in the tier's own
// namespace, so that the linker can't hand the portable tier a function compiled with AVX2.
#pragma once
#include <math.h>
#include <string.h>

#include <initializer_list>
#include <type_traits>

#include "cpu/backend.h"
#include "cpu/threads.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXL3_TIER_BEGIN namespace exl3 { namespace cpu { namespace EXL3_TIER {
#define EXL3_TIER_END } } }

EXL3_TIER_BEGIN

struct Half { uint16_t bits; };
struct Bfloat { uint16_t bits; };

static inline float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline float load(float x) { return x; }
static inline float load(Bfloat x) { return bits_to_float((uint32_t)x.bits << 16); }
static inline float load(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));  // exact for subnormals too
#endif
}

static inline void store(float* y, float v) { *y = v; }
static inline void store(Bfloat* y, float v) {
  const uint32_t u = float_to_bits(v);
  y->bits = v != v ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline void store(Half* y, float v) {
#if defined(__F16C__)
  y->bits = (uint16_t)_cvtss_sh(v, 0);
#else
  const uint32_t u = float_to_bits(v), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) { y->bits = (uint16_t)(sign | 0x7e00); return; }
  if (a >= 0x477ff000) { y->bits = (uint16_t)(sign | 0x7c00); return; }
  if (a < 0x38800000) {  // subnormal: the addition rounds to nearest even
    const float shifted = bits_to_float(a) + bits_to_float(126u << 23);
    y->bits = (uint16_t)(sign | (float_to_bits(shifted) - (126u << 23)));
    return;
  }
  y->bits = (uint16_t)(sign | (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
#endif
}

// f(tag) with a null pointer of the dtype's element type.
template <class F>
static int with_dtype(int dtype, F&& f) {
  switch (dtype) {
    case EXL3_F32: f((float*)nullptr); return EXL3_OK;
    case EXL3_F16: f((Half*)nullptr); return EXL3_OK;
    case EXL3_BF16: f((Bfloat*)nullptr); return EXL3_OK;
  }
  return fail(EXL3_BAD_ARGUMENT, "unknown dtype code %d", dtype);
}

// e^x to about 1 ulp; loops of it vectorise. Below -87.3 the result is 0 (or -inf in: 0), NaN stays.
static inline float exp_fast(float x) {
  float c = x > 88.0f ? 88.0f : x;
  c = c < -88.0f ? -88.0f : c;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;  // to nearest
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float e = p * bits_to_float((uint32_t)((int32_t)n + 127) << 23);
  return x < -87.3f ? 0.0f : e;
}

static inline float tanh_fast(float x) {
  const float s = x * x;
  const float small = x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
  const float big = 1.0f - 2.0f / (exp_fast(2.0f * x) + 1.0f);
  return s < 0.0625f ? small : big;
}

// Rows 0 .. rows-1 in even parts over the threads; one part where the work (in elements) doesn't pay for a fork.
template <class F>
static void for_rows(void* stream, int64_t rows, int64_t work, F&& f) {
  int threads = thread_count(stream);
  if (work < 16384) threads = 1;
  if (threads > rows) threads = (int)(rows > 0 ? rows : 1);
  parallel(threads, [&](int part, int parts) {
    const int64_t end = rows * (part + 1) / parts;
    for (int64_t r = rows * part / parts; r < end; r++) f(r);
  });
}

EXL3_TIER_END
