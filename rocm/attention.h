// Decode attention over the paged cache on RDNA: blocks share a row's positions, the last of them merges the shares (as in
// flash decoding, Dao et al. 2023). One decoded key or value serves all queries of a block. Many tokens of one row go through prefill.h.
#pragma once
#include "rdna.h"

#include "gpu/cache.h"

namespace rdna {

constexpr int kAttentionThreads = 128, kAttentionWarps = 4;

// Neighbouring tokens of a step, `size` at a time (0: prefill takes none).
struct TokenGroups {
  const int32_t* token_row;
  int32_t tokens, size;
};
// A group whose tokens belong to one row, padding apart, and are at least half there: prefill takes it, and `attention` all others. The
// same in all lanes, of which all must call it.
GPU_FN bool in_one_row(const TokenGroups& g, int group) {
  const int token0 = group * g.size, row = g.token_row[token0];
  int same = 0, others = 0;
  for (int i = lane_id(); i < g.size; i += 32) {
    const int r = token0 + i < g.tokens ? g.token_row[token0 + i] : -1;
    same += r == row;
    others += r >= 0 && r != row;
  }
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    same += lane_xor(same, m);
    others += lane_xor(others, m);
  }
  return row >= 0 && uniform(others) == 0 && 2 * uniform(same) >= g.size;
}

struct AttentionArgs {
  exl3_attention_args a;
  float* parts;   // [tokens][heads][splits][head_dim + 2]: sums of weighted values, best score, sum of weights
  int* counters;  // [tokens][blocks of queries]; zero, and zero again at the end
  int32_t splits, first_token;  // of the step's, in this launch
  TokenGroups groups;
};

// One block of 128 threads a token and QUERIES heads of one key/value head and split; head_dim at most 32 * GROUPS. Each warp takes every
// fourth run of kBatch positions. Scores against quantized keys are taken in the rotated basis, which is orthonormal.
// Grid: key/value heads times chunks of their queries times splits; tokens.
template <int GROUPS, int QUERIES>
GPU_FN void attention(const AttentionArgs& args) {
  constexpr int kBatch = 16 / GROUPS, kPart = GROUPS * 32 + 2;
  GPU_SHARED(float, merged, kAttentionWarps * QUERIES * kPart);
  GPU_SHARED(int, space, 1);
  begin_kernel();
  const exl3_attention_args& a = args.a;
  const exl3_cache_layer& c = a.cache;
  const int lane = lane_id(), warp = uniform_warp(), token = block_y();
  if (args.groups.size && in_one_row(args.groups, (args.first_token + token) / args.groups.size)) return;
  const int each = a.heads / c.kv_heads, chunks = (each + QUERIES - 1) / QUERIES;
  const int split = block_x() % args.splits, chunk = block_x() / args.splits % chunks, kv_head = block_x() / args.splits / chunks;
  const int head0 = kv_head * each + chunk * QUERIES, queries = each - chunk * QUERIES < QUERIES ? each - chunk * QUERIES : QUERIES;
  const int groups = c.head_dim / 32, all_groups = c.kv_heads * groups;
  const int row = a.token_row[token], last = a.positions[token];
  float query[QUERIES][GROUPS], sum[QUERIES][GROUPS], best[QUERIES], total[QUERIES];
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    const void* from = row_of(a.q, token * a.q_stride + (int64_t)(head0 + (q < queries ? q : 0)) * c.head_dim, a.dtype);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      query[q][g] = g < fresh(groups) ? load(from, g * 32 + lane, a.dtype) : 0.f;
      if (c.k_bits != 16) query[q][g] = hadamard32(query[q][g]);
      query[q][g] *= a.scale;
      sum[q][g] = 0.f;
    }
    best[q] = -1e30f;
    total[q] = 0.f;
  }
  const int first = a.window > 0 && last - a.window + 1 > 0 ? last - a.window + 1 : 0, count = row < 0 ? 0 : last - first + 1;
  const int from = first + (int)((int64_t)count * split / args.splits), to = first + (int)((int64_t)count * (split + 1) / args.splits);
  for (int p0 = from + warp * kBatch; p0 < to; p0 += kAttentionWarps * kBatch) {
    int64_t place[kBatch];
    float score[QUERIES][kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {  // positions past the end repeat the last one, with no weight
      const int position = p0 + j < to ? p0 + j : to - 1;
      place[j] = (int64_t)a.block_table[(int64_t)row * a.table_stride + position / EXL3_PAGE] * EXL3_PAGE + position % EXL3_PAGE;
#pragma unroll
      for (int q = 0; q < QUERIES; q++) score[q][j] = 0.f;
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
        if (g < fresh(groups)) {
          const float k = read_group(c, 0, fresh(c.k_bits), place[j], all_groups, kv_head * groups + g);
#pragma unroll
          for (int q = 0; q < QUERIES; q++) score[q][j] += query[q][g] * k;
        }
    }
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
      float top = best[q];
#pragma unroll
      for (int j = 0; j < kBatch; j++) {
        float s = warp_sum(score[q][j]);
        if (a.softcap > 0.f) s = a.softcap * hyperbolic_tangent(s / a.softcap);
        score[q][j] = p0 + j < to ? s : -1e30f;
        top = larger(top, score[q][j]);
      }
      const float keep = fast_exp(best[q] - top);
      best[q] = top;
      total[q] *= keep;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) sum[q][g] *= keep;
#pragma unroll
      for (int j = 0; j < kBatch; j++) {
        score[q][j] = p0 + j < to ? fast_exp(score[q][j] - top) : 0.f;
        total[q] += score[q][j];
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; j++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
        if (g < fresh(groups)) {
          const float v = read_group(c, 1, fresh(c.v_bits), place[j], all_groups, kv_head * groups + g);
#pragma unroll
          for (int q = 0; q < QUERIES; q++) sum[q][g] += score[q][j] * v;
        }
  }
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    float* mine = merged + (warp * QUERIES + q) * kPart;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) mine[g * 32 + lane] = sum[q][g];
    if (lane == 0) {
      mine[GROUPS * 32] = best[q];
      mine[GROUPS * 32 + 1] = total[q];
    }
  }
  shared_sync();
  // warp w merges the four warps' shares of queries w, w + 4 ...; then the last block those of all splits
  for (int q = warp; q < queries; q += kAttentionWarps) {
    const float* share = merged + q * kPart;
    float top = -1e30f, all = 0.f;
    for (int w = 0; w < kAttentionWarps; w++) top = larger(top, share[w * QUERIES * kPart + GROUPS * 32]);
    for (int w = 0; w < kAttentionWarps; w++)
      all += share[w * QUERIES * kPart + GROUPS * 32 + 1] * fast_exp(share[w * QUERIES * kPart + GROUPS * 32] - top);
    float* part = args.parts + (((int64_t)token * a.heads + head0 + q) * args.splits + split) * (c.head_dim + 2);
    for (int g = 0; g < groups; g++) {
      float v = 0.f;
      for (int w = 0; w < kAttentionWarps; w++)
        v += share[w * QUERIES * kPart + g * 32 + lane] * fast_exp(share[w * QUERIES * kPart + GROUPS * 32] - top);
      part[g * 32 + lane] = v;
    }
    if (lane == 0) {
      part[c.head_dim] = top;
      part[c.head_dim + 1] = all;
    }
  }
  int* counter = args.counters + (int64_t)token * c.kv_heads * chunks + kv_head * chunks + chunk;
  if (take_number(counter, space) != args.splits - 1) return;
  for (int q = warp; q < queries; q += kAttentionWarps) {
    const float* part = args.parts + ((int64_t)token * a.heads + head0 + q) * args.splits * (c.head_dim + 2);
    void* y = row_of(a.y, token * a.y_stride + (int64_t)(head0 + q) * c.head_dim, a.dtype);
    float top = a.sinks ? a.sinks[head0 + q] : -1e30f;
    for (int s = 0; s < args.splits; s++) top = larger(top, part[s * (c.head_dim + 2) + c.head_dim]);
    float all = a.sinks ? fast_exp(a.sinks[head0 + q] - top) : 0.f;
    for (int s = 0; s < args.splits; s++) all += part[s * (c.head_dim + 2) + c.head_dim + 1] * fast_exp(part[s * (c.head_dim + 2) + c.head_dim] - top);
    for (int g = 0; g < groups; g++) {
      float v = 0.f;
      for (int s = 0; s < args.splits; s++) v += part[s * (c.head_dim + 2) + g * 32 + lane] * fast_exp(part[s * (c.head_dim + 2) + c.head_dim] - top);
      v /= all;
      if (c.v_bits != 16) v = hadamard32(v);
      store(y, g * 32 + lane, a.dtype, row < 0 ? 0.f : v);  // padding
    }
  }
  if (thread_id() == 0) *counter = 0;
}

}  // namespace rdna
