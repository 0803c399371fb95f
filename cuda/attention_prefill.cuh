// Prefill attention (flash-attention) on tensor cores, over the pages where they lie.
//
// A block takes one key/value head and up to 128 query rows that share it: consecutive tokens of a row of the batch times the heads of the
// group. Tiles of 64 positions start at multiples of 64; a masked position adds an exact zero and no row sees another, so a token's result
// does not depend on its neighbours. Quantized tiles are decoded once for all rows, in the rotated basis.
#pragma once
#include "attention_decode.cuh"

namespace exl3 {

template <int D>
struct Prefill {
  static constexpr int kWarps = D <= 128 ? 4 : 8, kThreads = kWarps * 32;
  static constexpr int kRows = kPrefillRows / kWarps, kFrags = kRows / 16;  // query rows of a warp
  static constexpr int kPitch = half_pitch(D) * 2, kQueryBytes = kPrefillRows * kPitch, kSideBytes = kPositions * kPitch;
};
// A tile of a quantized side to halves, a group a thread. Rows that are not there have zero scales.
template <int D, int THREADS>
__device__ __forceinline__ void decode_tile(uint8_t* to, const uint8_t* tile, const AttentionSide& s, int64_t place, int kv_heads, int kv_head,
                                            float compand, uint32_t ones) {
  constexpr int kGroups = D / 32;
  for (int i = threadIdx.x; i < kPositions * kGroups; i += THREADS) {
    const int r = i % kPositions, group = i / kPositions;
    uint4* out = (uint4*)(to + r * half_pitch(D) * 2 + group * 64);
    if (s.bits == 16) {
      const uint4* from = (const uint4*)(tile + r * s.pitch + group * 64);
      for (int n = 0; n < 4; n++) out[n] = from[n];
      continue;
    }
    const uint16_t scale = scales_of<D>(tile, s, r, place, kv_heads, kv_head)[group];
    uint32_t v[16];
#define EXL3_CALL(BITS) decode_group<BITS>(tile + r * s.pitch + group * 4 * BITS, scale, compand, ones, v)
    EXL3_BY_BITS(s.bits, EXL3_CALL)
#undef EXL3_CALL
#pragma unroll
    for (int n = 0; n < 4; n++) out[n] = make_uint4(v[4 * n], v[4 * n + 1], v[4 * n + 2], v[4 * n + 3]);
  }
}

// Unscaled 32-point Hadamard transforms along dims: a lane of a quad holds dims 8t + 2q and 8t + 2q + 1 of row e / 2 in out[t][e].
template <int T>
__device__ __forceinline__ void hadamard_rows(float (&out)[T][4], int q) {
#pragma unroll
  for (int t = 0; t < T; t++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float &a = out[t][2 * h], &b = out[t][2 * h + 1];
      const float s = a + b, d = a - b;
      a = s;
      b = d;
    }
#pragma unroll
  for (int t = 0; t < T; t++)
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int m = 1; m < 4; m <<= 1) {
        const float other = __shfl_xor_sync(~0u, out[t][e], m);
        out[t][e] = q & m ? other - out[t][e] : out[t][e] + other;
      }
#pragma unroll
  for (int m = 1; m < 4; m <<= 1)
#pragma unroll
    for (int t = 0; t < T; t++)
      if (!(t & m))
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float s = out[t][e] + out[t | m][e], d = out[t][e] - out[t | m][e];
          out[t][e] = s;
          out[t | m][e] = d;
        }
}

template <int D, bool CODES>
__global__ void __launch_bounds__(Prefill<D>::kThreads, D <= 128 ? 2 : 1) prefill_attention(const __grid_constant__ AttentionParams p) {
#if __CUDA_ARCH__ >= 800
  using P = Prefill<D>;
  constexpr int kFrags = P::kFrags, kThreads = P::kThreads;
  extern __shared__ __align__(128) uint8_t shared[];
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const exl3_attention_args& a = p.a;
  const exl3_cache_layer& c = a.cache;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  // the last tokens see most: their blocks of all heads come first, so that short ones fill the end
  const int order = blockIdx.y * gridDim.x + blockIdx.x, kv_head = order % gridDim.y / p.chunks, chunk = order % gridDim.y % p.chunks;
  const int block = gridDim.x - 1 - order / gridDim.y;
  const int heads = min(kPrefillRows, p.group - chunk * kPrefillRows), head0 = kv_head * p.group + chunk * kPrefillRows;
  uint8_t* query = shared;
  uint8_t* ring = shared + P::kQueryBytes + (CODES ? 2 * P::kSideBytes : 0);
  const int k_bytes = CODES ? p.side[0].bytes : P::kSideBytes, stage_bytes = k_bytes + (CODES ? p.side[1].bytes : P::kSideBytes);

  const SideCopy copy_k(p.side[0], c, 0, kv_head, threadIdx.x), copy_v(p.side[1], c, 1, kv_head, threadIdx.x);

  const int end = min(a.tokens, (block + 1) * p.tokens_a_tile);
  int token = block * p.tokens_a_tile, tokens;
  for (; token < end; token += tokens) {
    const int row = a.token_row[token], position = a.positions[token];
    // the run of tokens of this row from here on
    tokens = 0;
    for (bool goes_on = true; goes_on && token + tokens < end;) {
      const int t = token + tokens + lane;
      const bool follows = t < end && (row < 0 ? a.token_row[t] < 0 : a.token_row[t] == row && a.positions[t] == position + tokens + lane);
      const unsigned all = __ballot_sync(~0u, follows);
      const int n = all == ~0u ? 32 : __ffs(~all) - 1;
      tokens += n;
      goes_on = n == 32;
    }
    const int rows = tokens * heads;
    __syncthreads();  // the run before has read the queries
    if (row < 0) {
      for (int i = threadIdx.x; i < rows * D; i += kThreads)
        store(a.y, (token + i / (heads * D)) * a.y_stride + (int64_t)head0 * D + i % (heads * D), a.dtype, 0.f);
      continue;
    }
    const int highest = position + tokens - 1, lowest = a.window > 0 ? max(0, position - a.window + 1) : 0;
    const int first = lowest / kPositions, last = highest / kPositions;
    const int* table = a.block_table + (int64_t)row * a.table_stride;
    auto place_of = [&](int tile) { return (int64_t)table[tile * kPositions / EXL3_PAGE] * EXL3_PAGE + tile * kPositions % EXL3_PAGE; };
    auto fetch = [&](int tile, int stage) {
      if (tile <= last) {
        uint8_t* to = ring + stage * stage_bytes;
        const int page = table[tile * kPositions / EXL3_PAGE], in_page = tile * kPositions % EXL3_PAGE, valid = highest + 1 - tile * kPositions;
        if constexpr (CODES) {
          copy_k.operator()<D, kPositions>(to, p.side[0], page, in_page, c.kv_heads, valid);
          copy_v.operator()<D, kPositions>(to + k_bytes, p.side[1], page, in_page, c.kv_heads, valid);
          if (p.side[0].bits != 16)
            copy_scales<D, kPositions, kThreads>(to, p.side[0], c.k_scale, page, in_page, c.kv_heads, kv_head, valid, threadIdx.x);
          if (p.side[1].bits != 16)
            copy_scales<D, kPositions, kThreads>(to + k_bytes, p.side[1], c.v_scale, page, in_page, c.kv_heads, kv_head, valid, threadIdx.x);
        } else {
          copy_side<D, 16, kPositions, kThreads>(to, c.k, page, in_page, c.kv_heads, kv_head, valid, threadIdx.x);
          copy_side<D, 16, kPositions, kThreads>(to + k_bytes, c.v, page, in_page, c.kv_heads, kv_head, valid, threadIdx.x);
        }
      }
      ptx::copy_commit();
    };
    const bool ahead = EXL3_MUCH_SHARED || p.stages == 2;  // else there is room for one tile only
    auto query_of = [&](int r) { return (int64_t)(token + r / heads) * a.q_stride + (int64_t)(head0 + r % heads) * D; };
    const bool turned = CODES && p.side[0].bits != 16, copied = !turned && a.dtype == EXL3_F16 && a.q_stride % 8 == 0 && ((uintptr_t)a.q & 15) == 0;
    if (copied) {  // with the first tile
      for (int i = threadIdx.x; i < kPrefillRows * (D / 8); i += kThreads) {
        const int r = i / (D / 8), piece = i % (D / 8);
        ptx::copy_or_zero<16>(query + r * P::kPitch + piece * 16, (const uint16_t*)a.q + query_of(min(r, rows - 1)) + piece * 8, r < rows);
      }
    }
    if (ahead) fetch(first, 0);
    if (!copied) {
      constexpr int kTogether = 8;  // loads in flight
      for (int i0 = warp * kTogether; i0 < kPrefillRows * (D / 32); i0 += P::kWarps * kTogether) {
        float v[kTogether];
#pragma unroll
        for (int n = 0; n < kTogether; n++) {
          const int r = (i0 + n) / (D / 32), group = (i0 + n) % (D / 32);
          v[n] = r < rows ? load(a.q, query_of(r) + group * 32 + lane, a.dtype) : 0.f;
        }
#pragma unroll
        for (int n = 0; n < kTogether; n++) {
          const int r = (i0 + n) / (D / 32), group = (i0 + n) % (D / 32);
          if (turned) v[n] = hadamard32(v[n]);
          *(uint16_t*)(query + r * P::kPitch + (group * 32 + lane) * 2) = float_to_half(v[n]);
        }
      }
    }
    int limit[kFrags][2];
    float out[kFrags][D / 8][4], best[kFrags][2], total[kFrags][2];
#pragma unroll
    for (int f = 0; f < kFrags; f++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int r = warp * P::kRows + f * 16 + g + 8 * h;
        limit[f][h] = r < rows ? position + r / heads : -1;
        best[f][h] = kNothing;
        total[f][h] = 0.f;
      }
#pragma unroll
      for (int t = 0; t < D / 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[f][t][e] = 0.f;
    }
    const float scale = a.softcap > 0.f ? a.scale / a.softcap : a.scale * kLog2e;

    for (int tile = first; tile <= last; tile++) {
      if (ahead) {
        fetch(tile + 1, (tile + 1 - first) & 1);
        ptx::copy_wait<1>();
      } else {
        fetch(tile, 0);
        ptx::copy_wait<0>();
      }
      __syncthreads();
      const uint8_t* keys = ring + (ahead ? (tile - first) & 1 : 0) * stage_bytes;
      const uint8_t* values = keys + k_bytes;
      if (CODES) {
        uint8_t* decoded = shared + P::kQueryBytes;
        const int64_t place = D % 64 ? place_of(tile) : 0;
        decode_tile<D, kThreads>(decoded, keys, p.side[0], place, c.kv_heads, kv_head, c.compand, p.ones);
        decode_tile<D, kThreads>(decoded + P::kSideBytes, values, p.side[1], place, c.kv_heads, kv_head, c.compand, p.ones);
        __syncthreads();
        keys = decoded;
        values = decoded + P::kSideBytes;
      }
      float score[kFrags][kPositions / 8][4];
#pragma unroll
      for (int f = 0; f < kFrags; f++)
#pragma unroll
        for (int n = 0; n < kPositions / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) score[f][n][e] = 0.f;
      // operands are read one product ahead
      uint32_t qs[2][kFrags][4], b[2][4];
      auto read_queries = [&](int step) {
#pragma unroll
        for (int f = 0; f < kFrags; f++)
          ptx::load_matrices(qs[step & 1][f], query + (warp * P::kRows + f * 16 + (lane & 15)) * P::kPitch + step * 32 + (lane >> 4) * 16);
      };
      auto read_keys = [&](int step, int n) {  // positions 0-7 and 8-15 by dims 0-7 and 8-15
        ptx::load_matrices(b[n & 1], keys + (n * 16 + (lane & 7) + (lane >> 4) * 8) * P::kPitch + step * 32 + ((lane >> 3) & 1) * 16);
      };
      constexpr int kSteps = D / 16, kParts = kPositions / 16;
      read_queries(0);
      read_keys(0, 0);
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        if (step + 1 < kSteps) read_queries(step + 1);
#pragma unroll
        for (int n = 0; n < kParts; n++) {
          if (n + 1 < kParts)
            read_keys(step, n + 1);
          else if (step + 1 < kSteps)
            read_keys(step + 1, 0);
#pragma unroll
          for (int f = 0; f < kFrags; f++) {
            const uint32_t(&x)[4] = qs[step & 1][f];
            ptx::mma(score[f][2 * n], x[0], x[1], x[2], x[3], b[n & 1][0], b[n & 1][1]);
            ptx::mma(score[f][2 * n + 1], x[0], x[1], x[2], x[3], b[n & 1][2], b[n & 1][3]);
          }
        }
      }
      const bool edge = tile * kPositions + kPositions - 1 > position || (a.window > 0 && tile * kPositions <= highest - a.window);
#pragma unroll
      for (int f = 0; f < kFrags; f++) {
        if (a.softcap > 0.f) {
#pragma unroll
          for (int n = 0; n < kPositions / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) score[f][n][e] = a.softcap * kLog2e * hyperbolic_tangent(score[f][n][e] * scale);
        } else {
#pragma unroll
          for (int n = 0; n < kPositions / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) score[f][n][e] *= scale;
        }
        if (edge)
#pragma unroll
          for (int n = 0; n < kPositions / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int where = tile * kPositions + n * 8 + 2 * q + (e & 1), most = limit[f][e >> 1];
              if (where > most || (a.window > 0 && where <= most - a.window)) score[f][n][e] = -INFINITY;
            }
        float top[2] = {kNothing, kNothing};
#pragma unroll
        for (int n = 0; n < kPositions / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) top[e >> 1] = fmaxf(top[e >> 1], score[f][n][e]);
        if (__any_sync(~0u, top[0] > best[f][0] + kSlack || top[1] > best[f][1] + kSlack)) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
            const float now = top[h] > best[f][h] + kSlack ? top[h] : best[f][h], keep = ptx::exp2(best[f][h] - now);
            best[f][h] = now;
            total[f][h] *= keep;
#pragma unroll
            for (int t = 0; t < D / 8; t++) {
              out[f][t][2 * h] *= keep;
              out[f][t][2 * h + 1] *= keep;
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kPositions / 8; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            score[f][n][e] = ptx::exp2(score[f][n][e] - best[f][e >> 1]);
            total[f][e >> 1] += score[f][n][e];
          }
      }
      auto read_values = [&](int i) {  // positions 0-7 and 8-15 of dims 16t .. +7, then of the next eight
        const int n = i / (D / 16), t = i % (D / 16);
        ptx::load_matrices_transposed(b[i & 1], values + (n * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * P::kPitch + t * 32 + (lane >> 4) * 16);
      };
      read_values(0);
#pragma unroll
      for (int n = 0; n < kPositions / 16; n++) {
        uint32_t w[kFrags][4];
#pragma unroll
        for (int f = 0; f < kFrags; f++)
#pragma unroll
          for (int i = 0; i < 4; i++) w[f][i] = ptx::pack(score[f][2 * n + i / 2][2 * (i % 2)], score[f][2 * n + i / 2][2 * (i % 2) + 1]);
#pragma unroll
        for (int t = 0; t < D / 16; t++) {
          const int i = n * (D / 16) + t;
          if (i + 1 < kPositions / 16 * (D / 16)) read_values(i + 1);
#pragma unroll
          for (int f = 0; f < kFrags; f++) {
            ptx::mma(out[f][2 * t], w[f][0], w[f][1], w[f][2], w[f][3], b[i & 1][0], b[i & 1][1]);
            ptx::mma(out[f][2 * t + 1], w[f][0], w[f][1], w[f][2], w[f][3], b[i & 1][2], b[i & 1][3]);
          }
        }
      }
      __syncthreads();
    }
    ptx::copy_wait<0>();

#pragma unroll
    for (int f = 0; f < kFrags; f++) {
      const bool rotated = CODES && p.side[1].bits != 16;
      if (rotated) hadamard_rows(out[f], q);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float all = total[f][h];
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        const int r = warp * P::kRows + f * 16 + g + 8 * h;
        if (r >= rows) continue;
        const int head = head0 + r % heads;
        float factor = 1.f;
        if (a.sinks) {
          const float sink = a.sinks[head] * kLog2e, most = fmaxf(best[f][h], sink);
          factor = ptx::exp2(best[f][h] - most);
          all = all * factor + ptx::exp2(sink - most);
        }
        factor *= (rotated ? 0.17677669529663688f : 1.f) / all;
        const int64_t at = (token + r / heads) * a.y_stride + (int64_t)head * D + 2 * q;
#pragma unroll
        for (int t = 0; t < D / 8; t++) {
          const float x = out[f][t][2 * h] * factor, y = out[f][t][2 * h + 1] * factor;
          if (a.dtype == EXL3_F16) {
            *(uint32_t*)((uint16_t*)a.y + at + t * 8) = ptx::pack(x, y);
          } else {
            store(a.y, at + t * 8, a.dtype, x);
            store(a.y, at + t * 8 + 1, a.dtype, y);
          }
        }
      }
    }
  }
#endif
}

template <int D, AttentionKind KIND>
AttentionKernels attention_kernels() {
  return {(const void*)decode_attention<D, KIND>, (const void*)prefill_attention<D, KIND != kHalves>, Prefill<D>::kThreads};
}
template <int D>
AttentionKernels attention_kernels(AttentionKind kind) {
  switch (kind) {
    case kHalves: return attention_kernels<D, kHalves>();
    case kFourBits: return attention_kernels<D, kFourBits>();
    case kEightBits: return attention_kernels<D, kEightBits>();
    default: return attention_kernels<D, kAnyCodes>();
  }
}

}  // namespace exl3
