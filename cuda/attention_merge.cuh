// The end of a split of decode attention: its warps' sums become one, and one split of a row adds up all.
//
// Sums travel as in the product (product.cuh): a word that is zero has not arrived, a sum of zero travels as -0, and who has read leaves zeros.
#pragma once
#include "attention_products.cuh"

namespace exl3 {

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

__device__ __forceinline__ float not_zero(float v) { return v == 0.f ? -0.f : v; }
__device__ __forceinline__ bool is_there(float v) { return __float_as_uint(v) != 0; }

// merge: [warp][row][D + 4] floats: sums, highest score and sum of weights. One row a warp.
template <int D, bool CODES>
__device__ __forceinline__ void merge_rows(const AttentionParams& p, const float* merge, int token, int head0, int heads, int rows, int split,
                                           int active, bool merges, int v_bits) {
  constexpr int kDecodeWarps = decode_warps(D), kRowFloats = D + 4, kWarpFloats = kColumns * kRowFloats, kParts = (D + 127) / 128;
  constexpr int kEach = kMostSplits / 32, kBatch = 16;
  const exl3_attention_args& a = p.a;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int r = warp; r < rows; r += kDecodeWarps) {
    const int of_token = token + r / heads, head = head0 + r % heads;
    const float* part = merge + r * kRowFloats;
    float most = kNothing, all = 0.f, sum[kParts][4];
#pragma unroll
    for (int i = 0; i < kParts; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
#pragma unroll
    for (int n = 0; n < kDecodeWarps; n++) most = fmaxf(most, part[n * kWarpFloats + D]);
#pragma unroll
    for (int n = 0; n < kDecodeWarps; n++) {
      const float weight = ptx::exp2(part[n * kWarpFloats + D] - most);
      all += part[n * kWarpFloats + D + 1] * weight;
#pragma unroll
      for (int i = 0; i < kParts; i++) {
        const int d = i * 128 + 4 * lane;
        const float4 x = d < D ? *(const float4*)(part + n * kWarpFloats + d) : make_float4(0.f, 0.f, 0.f, 0.f);
        sum[i][0] += weight * x.x;
        sum[i][1] += weight * x.y;
        sum[i][2] += weight * x.z;
        sum[i][3] += weight * x.w;
      }
    }
    const float sink = a.sinks ? a.sinks[head] * kLog2e : kNothing;
    const int64_t slot = ((int64_t)of_token * a.heads + head) * p.splits;
    float* const partial = p.partial + slot * D;
    float* const stats = p.stats + slot * 4;
    float4 stat[kEach];  // of split lane + 32 h
    float weight[kEach], scale = 0.f;
    if (active == 1) {
      const float top = fmaxf(sink, most);
      scale = ptx::exp2(most - top);
      all = all * scale + (a.sinks ? ptx::exp2(sink - top) : 0.f);
    } else {
#pragma unroll
      for (int i = 0; i < kParts; i++)
        if (i * 128 + 4 * lane < D)
          ptx::store_relaxed(partial + split * D + i * 128 + 4 * lane,
                             make_float4(not_zero(sum[i][0]), not_zero(sum[i][1]), not_zero(sum[i][2]), not_zero(sum[i][3])));
      if (lane == 0) ptx::store_relaxed(stats + split * 4, make_float4(not_zero(most), not_zero(all), 0.f, 0.f));
      if (!merges) continue;
#pragma unroll
      for (int h = 0; h < kEach; h++)
        stat[h] = lane + 32 * h < active ? ptx::load_relaxed(stats + (lane + 32 * h) * 4) : make_float4(kNothing, -0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      const bool mine = i * 128 + 4 * lane < D;  // lanes beyond the head do as the first
      float v[4] = {scale * sum[i][0], scale * sum[i][1], scale * sum[i][2], scale * sum[i][3]};
#pragma unroll 1
      for (int first = 0; first < active && active > 1; first += kBatch) {
        float* const from = partial + first * D + i * 128 + (mine ? 4 * lane : 0);
        float4 x[kBatch];
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int n = 0; n < kBatch; n++) x[n] = first + n < active ? ptx::load_relaxed(from + n * D) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
          for (int n = 0; n < kBatch; n++)
            missing |= first + n < active && (!is_there(x[n].x) || !is_there(x[n].y) || !is_there(x[n].z) || !is_there(x[n].w));
        } while (__any_sync(~0u, missing));
        if (i == 0 && first == 0) {
          float top = sink;
#pragma unroll
          for (int h = 0; h < kEach; h++) {
            while (!is_there(stat[h].x) || !is_there(stat[h].y)) stat[h] = ptx::load_relaxed(stats + (lane + 32 * h) * 4);
            if (lane + 32 * h < active) ptx::store_relaxed(stats + (lane + 32 * h) * 4, make_float4(0.f, 0.f, 0.f, 0.f));
            top = fmaxf(top, stat[h].x);
          }
          top = warp_max(top);
          all = 0.f;
#pragma unroll
          for (int h = 0; h < kEach; h++) {
            weight[h] = ptx::exp2(stat[h].x - top);
            all += stat[h].y * weight[h];
          }
          all = warp_sum(all) + (a.sinks ? ptx::exp2(sink - top) : 0.f);
        }
        float of_lane = weight[0];
#pragma unroll
        for (int h = 1; h < kEach; h++)
          if (first >= 32 * h) of_lane = weight[h];
#pragma unroll
        for (int n = 0; n < kBatch; n++) {
          const float w = __shfl_sync(~0u, of_lane, (first + n) & 31);
          v[0] += w * x[n].x;
          v[1] += w * x[n].y;
          v[2] += w * x[n].z;
          v[3] += w * x[n].w;
          if (first + n < active) ptx::store_relaxed(from + n * D, make_float4(0.f, 0.f, 0.f, 0.f));
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] = all > 0.f ? v[e] / all : 0.f;
      if (CODES && v_bits != 16) hadamard32_of_four(v);
      if (mine)
#pragma unroll
        for (int e = 0; e < 4; e++) store(a.y, of_token * a.y_stride + (int64_t)head * D + i * 128 + 4 * lane + e, a.dtype, v[e]);
    }
  }
}

}  // namespace exl3
