// Codes of a quantized cache (format section 5) as operands of matrix products.
//
// A code of b bits is put into the mantissa of a half: h = 1 + code * 2^(kCodeAt - 10), and its level (2 code + 1) / 2^b - 1 is
// kCodeFactor * h + kCodeAdd, both exact. Which dimension of the head a lane's code belongs to differs by b; query_place and value_dim say it.
#pragma once
#include "attention.h"
#include "ptx.cuh"

namespace exl3 {

// Mantissa bit of a code's lowest bit: the top, but where that saves a shift.
__host__ __device__ constexpr int code_at(int bits) { return bits == 4 ? 4 : 10 - bits; }
__host__ __device__ constexpr float code_factor(int bits) { return (float)(1 << (11 - code_at(bits) - bits)); }
__host__ __device__ constexpr float code_add(int bits) { return 1.f / (1 << bits) - 1.f - code_factor(bits); }

// `ones` below is a pair of halves 1 of which the compiler knows nothing (AttentionParams::ones): masking and adding the exponent is one
// instruction with one immediate and two with two.

// Code i of the plane of W bits in both halves of x (bits W i ..) to its place in the mantissas of h.
template <int BITS, int W>
__device__ __forceinline__ void place_code(uint32_t x, int i, uint32_t& h) {
  constexpr int kTo = code_at(BITS) + (BITS & (W - 1));
  constexpr uint32_t kMask = ((1u << W) - 1) << kTo;
  const int shift = W * i - kTo;
  h |= (shift >= 0 ? x >> (shift & 31) : x << (-shift & 31)) & (kMask | kMask << 16);
}
template <int BITS, int W>
constexpr int kPlane = 4 * (BITS & ~(2 * W - 1));  // byte where the plane of W bits starts in a group

// Levels times nothing: centred, and through the compander where there is one.
template <int BITS>
__device__ __forceinline__ uint32_t code_level(uint32_t h, float compand) {
  const float factor = code_factor(BITS), add = code_add(BITS);
  uint32_t t = ptx::multiply_add(h, ptx::pack(factor, factor), ptx::pack(add, add));
  if (compand > 0.f) {
    const uint32_t a = ptx::pack(compand, compand), b = ptx::pack(1.f - compand, 1.f - compand);
    t = ptx::multiply(t, ptx::multiply_add(ptx::multiply(t, t), b, a));
  }
  return t;
}

// ------------------------------------------------------------------------------------------------ codes of 4 and 8 bits as they are
// A code in the lowest bits of a half is a number below the normal ones, code * 2^-24, and tensor cores multiply those exactly. So nothing but
// masks makes operands of codes, and what is to be taken off is the middle of the codes alone. The upper code of a byte counts 16 times.
template <int BITS>
constexpr int kPairs = 16 / BITS;  // of halves that hold 32 bits of codes

// Pair i: the code that starts at bit BITS * i of each half of x.
template <int BITS>
__device__ __forceinline__ void plain_codes(uint32_t x, uint32_t (&pair)[kPairs<BITS>]) {
#pragma unroll
  for (int i = 0; i < kPairs<BITS>; i++) {
    constexpr uint32_t kMask = (1u << BITS) - 1;
    const int bit = BITS * i % 8;
    pair[i] = x >> (BITS * i - bit) & (kMask << bit | kMask << (bit + 16));
  }
}
__host__ __device__ constexpr float plain_weight(int bits, int pair) { return bits * pair % 8 ? 16.f : 1.f; }
__host__ __device__ constexpr float plain_middle(int bits) { return ((1 << bits) - 1) / 2.f; }  // level 0
__host__ __device__ constexpr float plain_step(int bits) { return 2.f / (1 << bits); }         // between levels
constexpr float kPlainOne = 16777216.f;                                                      // 2^24: of code 1

// ------------------------------------------------------------------------------------------------ keys
// Lane q of a quad holds codes 8q .. 8q+7 of a group in four pairs, codes i and i + 4 in pair i; of 8 bits i and i + 2. As they are, the matrices
// for ldmatrix have 16 bytes a position, and lane q word q of them.
// Where a query's dimension d of a group stands, so that ldmatrix gives each lane what its keys meet: 8 halves for each pair.
__host__ __device__ constexpr int query_place(int bits, bool plain, int d) {
  if (bits == 16) return d;
  if (bits != 8) return 8 * (d & 3) + 2 * (d >> 3) + (d >> 2 & 1);
  if (plain) return (d & 16) + 8 * (d & 1) + 2 * (d >> 2 & 3) + (d >> 1 & 1);
  return 16 * (d >> 2 & 1) + 8 * (d & 1) + 2 * (d >> 3) + (d >> 1 & 1);
}
template <int BITS, int W>
__device__ __forceinline__ void key_plane(const uint8_t* group, int q, uint32_t (&pair)[4]) {
  if constexpr ((BITS & W) != 0) {
    const uint8_t* at = group + kPlane<BITS, W> + q * W;
    if constexpr (W == 8) {
      const uint2 w = *(const uint2*)at;
#pragma unroll
      for (int i = 0; i < 4; i++) place_code<BITS, 8>(i < 2 ? w.x : w.y, i % 2, pair[i]);
    } else {
      uint32_t x;
      if constexpr (W == 4) x = *(const uint32_t*)at;
      if constexpr (W == 2) x = __byte_perm(*(const uint16_t*)at, 0, 0x4140);
      if constexpr (W == 1) x = *at * 0x1001u;  // codes 4 .. 7 into the high half
#pragma unroll
      for (int i = 0; i < 4; i++) place_code<BITS, W>(x, i, pair[i]);
    }
  }
}
template <int BITS>
__device__ __forceinline__ void key_codes(const uint8_t* group, int q, uint32_t ones, uint32_t (&pair)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) pair[i] = ones;
  key_plane<BITS, 8>(group, q, pair);
  key_plane<BITS, 4>(group, q, pair);
  key_plane<BITS, 2>(group, q, pair);
  key_plane<BITS, 1>(group, q, pair);
}

// ------------------------------------------------------------------------------------------------ values
// Lane row g of eight holds 4 * SUPER consecutive codes of SUPER groups, of two positions a register: half `high` belongs to the second.
template <int D>
constexpr int kSuper = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;
template <int WORDS>
__device__ __forceinline__ void read_words(const uint8_t* at, bool aligned, uint32_t (&w)[WORDS]) {
  if (WORDS == 4 && aligned)
    *(uint4*)w = *(const uint4*)at;
  else if (WORDS == 2 && aligned)
    *(uint2*)w = *(const uint2*)at;
  else
#pragma unroll
    for (int i = 0; i < WORDS; i++) w[i] = ((const uint32_t*)at)[i];
}
template <int BITS, int W, int SUPER>
__device__ __forceinline__ void value_plane(const uint8_t* first, const uint8_t* second, int in, uint32_t (&pair)[4 * SUPER]) {
  if constexpr ((BITS & W) != 0) {
    constexpr int kLaneBits = 4 * SUPER * W, kPer = 16 / W, kFields = kLaneBits < 16 ? 1 : kLaneBits / 16;
    const int at = kPlane<BITS, W> + in * W / 8;
    uint32_t x[kFields];
    if constexpr (kLaneBits >= 32) {
      constexpr int kWords = kLaneBits / 32;
      uint32_t a[kWords], b[kWords];
      read_words<kWords>(first + at, BITS % 2 == 0, a);
      read_words<kWords>(second + at, BITS % 2 == 0, b);
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        x[2 * i] = __byte_perm(a[i], b[i], 0x5410);
        x[2 * i + 1] = __byte_perm(a[i], b[i], 0x7632);
      }
    } else if constexpr (kLaneBits == 16) {
      x[0] = *(const uint16_t*)(first + at) | (uint32_t) * (const uint16_t*)(second + at) << 16;
    } else {
      x[0] = first[at] | (uint32_t)second[at] << 16;
      if constexpr (kLaneBits == 4) x[0] >>= in * W & 7;
    }
#pragma unroll
    for (int n = 0; n < 4 * SUPER; n++) place_code<BITS, W>(x[n / kPer], n % kPer, pair[n]);
  }
}
template <int BITS, int SUPER>
__device__ __forceinline__ void value_codes(const uint8_t* first, const uint8_t* second, int in, uint32_t ones, uint32_t (&pair)[4 * SUPER]) {
#pragma unroll
  for (int n = 0; n < 4 * SUPER; n++) pair[n] = ones;
  value_plane<BITS, 8, SUPER>(first, second, in, pair);
  value_plane<BITS, 4, SUPER>(first, second, in, pair);
  value_plane<BITS, 2, SUPER>(first, second, in, pair);
  value_plane<BITS, 1, SUPER>(first, second, in, pair);
}

// ------------------------------------------------------------------------------------------------ whole groups
template <int BITS, int W>
__device__ __forceinline__ void group_plane(const uint32_t* words, uint32_t (&pair)[16]) {
  if constexpr ((BITS & W) != 0) {
    constexpr int kWord = kPlane<BITS, W> / 4, kPer = 16 / W;
#pragma unroll
    for (int i = 0; i < 16; i++) {  // codes i and i + 16: half words i / kPer and those W half words on
      const int field = i / kPer;
      const uint32_t low = words[kWord + field / 2], high = words[kWord + (W == 1 ? 0 : field / 2 + W / 2)];
      place_code<BITS, W>(W == 1 ? low : __byte_perm(low, high, field % 2 ? 0x7632 : 0x5410), i % kPer, pair[i]);
    }
  }
}
// The codes of a group in the mantissas of halves that begin as `ones`: i and i + 16 in a pair.
template <int BITS>
__device__ __forceinline__ void group_codes(const uint32_t* group, uint32_t ones, uint32_t (&pair)[16]) {
  uint32_t words[BITS];
#pragma unroll
  for (int i = 0; i < BITS; i++) words[i] = group[i];
#pragma unroll
  for (int i = 0; i < 16; i++) pair[i] = ones;
  group_plane<BITS, 8>(words, pair);
  group_plane<BITS, 4>(words, pair);
  group_plane<BITS, 2>(words, pair);
  group_plane<BITS, 1>(words, pair);
}

// The 32 values of a group in the rotated basis, as halves in natural order. Its words are aligned to four bytes.
template <int BITS>
__device__ __forceinline__ void decode_group(const uint8_t* group, uint16_t scale, float compand, uint32_t ones, uint32_t (&out)[16]) {
  uint32_t pair[16];
  group_codes<BITS>((const uint32_t*)group, ones, pair);
  const uint32_t both = scale | (uint32_t)scale << 16;
  if (compand > 0.f) {  // rounded once, after the scale: the few levels of two bits would repeat their errors everywhere
    const float factor = __half22float2(*(const __half2*)&both).x;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const uint32_t level = code_level<BITS>(pair[i], 0.f);
      const float2 t = __half22float2(*(const __half2*)&level);
      pair[i] = ptx::pack(factor * t.x * (compand + (1.f - compand) * t.x * t.x), factor * t.y * (compand + (1.f - compand) * t.y * t.y));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++) pair[i] = ptx::multiply(code_level<BITS>(pair[i], 0.f), both);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) out[i] = __byte_perm(pair[2 * i % 16], pair[2 * i % 16 + 1], i < 8 ? 0x5410 : 0x7632);
}

#define EXL3_BY_BITS(bits, CALL) \
  switch (bits) {                \
    case 2: CALL(2); break;      \
    case 3: CALL(3); break;      \
    case 4: CALL(4); break;      \
    case 5: CALL(5); break;      \
    case 6: CALL(6); break;      \
    case 7: CALL(7); break;      \
    default: CALL(8); break;     \
  }

}  // namespace exl3
