// The AVX-512 (VBMI, VNNI) tier of the trellis product (trellis.h). One byte permute and one multishift give 32 states of any rate;
// the hash is taken by 16-bit halves, its bytes are summed and meet 16-bit activations in vpdpwssd: 10 operations for 32 weights.
#include "cpu/isa.h"
#include "cpu/trellis.h"
#if EXL3_X86
#if defined(__GNUC__) && !defined(__clang__)
// gcc's own headers read an undefined register on purpose (gcc bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace exl3::cpu {

namespace {

inline __m512i words(uint32_t v) { return _mm512_set1_epi16((short)v); }

// One half of each hash in units of 2^-13 (codec.h, half_units), mask and xor of half_pair folded in.
inline __m512i units_of_half(__m512i h) {
  const __m512i magnitude_bits = _mm512_ternarylogic_epi32(h, words(0x3FF), words(0x760), 0x6A);      // (h & a) ^ b: mantissa with its leading one
  const __m512i shift = _mm512_ternarylogic_epi32(_mm512_srli_epi16(h, 10), words(3), words(2), 0x6A);
  const __m512i magnitude = _mm512_sllv_epi16(magnitude_bits, shift);
  return _mm512_mask_sub_epi16(magnitude, _mm512_movepi16_mask(h), _mm512_setzero_si512(), magnitude);
}

template <int Codebook> struct Decoder {
  __m512i low, high, add_low, add_high;
  explicit Decoder(const Column& c)
      : low(words(c.multiplier)), high(words(c.multiplier >> 16)), add_low(words(k3instAddend)), add_high(words(k3instAddend >> 16)) {}

  void hash(__m512i state, __m512i& l, __m512i& h) const {
    l = _mm512_mullo_epi16(state, low);
    h = _mm512_add_epi16(_mm512_mulhi_epu16(state, low), _mm512_mullo_epi16(state, high));
    if (Codebook == EXL3_3INST) {
      l = _mm512_add_epi16(l, add_low);
      const __mmask32 carry = _mm512_cmplt_epu16_mask(l, add_low);
      h = _mm512_add_epi16(h, add_high);
      h = _mm512_mask_add_epi16(h, carry, h, words(1));
    }
  }

  // 32 weights as 16-bit integers: byte sums or units of 2^-13.
  __m512i weights(__m512i state) const {
    __m512i l, h;
    hash(state, l, h);
    if (Codebook == EXL3_MUL1) {
      const __m512i ones = _mm512_set1_epi8(1);
      return _mm512_add_epi16(_mm512_maddubs_epi16(l, ones), _mm512_maddubs_epi16(h, ones));
    }
    return _mm512_add_epi16(units_of_half(l), units_of_half(h));
  }
};

// 32 states: positions 32 * chunk ... of a tile.
struct Windows {
  __m512i bytes, shifts;
  int32_t offset;
  Windows(const Avx512Tables& t, int chunk)
      : bytes(_mm512_load_si512(t.bytes[chunk])), shifts(_mm512_load_si512(t.shifts[chunk])), offset(t.offset[chunk]) {}
  __m512i states(const uint8_t* tile) const {
    return _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(bytes, _mm512_loadu_si512(tile + offset)));
  }
};

inline __m512 add_block(__m512 sum, __m512i acc, float scale) { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), _mm512_set1_ps(scale), sum); }

// Lanes d of a chunk's sums belong to column `chunk` where d % 4 < 2, else to column chunk + 8.
template <int Codebook> inline void finish_row(const __m512* sums, float total, float* y) {
  const __m256 unit = _mm256_set1_ps(Codebook == EXL3_MUL1 ? kMul1Scale : 1.0f / 8192);
  const __m128 rest = _mm_set1_ps(Codebook == EXL3_MUL1 ? (float)((1024 + 510) * (double)kMul1Scale + (double)kMul1Shift) * total : 0.0f);
  __m128 pairs[4];
  for (int i = 0; i < 4; i++) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(sums[2 * i]), _mm512_extractf32x8_ps(sums[2 * i], 1));
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(sums[2 * i + 1]), _mm512_extractf32x8_ps(sums[2 * i + 1], 1));
    const __m256 h = _mm256_mul_ps(_mm256_hadd_ps(a, b), unit);
    pairs[i] = _mm_add_ps(_mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)), rest);   // c, c + 8, c + 1, c + 9
  }
  _mm_storeu_ps(y, _mm_shuffle_ps(pairs[0], pairs[1], 0x88));
  _mm_storeu_ps(y + 4, _mm_shuffle_ps(pairs[2], pairs[3], 0x88));
  _mm_storeu_ps(y + 8, _mm_shuffle_ps(pairs[0], pairs[1], 0xDD));
  _mm_storeu_ps(y + 12, _mm_shuffle_ps(pairs[2], pairs[3], 0xDD));
}

// One row. Bytes: activations are bytes, and the hash meets them as it is, without the byte sums.
template <int Codebook, bool Bytes> void column_one(const Column& c) {
  const Operand& x = *c.x;
  const Avx512Tables& tables = avx512_tables(c.k2);
  const Decoder<Codebook> decoder(c);
  const size_t stride = tile_stride(c.k2);
  __m512 sums[8];
  for (__m512& s : sums) s = _mm512_setzero_ps();
  for (int b = 0; b < x.blocks; b++) {
    const uint8_t* tiles = c.tiles + 8 * stride * b;
    const int16_t* units = x.units + 256 * b;
    for (size_t ahead = 0; ahead < 8 * stride; ahead += 64) _mm_prefetch((const char*)(tiles + 16 * stride + ahead), _MM_HINT_T0);
    for (int chunk = 0; chunk < 8; chunk++) {
      const Windows windows(tables, chunk);
      __m512i acc = _mm512_loadu_si512(x.offset + 16 * b), second = _mm512_setzero_si512();
      for (int t = 0; t < 8; t++) {
        const __m512i in = _mm512_loadu_si512(units + 32 * t), state = windows.states(tiles + stride * t);
        if (Bytes) {
          __m512i l, h;
          decoder.hash(state, l, h);
          acc = _mm512_dpbusd_epi32(acc, l, in);
          second = _mm512_dpbusd_epi32(second, h, in);
        } else {
          acc = _mm512_dpwssd_epi32(acc, decoder.weights(state), in);
        }
      }
      sums[chunk] = add_block(sums[chunk], Bytes ? _mm512_add_epi32(acc, second) : acc, x.scale[b]);
    }
  }
  finish_row<Codebook>(sums, x.total[0], c.y);
}

template <int R> inline void multiply(const __m512i* w, const int16_t* units, const int32_t* offset, const float* scale, __m512* sums) {
  __m512i acc[R];
  for (int r = 0; r < R; r++) acc[r] = _mm512_loadu_si512(offset + 16 * r);
  for (int t = 0; t < 8; t++)
    for (int r = 0; r < R; r++) acc[r] = _mm512_dpwssd_epi32(acc[r], w[t], _mm512_loadu_si512(units + 256 * r + 32 * t));
  for (int r = 0; r < R; r++) sums[8 * r] = add_block(sums[8 * r], acc[r], scale[r]);
}

template <int Codebook> void column_many(const Column& c) {
  const Operand& x = *c.x;
  const int rows = x.rows;
  const Avx512Tables& tables = avx512_tables(c.k2);
  const Decoder<Codebook> decoder(c);
  const size_t stride = tile_stride(c.k2);
  __m512 sums[kMaxRows][8];
  for (int r = 0; r < rows; r++)
    for (__m512& s : sums[r]) s = _mm512_setzero_ps();
  __m512i w[8][8];
  for (int b = 0; b < x.blocks; b++) {
    const uint8_t* tiles = c.tiles + 8 * stride * b;
    for (int chunk = 0; chunk < 8; chunk++) {
      const Windows windows(tables, chunk);
      for (int t = 0; t < 8; t++) w[chunk][t] = decoder.weights(windows.states(tiles + stride * t));
    }
    const int16_t* units = x.units + (size_t)256 * rows * b;
    const int32_t* offset = x.offset + (size_t)16 * rows * b;
    const float* scale = x.scale + (size_t)rows * b;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      for (int chunk = 0; chunk < 8; chunk++) multiply<4>(w[chunk], units + 256 * r, offset + 16 * r, scale + r, &sums[r][chunk]);
    for (; r < rows; r++)
      for (int chunk = 0; chunk < 8; chunk++) multiply<1>(w[chunk], units + 256 * r, offset + 16 * r, scale + r, &sums[r][chunk]);
  }
  for (int r = 0; r < rows; r++) finish_row<Codebook>(sums[r], x.total[r], c.y + r * c.y_stride);
}

void column(const Column& c) {
  const bool one = c.x->rows == 1;
  if (c.codebook == EXL3_MUL1) one ? column_one<EXL3_MUL1, false>(c) : column_many<EXL3_MUL1>(c);
  else if (c.codebook == EXL3_MCG) one ? column_one<EXL3_MCG, false>(c) : column_many<EXL3_MCG>(c);
  else one ? column_one<EXL3_3INST, false>(c) : column_many<EXL3_3INST>(c);
}

void column_byte(const Column& c) { column_one<EXL3_MUL1, true>(c); }

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels k = [] {
    Kernels v = avx2_kernels();
    v.column = column;
    v.column_byte = column_byte;
    return v;
  }();
  return k;
}

}  // namespace exl3::cpu
#endif
