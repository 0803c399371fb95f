// Attention of many tokens of one row (prefill) over the paged cache on RDNA: keys and values are decoded once for all queries of a block,
// and multiplied with the matrix product of a wave, or with dot products where a card has none (as in FlashAttention-2, Dao 2023).
#pragma once
#include "attention.h"

namespace rdna {

// Positions at a time; strides keep 16-byte reads of many rows off each other's banks.
template <int GROUPS>
struct Sizes {
  static constexpr int kKeys = GROUPS > 4 ? 16 : 32, kKeyStride = kKeys + 8, kStride = GROUPS * 32 + 8;
};

struct PrefillArgs {
  exl3_attention_args a;
  TokenGroups groups;
  int32_t block_heads;  // heads of a block, 1, 2 or 4; its other warps take further tokens of the group
};

// What a warp keeps of its 16 queries, tokens of one head. Rows of scores and results are spread as the product leaves them.
#if GPU_WMMA
constexpr int kQueryRows = 8, kQuerySpan = 16;  // rows of a lane; its columns are this far apart
template <int GROUPS>
struct Queries {
  Sums out[2 * GROUPS];
  float best[kQueryRows], total[kQueryRows];  // total: of this lane's columns
  int position[kQueryRows];                   // -1: no token
};
GPU_FN int query_row(int i) { return fragment_row(i); }
template <int GROUPS>
GPU_FN float& result(Queries<GROUPS>& q, int i, int e) {
  return q.out[e].v[i];
}
#else
constexpr int kQueryRows = 16, kQuerySpan = 32;
template <int GROUPS>
struct Queries {
  float out[kQueryRows][GROUPS], best[kQueryRows], total[kQueryRows];
  int position[kQueryRows];
};
GPU_FN int query_row(int i) { return i; }
template <int GROUPS>
GPU_FN float& result(Queries<GROUPS>& q, int i, int e) {
  return q.out[i][e];
}
#endif
constexpr int kResultsAGroup = 32 / kQuerySpan;  // values of a row and group of 32 in a lane
template <int GROUPS>
struct Scores {
  static constexpr int kColumns = (Sizes<GROUPS>::kKeys + kQuerySpan - 1) / kQuerySpan;
  float v[kColumns][kQueryRows];
};
GPU_FN float over_columns(float v, bool sum) {
#pragma unroll
  for (int m = 1; m < kQuerySpan; m <<= 1) {
    const float other = lane_xor(v, m);
    v = sum ? v + other : larger(v, other);
  }
  return v;
}
// hadamard32 of a group as its columns are spread
GPU_FN void rotate_columns(float (&v)[kResultsAGroup]) {
#if GPU_WMMA
  const float sum = v[0] + v[1], difference = v[0] - v[1];
  v[0] = sum * 0.17677669529663688f;
  v[1] = difference * 0.17677669529663688f;
#pragma unroll
  for (int m = 1; m < 16; m <<= 1)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float other = lane_xor(v[e], m);
      v[e] = lane_id() & m ? other - v[e] : v[e] + other;
    }
#else
  v[0] = hadamard32(v[0]);
#endif
}

// Of row i and column n. queries: [16][kStride], keys: [kKeys][kStride], halves.
template <int GROUPS>
GPU_FN Scores<GROUPS> multiply_keys(const uint16_t* queries, const uint16_t* keys, int groups) {
  constexpr int kStride = Sizes<GROUPS>::kStride;
  Scores<GROUPS> s;
#if GPU_WMMA
  constexpr int kColumns = Scores<GROUPS>::kColumns;
  Sums sums[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; n++)
#pragma unroll
    for (int i = 0; i < kQueryRows; i++) sums[n].v[i] = 0.f;
#pragma unroll
  for (int k = 0; k < 2 * GROUPS; k++) {
    if (k >= 2 * fresh(groups)) continue;
    const Fragment f = read_fragment(queries + (lane_id() & 15) * kStride + k * 16);
#pragma unroll
    for (int n = 0; n < kColumns; n++) wave_product(f, read_fragment(keys + (n * 16 + (lane_id() & 15)) * kStride + k * 16), sums[n]);
  }
#pragma unroll
  for (int n = 0; n < kColumns; n++)
#pragma unroll
    for (int i = 0; i < kQueryRows; i++) s.v[n][i] = sums[n].v[i];
#else
#pragma unroll
  for (int i = 0; i < kQueryRows; i++) s.v[0][i] = 0.f;
#pragma unroll 1
  for (int k = 0; k < 4 * groups; k++) {
    const Words4 key = *(const Words4*)(keys + lane_id() * kStride + k * 8);
#pragma unroll
    for (int i = 0; i < kQueryRows; i++) {
      const Words4 query = *(const Words4*)(queries + i * kStride + k * 8);
#pragma unroll
      for (int e = 0; e < 4; e++) s.v[0][i] = dot2(query.v[e], key.v[e], s.v[0][i]);
    }
  }
#endif
  return s;
}

// q.out += weights @ values. weights: [16][kKeyStride], values: [head_dim][kKeyStride], halves.
template <int GROUPS>
GPU_FN void add_values(Queries<GROUPS>& q, const uint16_t* weights, const uint16_t* values, int groups) {
  constexpr int kKeys = Sizes<GROUPS>::kKeys, kKeyStride = Sizes<GROUPS>::kKeyStride;
#if GPU_WMMA
  const int c = lane_id() & 15;
  Fragment w[kKeys / 16];
#pragma unroll
  for (int k = 0; k < kKeys / 16; k++) w[k] = read_fragment(weights + c * kKeyStride + k * 16);
#pragma unroll
  for (int d = 0; d < 2 * GROUPS; d++)
    if (d < 2 * fresh(groups))
#pragma unroll
      for (int k = 0; k < kKeys / 16; k++) wave_product(w[k], read_fragment(values + (d * 16 + c) * kKeyStride + k * 16), q.out[d]);
#else
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
    if (g < fresh(groups))
#pragma unroll
      for (int k = 0; k < kKeys / 8; k++) {
        const Words4 value = *(const Words4*)(values + (g * 32 + lane_id()) * kKeyStride + k * 8);
#pragma unroll
        for (int i = 0; i < kQueryRows; i++) {
          const Words4 weight = *(const Words4*)(weights + i * kKeyStride + k * 8);
#pragma unroll
          for (int e = 0; e < 4; e++) q.out[i][g] = dot2(weight.v[e], value.v[e], q.out[i][g]);
        }
      }
#endif
}

// One step of the running softmax: scores of kKeys positions from p0 on to weights, what was summed before to the new maximum.
template <int GROUPS>
GPU_FN void soften(const exl3_attention_args& a, Queries<GROUPS>& q, Scores<GROUPS> score, int p0, uint16_t* weights) {
  constexpr int kColumns = Scores<GROUPS>::kColumns;
  const int column = lane_id() & (kQuerySpan - 1), span = a.window > 0 ? a.window : 0x40000000;
#pragma unroll
  for (int i = 0; i < kQueryRows; i++) {
    float top = q.best[i];
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
      const int position = p0 + n * 16 + column;
      float s = score.v[n][i];
      if (a.softcap > 0.f) s = a.softcap * hyperbolic_tangent(s / a.softcap);
      score.v[n][i] = position <= q.position[i] && position > q.position[i] - span ? s : -1e30f;
      top = larger(top, score.v[n][i]);
    }
    top = over_columns(top, false);
    const float keep = fast_exp(q.best[i] - top);
    q.best[i] = top;
    q.total[i] *= keep;
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
      const float weight = score.v[n][i] > -1e29f ? fast_exp(score.v[n][i] - top) : 0.f;
      q.total[i] += weight;
      weights[query_row(i) * Sizes<GROUPS>::kKeyStride + n * 16 + column] = float_to_half(weight);
    }
#pragma unroll
    for (int e = 0; e < kResultsAGroup * GROUPS; e++) result(q, i, e) *= keep;
  }
}

// kKeys positions from p0 on as halves in the basis of the cache: keys [kKeys][kStride], values turned, [head_dim][kKeyStride]. What lies
// outside first .. last is zero and not read.
template <int GROUPS, int WARPS>
GPU_FN void stage_positions(const exl3_attention_args& a, int row, int kv_head, int p0, int first, int last, uint16_t* keys, uint16_t* values) {
  constexpr int kKeys = Sizes<GROUPS>::kKeys, kKeyStride = Sizes<GROUPS>::kKeyStride, kStride = Sizes<GROUPS>::kStride;
  constexpr int kPieces = GROUPS * 4, kThreads = WARPS * 32;
  const exl3_cache_layer& c = a.cache;
  const int lane = lane_id(), warp = uniform_warp(), groups = c.head_dim / 32;
  auto inside = [&](int position) { return position >= first && position <= last; };
  auto place = [&](int position) {
    const int p = position < first ? first : position > last ? last : position;
    return (int64_t)a.block_table[(int64_t)row * a.table_stride + p / EXL3_PAGE] * EXL3_PAGE + p % EXL3_PAGE;
  };
  auto read = [&](int side, int bits, int position, int g) {
    const float v = read_group(c, side, bits, place(position), c.kv_heads * groups, kv_head * groups + g);
    return float_to_half(inside(position) ? v : 0.f);
  };
  if (c.k_bits == 16) {
#pragma unroll 4
    for (int n = 0; n < kKeys * kPieces; n += kThreads) {
      const int j = (n + thread_id()) / kPieces, piece = (n + thread_id()) % kPieces;
      if (piece >= 4 * groups) continue;
      Words4 w = *(const Words4*)((const uint16_t*)c.k + (place(p0 + j) * c.kv_heads + kv_head) * c.head_dim + piece * 8);
#pragma unroll
      for (int e = 0; e < 4; e++) w.v[e] = inside(p0 + j) ? w.v[e] : 0u;
      *(Words4*)(keys + j * kStride + piece * 8) = w;
    }
  } else {
#pragma unroll 2
    for (int n = 0; n < kKeys * GROUPS; n += WARPS) {
      const int j = (n + warp) / GROUPS, g = (n + warp) % GROUPS;
      if (g < groups) keys[j * kStride + g * 32 + lane] = read(0, c.k_bits, p0 + j, g);
    }
  }
#pragma unroll 2
  for (int n = 0; n < kKeys / 2 * GROUPS; n += WARPS) {
    const int j = (n + warp) / GROUPS * 2, g = (n + warp) % GROUPS;
    if (g >= groups) continue;
    const uint32_t even = read(1, c.v_bits, p0 + j, g), odd = read(1, c.v_bits, p0 + j + 1, g);
    *(uint32_t*)(values + (g * 32 + lane) * kKeyStride + j) = even | odd << 16;
  }
}

// This warp's 16 queries from token0 on, scaled, in the basis of the keys; their positions; and nothing summed yet.
template <int GROUPS>
GPU_FN void read_queries(const PrefillArgs& args, Queries<GROUPS>& q, int token0, int head, bool live, uint16_t* queries) {
  const exl3_attention_args& a = args.a;
  const int lane = lane_id(), groups = a.cache.head_dim / 32;
#pragma unroll 1
  for (int r = 0; r < 16; r++) {
    const int token = token0 + r < a.tokens ? token0 + r : a.tokens - 1;
    const void* from = row_of(a.q, token * a.q_stride + (int64_t)head * a.cache.head_dim, a.dtype);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      float v = g < fresh(groups) ? load(from, g * 32 + lane, a.dtype) : 0.f;
      if (a.cache.k_bits != 16) v = hadamard32(v);
      queries[r * Sizes<GROUPS>::kStride + g * 32 + lane] = float_to_half(v * a.scale);
    }
  }
#pragma unroll
  for (int i = 0; i < kQueryRows; i++) {
    const int token = token0 + query_row(i);
    q.position[i] = live && token < a.tokens && a.token_row[token] >= 0 ? a.positions[token] : -1;
    q.best[i] = -1e30f;
    q.total[i] = 0.f;
#pragma unroll
    for (int e = 0; e < kResultsAGroup * GROUPS; e++) result(q, i, e) = 0.f;
  }
}

// Divides by the sum of weights, turns back into the basis of the result, and writes y; padding gives zeros. Rows move through the first
// one: one copy of the code, and no register with a variable number.
template <int GROUPS>
GPU_FN void write_results(const exl3_attention_args& a, Queries<GROUPS>& q, int token0, int head, bool live) {
  const int groups = a.cache.head_dim / 32, column = lane_id() & (kQuerySpan - 1);
  const float sink = a.sinks ? a.sinks[head] : -1e30f;
#pragma unroll 1
  for (int i = 0; i < kQueryRows; i++) {
    const float top = larger(q.best[0], sink), keep = fast_exp(q.best[0] - top);
    const float all = over_columns(q.total[0], true) * keep + (a.sinks ? fast_exp(sink - top) : 0.f);
    const int token = token0 + query_row(i);
    void* y = row_of(a.y, token * a.y_stride + (int64_t)head * a.cache.head_dim, a.dtype);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
      if (g < fresh(groups)) {
        float v[kResultsAGroup];
#pragma unroll
        for (int e = 0; e < kResultsAGroup; e++) v[e] = q.position[0] < 0 ? 0.f : result(q, 0, g * kResultsAGroup + e) * (keep / all);
        if (a.cache.v_bits != 16) rotate_columns(v);
#pragma unroll
        for (int e = 0; e < kResultsAGroup; e++)
          if (live && token < a.tokens) store(y, g * 32 + e * 16 + column, a.dtype, v[e]);
      }
#pragma unroll
    for (int r = 0; r + 1 < kQueryRows; r++) {
      q.best[r] = q.best[r + 1];
      q.total[r] = q.total[r + 1];
      q.position[r] = q.position[r + 1];
#pragma unroll
      for (int e = 0; e < kResultsAGroup * GROUPS; e++) result(q, r, e) = result(q, r + 1, e);
    }
  }
}

// One block a key/value head, chunk of its heads and group of tokens; head_dim at most 32 * GROUPS. Which positions stand together depends
// on the positions alone. Groups that in_one_row refuses are left to `attention`.
// Grid: key/value heads times chunks of block_heads heads; groups of tokens.
template <int GROUPS, int WARPS>
GPU_FN void prefill(const PrefillArgs& args) {
  if constexpr (!GPU_WMMA && GROUPS > 4) return;  // too many registers for wide heads; never launched
  constexpr int kKeys = Sizes<GROUPS>::kKeys, kKeyStride = Sizes<GROUPS>::kKeyStride, kStride = Sizes<GROUPS>::kStride;
  GPU_SHARED(Words4, query_space, WARPS * 16 * kStride / 8);
  GPU_SHARED(Words4, key_space, kKeys * kStride / 8);
  GPU_SHARED(Words4, value_space, GROUPS * 32 * kKeyStride / 8);
  GPU_SHARED(Words4, weight_space, WARPS * 16 * kKeyStride / 8);
  begin_kernel();
  const exl3_attention_args& a = args.a;
  if (!in_one_row(args.groups, block_y())) return;
  const int warp = uniform_warp(), size = args.groups.size, group0 = block_y() * size;
  const int each = a.heads / a.cache.kv_heads, chunks = (each + args.block_heads - 1) / args.block_heads;
  const int kv_head = block_x() / chunks, member = block_x() % chunks * args.block_heads + warp % args.block_heads;
  const bool live = member < each;
  const int head = kv_head * each + (live ? member : 0), token0 = group0 + warp / args.block_heads * 16;
  uint16_t* queries = (uint16_t*)query_space + warp * 16 * kStride;
  uint16_t* weights = (uint16_t*)weight_space + warp * 16 * kKeyStride;
  Queries<GROUPS> q;
  read_queries(args, q, token0, head, live, queries);
  int last = -1, lowest = 0x7fffffff;
  for (int i = lane_id(); i < size; i += 32) {
    const int token = group0 + i, position = token < a.tokens && a.token_row[token] >= 0 ? a.positions[token] : -1;
    last = position > last ? position : last;
    lowest = position >= 0 && position < lowest ? position : lowest;
  }
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const int high = lane_xor(last, m), low = lane_xor(lowest, m);
    last = high > last ? high : last;
    lowest = low < lowest ? low : lowest;
  }
  last = uniform(last);
  lowest = uniform(lowest);
  const int first = a.window > 0 && lowest - a.window + 1 > 0 ? lowest - a.window + 1 : 0, row = a.token_row[group0];
  for (int p0 = first & -kKeys; p0 <= last; p0 += kKeys) {
    shared_sync();  // all have read the positions before
    stage_positions<GROUPS, WARPS>(a, row, kv_head, p0, first, last, (uint16_t*)key_space, (uint16_t*)value_space);
    shared_sync();
    soften(a, q, multiply_keys<GROUPS>(queries, (const uint16_t*)key_space, a.cache.head_dim / 32), p0, weights);
    wave_sync();
    add_values(q, weights, (const uint16_t*)value_space, a.cache.head_dim / 32);
  }
  write_results(a, q, token0, head, live);
}

}  // namespace rdna
