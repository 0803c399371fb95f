// The AVX2 tier of the trellis product (trellis.h): 16 states a register by byte shuffles and per-lane shifts, hashed by 16-bit halves.
#include "cpu/isa.h"
#include "cpu/trellis.h"
#if EXL3_X86
#include <immintrin.h>

#include "cpu/simd_avx2.h"

namespace exl3::cpu {

namespace {

// The 16-bit halves of state * multiplier + addend.
struct Hash {
  __m256i low, high, add_low, add_high;
  Hash(uint32_t m, uint32_t addend)
      : low(_mm256_set1_epi16((short)m)), high(_mm256_set1_epi16((short)(m >> 16))),
        add_low(_mm256_set1_epi16((short)addend)), add_high(_mm256_set1_epi16((short)((addend >> 16) + 1))) {}
};

// One half of each hash as an integer in units of 2^-13 (codec.h, half_units): mantissa << exponent as a high multiply, the factor by
// table from the exponent bits; mask and xor of half_pair are folded into the constants.
inline __m256i units_of_half(__m256i h) {
  const __m256i factor = _mm256_setr_epi8(32, 32, 32, 32, 64, 64, 64, 64, 8, 8, 8, 8, 16, 16, 16, 16,
                                          32, 32, 32, 32, 64, 64, 64, 64, 8, 8, 8, 8, 16, 16, 16, 16);
  const __m256i mantissa = _mm256_or_si256(_mm256_xor_si256(_mm256_slli_epi16(h, 5), _mm256_set1_epi16(0x6C00)), _mm256_set1_epi16((short)0x8000));
  const __m256i index = _mm256_or_si256(_mm256_and_si256(h, _mm256_set1_epi16(0x0F00)), _mm256_set1_epi16(0x0080));
  const __m256i magnitude = _mm256_mulhi_epu16(mantissa, _mm256_shuffle_epi8(factor, index));
  return _mm256_sign_epi16(magnitude, _mm256_or_si256(h, _mm256_set1_epi16(1)));
}

// 16 decoded weights as 16-bit integers: byte sums (mul1) or units of 2^-13.
template <int Codebook> struct Decoder {
  Hash hash;
  explicit Decoder(const Column& c) : hash(c.multiplier, Codebook == EXL3_3INST ? k3instAddend : 0) {}

  __m256i weights(__m256i state) const {
    __m256i low = _mm256_mullo_epi16(state, hash.low);
    __m256i high = _mm256_add_epi16(_mm256_mulhi_epu16(state, hash.low), _mm256_mullo_epi16(state, hash.high));
    if (Codebook == EXL3_MUL1) {
      const __m256i ones = _mm256_set1_epi8(1);
      return _mm256_add_epi16(_mm256_maddubs_epi16(low, ones), _mm256_maddubs_epi16(high, ones));
    }
    if (Codebook == EXL3_3INST) {
      low = _mm256_add_epi16(low, hash.add_low);
      // all ones where the low half did not overflow: takes back the carry that add_high already has
      const __m256i no_carry = _mm256_cmpeq_epi16(_mm256_max_epu16(low, hash.add_low), low);
      high = _mm256_add_epi16(_mm256_add_epi16(high, hash.add_high), no_carry);
    }
    return _mm256_add_epi16(units_of_half(low), units_of_half(high));
  }
};

// 16 states: positions 16 * half ... of a tile.
struct Windows {
  __m256i even, odd, right, left;
  int32_t first, second;
  Windows(const Avx2Tables& t, int half)
      : even(_mm256_load_si256((const __m256i*)t.even[half])), odd(_mm256_load_si256((const __m256i*)t.odd[half])),
        right(_mm256_load_si256((const __m256i*)t.right[half])), left(_mm256_load_si256((const __m256i*)t.left[half])),
        first(t.offset[2 * half]), second(t.offset[2 * half + 1]) {}

  __m256i states(const uint8_t* tile) const {
    const __m256i v = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(tile + first))),
                                              _mm_loadu_si128((const __m128i*)(tile + second)), 1);
    return _mm256_blend_epi16(_mm256_srlv_epi32(_mm256_shuffle_epi8(v, even), right), _mm256_sllv_epi32(_mm256_shuffle_epi8(v, odd), left), 0xAA);
  }
};

inline __m256i load_units(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Adds one block's integer sums to the running fp32 sums. Byte sums of both halves of a chunk share 32 bits; units of 2^-13 would not.
template <int Codebook> inline __m256 add_block(__m256 sum, __m256i first, __m256i second, float scale) {
  const __m256 s = _mm256_set1_ps(scale);
  if (Codebook == EXL3_MUL1) return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(first, second)), s, sum);
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), s, _mm256_fmadd_ps(_mm256_cvtepi32_ps(first), s, sum));
}

template <int Codebook, int R>
inline void multiply(const __m256i* w, const int16_t* units, const int32_t* offset, const float* scale, __m256* sums, int64_t sum_stride) {
  __m256i first[R], second[R];
  for (int r = 0; r < R; r++) {
    first[r] = _mm256_loadu_si256((const __m256i*)(offset + 16 * r));
    second[r] = _mm256_loadu_si256((const __m256i*)(offset + 16 * r + 8));
  }
  for (int t = 0; t < 8; t++) {
    for (int r = 0; r < R; r++) first[r] = _mm256_add_epi32(first[r], _mm256_madd_epi16(w[2 * t], load_units(units + 256 * r + 32 * t)));
    for (int r = 0; r < R; r++) second[r] = _mm256_add_epi32(second[r], _mm256_madd_epi16(w[2 * t + 1], load_units(units + 256 * r + 32 * t + 16)));
  }
  for (int r = 0; r < R; r++) sums[r * sum_stride] = add_block<Codebook>(sums[r * sum_stride], first[r], second[r], scale[r]);
}

// Lanes d of a chunk's sums belong to column `chunk` where d % 4 < 2, else to column chunk + 8.
template <int Codebook> inline void finish_row(const __m256* sums, float total, float* y) {
  const __m256 unit = _mm256_set1_ps(Codebook == EXL3_MUL1 ? kMul1Scale : 1.0f / 8192);
  // what centring at 510 leaves over: 510 * scale + 1024 * scale + shift
  const __m128 rest = _mm_set1_ps(Codebook == EXL3_MUL1 ? (float)((1024 + 510) * (double)kMul1Scale + (double)kMul1Shift) * total : 0.0f);
  __m128 pairs[4];
  for (int i = 0; i < 4; i++) {
    const __m256 h = _mm256_mul_ps(_mm256_hadd_ps(sums[2 * i], sums[2 * i + 1]), unit);
    pairs[i] = _mm_add_ps(_mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)), rest);   // c, c + 8, c + 1, c + 9
  }
  _mm_storeu_ps(y, _mm_shuffle_ps(pairs[0], pairs[1], 0x88));
  _mm_storeu_ps(y + 4, _mm_shuffle_ps(pairs[2], pairs[3], 0x88));
  _mm_storeu_ps(y + 8, _mm_shuffle_ps(pairs[0], pairs[1], 0xDD));
  _mm_storeu_ps(y + 12, _mm_shuffle_ps(pairs[2], pairs[3], 0xDD));
}

template <int Codebook> void column_one(const Column& c) {
  const Operand& x = *c.x;
  const Avx2Tables& tables = avx2_tables(c.k2);
  const Decoder<Codebook> decoder(c);
  const size_t stride = tile_stride(c.k2);
  __m256 sums[8];
  for (__m256& s : sums) s = _mm256_setzero_ps();
  for (int b = 0; b < x.blocks; b++) {
    const uint8_t* tiles = c.tiles + 8 * stride * b;
    const int16_t* units = x.units + 256 * b;
    for (size_t ahead = 0; ahead < 8 * stride; ahead += 64) _mm_prefetch((const char*)(tiles + 16 * stride + ahead), _MM_HINT_T0);
    for (int chunk = 0; chunk < 8; chunk++) {
      const Windows low(tables, 2 * chunk), high(tables, 2 * chunk + 1);
      __m256i first = _mm256_loadu_si256((const __m256i*)(x.offset + 16 * b)), second = _mm256_loadu_si256((const __m256i*)(x.offset + 16 * b + 8));
      for (int t = 0; t < 8; t++) {
        first = _mm256_add_epi32(first, _mm256_madd_epi16(decoder.weights(low.states(tiles + stride * t)), load_units(units + 32 * t)));
        second = _mm256_add_epi32(second, _mm256_madd_epi16(decoder.weights(high.states(tiles + stride * t)), load_units(units + 32 * t + 16)));
      }
      sums[chunk] = add_block<Codebook>(sums[chunk], first, second, x.scale[b]);
    }
  }
  finish_row<Codebook>(sums, x.total[0], c.y);
}

template <int Codebook> void column_many(const Column& c) {
  const Operand& x = *c.x;
  const int rows = x.rows;
  const Avx2Tables& tables = avx2_tables(c.k2);
  const Decoder<Codebook> decoder(c);
  const size_t stride = tile_stride(c.k2);
  __m256 sums[kMaxRows][8];
  for (int r = 0; r < rows; r++)
    for (__m256& s : sums[r]) s = _mm256_setzero_ps();
  __m256i w[8][16];
  for (int b = 0; b < x.blocks; b++) {
    const uint8_t* tiles = c.tiles + 8 * stride * b;
    for (int chunk = 0; chunk < 8; chunk++)
      for (int half = 0; half < 2; half++) {
        const Windows windows(tables, 2 * chunk + half);
        for (int t = 0; t < 8; t++) w[chunk][2 * t + half] = decoder.weights(windows.states(tiles + stride * t));
      }
    const int16_t* units = x.units + (size_t)256 * rows * b;
    const int32_t* offset = x.offset + (size_t)16 * rows * b;
    const float* scale = x.scale + (size_t)rows * b;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      for (int chunk = 0; chunk < 8; chunk++) multiply<Codebook, 4>(w[chunk], units + 256 * r, offset + 16 * r, scale + r, &sums[r][chunk], 8);
    for (; r < rows; r++)
      for (int chunk = 0; chunk < 8; chunk++) multiply<Codebook, 1>(w[chunk], units + 256 * r, offset + 16 * r, scale + r, &sums[r][chunk], 8);
  }
  for (int r = 0; r < rows; r++) finish_row<Codebook>(sums[r], x.total[r], c.y + r * c.y_stride);
}

void column(const Column& c) {
  const bool one = c.x->rows == 1;
  if (c.codebook == EXL3_MUL1) one ? column_one<EXL3_MUL1>(c) : column_many<EXL3_MUL1>(c);
  else if (c.codebook == EXL3_MCG) one ? column_one<EXL3_MCG>(c) : column_many<EXL3_MCG>(c);
  else one ? column_one<EXL3_3INST>(c) : column_many<EXL3_3INST>(c);
}

// 16 integers to the format's fp16 values.
template <int Codebook> inline void to_float(__m256i w, float* out) {
  for (int half = 0; half < 2; half++) {
    const __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(half ? _mm256_extracti128_si256(w, 1) : _mm256_castsi256_si128(w)));
    const __m256 exact = Codebook == EXL3_MUL1 ? _mm256_fmadd_ps(_mm256_add_ps(v, _mm256_set1_ps(1024)), _mm256_set1_ps(kMul1Scale), _mm256_set1_ps(kMul1Shift))
                                               : _mm256_mul_ps(v, _mm256_set1_ps(1.0f / 8192));
    _mm256_storeu_ps(out + 8 * half, _mm256_cvtph_ps(_mm256_cvtps_ph(exact, 0)));
  }
}

template <int Codebook> void decode_tile(const uint8_t* tile, int k2, const Column& c, float* out) {
  const Avx2Tables& tables = avx2_tables(k2);
  const Decoder<Codebook> decoder(c);
  for (int half = 0; half < 16; half++) to_float<Codebook>(decoder.weights(Windows(tables, half).states(tile)), out + 16 * half);
}

void decode(const uint8_t* tile, int k2, int codebook, uint32_t multiplier, float* out) {
  Column c{};
  c.multiplier = multiplier;
  if (codebook == EXL3_MUL1) decode_tile<EXL3_MUL1>(tile, k2, c, out);
  else if (codebook == EXL3_MCG) decode_tile<EXL3_MCG>(tile, k2, c, out);
  else decode_tile<EXL3_3INST>(tile, k2, c, out);
}

// fp32 products with the format's own values. Positions 8 l .. 8 l + 7 of a tile meet the inputs 2 (l % 4) + {0, 1, 8, 9}, twice.
void column_float(const Column& c) {
  const Operand& x = *c.x;
  __m256 sums[kMaxRows][8];
  for (int r = 0; r < x.rows; r++)
    for (__m256& s : sums[r]) s = _mm256_setzero_ps();
  alignas(32) float w[kTileWeights];
  for (int b = 0; b < x.blocks; b++)
    for (int t = 0; t < 8; t++) {
      decode(c.tiles + tile_stride(c.k2) * (size_t)(8 * b + t), c.k2, c.codebook, c.multiplier, w);
      for (int r = 0; r < x.rows; r++) {
        const float* a = x.exact + ((size_t)b * x.rows + r) * kBlock + kTile * t;
        __m256 in[4];
        for (int q = 0; q < 4; q++)
          in[q] = _mm256_setr_ps(a[2 * q], a[2 * q + 1], a[2 * q + 8], a[2 * q + 9], a[2 * q], a[2 * q + 1], a[2 * q + 8], a[2 * q + 9]);
        for (int chunk = 0; chunk < 8; chunk++)
          for (int q = 0; q < 4; q++) sums[r][chunk] = _mm256_fmadd_ps(_mm256_load_ps(w + 32 * chunk + 8 * q), in[q], sums[r][chunk]);
      }
    }
  for (int r = 0; r < x.rows; r++)
    for (int chunk = 0; chunk < 8; chunk++) {
      float s[8];
      _mm256_storeu_ps(s, sums[r][chunk]);
      c.y[r * c.y_stride + chunk] = (s[0] + s[1]) + (s[2] + s[3]);
      c.y[r * c.y_stride + chunk + 8] = (s[4] + s[5]) + (s[6] + s[7]);
    }
}

// A block's rows to integers with one scale, each tile's 16 values in the order of the decoded states.
void quantize(const float* block, int limit, int16_t* units, int32_t* offset, float* scale, float* total) {
  const __m256 absolute = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  __m256 top = _mm256_setzero_ps();
  for (int i = 0; i < kBlock; i += 8) top = _mm256_max_ps(top, _mm256_and_ps(_mm256_loadu_ps(block + i), absolute));
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
  const float most = _mm_cvtss_f32(m);
  // the rotation spreads a NaN over its whole block
  *scale = block[0] == block[0] ? most / (float)limit : block[0];
  const __m256 inverse = _mm256_set1_ps(most > 0 ? (float)limit / most : 0.0f);
  const __m256i bound = _mm256_set1_epi32(limit), minus = _mm256_set1_epi32(-limit);
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int t = 0; t < 8; t++) {
    __m256i v[2];
    for (int h = 0; h < 2; h++) {
      v[h] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(block + kTile * t + 8 * h), inverse));
      v[h] = _mm256_max_epi32(_mm256_min_epi32(v[h], bound), minus);
    }
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xD8);
    const __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
    const __m128i a = _mm_unpacklo_epi32(low, high), b = _mm_unpackhi_epi32(low, high);
    const __m256i first = _mm256_set_m128i(_mm_unpackhi_epi64(a, a), _mm_unpacklo_epi64(a, a));
    const __m256i second = _mm256_set_m128i(_mm_unpackhi_epi64(b, b), _mm_unpacklo_epi64(b, b));
    _mm256_storeu_si256((__m256i*)(units + 32 * t), first);
    _mm256_storeu_si256((__m256i*)(units + 32 * t + 16), second);
    sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(first, _mm256_set1_epi16(1)));
    sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(second, _mm256_set1_epi16(1)));
  }
  int32_t lanes[16];
  _mm256_storeu_si256((__m256i*)lanes, sums[0]);
  _mm256_storeu_si256((__m256i*)(lanes + 8), sums[1]);
  int32_t all = 0;
  for (int d = 0; d < 16; d++)
    if (d % 4 < 2) all += lanes[d];      // each input stands twice
  *total += *scale * (float)all;
  for (int d = 0; d < 16; d++) offset[d] = limit == kUnitLimitHalf ? 0 : -510 * lanes[d];
}

void load(float* out, const void* x, int dtype, int64_t n) { load_row(out, x, dtype, n); }
void store(void* y, const float* x, int dtype, int64_t n) { store_row(y, x, dtype, n); }
void hadamard(float* block) { hadamard128(block); }

void activate(float* gate, const float* up, int activation, int64_t n) {
  if (activation == EXL3_ACT_GELU || n % 8) return scalar_kernels().activate(gate, up, activation, n);
  const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1);
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 g = _mm256_loadu_ps(gate + i);
    __m256 a = g;
    if (activation == EXL3_ACT_SILU) a = _mm256_div_ps(g, _mm256_add_ps(one, exp_ps(_mm256_sub_ps(zero, g))));
    else if (activation == EXL3_ACT_GELU_TANH) {
      // 0.5 g (1 + tanh u) = g / (1 + e^-2u), u = sqrt(2 / pi) (g + 0.044715 g^3)
      const __m256 u = _mm256_mul_ps(_mm256_mul_ps(g, _mm256_set1_ps(-1.5957691216f)), _mm256_fmadd_ps(_mm256_mul_ps(g, g), _mm256_set1_ps(0.044715f), one));
      a = _mm256_div_ps(g, _mm256_add_ps(one, exp_ps(u)));
    } else if (activation == EXL3_ACT_RELU2) a = _mm256_mul_ps(_mm256_max_ps(g, zero), _mm256_max_ps(g, zero));
    else if (activation == EXL3_ACT_RELU) a = _mm256_max_ps(g, zero);
    _mm256_storeu_ps(gate + i, _mm256_mul_ps(a, _mm256_loadu_ps(up + i)));
  }
}

}  // namespace

void dense_avx2(const exl3_dense_args& a, int64_t first, int64_t last);

const Kernels& avx2_kernels() {
  static const Kernels k = {load, store, hadamard, quantize, activate, column, nullptr, column_float, decode, dense_avx2};
  return k;
}

}  // namespace exl3::cpu
#endif
