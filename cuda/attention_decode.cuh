// Decode attention (flash-decoding) on tensor cores, for fp16 and 2 to 8 bit keys and values.
//
// Positions are the rows of both products and query rows their columns, so that 16 positions take one instruction for up to eight query
// rows: scores (positions x rows) = keys x queries, sums (dims x rows) = values x weights. Codes are decoded in registers. Which positions
// a split and a warp see follows from the token's own position, a masked position adds an exact zero and no column sees another, so a
// token's result does not depend on what shares the step with it. The last split to arrive merges all, in order.
#pragma once
#include "attention_fresh.cuh"

namespace exl3 {

template <int D>
struct Queries {
  uint32_t operand[D / 16][2];  // 16 dims by 8 rows each
  uint32_t offset[2];           // of row g, groups 2q and 2q + 1: what each adds to a score times its scale; rounded, and the rest
};

template <int D>
__device__ __forceinline__ void read_scales(const uint16_t* from, float (&scale)[D / 32]) {
  if constexpr (D % 64 == 0) {  // aligned: words
    constexpr int kWords = D / 64;
    uint32_t w[kWords];
    read_words<kWords>((const uint8_t*)from, kWords != 3, w);
#pragma unroll
    for (int i = 0; i < D / 32; i++) scale[i] = half_to_float((uint16_t)(w[i / 2] >> 16 * (i % 2)));
  } else {
#pragma unroll
    for (int i = 0; i < D / 32; i++) scale[i] = half_to_float(from[i]);
  }
}

// Scores of positions g and g + 8 against query rows 2q and 2q + 1. The products are of halves 1 + code ..; what is too much is subtracted by
// a product of scales and offsets.
template <int D, int BITS>
__device__ __forceinline__ void scores_of_codes(const uint8_t* tile, const AttentionSide& s, const Queries<D>& queries, const uint16_t* scale0,
                                                const uint16_t* scale1, float compand, uint32_t ones, int g, int q, float (&score)[4]) {
  float of0[D / 32], of1[D / 32];
  read_scales<D>(scale0, of0);
  read_scales<D>(scale1, of1);
  uint32_t pair0 = 0, pair1 = 0;
  if (2 * q < D / 32) {
    const bool two = D % 64 == 0 || 2 * q + 1 < D / 32;
    pair0 = scale0[2 * q] | (two ? (uint32_t)scale0[2 * q + 1] << 16 : 0);
    pair1 = scale1[2 * q] | (two ? (uint32_t)scale1[2 * q + 1] << 16 : 0);
  }
  ptx::mma(score, pair0, pair1, pair0, pair1, queries.offset[0], queries.offset[1]);
#pragma unroll
  for (int group = 0; group < D / 32; group++) {
    uint32_t a[4], b[4];
    key_codes<BITS>(tile + g * s.pitch + group * 4 * BITS, q, ones, a);
    key_codes<BITS>(tile + (g + 8) * s.pitch + group * 4 * BITS, q, ones, b);
    if (compand > 0.f)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[i] = code_level<BITS>(a[i], compand);
        b[i] = code_level<BITS>(b[i], compand);
      }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; h++)
      ptx::mma(sum, a[2 * h], b[2 * h], a[2 * h + 1], b[2 * h + 1], queries.operand[2 * group + h][0], queries.operand[2 * group + h][1]);
    score[0] += sum[0] * of0[group];
    score[1] += sum[1] * of0[group];
    score[2] += sum[2] * of1[group];
    score[3] += sum[3] * of1[group];
  }
}
template <int D>
__device__ __forceinline__ void scores_of_halves(const uint8_t* tile, const Queries<D>& queries, int lane, float (&score)[4]) {
#pragma unroll
  for (int step = 0; step < D / 16; step++) {
    uint32_t a[4];
    ptx::load_matrices(a, tile + (lane & 15) * half_pitch(D) * 2 + step * 32 + (lane >> 4) * 16);
    ptx::mma(score, a[0], a[1], a[2], a[3], queries.operand[step][0], queries.operand[step][1]);
  }
}

// Adds 16 positions' values by their weights. Rows g and g + 8 of out[t] are dims value_dim(bits, g, t, 0) and (.., 1).
template <int D>
__device__ __forceinline__ int value_dim(int bits, int g, int t, int high) {
  constexpr int kTiles = 2 * kSuper<D>;  // of a super group
  return bits == 16 ? 16 * t + g + 8 * high : t / kTiles * 32 * kSuper<D> + g * 4 * kSuper<D> + 2 * (t % kTiles) + high;
}
// One multiply-add a pair: h * scale + offset, offset = -centre * scale rounded; what its rounding took is added up by a product of its own,
// rest[super], whose row g holds the group that the dims of row g belong to. `factor` of the level is left to the end.
template <int D, int BITS>
__device__ __forceinline__ void sums_of_codes(const uint8_t* tile, const AttentionSide& s, const uint16_t* const (&scale)[4], float compand,
                                              uint32_t ones, int g, int q, const uint32_t (&weights)[2], float (&out)[D / 16][4], float (&rest)[D / 32 / kSuper<D>][4]) {
  constexpr int S = kSuper<D>;
  const float centre = code_add(BITS) / code_factor(BITS);
#pragma unroll
  for (int super = 0; super < D / 32 / S; super++) {
    const int group = super * S + g * S / 8, in = g * 4 * S % 32;
    uint32_t v[2][4 * S], residue[2];
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const uint8_t* at = tile + (2 * q + 8 * p) * s.pitch + group * 4 * BITS;
      value_codes<BITS, S>(at, at + s.pitch, in, ones, v[p]);
      const uint32_t both = scale[2 * p][group] | (uint32_t)scale[2 * p + 1][group] << 16;
      if (compand > 0.f) {
        residue[p] = 0;
#pragma unroll
        for (int n = 0; n < 4 * S; n++) v[p][n] = ptx::multiply(code_level<BITS>(v[p][n], compand), both);
      } else {
        const uint32_t c = ptx::pack(centre, centre), offset = ptx::multiply(both, c);
        residue[p] = ptx::multiply_add(both, c, offset ^ 0x80008000u);
#pragma unroll
        for (int n = 0; n < 4 * S; n++) v[p][n] = ptx::multiply_add(v[p][n], both, offset);
      }
    }
#pragma unroll
    for (int t = 0; t < 2 * S; t++)
      ptx::mma(out[super * 2 * S + t], v[0][2 * t], v[0][2 * t + 1], v[1][2 * t], v[1][2 * t + 1], weights[0], weights[1]);
    ptx::mma(rest[super], residue[0], 0, residue[1], 0, weights[0], weights[1]);
  }
}
template <int D>
__device__ __forceinline__ void sums_of_halves(const uint8_t* tile, int lane, const uint32_t (&weights)[2], float (&out)[D / 16][4]) {
#pragma unroll
  for (int t = 0; t < D / 16; t++) {
    uint32_t a[4];  // dims 0-7 and 8-15 of positions 0-7, then of positions 8-15
    ptx::load_matrices_transposed(a, tile + ((lane & 7) + (lane >> 4) * 8) * half_pitch(D) * 2 + t * 32 + ((lane >> 3) & 1) * 16);
    ptx::mma(out[t], a[0], a[1], a[2], a[3], weights[0], weights[1]);
  }
}

// The tile's tokens: one token, or as many as fit the columns, from a multiple of p.tokens_a_tile or the start of a run on. 0: another
// block's.
__device__ __forceinline__ int tile_tokens(const AttentionParams& p, int token, int row, int position) {
  const exl3_attention_args& a = p.a;
  auto follows = [&](int t, int n) { return a.token_row[t] == row && a.positions[t] == position + n; };
  if (position % p.tokens_a_tile != 0 && token > 0 && follows(token - 1, -1)) return 0;
  int tokens = 1;
  while (tokens < p.tokens_a_tile && token + tokens < a.tokens && (position + tokens) % p.tokens_a_tile != 0 && follows(token + tokens, tokens))
    tokens++;
  return tokens;
}

// 32-point Hadamard transform of groups of eight lanes with four consecutive values each.
__device__ __forceinline__ void hadamard32_of_four(float (&v)[4]) {
  const float s0 = v[0] + v[1], d0 = v[0] - v[1], s1 = v[2] + v[3], d1 = v[2] - v[3];
  v[0] = s0 + s1;
  v[1] = d0 + d1;
  v[2] = s0 - s1;
  v[3] = d0 - d1;
  for (int m = 1; m < 8; m <<= 1)
    for (int e = 0; e < 4; e++) {
      const float other = lane_xor(v[e], m);
      v[e] = lane_id() & m ? other - v[e] : v[e] + other;
    }
  for (int e = 0; e < 4; e++) v[e] *= 0.17677669529663688f;
}

// One warp adds up parts 0 .. count-1 of a row in order: part(n) points to head_dim sums, weight(n) is its factor. done(d, v) takes four values.
template <int D, class Part, class Weight, class Done>
__device__ __forceinline__ void add_parts(int count, int lane, Part part, Weight weight, Done done) {
#pragma unroll
  for (int first = 0; first < D; first += 128) {
    const int d = first + 4 * lane;
    float v[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 16
    for (int n = 0; n < count; n++) {
      const float w = weight(n);
      const float4 x = d < D ? *(const float4*)(part(n) + d) : make_float4(0.f, 0.f, 0.f, 0.f);
      v[0] += w * x.x;
      v[1] += w * x.y;
      v[2] += w * x.z;
      v[3] += w * x.w;
    }
    done(d, v);
  }
}

// KIND: fp16, codes of the bits in the arguments, or codes of KIND bits on both sides.
template <int D, AttentionKind KIND>
__global__ void __launch_bounds__(kDecodeWarps * 32, D > 128 ? 2 : KIND == kAnyCodes ? 3 : 4) decode_attention(const __grid_constant__ AttentionParams p) {
#if __CUDA_ARCH__ >= 800
  constexpr int kGroups = D / 32, kTiles = D / 16, kSupers = kGroups / kSuper<D>;
  constexpr bool CODES = KIND != kHalves, kAny = KIND == kAnyCodes;
  constexpr int kRun = decode_run(CODES), kUnit = kDecodeWarps * kRun, kSubs = kRun / 16;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int last_arrived;
  ptx::launch_dependents();
  const exl3_attention_args& a = p.a;
  const exl3_cache_layer& c = a.cache;
  const int token = blockIdx.x, kv_head = blockIdx.y / p.chunks, chunk = blockIdx.y % p.chunks, split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  constexpr AttentionSide kFixed = make_side(D, kAny ? 16 : KIND, kRun, 32);
  const AttentionSide k_side = kAny ? p.side[0] : kFixed, v_side = kAny ? p.side[1] : kFixed;
  const int k_bits = k_side.bits, v_bits = v_side.bits;
  const float compand = kAny ? c.compand : 0.f;
  const int row = a.token_row[token], position = a.positions[token];
  const int heads = min(kColumns, p.group - chunk * kColumns), head0 = kv_head * p.group + chunk * kColumns;

  // indices are copies from the host, which no kernel of a step writes: they are read while the kernel before still runs
  if (row < 0) {
    ptx::wait_for_previous();
    if (split == 0)
      for (int i = threadIdx.x; i < heads * D; i += kDecodeWarps * 32)
        store(a.y, token * a.y_stride + (int64_t)(head0 + i / D) * D + i % D, a.dtype, 0.f);
    return;
  }
  // units and splits of the whole tile follow from `base`, which its tokens have in common whichever of them are there
  const int base = position / p.tokens_a_tile * p.tokens_a_tile;
  const int first_unit = a.window > 0 ? max(0, base - a.window + 1) / kUnit : 0;
  const int active = min(p.splits, (base / kUnit - first_unit) / p.least + 1);
  if (split >= active) return;
  const int tokens = tile_tokens(p, token, row, position);
  if (tokens == 0) return;
  const int highest = position + tokens - 1, rows = tokens * heads;
  const int before = p.fresh.k ? tokens_before(a, token, row, position, lane) : 0;

  // this warp's runs of positions: one of each unit of the split
  const int stage_bytes = k_side.bytes + v_side.bytes, stages = p.stages;
  uint8_t* ring = shared + decode_ring(D) + warp * stages * stage_bytes;
  const int* table = a.block_table + (int64_t)row * a.table_stride;
  int ahead = (first_unit + (split + active - first_unit % active) % active) * kUnit + warp * kRun;
  const int step = active * kUnit;
  if (a.window > 0 && ahead + kRun <= position - a.window + 1) ahead += step;  // before the window
  int page = ahead <= highest ? table[ahead / EXL3_PAGE] : 0;
  int at = ahead;
  ptx::wait_for_previous();

  // this warp's queries start to load
  constexpr int kMine = kColumns / kDecodeWarps;
  Head<D> head[kMine];
#pragma unroll
  for (int j = 0; j < kMine; j++) {
    const int r = warp + j * kDecodeWarps;
    if (r < rows)
      load_head(head[j], p, a.q, (int64_t)(token + r / heads) * a.q_stride + (int64_t)(head0 + r % heads) * D, token + r / heads, lane);
    else
#pragma unroll
      for (int group = 0; group < kGroups; group++) head[j].v[group] = 0.f;
  }

  const SideCopy copy_k(k_side, c, 0, kv_head, lane), copy_v(v_side, c, 1, kv_head, lane);
  auto fetch = [&](int stage) {
    if (ahead <= highest) {
      uint8_t* k_tile = ring + stage * stage_bytes;
      uint8_t* v_tile = k_tile + k_side.bytes;
      const int from_page = page, in_page = ahead % EXL3_PAGE, valid = highest + 1 - ahead;
      ahead += step;
      if (ahead <= highest) page = table[ahead / EXL3_PAGE];
      if constexpr (kAny) {
        copy_k.operator()<D, kRun>(k_tile, k_side, from_page, in_page, c.kv_heads, valid);
        copy_v.operator()<D, kRun>(v_tile, v_side, from_page, in_page, c.kv_heads, valid);
      } else {
        copy_side<D, KIND, kRun, 32>(k_tile, c.k, from_page, in_page, c.kv_heads, kv_head, valid, lane);
        copy_side<D, KIND, kRun, 32>(v_tile, c.v, from_page, in_page, c.kv_heads, kv_head, valid, lane);
      }
      if (k_bits != 16) copy_scales<D, kRun, 32>(k_tile, k_side, c.k_scale, from_page, in_page, c.kv_heads, kv_head, valid, lane);
      if (v_bits != 16) copy_scales<D, kRun, 32>(v_tile, v_side, c.v_scale, from_page, in_page, c.kv_heads, kv_head, valid, lane);
    }
    ptx::copy_commit();
  };
  // the first fetches go ahead where they read no position that is appended here
  const bool early = !p.fresh.k || ahead > highest || ahead + (stages - 2) * step + kRun <= position - before;
  if (early)
    for (int i = 0; i < stages - 1; i++) fetch(i);
  float* space = (float*)(shared + decode_heads(D)) + warp * D;
  if (p.fresh.k)
    for (int i = kDecodeWarps - 1 - warp; i < 2 * (before + tokens); i += kDecodeWarps) {
      const int further = i / 2 - before, unit = (position + further) / kUnit;
      if (unit < first_unit || unit % active != split) continue;
      append_head<D>(p, i % 2, i % 2 ? v_bits : k_bits, token + further, row, position + further, kv_head, space, lane);
    }

  // queries, rotated where the keys are and scaled, into shared memory, and the sum of each group
  const float factor = !CODES || k_bits == 16 || compand > 0.f ? 1.f : code_factor(k_bits);
  const float scale = a.scale * factor * (a.softcap > 0.f ? 1.f : kLog2e);
  uint16_t* query = (uint16_t*)shared;
  float* query_sum = (float*)(shared + kColumns * half_pitch(D) * 2);
#pragma unroll
  for (int j = 0; j < kMine; j++) {
    const int r = warp + j * kDecodeWarps;
    if (p.fresh.k && r < rows) rotate_head(head[j], p, p.fresh.q_norm, space, lane);
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      float v = head[j].v[group];
      if (CODES && k_bits != 16) v = hadamard32(v);
      const uint16_t h = float_to_half(v * scale);
      query[r * half_pitch(D) + group * 32 + lane] = h;
      if (CODES) {
        const float sum = warp_sum(half_to_float(h));
        if (lane == 0) query_sum[r * kGroups + group] = sum;
      }
    }
  }
  __syncthreads();
  if (!early)
    for (int i = 0; i < stages - 1; i++) fetch(i);
  Queries<D> queries;
#pragma unroll
  for (int s = 0; s < kTiles; s++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint16_t* from = query + g * half_pitch(D);
      if (!CODES || k_bits == 16) {
        queries.operand[s][h] = *(const uint32_t*)(from + s * 16 + h * 8 + 2 * q);
      } else {
        const int i = 2 * (s % 2) + h;
        from += s / 2 * 32;
        queries.operand[s][h] = from[key_dim(k_bits, q, i, 0)] | (uint32_t)from[key_dim(k_bits, q, i, 1)] << 16;
      }
    }
  if constexpr (CODES) {
    const float per_sum = compand > 0.f || k_bits == 16 ? 0.f : code_add(k_bits) / code_factor(k_bits);
    float offset[2], whole[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      offset[h] = 2 * q + h < kGroups ? per_sum * query_sum[g * kGroups + 2 * q + h] : 0.f;
      whole[h] = half_to_float(float_to_half(offset[h]));
    }
    queries.offset[0] = ptx::pack(whole[0], whole[1]);
    queries.offset[1] = ptx::pack(offset[0] - whole[0], offset[1] - whole[1]);
  }
  int limit[2];  // positions of the tokens of rows 2q and 2q + 1
#pragma unroll
  for (int h = 0; h < 2; h++) limit[h] = 2 * q + h < rows ? position + (2 * q + h) / heads : -1;

  float rest[kSupers][4];
#pragma unroll
  for (int s = 0; s < kSupers; s++)
#pragma unroll
    for (int e = 0; e < 4; e++) rest[s][e] = 0.f;
  float out[kTiles][4], best[2] = {kNothing, kNothing}, total[2] = {0.f, 0.f};
#pragma unroll
  for (int t = 0; t < kTiles; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) out[t][e] = 0.f;
  int stage = 0, fill = stages - 1;
  for (; at <= highest; at += step) {
    fetch(fill);
    if (++fill == stages) fill = 0;
    if (!EXL3_MUCH_SHARED && stages == 1)
      ptx::copy_wait<0>();
    else if (stages == 2)
      ptx::copy_wait<1>();
    else if (stages == 3)
      ptx::copy_wait<2>();
    else
      ptx::copy_wait<3>();
    __syncwarp();
    const uint8_t* k_tile = ring + stage * stage_bytes;
    const uint8_t* v_tile = k_tile + k_side.bytes;
    if (++stage == stages) stage = 0;
    const int64_t place = D % 64 && CODES ? (int64_t)table[at / EXL3_PAGE] * EXL3_PAGE + at % EXL3_PAGE : 0;
    auto scales = [&](const uint8_t* tile, int side, int r) { return scales_of<D>(tile, side ? v_side : k_side, r, place, c.kv_heads, kv_head); };

    float score[kSubs][4];
#pragma unroll
    for (int u = 0; u < kSubs; u++)
#pragma unroll
      for (int e = 0; e < 4; e++) score[u][e] = 0.f;
    if (!CODES || k_bits == 16) {
#pragma unroll
      for (int u = 0; u < kSubs; u++) scores_of_halves<D>(k_tile + u * 16 * half_pitch(D) * 2, queries, lane, score[u]);
    } else {
#define EXL3_CALL(BITS)                                                                                                                  \
  _Pragma("unroll") for (int u = 0; u < kSubs; u++)                                                                                      \
      scores_of_codes<D, BITS>(k_tile + u * 16 * k_side.pitch, k_side, queries, scales(k_tile, 0, u * 16 + g), scales(k_tile, 0, u * 16 + g + 8), \
                               compand, p.ones, g, q, score[u])
      EXL3_BY_BITS(k_bits, EXL3_CALL)
#undef EXL3_CALL
    }
    if (a.softcap > 0.f)
#pragma unroll
      for (int u = 0; u < kSubs; u++)
#pragma unroll
        for (int e = 0; e < 4; e++) score[u][e] = a.softcap * kLog2e * hyperbolic_tangent(score[u][e] / a.softcap);
    if (at + kRun - 1 > position || (a.window > 0 && at <= highest - a.window))
#pragma unroll
      for (int u = 0; u < kSubs; u++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int where = at + u * 16 + g + 8 * (e >> 1), end = limit[e & 1];
          if (where > end || (a.window > 0 && where <= end - a.window)) score[u][e] = -INFINITY;
        }
    float top[2] = {kNothing, kNothing};
#pragma unroll
    for (int u = 0; u < kSubs; u++)
#pragma unroll
      for (int e = 0; e < 4; e++) top[e & 1] = fmaxf(top[e & 1], score[u][e]);
    if (__any_sync(~0u, top[0] > best[0] + kSlack || top[1] > best[1] + kSlack)) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int m = 4; m < 32; m <<= 1) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], m));
        const float now = top[h] > best[h] + kSlack ? top[h] : best[h], keep = ptx::exp2(best[h] - now);
        best[h] = now;
        total[h] *= keep;
#pragma unroll
        for (int s = 0; s < kSupers; s++) rest[s][h] *= keep;
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
          out[t][h] *= keep;
          out[t][h + 2] *= keep;
        }
      }
    }
    uint32_t weights[kSubs][2];
#pragma unroll
    for (int u = 0; u < kSubs; u++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        score[u][e] = ptx::exp2(score[u][e] - best[e & 1]);
        total[e & 1] += score[u][e];
      }
      weights[u][0] = ptx::transpose(ptx::pack(score[u][0], score[u][1]));
      weights[u][1] = ptx::transpose(ptx::pack(score[u][2], score[u][3]));
    }
    if (!CODES || v_bits == 16) {
#pragma unroll
      for (int u = 0; u < kSubs; u++) sums_of_halves<D>(v_tile + u * 16 * half_pitch(D) * 2, lane, weights[u], out);
    } else {
#define EXL3_CALL(BITS)                                                                                                                      \
  _Pragma("unroll") for (int u = 0; u < kSubs; u++) {                                                                                        \
    const int r = u * 16 + 2 * q;                                                                                                            \
    const uint16_t* const scale[4] = {scales(v_tile, 1, r), scales(v_tile, 1, r + 1), scales(v_tile, 1, r + 8), scales(v_tile, 1, r + 9)};     \
    sums_of_codes<D, BITS>(v_tile + u * 16 * v_side.pitch, v_side, scale, compand, p.ones, g, q, weights[u], out, rest);                       \
  }
      EXL3_BY_BITS(v_bits, EXL3_CALL)
#undef EXL3_CALL
    }
    __syncwarp();
  }
  ptx::copy_wait<0>();

  // the warps' sums: [warp][row][D + 4] floats over the ring
  constexpr int kRowFloats = D + 4, kWarpFloats = kColumns * kRowFloats;
  float* merge = (float*)(shared + decode_ring(D));
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) total[h] += __shfl_xor_sync(~0u, total[h], m);
    float* mine = merge + warp * kWarpFloats + (2 * q + h) * kRowFloats;
    const float factor = !CODES || v_bits == 16 || compand > 0.f ? 1.f : code_factor(v_bits);
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
      const float more = rest[t / (2 * kSuper<D>)][h];
      mine[value_dim<D>(v_bits, g, t, 0)] = (out[t][h] + more) * factor;
      mine[value_dim<D>(v_bits, g, t, 1)] = (out[t][h + 2] + more) * factor;
    }
    if (g == 0) {
      mine[D] = best[h];
      mine[D + 1] = total[h];
    }
  }
  __syncthreads();
  auto finish = [&](int of_token, int head, int d, float (&v)[4], float all) {
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = all > 0.f ? v[e] / all : 0.f;
    if (CODES && v_bits != 16) hadamard32_of_four(v);
    if (d < D)
#pragma unroll
      for (int e = 0; e < 4; e++) store(a.y, of_token * a.y_stride + (int64_t)head * D + d + e, a.dtype, v[e]);
  };
  // one row a warp
  for (int r = warp; r < rows; r += kDecodeWarps) {
    const int of_token = token + r / heads, head = head0 + r % heads;
    const bool to_output = active == 1;
    const float* part = merge + r * kRowFloats;
    const float sink = to_output && a.sinks ? a.sinks[head] * kLog2e : kNothing;
    float most = sink, weight[kDecodeWarps];
#pragma unroll
    for (int n = 0; n < kDecodeWarps; n++) most = fmaxf(most, part[n * kWarpFloats + D]);
    float all = to_output && a.sinks ? ptx::exp2(sink - most) : 0.f;
#pragma unroll
    for (int n = 0; n < kDecodeWarps; n++) {
      weight[n] = ptx::exp2(part[n * kWarpFloats + D] - most);
      all += part[n * kWarpFloats + D + 1] * weight[n];
    }
    const int64_t slot = ((int64_t)of_token * a.heads + head) * p.splits + split;
#pragma unroll
    for (int first = 0; first < D; first += 128) {
      const int d = first + 4 * lane;
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      if (d < D)
#pragma unroll
        for (int n = 0; n < kDecodeWarps; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] += weight[n] * part[n * kWarpFloats + d + e];
      if (to_output)
        finish(of_token, head, d, v, all);
      else if (d < D)
        *(float4*)(p.partial + slot * D + d) = make_float4(v[0], v[1], v[2], v[3]);
    }
    if (!to_output && lane == 0) *(float2*)(p.stats + slot * 2) = make_float2(most, all);
  }
  if (active == 1) return;

  __threadfence();
  __syncthreads();
  int32_t* counter = p.counters + (int64_t)token * gridDim.y + blockIdx.y;
  if (threadIdx.x == 0) last_arrived = atomicAdd(counter, 1) == active - 1;
  __syncthreads();
  if (!last_arrived) return;
  if (threadIdx.x == 0) *counter = 0;
  __threadfence();
  for (int r = warp; r < rows; r += kDecodeWarps) {
    const int of_token = token + r / heads, head = head0 + r % heads;
    const int64_t slot = ((int64_t)of_token * a.heads + head) * p.splits;
    constexpr int kEach = kMostSplits / 32;
    float most[kEach], sum[kEach], weight[kEach], top = a.sinks ? a.sinks[head] * kLog2e : kNothing;
    const float sink = top;
#pragma unroll
    for (int h = 0; h < kEach; h++) {
      const int n = lane + 32 * h;
      const float2 both = n < active ? *(const float2*)(p.stats + (slot + n) * 2) : make_float2(kNothing, 0.f);
      most[h] = both.x;
      sum[h] = both.y;
      top = fmaxf(top, most[h]);
    }
    top = warp_max(top);
    float all = 0.f;
#pragma unroll
    for (int h = 0; h < kEach; h++) {
      weight[h] = ptx::exp2(most[h] - top);
      all += sum[h] * weight[h];
    }
    all = warp_sum(all) + (a.sinks ? ptx::exp2(sink - top) : 0.f);
    add_parts<D>(
        active, lane, [&](int n) { return p.partial + (slot + n) * D; },
        [&](int n) {
          const float w = n < 64 ? (n < 32 ? weight[0] : weight[1]) : (n < 96 ? weight[2] : weight[3]);
          return __shfl_sync(~0u, w, n & 31);
        },
        [&](int d, float(&v)[4]) { finish(of_token, head, d, v, all); });
  }
#endif
}

}  // namespace exl3
