// cache_append and cache_read: the paged key/value cache, fp16 or quantized (format section 5).
#include "cpu/kv.h"

EXL3_TIER_BEGIN

// f^-1 of the compander f(t) = a t + (1 - a) t^3, by Cardano, in fp64.
static float expand(float u, double a) {
  const double b = 1.0 - a, h = (double)u / (2 * b), q = a / b / 3, root = sqrt(h * h + q * q * q);
  return (float)(cbrt(h + root) + cbrt(h - root));
}

// 32 values -> codes in planes, and the scale (used unrounded for the codes, stored as fp16).
static void encode_group(float* x, int bits, float compand, uint32_t* words, Half* scale) {
  walsh32(x);
  float top = 0;
  for (int i = 0; i < 32; i++) {
    x[i] *= kNorm32;
    const float v = fabsf(x[i]);
    top = v > top || v != v ? v : top;  // a NaN stays, so that the scale tells it
  }
  const float s = top + 1e-10f, inverse = 1.0f / s;
  store(scale, s);
  const float half = (float)(1 << (bits - 1)), last = 2 * half - 1;
  const double a = compander(compand);
  uint32_t code[32];
  for (int i = 0; i < 32; i++) {
    float u = x[i] * inverse;
    if (compand > 0) u = expand(u, a);
    const float q = floorf(u * half + half);
    code[i] = !(q > 0) ? 0 : q > last ? (uint32_t)last : (uint32_t)q;
  }
  int left = bits;
  for (int w = 8; w; w >>= 1) {
    if (!(bits & w)) continue;
    left -= w;
    for (int i = 0; i < w; i++) words[i] = 0;
    for (int j = 0; j < 32; j++) words[j * w >> 5] |= (code[j] >> left & ((1u << w) - 1)) << (j * w & 31);
    words += w;
  }
}

template <class T>
static void append_side(const Side& side, const exl3_cache_layer& c, const T* x, int64_t page, int place) {
  for (int h = 0; h < c.kv_heads; h++, x += c.head_dim) {
    if (side.bits == 16) {
      Half* y = half_at(side, c, page, place, h);
      for (int i = 0; i < c.head_dim; i++) store(&y[i], load(x[i]));
      continue;
    }
    uint32_t* words = codes_at(side, c, page, place, h);
    Half* scales = scales_at(side, c, page, place, h);
    float v[32];
    for (int g = 0; g < c.head_dim / 32; g++) {
      for (int i = 0; i < 32; i++) {  // the codes are of the fp16 value, whatever the model computes in
        Half rounded;
        store(&rounded, load(x[32 * g + i]));
        v[i] = load(rounded);
      }
      encode_group(v, side.bits, c.compand, words + g * side.bits, &scales[g]);
    }
  }
}

int cache_append(const exl3_cache_append_args* a, void* stream) {
  const exl3_cache_layer& c = a->cache;
  if (const char* wrong = check_layer(c)) return fail(EXL3_BAD_ARGUMENT, "cache_append: %s", wrong);
  return with_dtype(a->dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int64_t work = (int64_t)a->tokens * c.kv_heads * c.head_dim * ((c.k_bits == 16 ? 1 : 16) + (c.v_bits == 16 ? 1 : 16));
    for_rows(stream, a->tokens, work, [&](int64_t t) {
      const int row = a->token_row[t], position = a->positions[t];
      if (row < 0 || position < 0 || position / EXL3_PAGE >= a->table_stride) return;
      const int64_t page = a->block_table[(int64_t)row * a->table_stride + position / EXL3_PAGE];
      if (page < 0 || page >= c.pages) return;
      append_side(keys_of(c), c, (const T*)a->k + t * a->k_stride, page, position % EXL3_PAGE);
      append_side(values_of(c), c, (const T*)a->v + t * a->v_stride, page, position % EXL3_PAGE);
    });
  });
}

int cache_read(const exl3_cache_read_args* a, void* stream) {
  const exl3_cache_layer& c = a->cache;
  if (const char* wrong = check_layer(c)) return fail(EXL3_BAD_ARGUMENT, "cache_read: %s", wrong);
  return with_dtype(a->dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for_rows(stream, a->count, (int64_t)a->count * c.kv_heads * c.head_dim * 2, [&](int64_t i) {
      const int64_t position = a->start + i, page = a->block_table[position / EXL3_PAGE];
      const Side sides[2] = {keys_of(c), values_of(c)};
      for (int side = 0; side < 2; side++) {
        T* y = (T*)(side ? a->v : a->k) + i * c.kv_heads * c.head_dim;
        float v[512];
        for (int h = 0; h < c.kv_heads; h++, y += c.head_dim) {
          if (page < 0 || page >= c.pages) {
            for (int j = 0; j < c.head_dim; j++) store(&y[j], 0.0f);
            continue;
          }
          read_head(sides[side], c, page, (int)(position % EXL3_PAGE), h, v);
          if (sides[side].bits != 16) {
            rotate32(v, c.head_dim);
            for (int j = 0; j < c.head_dim; j++) {
              Half rounded;
              store(&rounded, v[j]);
              v[j] = load(rounded);
            }
          }
          for (int j = 0; j < c.head_dim; j++) store(&y[j], v[j]);
        }
      }
    });
  });
}

EXL3_TIER_END
