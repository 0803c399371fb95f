// Decode attention over the paged cache (flash-decoding), for fp16 and 2 to 8 bit keys and values, on tensor cores.
//
// A block of four warps owns one key/value head, up to 16 query rows that share it (heads of the group times consecutive tokens of one
// row of the batch) and the units of 64 positions u with u % splits == its split. A warp takes one run of 16 positions of each unit through its own ring of
// asynchronous copies and keeps its own softmax. Which positions a split and a warp see depends on the position alone, and a masked position
// adds an exact zero, so a token's result does not depend on what shares the step with it. The last split to arrive merges, in order.
#include "parts.h"
#include "ptx.cuh"

#include "../cpp/gpu/numbers.h"

namespace exl3 {

constexpr int kAttentionWarps = 4, kQueryRows = 16, kRun = 16, kUnit = kAttentionWarps * kRun;  // positions: of a step of a warp, of a block
constexpr float kNothing = -1e30f;

struct AttentionParams {
  exl3_attention_args a;
  float* partial;      // [token][head][split][head_dim + 2]
  int32_t* counters;   // [token][kv head * chunk], zero before and after
  int32_t splits, group, chunks, tokens_a_tile;  // heads of one kv head; chunks of at most 16 of them
};

// ------------------------------------------------------------------------------------------------ quantized groups
// The bits of one plane into the mantissas of 16 pairs of halves: code j in the low half of pair j, code j + 16 in its high half. A plane of
// width W comes after the words of the wider ones and above the bits of the narrower ones.
template <int BITS, int W>
__device__ __forceinline__ void unpack_plane(const uint32_t* words, uint32_t (&pair)[16]) {
  if constexpr ((BITS & W) != 0) {
    constexpr int kWord = BITS & ~(2 * W - 1), kTarget = 10 - BITS + (BITS & (W - 1));
    constexpr uint32_t kMask = ((1u << W) - 1) << kTarget, kBoth = kMask | kMask << 16;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const int part = j / (16 / W), shift = W * (j % (16 / W)) - kTarget;  // half words of codes 0 .. 15; beside them those of 16 .. 31
      const uint32_t low = words[kWord + part / 2], high = words[kWord + part / 2 + W / 2];
      const uint32_t t = W == 1 ? low : __byte_perm(low, high, part % 2 ? 0x7632 : 0x5410);
      pair[j] |= (shift >= 0 ? t >> (shift & 31) : t << (-shift & 31)) & kBoth;
    }
  }
}

// 32 codes of BITS -> 16 half2 of decoded values in the rotated basis, natural order. With a code on top of its mantissa a half is
// 1 + code / 2^b.
template <int BITS>
__device__ __forceinline__ void unpack_halves(const uint32_t* words, __half2 scale, uint32_t (&out)[16]) {
  uint32_t pair[16];
#pragma unroll
  for (int j = 0; j < 16; j++) pair[j] = 0x3c003c00u;
  unpack_plane<BITS, 8>(words, pair);
  unpack_plane<BITS, 4>(words, pair);
  unpack_plane<BITS, 2>(words, pair);
  unpack_plane<BITS, 1>(words, pair);
  const __half2 two = __float2half2_rn(2.f), middle = __float2half2_rn(1.f / (1 << BITS) - 3.f);
#pragma unroll
  for (int j = 0; j < 16; j++) {  // level = (2 code + 1) / 2^b - 1, exact; then one rounding
    const uint32_t both = __byte_perm(pair[2 * j % 16], pair[2 * j % 16 + 1], j < 8 ? 0x5410 : 0x7632);
    const __half2 value = __hmul2(__hfma2(*(const __half2*)&both, two, middle), scale);
    out[j] = *(const uint32_t*)&value;
  }
}

__device__ __forceinline__ void compand_halves(uint32_t (&v)[16], float scale, float a) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float2 t = __half22float2(*(const __half2*)&v[i]);
    const __half2 h = __floats2half2_rn(t.x * (a + (1.f - a) * t.x * t.x) * scale, t.y * (a + (1.f - a) * t.y * t.y) * scale);
    v[i] = *(const uint32_t*)&h;
  }
}

template <int D>
struct AttentionLayout {
  static constexpr int kPitch = D + 8;                  // halves between rows: ldmatrix without bank conflicts
  static constexpr int kTile = kRun * kPitch * 2;       // bytes of 16 positions, decoded
  static constexpr int kGroups = D / 32;
  static __host__ __device__ int raw_row(int bits) { return bits == 16 ? kPitch * 2 : (kGroups * bits * 4 + 2 * kGroups + 4 + 15) / 16 * 16; }
  static __host__ __device__ int stage(int k_bits, int v_bits) { return kRun * (raw_row(k_bits) + raw_row(v_bits)); }
  static __host__ __device__ int stages(int k_bits, int v_bits) { return D > 128 && k_bits == 16 && v_bits == 16 ? 2 : 3; }
  static __host__ __device__ int work(int k_bits, int v_bits) { return (k_bits == 16 ? 0 : kTile) + (v_bits == 16 ? 0 : kTile); }
  static __host__ __device__ int warp(int k_bits, int v_bits) { return stages(k_bits, v_bits) * stage(k_bits, v_bits) + work(k_bits, v_bits); }
  static __host__ __device__ int total(int k_bits, int v_bits) {
    const int streams = kAttentionWarps * warp(k_bits, v_bits), merge = kAttentionWarps * kQueryRows * (D + 4) * 4;
    return kTile + (streams > merge ? streams : merge);
  }
};

// Copies the stored form of positions first .. first+15 of one side; those past `last` are zero.
template <int D>
__device__ __forceinline__ void fetch_side(uint8_t* to, const exl3_cache_layer& c, int side, int64_t place, int kv_head, int valid, int lane) {
  using L = AttentionLayout<D>;
  const int bits = side ? c.v_bits : c.k_bits;
  const uint8_t* data = (const uint8_t*)(side ? c.v : c.k);
  const int row_bytes = L::raw_row(bits);
  if (bits == 16) {
    constexpr int kChunks = D / 8;
    for (int i = lane; i < kRun * kChunks; i += 32) {
      const int r = i / kChunks, chunk = i % kChunks;
      uint8_t* at = to + r * row_bytes + chunk * 16;
      if (r < valid)
        ptx::copy16(at, data + ((place + r) * c.kv_heads + kv_head) * (D * 2) + chunk * 16);
      else
        *(uint4*)at = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const int words = L::kGroups * bits, all_groups = c.kv_heads * L::kGroups;
  const uint8_t* scales = (const uint8_t*)(side ? c.v_scale : c.k_scale);
  const bool wide = words % 4 == 0;
  const int pieces = wide ? words / 4 : words, size = wide ? 16 : 4;
  for (int i = lane; i < valid * pieces; i += 32) {
    const int r = i / pieces, piece = i % pieces;
    const uint8_t* from = data + ((place + r) * all_groups + kv_head * L::kGroups) * (int64_t)bits * 4 + piece * size;
    uint8_t* at = to + r * row_bytes + piece * size;
    if (wide)
      ptx::copy16(at, from);
    else
      ptx::copy4(at, from);
  }
  constexpr int kScaleWords = (2 * L::kGroups + 2 + 3) / 4;  // with the half before, where the row starts at an odd half
  for (int i = lane; i < valid * kScaleWords; i += 32) {
    const int r = i / kScaleWords, piece = i % kScaleWords;
    const int64_t at = ((place + r) * all_groups + kv_head * L::kGroups) * 2;
    if (piece * 4 >= (int)(at & 2) + 2 * L::kGroups) continue;
    ptx::copy4(to + r * row_bytes + words * 4 + piece * 4, scales + at / 4 * 4 + piece * 4);
  }
}

// Decodes 16 positions of a quantized side into a tile of halves. Lane l takes position l % 16.
template <int D>
__device__ __forceinline__ void decode_side(uint8_t* tile, const uint8_t* raw, const exl3_cache_layer& c, int side, int64_t place, int kv_head,
                                            int valid, int lane) {
  using L = AttentionLayout<D>;
  const int bits = side ? c.v_bits : c.k_bits, row_bytes = L::raw_row(bits), r = lane % 16;
  const int all_groups = c.kv_heads * L::kGroups;
  const bool companded = c.compand > 0.f && c.compand < 1.f;
#pragma unroll 1
  for (int group = lane / 16; group < L::kGroups; group += 2) {
    uint32_t v[16];
    if (r < valid) {
      const uint8_t* row = raw + r * row_bytes;
      const int odd = (int)((((place + r) * all_groups + kv_head * L::kGroups) * 2) & 2);
      const float scale = half_to_float(*(const uint16_t*)(row + L::kGroups * bits * 4 + odd + group * 2));
      const __half2 factor = __float2half2_rn(companded ? 1.f : scale);
      const uint32_t* words = (const uint32_t*)row + group * bits;
      uint32_t w[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i < bits) w[i] = words[i];
      switch (bits) {
        case 2: unpack_halves<2>(w, factor, v); break;
        case 3: unpack_halves<3>(w, factor, v); break;
        case 4: unpack_halves<4>(w, factor, v); break;
        case 5: unpack_halves<5>(w, factor, v); break;
        case 6: unpack_halves<6>(w, factor, v); break;
        case 7: unpack_halves<7>(w, factor, v); break;
        default: unpack_halves<8>(w, factor, v); break;
      }
      if (companded) compand_halves(v, scale, c.compand);
    } else {
#pragma unroll
      for (int i = 0; i < 16; i++) v[i] = 0;
    }
    uint4* out = (uint4*)(tile + r * L::kPitch * 2 + group * 64);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = make_uint4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
}

template <int D>
__global__ void __launch_bounds__(kAttentionWarps * 32, D <= 128 ? 3 : 1) attention_kernel(const __grid_constant__ AttentionParams p) {
#if __CUDA_ARCH__ >= 800
  using L = AttentionLayout<D>;
  constexpr int kSteps = D / 16;
  constexpr bool kKeepQuery = D <= 128;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int limits[kQueryRows];  // position of each query row's token, -1: none
  __shared__ int last_arrived;
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const exl3_attention_args& a = p.a;
  const exl3_cache_layer& c = a.cache;
  const int token = blockIdx.x, kv_head = blockIdx.y / p.chunks, chunk = blockIdx.y % p.chunks, split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row = a.token_row[token], position = a.positions[token];
  const int heads = min(kQueryRows, p.group - chunk * kQueryRows), head0 = kv_head * p.group + chunk * kQueryRows;

  if (row < 0) {
    if (split == 0)
      for (int i = threadIdx.x; i < heads * D; i += kAttentionWarps * 32)
        store(a.y, token * a.y_stride + (int64_t)(head0 + i / D) * D + i % D, a.dtype, 0.f);
    return;
  }
  // tiles of consecutive tokens of one row start at multiples of tokens_a_tile, or where a run of tokens does
  const int per_tile = p.tokens_a_tile;
  if (position % per_tile != 0 && token > 0 && a.token_row[token - 1] == row && a.positions[token - 1] == position - 1) return;
  int tokens = 1;
  while (tokens < per_tile && token + tokens < a.tokens && (position + tokens) % per_tile != 0 && a.token_row[token + tokens] == row &&
         a.positions[token + tokens] == position + tokens)
    tokens++;
  const int highest = position + tokens - 1, lowest = a.window > 0 ? max(0, position - a.window + 1) : 0;
  const int first_unit = lowest / kUnit, last_unit = highest / kUnit;
  const int active = min(p.splits, last_unit - first_unit + 1);  // splits that have a unit
  const int from_first = (split - first_unit % p.splits + p.splits) % p.splits;
  if (from_first >= active) return;

  // this warp's runs of positions: one of each unit of the split
  uint8_t* streams = shared + L::kTile + warp * L::warp(c.k_bits, c.v_bits);
  const int stages = L::stages(c.k_bits, c.v_bits), stage_bytes = L::stage(c.k_bits, c.v_bits);
  uint8_t* k_work = streams + stages * stage_bytes;
  uint8_t* v_work = k_work + (c.k_bits == 16 ? 0 : L::kTile);
  const int* table = a.block_table + (int64_t)row * a.table_stride;
  struct Cursor {
    int unit;
  };
  auto start_of = [&](const Cursor& u) { return u.unit * kUnit + warp * kRun; };
  auto live = [&](const Cursor& u) { return start_of(u) <= highest; };
  auto next = [&](Cursor& u) { u.unit += p.splits; };
  auto place_of = [&](const Cursor& u) { return (int64_t)table[start_of(u) / EXL3_PAGE] * EXL3_PAGE + start_of(u) % EXL3_PAGE; };
  auto valid_of = [&](const Cursor& u) { return min(kRun, highest + 1 - start_of(u)); };
  auto fetch = [&](const Cursor& u, int stage) {
    uint8_t* to = streams + stage * stage_bytes;
    const int64_t place = place_of(u);
    fetch_side<D>(to, c, 0, place, kv_head, valid_of(u), lane);
    fetch_side<D>(to + kRun * L::raw_row(c.k_bits), c, 1, place, kv_head, valid_of(u), lane);
  };
  Cursor read{first_unit + from_first}, ahead;
  while (live(read) && start_of(read) + kRun <= lowest) next(read);  // before the window
  ahead = read;
  for (int i = 0; i < stages - 1; i++) {
    if (live(ahead)) {
      fetch(ahead, i);
      next(ahead);
    }
    ptx::copy_commit();
  }

  // queries, rotated where the keys are, into shared memory
  uint8_t* query = shared;
  const int rows = tokens * heads;
  if (threadIdx.x < kQueryRows) limits[threadIdx.x] = (int)threadIdx.x < rows ? position + (int)threadIdx.x / heads : -1;
  constexpr int kBatch = 4;  // loads under way together
  for (int first = warp; first < kQueryRows * L::kGroups; first += kBatch * kAttentionWarps) {
    float v[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      const int i = first + k * kAttentionWarps, r = i / L::kGroups, group = i % L::kGroups;
      v[k] = r < rows ? load(a.q, (int64_t)(token + r / heads) * a.q_stride + (int64_t)(head0 + r % heads) * D + group * 32 + lane, a.dtype) : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kBatch; k++) {
      const int i = first + k * kAttentionWarps, r = i / L::kGroups, group = i % L::kGroups;
      if (i >= kQueryRows * L::kGroups) break;
      if (c.k_bits != 16) v[k] = hadamard32(v[k]);
      *(uint16_t*)(query + r * L::kPitch * 2 + (group * 32 + lane) * 2) = float_to_half(v[k]);
    }
  }
  __syncthreads();
  uint32_t qa[kKeepQuery ? kSteps : 1][4];
  auto load_query = [&](int step, uint32_t(&r)[4]) {
    ptx::load_matrices(r, query + (lane & 15) * L::kPitch * 2 + step * 32 + (lane >> 4) * 16);
  };
  if constexpr (kKeepQuery)
#pragma unroll
    for (int s = 0; s < kSteps; s++) load_query(s, qa[s]);
  const int limit[2] = {limits[g], limits[g + 8]};

  float out[D / 8][4], best[2] = {kNothing, kNothing}, total[2] = {0.f, 0.f};
#pragma unroll
  for (int t = 0; t < D / 8; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) out[t][e] = 0.f;
  const float log2e = 1.4426950408889634f;
  int stage = 0, fill = stages - 1;
  for (; live(read); next(read)) {
    if (live(ahead)) {
      fetch(ahead, fill);
      next(ahead);
    }
    ptx::copy_commit();
    if (++fill == stages) fill = 0;
    if (stages == 3)
      ptx::copy_wait<2>();
    else
      ptx::copy_wait<1>();
    __syncwarp();
    const uint8_t* k_tile = streams + stage * stage_bytes;
    const uint8_t* v_tile = k_tile + kRun * L::raw_row(c.k_bits);
    if (++stage == stages) stage = 0;
    if (c.k_bits != 16) {
      decode_side<D>(k_work, k_tile, c, 0, place_of(read), kv_head, valid_of(read), lane);
      k_tile = k_work;
    }
    if (c.v_bits != 16) {
      decode_side<D>(v_work, v_tile, c, 1, place_of(read), kv_head, valid_of(read), lane);
      v_tile = v_work;
    }
    __syncwarp();

    float score[2][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      uint32_t b[4], fresh[4];
      // matrices: positions 0-7 and 8-15 by dims 0-7 and 8-15
      ptx::load_matrices(b, k_tile + ((lane & 7) + (lane >> 4) * 8) * L::kPitch * 2 + s * 32 + ((lane >> 3) & 1) * 16);
      if constexpr (!kKeepQuery) load_query(s, fresh);
      const uint32_t(&qs)[4] = kKeepQuery ? qa[kKeepQuery ? s : 0] : fresh;
      ptx::mma(score[0], qs[0], qs[1], qs[2], qs[3], b[0], b[1]);
      ptx::mma(score[1], qs[0], qs[1], qs[2], qs[3], b[2], b[3]);
    }
    const int at = start_of(read);
    float highest_now[2] = {best[0], best[1]};
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int where = at + n * 8 + 2 * q + (e & 1), end = limit[e >> 1];
        float s = score[n][e] * a.scale;
        if (a.softcap > 0.f) s = a.softcap * tanhf(s / a.softcap);
        s *= log2e;
        if (where > end || (a.window > 0 && where <= end - a.window)) s = -INFINITY;
        score[n][e] = s;
        highest_now[e >> 1] = fmaxf(highest_now[e >> 1], s);
      }
    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      highest_now[h] = fmaxf(highest_now[h], __shfl_xor_sync(~0u, highest_now[h], 1));
      highest_now[h] = fmaxf(highest_now[h], __shfl_xor_sync(~0u, highest_now[h], 2));
      keep[h] = exp2f(best[h] - highest_now[h]);
      best[h] = highest_now[h];
      total[h] *= keep[h];
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        score[n][e] = exp2f(score[n][e] - best[e >> 1]);
        total[e >> 1] += score[n][e];
      }
#pragma unroll
    for (int t = 0; t < D / 8; t++) {
      out[t][0] *= keep[0];
      out[t][1] *= keep[0];
      out[t][2] *= keep[1];
      out[t][3] *= keep[1];
    }
    auto pack = [](float x, float y) {
      const __half2 h = __floats2half2_rn(x, y);
      return *(const uint32_t*)&h;
    };
    const uint32_t w[4] = {pack(score[0][0], score[0][1]), pack(score[0][2], score[0][3]), pack(score[1][0], score[1][1]),
                           pack(score[1][2], score[1][3])};
#pragma unroll
    for (int t = 0; t < D / 16; t++) {
      uint32_t b[4];
      // matrices: positions 0-7, 8-15 of dims 16t .. +7, then of the next eight
      ptx::load_matrices_transposed(b, v_tile + ((lane & 7) + ((lane >> 3) & 1) * 8) * L::kPitch * 2 + t * 32 + (lane >> 4) * 16);
      ptx::mma(out[2 * t], w[0], w[1], w[2], w[3], b[0], b[1]);
      ptx::mma(out[2 * t + 1], w[0], w[1], w[2], w[3], b[2], b[3]);
    }
    __syncwarp();
  }
  ptx::copy_wait<0>();

  // merge the warps: [warp][row][D + 4] floats over the streams
  float* merge = (float*)(shared + L::kTile);
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    total[h] += __shfl_xor_sync(~0u, total[h], 1);
    total[h] += __shfl_xor_sync(~0u, total[h], 2);
    float* mine = merge + (warp * kQueryRows + g + 8 * h) * (D + 4);
#pragma unroll
    for (int t = 0; t < D / 8; t++) *(float2*)(mine + t * 8 + 2 * q) = make_float2(out[t][2 * h], out[t][2 * h + 1]);
    if (q == 0) {
      mine[D] = best[h];
      mine[D + 1] = total[h];
    }
  }
  __syncthreads();
  // One row a warp: adds up the four warps, into the output or into this split's partial sums.
  for (int r = warp; r < rows; r += kAttentionWarps) {
    const int of_token = token + r / heads, head = head0 + r % heads;
    const bool to_output = active == 1;
    constexpr int kStride = kQueryRows * (D + 4);
    const float* part = merge + r * (D + 4);
    float top = to_output && a.sinks ? a.sinks[head] * log2e : kNothing;
#pragma unroll
    for (int n = 0; n < kAttentionWarps; n++) top = fmaxf(top, part[n * kStride + D]);
    float all = to_output && a.sinks ? exp2f(a.sinks[head] * log2e - top) : 0.f, weight[kAttentionWarps];
#pragma unroll
    for (int n = 0; n < kAttentionWarps; n++) {
      weight[n] = exp2f(part[n * kStride + D] - top);
      all += part[n * kStride + D + 1] * weight[n];
    }
    float* sums = p.partial + (((int64_t)of_token * a.heads + head) * p.splits + split) * (D + 2);
    for (int group = 0; group < L::kGroups; group++) {
      float v = 0.f;
#pragma unroll
      for (int n = 0; n < kAttentionWarps; n++) v += part[n * kStride + group * 32 + lane] * weight[n];
      if (to_output) {
        v = all > 0.f ? v / all : 0.f;
        if (c.v_bits != 16) v = hadamard32(v);
        store(a.y, of_token * a.y_stride + (int64_t)head * D + group * 32 + lane, a.dtype, v);
      } else {
        sums[group * 32 + lane] = v;
      }
    }
    if (!to_output && lane == 0) {
      sums[D] = top;
      sums[D + 1] = all;
    }
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
  // One row a warp: lane n weighs splits n and n + 32, then all lanes add up the values in the order of splits. Splits without a unit count
  // for nothing; the number of splits is a power of two.
  auto has = [&](int n) { return n < p.splits && ((n - first_unit) & (p.splits - 1)) < active; };
  for (int r = warp; r < rows; r += kAttentionWarps) {
    const int of_token = token + r / heads, head = head0 + r % heads;
    const float* part = p.partial + ((int64_t)of_token * a.heads + head) * p.splits * (D + 2);
    float most[2], sum[2], weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int n = lane + 32 * h;
      most[h] = has(n) ? part[n * (D + 2) + D] : kNothing;
      sum[h] = has(n) ? part[n * (D + 2) + D + 1] : 0.f;
    }
    float top = warp_max(fmaxf(most[0], most[1]));
    if (a.sinks) top = fmaxf(top, a.sinks[head] * log2e);
#pragma unroll
    for (int h = 0; h < 2; h++) weight[h] = has(lane + 32 * h) ? exp2f(most[h] - top) : 0.f;
    float all = warp_sum(sum[0] * weight[0] + sum[1] * weight[1]);
    if (a.sinks) all += exp2f(a.sinks[head] * log2e - top);
    float v[L::kGroups];
#pragma unroll
    for (int group = 0; group < L::kGroups; group++) v[group] = 0.f;
#pragma unroll 4
    for (int n = 0; n < p.splits; n++) {
      const float w = __shfl_sync(~0u, n < 32 ? weight[0] : weight[1], n & 31);
      const bool there = has(n);
#pragma unroll
      for (int group = 0; group < L::kGroups; group++) v[group] += there ? w * part[n * (D + 2) + group * 32 + lane] : 0.f;
    }
#pragma unroll
    for (int group = 0; group < L::kGroups; group++) {
      float y = all > 0.f ? v[group] / all : 0.f;
      if (c.v_bits != 16) y = hadamard32(y);
      store(a.y, of_token * a.y_stride + (int64_t)head * D + group * 32 + lane, a.dtype, y);
    }
  }
#endif
}

// ------------------------------------------------------------------------------------------------ launch
constexpr int64_t kAttentionCounters = 65536;

static AttentionParams make_attention(const exl3_attention_args* a, const Device& device) {
  AttentionParams p{};
  p.a = *a;
  p.group = a->heads / a->cache.kv_heads;
  p.chunks = (p.group + kQueryRows - 1) / kQueryRows;
  p.tokens_a_tile = p.chunks > 1 ? 1 : kQueryRows / p.group;
  // two blocks on each multiprocessor for up to eight tokens, fewer splits for more; never by length
  const int64_t wanted = 2 * device.sms / ((int64_t)a->cache.kv_heads * p.chunks);
  const int64_t shared_out = a->tokens <= 8 ? wanted : wanted * 8 / a->tokens;
  p.splits = 1;
  while (p.splits * 2 <= shared_out && p.splits < 64 && p.splits < a->table_stride * (EXL3_PAGE / kUnit)) p.splits *= 2;
  if ((int64_t)a->tokens * a->cache.kv_heads * p.chunks * 4 > kAttentionCounters) p.splits = 1;
  return p;
}
static int64_t partial_bytes(const exl3_attention_args* a, const AttentionParams& p) {
  return p.splits > 1 ? (int64_t)a->tokens * a->heads * p.splits * (a->cache.head_dim + 2) * 4 : 0;
}
static const void* attention_entry(int head_dim, int k_bits, int v_bits, int* shared_bytes) {
  switch (head_dim) {
#define EXL3_HEAD(D) \
  case D: *shared_bytes = AttentionLayout<D>::total(k_bits, v_bits); return (const void*)attention_kernel<D>;
    EXL3_HEAD(64)
    EXL3_HEAD(96)
    EXL3_HEAD(128)
    EXL3_HEAD(192)
    EXL3_HEAD(256)
#undef EXL3_HEAD
  }
  return nullptr;
}

int64_t attention_workspace(const exl3_attention_args* a) {
  const Device* device = current_device();
  if (!device || portable::checked_attention(a) != EXL3_OK) return 0;
  return kAttentionCounters + partial_bytes(a, make_attention(a, *device));
}

int attention(const exl3_attention_args* a, void* stream) {
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  if (const int status = portable::checked_attention(a)) return status;
  if (a->tokens <= 0) return EXL3_OK;
  int shared_bytes = 0;
  const void* kernel = attention_entry(a->cache.head_dim, a->cache.k_bits, a->cache.v_bits, &shared_bytes);
  if (!kernel || device->code < 80 || shared_bytes > device->shared_bytes) return portable::plain_attention(a, stream);
  AttentionParams p = make_attention(a, *device);
  if (a->workspace_bytes < kAttentionCounters + partial_bytes(a, p)) return refuse(EXL3_BAD_ARGUMENT, "attention: the workspace is too small");
  p.counters = (int32_t*)a->workspace;
  p.partial = (float*)((uint8_t*)a->workspace + kAttentionCounters);
  return launch(kernel, dim3(a->tokens, a->cache.kv_heads * p.chunks, p.splits), kAttentionWarps * 32, shared_bytes, 1, (const void*)&p,
                (cudaStream_t)stream, "attention");
}

}  // namespace exl3
