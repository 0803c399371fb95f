// The paged key/value cache: append, read back, and a plain attention over it (format 5).
#pragma once
#include "numbers.h"

// Codes of 32 lanes into `bits` words: power-of-two planes, most significant bits first; lane j's part of a plane of width w sits at bit
// (j*w) % 32 of the plane's word j*w / 32.
GPU_FN void pack_group(uint32_t* words, int code, int bits) {
  int left = bits, word = 0;
  for (int width = 8; width; width >>= 1) {
    if (!(bits & width)) continue;
    left -= width;
    const int lane = lane_id();
    int v = (int)((uint32_t)((code >> left) & ((1 << width) - 1)) << ((lane * width) & 31));
    for (int m = 1; m < 32 / width; m <<= 1) v |= lane_xor(v, m);
    if (lane % (32 / width) == 0) words[word + lane * width / 32] = (uint32_t)v;
    word += width;
  }
}
GPU_FN int unpack_group(const uint32_t* words, int j, int bits) {
  int left = bits, word = 0, code = 0;
  for (int width = 8; width; width >>= 1) {
    if (!(bits & width)) continue;
    left -= width;
    code |= (int)(((words[word + j * width / 32] >> ((j * width) & 31)) & ((1u << width) - 1)) << left);
    word += width;
  }
  return code;
}
// Position of u on the compander's input axis: the inverse of f(t) = a t + (1-a) t^3 by Cardano, in double as the two roots nearly cancel.
GPU_FN float expand(float u, float a) {
  const double h = (double)u / (2.0 * (1.0 - a)), p = a / (3.0 * (1.0 - a)), r = wide_root(h * h + p * p * p);
  const double s = h + r, d = h - r;
  const double cs = s < 0 ? -cube_root(-s) : s > 0 ? cube_root(s) : 0.0;
  const double cd = d < 0 ? -cube_root(-d) : d > 0 ? cube_root(d) : 0.0;
  return (float)(cs + cd);
}
// The decoded value of a code in the rotated basis.
GPU_FN float code_level(int code, int bits, float compand) {
  const float t = (float)(2 * code + 1) / (float)(1 << bits) - 1.f;
  return compand > 0.f && compand < 1.f ? t * (compand + (1.f - compand) * t * t) : t;
}

// A warp stores x, lane by lane, as a group of 32 values of one place.
GPU_FN void store_group(const exl3_cache_layer& c, int side, int bits, int64_t place, int groups, int group, float x) {
  void* data = side ? c.v : c.k;
  if (bits == 16) {
    ((uint16_t*)data)[(place * groups + group) * 32 + lane_id()] = float_to_half(x);
    return;
  }
  const float y = hadamard32(half_to_float(float_to_half(x)));
  const float scale = warp_max(absolute(y)) + 1e-10f;
  float u = y * (1.f / scale);
  if (c.compand > 0.f && c.compand < 1.f) u = expand(u, c.compand);
  const int half = 1 << (bits - 1);
  float q = floor_(u * (float)half + (float)half);
  q = q > 0.f ? q : 0.f;  // NaN goes to 0; the group's scale is not finite then
  const int code = q < (float)(2 * half - 1) ? (int)q : 2 * half - 1;
  pack_group((uint32_t*)data + (place * groups + group) * bits, code, bits);
  if (lane_id() == 0) ((uint16_t*)(side ? c.v_scale : c.k_scale))[place * groups + group] = float_to_half(scale);
}

// One warp a token, side (k or v) and group of 32 values.
GPU_FN void cache_append(const exl3_cache_append_args& a) {
  begin_kernel();
  const exl3_cache_layer& c = a.cache;
  const int groups = c.kv_heads * c.head_dim / 32, lane = lane_id();
  const int64_t unit = (int64_t)block_x() * 8 + warp_id();
  if (unit >= (int64_t)a.tokens * 2 * groups) return;
  const int group = (int)(unit % groups), side = (int)(unit / groups % 2), token = (int)(unit / groups / 2);
  const int row = a.token_row[token];
  if (row < 0) return;
  const int position = a.positions[token];
  const int64_t page = a.block_table[(int64_t)row * a.table_stride + position / EXL3_PAGE];
  const int64_t place = page * EXL3_PAGE + position % EXL3_PAGE;
  const void* source = side ? row_of(a.v, token * a.v_stride, a.dtype) : row_of(a.k, token * a.k_stride, a.dtype);
  store_group(c, side, side ? c.v_bits : c.k_bits, place, groups, group, load(source, group * 32 + lane, a.dtype));
}

// Lane's value of a group; quantized groups stay in the rotated basis.
GPU_FN float read_group(const exl3_cache_layer& c, int side, int bits, int64_t place, int groups, int group) {
  const int lane = lane_id();
  const void* data = side ? c.v : c.k;
  if (bits == 16) return half_to_float(((const uint16_t*)data)[(place * groups + group) * 32 + lane]);
  const float scale = half_to_float(((const uint16_t*)(side ? c.v_scale : c.k_scale))[place * groups + group]);
  return code_level(unpack_group((const uint32_t*)data + (place * groups + group) * bits, lane, bits), bits, c.compand) * scale;
}
GPU_FN float read_group(const exl3_cache_layer& c, int side, int64_t place, int groups, int group) {
  return read_group(c, side, side ? c.v_bits : c.k_bits, place, groups, group);
}

GPU_FN void cache_read(const exl3_cache_read_args& a) {
  begin_kernel();
  const exl3_cache_layer& c = a.cache;
  const int groups = c.kv_heads * c.head_dim / 32, lane = lane_id();
  const int64_t unit = (int64_t)block_x() * 8 + warp_id();
  if (unit >= (int64_t)a.count * 2 * groups) return;
  const int group = (int)(unit % groups), side = (int)(unit / groups % 2);
  const int64_t n = unit / groups / 2, position = a.start + n;
  const int64_t place = (int64_t)a.block_table[position / EXL3_PAGE] * EXL3_PAGE + position % EXL3_PAGE;
  float x = read_group(c, side, place, groups, group);
  if ((side ? c.v_bits : c.k_bits) != 16) x = half_to_float(float_to_half(hadamard32(x)));
  store(side ? a.v : a.k, (n * groups + group) * 32 + lane, a.dtype, x);
}

// Plain attention for every head size up to 512: one block of 256 threads a (token, head). Warp w takes positions w, w + 8, ... of the
// token's window and keeps its own softmax; the eight are merged at the end. Scores against quantized keys are taken in the rotated basis.
GPU_FN void attention_plain(const exl3_attention_args& a) {
  constexpr int kWarps = 8, kGroups = 16;
  GPU_SHARED(float, merged, kWarps * (kGroups * 32 + 2));
  begin_kernel();
  const exl3_cache_layer& c = a.cache;
  const int token = block_y(), head = block_x(), lane = lane_id(), warp = warp_id();
  const int groups = c.head_dim / 32, all_groups = c.kv_heads * groups, kv_head = head / (a.heads / c.kv_heads);
  const int row = a.token_row[token], last = a.positions[token];
  const void* q = row_of(a.q, token * a.q_stride + (int64_t)head * c.head_dim, a.dtype);
  void* y = row_of(a.y, token * a.y_stride + (int64_t)head * c.head_dim, a.dtype);
  if (row < 0) {
    for (int i = thread_id(); i < c.head_dim; i += kWarps * 32) store(y, i, a.dtype, 0.f);
    return;
  }
  float query[kGroups], sum[kGroups];
  for (int g = 0; g < groups; g++) {
    query[g] = load(q, g * 32 + lane, a.dtype);
    if (c.k_bits != 16) query[g] = hadamard32(query[g]);
    sum[g] = 0.f;
  }
  float best = -1e30f, total = 0.f;
  const int first = a.window > 0 && last - a.window + 1 > 0 ? last - a.window + 1 : 0;
  for (int position = first + warp; position <= last; position += kWarps) {
    const int64_t page = a.block_table[(int64_t)row * a.table_stride + position / EXL3_PAGE];
    const int64_t place = page * EXL3_PAGE + position % EXL3_PAGE;
    float dot = 0.f;
    for (int g = 0; g < groups; g++) dot += query[g] * read_group(c, 0, place, all_groups, kv_head * groups + g);
    float score = warp_sum(dot) * a.scale;
    if (a.softcap > 0.f) score = a.softcap * hyperbolic_tangent(score / a.softcap);
    const float now = larger(best, score), keep = fast_exp(best - now), weight = fast_exp(score - now);
    for (int g = 0; g < groups; g++) sum[g] = sum[g] * keep + weight * read_group(c, 1, place, all_groups, kv_head * groups + g);
    total = total * keep + weight;
    best = now;
  }
  float* mine = merged + warp * (kGroups * 32 + 2);
  for (int g = 0; g < groups; g++) mine[g * 32 + lane] = sum[g];
  if (lane == 0) {
    mine[kGroups * 32] = best;
    mine[kGroups * 32 + 1] = total;
  }
  block_sync();
  float top = a.sinks ? a.sinks[head] : -1e30f;
  for (int w = 0; w < kWarps; w++) top = larger(top, merged[w * (kGroups * 32 + 2) + kGroups * 32]);
  float all = a.sinks ? fast_exp(a.sinks[head] - top) : 0.f;
  for (int w = 0; w < kWarps; w++) {
    const float* m = merged + w * (kGroups * 32 + 2);
    all += m[kGroups * 32 + 1] * fast_exp(m[kGroups * 32] - top);
  }
  for (int g = warp; g < groups; g += kWarps) {
    float v = 0.f;
    for (int w = 0; w < kWarps; w++) {
      const float* m = merged + w * (kGroups * 32 + 2);
      v += m[g * 32 + lane] * fast_exp(m[kGroups * 32] - top);
    }
    v /= all;
    if (c.v_bits != 16) v = hadamard32(v);
    store(y, g * 32 + lane, a.dtype, v);
  }
}
