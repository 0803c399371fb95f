// embedding: rows of a plain or ring-quantized table (format section 4.8).
#include "cpu/small.h"

EXL3_TIER_BEGIN

static const uint32_t kMul1 = 0x83DCD12Du;

// mul1 codebook: fp16 fma of the byte sum; fp32 holds the exact product and sum, so one rounding remains (format section 3).
static inline float mul1_value(uint32_t state) {
  const uint32_t x = state * kMul1;
  const uint32_t sum = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24);
  const Half inverse = {0x1EEE}, bias = {0xC931};
  Half v;
  store(&v, (float)((double)(1024 + sum) * (double)load(inverse) + (double)load(bias)));
  return load(v);
}

// One ring of 1 + 16*bits words -> 256 values, times H256 and the signs.
static void decode_ring(const uint16_t* ring, int bits, const Half* signs, float* out) {
  uint16_t symbol[256];
  for (int i = 0; i < 256; i++) {
    const int at = i * bits, word = at >> 4, shift = at & 15;
    uint32_t pair = ring[1 + word];
    if (shift + bits > 16) pair |= (uint32_t)ring[2 + word] << 16;
    symbol[i] = (uint16_t)(pair >> shift & ((1u << bits) - 1));
  }
  const float scale = load(Half{ring[0]});
  uint32_t state = 0;
  for (int i = 256 - (15 + bits) / bits; i < 256; i++) state = state << bits | symbol[i];
  for (int i = 0; i < 256; i++) {
    state = (state << bits | symbol[i]) & 0xffff;
    out[i] = mul1_value(state) * scale;
  }
  for (int step = 1; step < 256; step *= 2)
    for (int i = 0; i < 256; i += 2 * step)
      for (int j = i; j < i + step; j++) {
        const float p = out[j], q = out[j + step];
        out[j] = p + q;
        out[j + step] = p - q;
      }
  for (int i = 0; i < 256; i++) out[i] *= 0.0625f * load(signs[i]);
}

template <class Y>
static void ring_row(const exl3_embedding_args& a, int id, Y* y) {
  const int groups = (a.n + 255) / 256, words = 1 + 16 * a.trellis_bits;
  const uint16_t* row = (const uint16_t*)a.table + (int64_t)id * groups * words;
  float v[256];
  for (int g = 0; g < groups; g++) {
    decode_ring(row + g * words, a.trellis_bits, (const Half*)a.signs + g * 256, v);
    const int n = a.n - g * 256 < 256 ? a.n - g * 256 : 256;
    for (int i = 0; i < n; i++) store(&y[g * 256 + i], v[i] * a.scale);
  }
}

int embedding(const exl3_embedding_args* a, void* stream) {
  if (a->trellis_bits < 0 || a->trellis_bits > 8) return fail(EXL3_BAD_ARGUMENT, "embedding: %d bits per value", a->trellis_bits);
  int status = EXL3_OK;
  const int outer = with_dtype(a->y_dtype, [&](auto* y_tag) {
    using Y = std::remove_pointer_t<decltype(y_tag)>;
    status = with_dtype(a->table_dtype, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      for_rows(stream, a->tokens, (int64_t)a->tokens * a->n, [&](int64_t t) {
        Y* y = (Y*)a->y + t * a->y_stride;
        const int id = a->ids[t];
        if (id < 0 || id >= a->vocab) {
          for (int i = 0; i < a->n; i++) store(&y[i], 0.0f);
        } else if (a->trellis_bits) {
          ring_row(*a, id, y);
        } else {
          const T* row = (const T*)a->table + (int64_t)id * a->n;
          for (int i = 0; i < a->n; i++) store(&y[i], load(row[i]) * a->scale);
        }
      });
    });
  });
  return outer ? outer : status;
}

EXL3_TIER_END
