// Decode attention (flash-decoding) on tensor cores, for fp16 and 2 to 8 bit keys and values.
//
// Positions are the rows of both products and query rows their columns, so that 16 positions take one instruction for up to eight query
// rows: scores (positions x rows) = keys x queries, sums (dims x rows) = values x weights. Codes are decoded in registers. Which positions
// a split and a warp see follows from the token's own position, a masked position adds an exact zero and no column sees another, so a
// token's result does not depend on what shares the step with it. The last split to begin merges all, in order.
#pragma once
#include "attention_merge.cuh"

namespace exl3 {

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

// KIND: fp16, codes of the bits in the arguments, or codes of KIND bits on both sides.
template <int D, AttentionKind KIND>
__global__ void __launch_bounds__(decode_warps(D) * 32, 2) decode_attention(const __grid_constant__ AttentionParams p) {
#if __CUDA_ARCH__ >= 800
  constexpr int kGroups = D / 32, kTiles = D / 16;
  constexpr bool CODES = KIND != kHalves, kAny = KIND == kAnyCodes, kPlain = CODES && !kAny;
  constexpr int kDecodeWarps = decode_warps(D), kBits = kAny ? 16 : KIND, kRun = decode_run(CODES), kUnit = kDecodeWarps * kRun, kSubs = kRun / 16;
  constexpr int kSupers = kPlain ? 1 : kGroups / kSuper<D>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int merges;
  ptx::launch_dependents();
  const exl3_attention_args& a = p.a;
  exl3_cache_layer c = a.cache;
  if (!kAny) c.compand = 0.f, c.k_bits = c.v_bits = kBits;
  const int token = blockIdx.x, kv_head = blockIdx.y / p.chunks, chunk = blockIdx.y % p.chunks, split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  constexpr AttentionSide kFixed = make_side(D, kBits, kRun, 32);
  const AttentionSide k_side = kAny ? p.side[0] : kFixed, v_side = kAny ? p.side[1] : kFixed;
  const int k_bits = k_side.bits, v_bits = v_side.bits;
  const float compand = c.compand;
  const int row = a.token_row[token], position = a.positions[token];
  const int heads = min(kColumns, p.group - chunk * kColumns), head0 = kv_head * p.group + chunk * kColumns;

  // indices are copies from the host, which no kernel of a step writes: they are read while the kernel before still runs
  if ((row | position) < 0) {  // both, so that the loads go together
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
  int at = ahead, pages = 0, next_page = 0;  // lane i has the page of run i of 32

  const SideCopy any_k(k_side, c, 0, kv_head, lane), any_v(v_side, c, 1, kv_head, lane);
  const SideRows<D, kBits, kRun> k_rows(c.k, c.kv_heads, kv_head, lane), v_rows(c.v, c.kv_heads, kv_head, lane);
  const ScaleRows<D, kRun> k_scales(c.k_scale, c.kv_heads, kv_head, lane), v_scales(c.v_scale, c.kv_heads, kv_head, lane);
  auto fetch = [&](int stage) {
    uint8_t* k_tile = ring + stage * stage_bytes;
    uint8_t* v_tile = k_tile + k_side.bytes;
    if ((next_page & 31) == 0) {
      const int of = ahead + lane * step;
      pages = of <= highest ? table[of / EXL3_PAGE] : 0;
    }
    const int from_page = __shfl_sync(~0u, pages, next_page++ & 31), in_page = ahead % EXL3_PAGE, valid = highest + 1 - ahead;
    ahead += step;
    if constexpr (kAny) {
      any_k.operator()<D, kRun>(k_tile, k_side, from_page, in_page, c.kv_heads, valid);
      any_v.operator()<D, kRun>(v_tile, v_side, from_page, in_page, c.kv_heads, valid);
    } else {
      k_rows(k_tile, from_page * EXL3_PAGE + in_page, valid);
      v_rows(v_tile, from_page * EXL3_PAGE + in_page, valid);
    }
    if constexpr (kPlain && D % 64 == 0) {
      k_scales(k_tile + k_side.scales, from_page * EXL3_PAGE + in_page, valid);
      v_scales(v_tile + v_side.scales, from_page * EXL3_PAGE + in_page, valid);
    } else {
      if (k_bits != 16) copy_scales<D, kRun, 32>(k_tile, k_side, c.k_scale, from_page, in_page, c.kv_heads, kv_head, valid, lane);
      if (v_bits != 16) copy_scales<D, kRun, 32>(v_tile, v_side, c.v_scale, from_page, in_page, c.kv_heads, kv_head, valid, lane);
    }
  };
  // Fetches go ahead up to the first that reads a position which is appended here. What this step does not append, no kernel that may still
  // run has written, unless all of it was appended by a kernel of its own. One stage stays empty, so that queries don't wait for so much.
  int filled = 0;
  auto fetch_first = [&](int most, int below) {
#pragma unroll 1
    for (; filled < most && (ahead > highest || ahead + kRun <= below); filled++) {
      if (ahead <= highest) fetch(filled);
      ptx::copy_commit();
    }
  };
  if (p.fresh.k) fetch_first(max(1, stages - 1), position - before);
  ptx::wait_for_previous();

  // this warp's first query starts to load
  Head<D> head;
  auto load_query = [&](int r) {
    load_head(head, p, a.q, (int64_t)(token + r / heads) * a.q_stride + (int64_t)(head0 + r % heads) * D, token + r / heads, lane);
  };
  if (warp < rows) load_query(warp);
  // the last split to begin merges: all others are under way then, and wait for none
  int32_t* counter = p.counters + (int64_t)token * gridDim.y + blockIdx.y;
  int begun = 0;
  if (threadIdx.x == 0 && active > 1) begun = atomicAdd(counter, 1);
  float* space = (float*)(shared + decode_heads(D)) + warp * D;
  if (p.fresh.k) {
    const int parts = before + tokens == 1 ? 2 : 1;  // warps that share a head
#pragma unroll 1
    for (int i = kDecodeWarps - 1 - warp; i < 2 * (before + tokens) * parts; i += kDecodeWarps) {
      const int side = i / parts % 2, further = i / parts / 2 - before, unit = (position + further) / kUnit;
      if (unit < first_unit || unit % active != split) continue;
      append_head<D>(p, c, side, side ? v_bits : k_bits, token + further, row, position + further, kv_head, i % parts, parts, space, lane);
    }
  }

  // queries, rotated where the keys are and scaled, into shared memory, and the sum of each group
  const float factor = !CODES || kPlain || k_bits == 16 || compand > 0.f ? 1.f : code_factor(k_bits);
  const float scale = a.scale * factor * (a.softcap > 0.f ? 1.f : kLog2e);
  uint16_t* query = (uint16_t*)shared;
  float* query_sum = (float*)(shared + kColumns * half_pitch(D) * 2);
  const float weight = kPlain && kBits == 4 && lane % 2 == 0 ? 16.f : 1.f;  // makes up for codes that count 16 times
  const int place_of_dim = query_place(k_bits, kPlain, lane);
#pragma unroll 1
  for (int r = warp; r < kColumns; r += kDecodeWarps) {
    if (r >= rows) {
#pragma unroll
      for (int group = 0; group < kGroups; group++) query[r * half_pitch(D) + group * 32 + lane] = 0;
      if (kAny && lane < kGroups) query_sum[r * kGroups + lane] = 0.f;
      continue;
    }
    if (r != warp) load_query(r);
    if (p.fresh.k) rotate_head(head, p, p.fresh.q_norm, space, lane);
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      float v = head.v[group];
      if (CODES && k_bits != 16) v = hadamard32(v);
      const uint16_t h = float_to_half(v * (scale * weight));
      query[r * half_pitch(D) + group * 32 + place_of_dim] = h;
      if (kAny) {
        const float sum = warp_sum(half_to_float(h));
        if (lane == 0) query_sum[r * kGroups + group] = sum;
      }
    }
  }
  if (threadIdx.x == 0) {
    merges = begun == active - 1;
    if (merges) *counter = 0;
  }
  __syncthreads();
  fetch_first(stages, highest + kRun);
  Queries<D> queries;
#pragma unroll
  for (int s = 0; s < kTiles; s += 2) {
    uint32_t both[4];
    ptx::load_matrices(both, query + (lane & 7) * half_pitch(D) + s * 16 + (lane >> 3) * 8);
#pragma unroll
    for (int i = 0; i < 4; i++) queries.operand[s + i / 2][i % 2] = both[i];
  }
  if constexpr (kPlain) {
    const uint32_t ones = 0x3c003c00u, more = kBits == 4 ? 0x4c004c00u : ones;  // 1 and 16
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int s = 2 * group; s < 2 * group + 2; s++) ptx::mma(sum, ones, ones, more, more, queries.operand[s][0], queries.operand[s][1]);
#pragma unroll
      for (int h = 0; h < 2; h++) queries.start[group][h] = -plain_middle(kBits) / kPlainOne * sum[h];
    }
  } else if constexpr (CODES) {
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
  int stage = 0;
  for (; at <= highest; at += step) {
    if (stages == 1)
      ptx::copy_wait<0>();
    else if (stages == 2)
      ptx::copy_wait<1>();
    else
      ptx::copy_wait<2>();
    __syncwarp();
    const uint8_t* k_tile = ring + stage * stage_bytes;
    const uint8_t* v_tile = k_tile + k_side.bytes;
    const int64_t place = D % 64 && CODES ? (int64_t)table[at / EXL3_PAGE] * EXL3_PAGE + at % EXL3_PAGE : 0;
    auto scales = [&](const uint8_t* tile, int side, int r) { return scales_of<D>(tile, side ? v_side : k_side, r, place, c.kv_heads, kv_head); };

    float score[kSubs][4];
#pragma unroll
    for (int u = 0; u < kSubs; u++)
#pragma unroll
      for (int e = 0; e < 4; e++) score[u][e] = 0.f;
    if constexpr (kPlain) {
#pragma unroll
      for (int u = 0; u < kSubs; u++) {
        const int r = u * 16 + g;
        scores_of_plain<D, kBits>(k_tile + u * 16 * k_side.pitch, queries, scales(k_tile, 0, r), scales(k_tile, 0, r + 8), lane, score[u]);
#pragma unroll
        for (int e = 0; e < 4; e++) score[u][e] *= kPlainOne / plain_weight(kBits, 1) * plain_step(kBits);
      }
    } else if (!CODES || k_bits == 16) {
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
    if (a.softcap > 0.f) {  // times the hyperbolic tangent, 1 - 2 / (1 + e^2x): short, as it stands in the middle of the loop
      const float most = a.softcap * kLog2e, inner = __fdividef(2.f * kLog2e, a.softcap);
#pragma unroll
      for (int u = 0; u < kSubs; u++)
#pragma unroll
        for (int e = 0; e < 4; e++) score[u][e] = most - __fdividef(2.f * most, 1.f + ptx::exp2(score[u][e] * inner));
    }
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
    if constexpr (kPlain) {
#pragma unroll
      for (int u = 0; u < kSubs; u++) {
        const int r = u * 16 + 2 * q;
        const uint16_t* const scale[4] = {scales(v_tile, 1, r), scales(v_tile, 1, r + 1), scales(v_tile, 1, r + 8), scales(v_tile, 1, r + 9)};
        sums_of_plain<D, kBits>(v_tile + u * 16 * v_side.pitch, scale, lane, weights[u], out, rest[0]);
      }
    } else if (!CODES || v_bits == 16) {
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
    if (ahead <= highest) fetch(stage);
    ptx::copy_commit();
    if (++stage == stages) stage = 0;
  }
  ptx::copy_wait<0>();

  // the warps' sums: [warp][row][kRowFloats] floats over the ring
  constexpr int kRowFloats = D + 4, kWarpFloats = kColumns * kRowFloats;
  float* merge = (float*)(shared + decode_ring(D));
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) total[h] += __shfl_xor_sync(~0u, total[h], m);
    float* mine = merge + warp * kWarpFloats + (2 * q + h) * kRowFloats;
    if constexpr (kPlain) {
#pragma unroll
      for (int t = 0; t < kTiles; t += kPairs<kBits> / 2) {  // a matrix: kPairs dims on end
        constexpr float kStep = plain_step(kBits), kEven = kPlainOne * kStep, kOdd = kEven / plain_weight(kBits, 1);
        const float more = -plain_middle(kBits) * kStep * __shfl_sync(~0u, rest[0][h], t / 2 * 4 + q);
        float* to = mine + value_dim<D>(kBits, true, g, t, 0);
        if constexpr (kBits == 4)
          *(float4*)to = make_float4(fmaf(out[t][h], kEven, more), fmaf(out[t][h + 2], kOdd, more), fmaf(out[t + 1][h], kEven, more),
                                     fmaf(out[t + 1][h + 2], kOdd, more));
        else
          *(float2*)to = make_float2(fmaf(out[t][h], kEven, more), fmaf(out[t][h + 2], kOdd, more));
      }
    } else {
      const float factor = !CODES || v_bits == 16 || compand > 0.f ? 1.f : code_factor(v_bits);
#pragma unroll
      for (int t = 0; t < kTiles; t++) {
        const float more = rest[t / (2 * kSuper<D>)][h];
        mine[value_dim<D>(v_bits, false, g, t, 0)] = (out[t][h] + more) * factor;
        mine[value_dim<D>(v_bits, false, g, t, 1)] = (out[t][h + 2] + more) * factor;
      }
    }
    if (g == 0) {
      mine[D] = best[h];
      mine[D + 1] = total[h];
    }
  }
  __syncthreads();
  merge_rows<D, CODES>(p, merge, token, head0, heads, rows, split, active, merges, v_bits);
#endif
}

}  // namespace exl3
