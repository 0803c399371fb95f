// The EXL3 product y = epilogue(norm(x) @ W) on RDNA: rotated activations as halves (rotate_halves), sums of 128 columns by blocks that
// share the inner dimension (gemv for few rows, gemm for many), and the last block of a group of columns adds the shares and finishes.
#pragma once
#include "decode.h"

#include "gpu/product.h"

namespace rdna {

struct HalvesArgs {
  const void* x;
  const float* norm_weight;
  const void* suh[EXL3_MAX_GROUP];
  uint16_t* out;  // [rotations][rows][in_padded] halves, each 16 in row_order
  float* scales;  // [rotations][rows][2]: what the halves are to be multiplied with, and their sum
  int64_t x_stride;
  int32_t rows, in_features, in_padded, x_dtype;
  float eps;
};

// One block a row and rotation: H128(norm(x) * suh), scaled by a power of two that brings the row's largest value before the rotation
// to 2^10 .. 2^11. So none overflows, and halves lose nothing of what is above 2^-24 of the largest.
GPU_FN void rotate_halves(const HalvesArgs& a) {
  constexpr int kThreads = 256, kWarps = kThreads / 32;
  GPU_SHARED(float, space, kWarps);
  begin_kernel();
  const int64_t row = block_x();
  const int lane = lane_id(), which = block_y();
  const void* x = row_of(a.x, row * a.x_stride, a.x_dtype);
  const uint16_t* suh = (const uint16_t*)(which == 0 ? a.suh[0] : which == 1 ? a.suh[1] : which == 2 ? a.suh[2] : a.suh[3]);
  const int64_t line = (int64_t)which * a.rows + row;
  uint16_t* out = a.out + line * a.in_padded;
  float norm = 1.f;
  if (a.norm_weight) {
    float sum = 0.f;
    for (int i = thread_id(); i < a.in_features; i += kThreads) {
      const float v = load(x, i, a.x_dtype);
      sum += v * v;
    }
    norm = 1.f / root(block_sum<kThreads>(sum, space) / (float)a.in_features + a.eps);
  }
  auto scaled = [&](int i, float (&v)[4]) {
    load4(x, i, a.in_features, a.x_dtype, v);
    for (int e = 0; e < 4; e++) {
      if (a.norm_weight && i + e < a.in_features) v[e] *= norm * a.norm_weight[i + e];
      v[e] *= half_to_float(suh[i + e]);
    }
  };
  float most = 0.f;
  for (int b = warp_id(); b < a.in_padded / 128; b += kWarps) {
    float v[4];
    scaled(b * 128 + 4 * lane, v);
    for (int e = 0; e < 4; e++) most = larger(most, absolute(v[e]));
  }
  most = warp_max(most);
  block_sync();
  if (lane == 0) space[warp_id()] = most;
  block_sync();
  for (int w = 0; w < kWarps; w++) most = larger(most, space[w]);
  const int exponent = (as_int(most) >> 23 & 255) - 127;
  const bool plain = most > 1e-30f && most < 1e30f;
  const float down = plain ? as_float((127 + 10 - exponent) << 23) : 1.f, up = plain ? as_float((127 - 10 + exponent) << 23) : 1.f;
  float sum = 0.f;
  for (int b = warp_id(); b < a.in_padded / 128; b += kWarps) {
    const int i = b * 128 + 4 * lane;
    float v[4];
    scaled(i, v);
    for (int e = 0; e < 4; e++) v[e] *= down;
    hadamard128(v);
    for (int e = 0; e < 4; e += 2) {  // a pair of rows stays a pair
      const uint16_t h0 = float_to_half(v[e] * HADAMARD128_SCALE), h1 = float_to_half(v[e + 1] * HADAMARD128_SCALE);
      sum += half_to_float(h0) + half_to_float(h1);
      const int place = (i & ~15) + row_place((i + e) & 15);
      *(uint32_t*)(out + place) = h0 | (uint32_t)h1 << 16;
    }
  }
  sum = block_sum<kThreads>(sum, space);
  if (thread_id() == 0) {
    a.scales[2 * line] = up;
    a.scales[2 * line + 1] = sum;
  }
}

struct ProductArgs {
  const uint16_t* x;    // [rotations][rows][in_padded]
  const float* scales;  // [rotations][rows][2]
  float* parts;         // [splits][rows][columns]
  int* counters;        // one a group of columns and tile of rows; zero, and zero again at the end
  LinearOutput out[EXL3_MAX_GROUP];
  int32_t first_group[EXL3_MAX_GROUP + 1];  // column groups of 128 before each matrix, of all matrices
  int32_t rows, count, rotations, splits, columns, y_dtype, activation, accumulate;
  int32_t matrix, matrices;  // those this launch multiplies: neighbours of one rate and kind of codebook
};

constexpr int kProductThreads = 128;  // four warps, 32 columns each

// Kernel arguments must not be indexed with a variable: they would be copied to memory first.
GPU_FN LinearOutput output_of(const ProductArgs& a, int m) { return m == 0 ? a.out[0] : m == 1 ? a.out[1] : m == 2 ? a.out[2] : a.out[3]; }
GPU_FN int first_group_of(const ProductArgs& a, int m) {
  return m == 0 ? 0 : m == 1 ? a.first_group[1] : m == 2 ? a.first_group[2] : a.first_group[3];
}

// Which matrix a block works on, and which of its groups.
GPU_FN int matrix_of(const ProductArgs& a, int& group) {
  const int at = first_group_of(a, a.matrix) + block_x(), end = a.matrix + a.matrices;
  int m = a.matrix;
  for (int i = 1; i < EXL3_MAX_GROUP; i++)
    if (i > a.matrix && i < end && at >= first_group_of(a, i)) m = i;
  group = at - first_group_of(a, m);
  return m;
}

// Rows row0 .. row0 + rows of one group of 128 columns: adds the shares of all blocks in order, scales, and writes y. `group` counts from
// the first of matrix m; with an activation m is 0 and the second matrix (up) is finished with it.
GPU_FN void finish_group(const ProductArgs& a, int m, int group, int row0, int rows) {
  const LinearOutput o = output_of(a, m);
  const exl3_weight up_w = a.out[1].w;
  const int lane = lane_id(), first = group * 128 + 4 * lane;
  auto sums = [&](const exl3_weight& w, int matrix, int64_t row, float (&v)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = 0.f;
    const float* p = a.parts + row * a.columns + first_group_of(a, matrix) * 128 + first;
    for (int s = 0; s < a.splits; s++, p += (int64_t)a.rows * a.columns)
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] += p[e];
    const float* scale = a.scales + 2 * ((a.rotations > 1 ? matrix : 0) * (int64_t)a.rows + row);
    const bool mul1 = w.codebook == EXL3_MUL1;
    const float factor = scale[0] * (mul1 ? exl3::kMul1Scale : 1.f) * HADAMARD128_SCALE, shift = mul1 ? exl3::kMul1Shift / exl3::kMul1Scale * scale[1] : 0.f;
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = (v[e] + shift) * factor;
    hadamard128(v);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[e] *= half_to_float(((const uint16_t*)w.svh)[first + e]);
      if (w.bias && first + e < w.out_features) v[e] += w.bias[first + e];
    }
  };
  for (int r = warp_id(); r < rows; r += kProductThreads / 32) {
    float v[4], u[4] = {1.f, 1.f, 1.f, 1.f};
    sums(o.w, m, row0 + r, v);
    if (a.activation) sums(up_w, 1, row0 + r, u);
    void* y = row_of(o.y, (row0 + r) * o.y_stride, a.y_dtype);
#pragma unroll 1
    for (int e = 0; e < 4; e++) {  // values move through v[0]: one copy of the code, and no register with a variable number
      const int column = first + e;
      if (column < o.w.out_features) {
        float value = activate(v[0], a.activation, nullptr) * u[0];
        if (a.accumulate) value += ((const float*)y)[column];
        store(y, column, a.y_dtype, value);
      }
      v[0] = v[1], v[1] = v[2], v[2] = v[3];
      u[0] = u[1], u[1] = u[2], u[2] = u[3];
    }
  }
}
// The last of the blocks that share a group (and, with an activation, of both matrices) finishes it.
GPU_FN void finish_when_last(const ProductArgs& a, int m, int group, int row_tile, int groups, int row0, int rows, int* space) {
  int* counter = a.counters + row_tile * groups + (a.activation ? group : first_group_of(a, m) + group);
  const int number = take_number(counter, space);
  if (number != (a.activation ? 2 * a.splits : a.splits) - 1) return;
  finish_group(a, a.activation ? 0 : m, group, row0, rows);
  if (thread_id() == 0) *counter = 0;
}

// Few rows (ROWS of them, up to eight): one lane a column, weights decoded once for all rows, activations the same for a whole wave.
// Grid: groups of 128 columns; splits. Order of adding depends on the sizes and splits alone, so a row's result has no neighbours in it.
template <int K2, bool MUL1, int ROWS>
GPU_FN void gemv(const ProductArgs& a) {
  constexpr int kTiles = ROWS >= 8 ? 1 : ROWS >= 4 || K2 > 8 ? 2 : 4;  // tiles whose words are asked for at once
  typedef Windows<K2, 4> W;
  GPU_SHARED(int, space, 1);
  begin_kernel();
  int group;
  const int matrix = matrix_of(a, group);
  const LinearOutput o = output_of(a, matrix);
  const int lane = lane_id(), warp = uniform_warp(), split = block_y();
  const int columns = o.w.out_padded / 16, steps = o.w.in_padded / 16;
  const int from = (int)((int64_t)steps * split / a.splits), to = (int)((int64_t)steps * (split + 1) / a.splits);
  const int c = lane & 15;
  const LaneWindows l = lane_windows<K2, 4>(8 * (c & 7) + (c >> 3));
  const Hash hash = weight_hash<MUL1>(o.w);
  const uint32_t* tile = (const uint32_t*)o.w.trellis + ((int64_t)from * columns + group * 8 + warp * 2 + (lane >> 4)) * (4 * K2);
  const int64_t step = (int64_t)columns * (4 * K2);
  const uint32_t* x = (const uint32_t*)(a.x + (a.rotations > 1 ? matrix : 0) * (int64_t)a.rows * o.w.in_padded) + from * 8;
  const int64_t x_row = o.w.in_padded / 2;
  float acc[ROWS];
  for (int r = 0; r < ROWS; r++) acc[r] = 0.f;

  auto multiply = [&](const uint32_t(&raw)[W::kRaw], const uint32_t* xs) {
    uint32_t bits[W::kCount], pairs[8];
    align_words<K2, 4>(raw, l, bits);
    decode_runs<K2, 4, MUL1, 0>(bits, hash, pairs);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const uint32_t* row = xs + (r < a.rows ? r : 0) * x_row;  // rows beyond the last repeat the first
#pragma unroll
      for (int i = 0; i < 8; i++) acc[r] = dot2(pairs[i], row[i], acc[r]);
    }
  };
  int k = from;
  for (; k + kTiles <= to; k += kTiles) {
    uint32_t raw[kTiles][W::kRaw];
#pragma unroll
    for (int t = 0; t < kTiles; t++) read_words<K2, 4>(tile + t * step, l, raw[t]);
#pragma unroll
    for (int t = 0; t < kTiles; t++) multiply(raw[t], x + t * 8);
    tile += kTiles * step;
    x += kTiles * 8;
  }
  for (; k < to; k++) {
    uint32_t raw[W::kRaw];
    read_words<K2, 4>(tile, l, raw);
    multiply(raw, x);
    tile += step;
    x += 8;
  }
  float* part = a.parts + (int64_t)split * a.rows * a.columns + (first_group_of(a, matrix) + group) * 128 + warp * 32 + lane;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (r < a.rows) part[(int64_t)r * a.columns] = acc[r];
  finish_when_last(a, matrix, group, 0, 0, 0, a.rows, space);
}

// Many rows: a block takes kGemmRows rows by 128 columns, 32 columns a warp. Rows come through shared memory, two stages of 64 values of
// the inner dimension; weights are decoded in registers, once for all rows of the block.
// Grid: groups of 128 columns; tiles of rows times splits.
constexpr int kGemmRows = 64, kStage = 64, kStride = kStage + 8;  // the stride keeps 16-byte reads of 16 rows off each other's banks

// Each thread's four 16-byte pieces of the next stage: by name, as an array would be kept in memory.
struct Pieces {
  Words4 p0, p1, p2, p3;
};
GPU_FN Words4 read_piece(const ProductArgs& a, const uint16_t* x, int64_t padded, int row0, int k, int i) {
  const int n = i * kProductThreads + thread_id(), r = n >> 3;
  return *(const Words4*)(x + (int64_t)(row0 + r < a.rows ? row0 + r : a.rows - 1) * padded + k + (n & 7) * 8);
}
GPU_FN void write_piece(uint16_t* stage, Words4 piece, int i) {
  const int n = i * kProductThreads + thread_id();
  *(Words4*)(stage + (n >> 3) * kStride + (n & 7) * 8) = piece;
}
GPU_FN Pieces read_stage(const ProductArgs& a, const uint16_t* x, int64_t padded, int row0, int k) {
  return {read_piece(a, x, padded, row0, k, 0), read_piece(a, x, padded, row0, k, 1), read_piece(a, x, padded, row0, k, 2),
          read_piece(a, x, padded, row0, k, 3)};
}
GPU_FN void write_stage(uint16_t* stage, const Pieces& p) {
  write_piece(stage, p.p0, 0);
  write_piece(stage, p.p1, 1);
  write_piece(stage, p.p2, 2);
  write_piece(stage, p.p3, 3);
}

template <int K2, bool MUL1>
GPU_FN void gemm(const ProductArgs& a) {
#if GPU_WMMA
  constexpr int kRuns = 2;  // each half of the wave decodes half of a column
#else
  constexpr int kRuns = 4;
#endif
  typedef Windows<K2, kRuns> W;
  GPU_SHARED(Words4, stages, 2 * kGemmRows * kStride / 8);
  GPU_SHARED(int, space, 1);
  begin_kernel();
  int group;
  const int matrix = matrix_of(a, group);
  const LinearOutput o = output_of(a, matrix);
  const int lane = lane_id(), warp = uniform_warp();
  const int tiles = (a.rows + kGemmRows - 1) / kGemmRows, row_tile = block_y() % tiles, split = block_y() / tiles, row0 = row_tile * kGemmRows;
  const int rows = a.rows - row0 < kGemmRows ? a.rows - row0 : kGemmRows;
  const int columns = o.w.out_padded / 16, blocks = o.w.in_padded / kStage;
  const int from = (int)((int64_t)blocks * split / a.splits), to = (int)((int64_t)blocks * (split + 1) / a.splits);
  const int c = lane & 15, half = lane >> 4;
  const Hash hash = weight_hash<MUL1>(o.w);
  const int64_t step = (int64_t)columns * (4 * K2);
  const uint16_t* x = a.x + (a.rotations > 1 ? matrix : 0) * (int64_t)a.rows * o.w.in_padded;
  if (from < to) write_stage((uint16_t*)stages, read_stage(a, x, o.w.in_padded, row0, from * kStage));
  shared_sync();
  float* part = a.parts + (int64_t)split * a.rows * a.columns + (int64_t)row0 * a.columns + (first_group_of(a, matrix) + group) * 128 + warp * 32;
#if GPU_WMMA
  const LaneWindows l = lane_windows<K2, kRuns>(8 * (c & 7) + 4 * half + (c >> 3));
  const uint32_t* tile = (const uint32_t*)o.w.trellis + ((int64_t)from * (kStage / 16) * columns + group * 8 + warp * 2) * (4 * K2);
  Sums sums[kGemmRows / 16][2];
#pragma unroll
  for (int m = 0; m < kGemmRows / 16; m++)
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[m][t].v[i] = 0.f;
  for (int b = from; b < to; b++) {
    const uint16_t* stage = (const uint16_t*)stages + ((b - from) & 1) * (kGemmRows * kStride);
    const Pieces next = read_stage(a, x, o.w.in_padded, row0, (b + 1 < to ? b + 1 : b) * kStage);
#pragma unroll 1
    for (int s = 0; s < kStage / 16; s++) {
      uint32_t raw[2][W::kRaw];
#pragma unroll
      for (int t = 0; t < 2; t++) read_words<K2, kRuns>(tile + t * (4 * K2), l, raw[t]);
      tile += step;
      Fragment weights[2];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        uint32_t bits[W::kCount], mine[4];
        align_words<K2, kRuns>(raw[t], l, bits);
        decode_runs<K2, kRuns, MUL1, 0>(bits, hash, mine);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if GPU_WMMA == 12
          weights[t].v[i] = mine[i];
#else
          const uint32_t other = (uint32_t)lane_xor((int)mine[i], 16);
          weights[t].v[i] = half ? other : mine[i];
          weights[t].v[4 + i] = half ? mine[i] : other;
#endif
        }
      }
#pragma unroll
      for (int m = 0; m < kGemmRows / 16; m++) {
        const Fragment f = read_fragment(stage + (m * 16 + c) * kStride + s * 16);
#pragma unroll
        for (int t = 0; t < 2; t++) wave_product(f, weights[t], sums[m][t]);
      }
    }
    if (b + 1 < to) write_stage((uint16_t*)stages + ((b + 1 - from) & 1) * (kGemmRows * kStride), next);
    shared_sync();
  }
#pragma unroll
  for (int m = 0; m < kGemmRows / 16; m++)
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int r = m * 16 + fragment_row(i);
        if (r < rows) part[(uint32_t)(r * a.columns + t * 16 + c)] = sums[m][t].v[i];
      }
#else
  // without a matrix product: a lane a column as in gemv, rows broadcast from shared memory
  const LaneWindows l = lane_windows<K2, 4>(8 * (c & 7) + (c >> 3));
  const uint32_t* tile = (const uint32_t*)o.w.trellis + ((int64_t)from * (kStage / 16) * columns + group * 8 + warp * 2 + half) * (4 * K2);
  float sums[kGemmRows];
#pragma unroll
  for (int r = 0; r < kGemmRows; r++) sums[r] = 0.f;
  for (int b = from; b < to; b++) {
    const uint16_t* stage = (const uint16_t*)stages + ((b - from) & 1) * (kGemmRows * kStride);
    const Pieces next = read_stage(a, x, o.w.in_padded, row0, (b + 1 < to ? b + 1 : b) * kStage);
#pragma unroll 1
    for (int s = 0; s < kStage / 16; s++) {
      uint32_t raw[W::kRaw], bits[W::kCount], pairs[8];
      read_words<K2, kRuns>(tile, l, raw);
      tile += step;
      align_words<K2, kRuns>(raw, l, bits);
      decode_runs<K2, kRuns, MUL1, 0>(bits, hash, pairs);
#pragma unroll
      for (int r = 0; r < kGemmRows; r++) {
        const Words4 p = *(const Words4*)(stage + r * kStride + s * 16), q = *(const Words4*)(stage + r * kStride + s * 16 + 8);
#pragma unroll
        for (int i = 0; i < 4; i++) sums[r] = dot2(pairs[i], p.v[i], sums[r]);
#pragma unroll
        for (int i = 0; i < 4; i++) sums[r] = dot2(pairs[4 + i], q.v[i], sums[r]);
      }
    }
    if (b + 1 < to) write_stage((uint16_t*)stages + ((b + 1 - from) & 1) * (kGemmRows * kStride), next);
    shared_sync();
  }
#pragma unroll
  for (int r = 0; r < kGemmRows; r++)
    if (r < rows) part[(uint32_t)(r * a.columns + lane)] = sums[r];
#endif
  finish_when_last(a, matrix, group, row_tile, a.first_group[EXL3_MAX_GROUP], row0, rows, space);
}

}  // namespace rdna
