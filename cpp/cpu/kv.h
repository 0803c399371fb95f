// Addresses and codes of the paged key/value cache (format section 5), shared by cache.cpp and attention.cpp.
#pragma once
#include "cpu/small.h"

EXL3_TIER_BEGIN

static const float kNorm32 = 0.17677669529663688f;  // 1 / sqrt(32)

// H32 without its factor, by butterflies of distance 1, 2, 4, 8, 16: the order decides the last bit, and with it the codes.
static inline void walsh32(float* x) {
  for (int step = 1; step < 32; step *= 2)
    for (int i = 0; i < 32; i += 2 * step)
      for (int j = i; j < i + step; j++) {
        const float p = x[j], q = x[j + step];
        x[j] = p + q;
        x[j + step] = p - q;
      }
}

static inline void rotate32(float* x, int n) {
  for (int g = 0; g < n; g += 32) {
    walsh32(x + g);
    for (int i = 0; i < 32; i++) x[g + i] *= kNorm32;
  }
}

static inline const char* check_layer(const exl3_cache_layer& c) {
  if (c.head_dim < 8 || c.head_dim > 512 || c.head_dim % 8) return "head_dim must be a multiple of 8 up to 512";
  for (int bits : {c.k_bits, c.v_bits}) {
    if (bits != 16 && (bits < 2 || bits > 8)) return "bits must be 16 or 2 to 8";
    if (bits != 16 && c.head_dim % 32) return "head_dim of a quantized cache must be a multiple of 32";
  }
  return nullptr;
}

// One of the two planes of a layer (keys or values).
struct Side {
  char* data;
  char* scale;
  int bits;
};
static inline Side keys_of(const exl3_cache_layer& c) { return {(char*)c.k, (char*)c.k_scale, c.k_bits}; }
static inline Side values_of(const exl3_cache_layer& c) { return {(char*)c.v, (char*)c.v_scale, c.v_bits}; }

static inline Half* half_at(const Side& s, const exl3_cache_layer& c, int64_t page, int place, int head) {
  return (Half*)s.data + ((page * EXL3_PAGE + place) * c.kv_heads + head) * c.head_dim;
}
static inline uint32_t* codes_at(const Side& s, const exl3_cache_layer& c, int64_t page, int place, int head) {
  return (uint32_t*)s.data + ((page * EXL3_PAGE + place) * c.kv_heads + head) * (c.head_dim / 32) * s.bits;
}
static inline Half* scales_at(const Side& s, const exl3_cache_layer& c, int64_t page, int place, int head) {
  return (Half*)s.scale + ((page * EXL3_PAGE + place) * c.kv_heads + head) * (c.head_dim / 32);
}

// The compander's parameter is a short decimal that came through a float; the format computes with the decimal.
static inline double compander(float a) { return (double)(int64_t)((double)a * 1e6 + 0.5) * 1e-6; }

// 32 codes of `bits` bits -> their values t * scale in the rotated basis. The bits of a code lie in planes of 8, 4, 2, 1 bits,
// the most significant plane first; code j is at bit j*w mod 32 of word j*w/32 of its plane.
static inline void decode_group(const uint32_t* words, int bits, float scale, float compand, float* out) {
  const float step = 2.0f / (float)(1 << bits), offset = step * 0.5f - 1.0f;
  const float cubic = compand > 0 ? (float)(1.0 - compander(compand)) : 0.0f;
#if defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i code[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int w = 8; w; w >>= 1) {
    if (!(bits & w)) continue;
    const __m256i mask = _mm256_set1_epi32((1 << w) - 1), shift = _mm256_mullo_epi32(lane, _mm256_set1_epi32(w));
    for (int v = 0; v < 4; v++) {
      __m256i part;
      if (w == 8) {  // eight codes fill two words
        const __m256i pair = _mm256_set1_epi64x((int64_t)((uint64_t)words[2 * v + 1] << 32 | words[2 * v]));
        const __m256i word = _mm256_permutevar8x32_epi32(pair, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
        part = _mm256_srlv_epi32(word, _mm256_and_si256(shift, _mm256_set1_epi32(31)));
      } else {
        const int at = 8 * v * w;
        part = _mm256_srlv_epi32(_mm256_set1_epi32((int)(words[at >> 5] >> (at & 31))), shift);
      }
      code[v] = _mm256_or_si256(_mm256_slli_epi32(code[v], w), _mm256_and_si256(part, mask));
    }
    words += w;
  }
  for (int v = 0; v < 4; v++) {
    __m256 t = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(code[v]), _mm256_set1_ps(step)), _mm256_set1_ps(offset));
    if (compand > 0)
      t = _mm256_mul_ps(t, _mm256_add_ps(_mm256_set1_ps(compand), _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(cubic), t), t)));
    _mm256_storeu_ps(out + 8 * v, _mm256_mul_ps(t, _mm256_set1_ps(scale)));
  }
#else
  uint32_t code[32] = {0};
  for (int w = 8; w; w >>= 1) {
    if (!(bits & w)) continue;
    for (int j = 0; j < 32; j++) code[j] = code[j] << w | (words[j * w >> 5] >> (j * w & 31) & ((1u << w) - 1));
    words += w;
  }
  for (int j = 0; j < 32; j++) {
    float t = (float)code[j] * step + offset;
    if (compand > 0) t = t * (compand + cubic * t * t);
    out[j] = t * scale;
  }
#endif
}

// Asks for one head of one token that will be read soon: the heads of a token lie together, so one head's rows are a stride apart and the
// hardware's own prefetch falls behind.
static inline void prefetch_head(const Side& s, const exl3_cache_layer& c, int64_t page, int place, int head) {
#if defined(__AVX2__)
  if (place >= EXL3_PAGE) return;
  const char* at = s.bits == 16 ? (const char*)half_at(s, c, page, place, head) : (const char*)codes_at(s, c, page, place, head);
  const int bytes = c.head_dim * s.bits / 8;
  for (int i = 0; i < bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
#endif
}

// One head of one token: fp16 as it is, codes in the rotated basis.
static inline void read_head(const Side& s, const exl3_cache_layer& c, int64_t page, int place, int head, float* out) {
  if (s.bits == 16) {
    const Half* x = half_at(s, c, page, place, head);
#if defined(__F16C__)
    for (int i = 0; i < c.head_dim; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
#else
    for (int i = 0; i < c.head_dim; i++) out[i] = load(x[i]);
#endif
    return;
  }
  const uint32_t* codes = codes_at(s, c, page, place, head);
  const Half* scales = scales_at(s, c, page, place, head);
  for (int g = 0; g < c.head_dim / 32; g++) decode_group(codes + g * s.bits, s.bits, load(scales[g]), c.compand, out + 32 * g);
}

EXL3_TIER_END
