// What follows the products of one part of a block's run: sums of the warps, their way to the block that finishes the unit, the epilogue.
#pragma once
#include "product_input.cuh"

namespace exl3 {

// The part of a block's run of work that lies in one matrix and column group.
struct Part {
  const uint8_t* weights;  // of row of tiles 0
  int32_t pitch;           // bytes from one row of tiles to the next
  int32_t from, count;     // rows of tiles
  int32_t before;          // rows of the parts before it
  int32_t unit, matrix;
};
static_assert(sizeof(Part) <= kPartBytes, "");

// The rows of tiles that the warps side by side have of it.
struct alignas(16) WarpRows {
  const uint8_t* weights;  // of the first of the warps, from the first of the rows on
  int32_t row, end;
};
static_assert(sizeof(WarpRows) == kRangeBytes, "");

// Where units are of one matrix each.
__device__ __forceinline__ int matrix_of_unit(const ProductParams& p, int unit) {
  int matrix = 0;
  while (matrix + 1 < p.count && unit >= p.first_group[matrix + 1]) matrix++;
  return matrix;
}

// Part i of a run: units from the last to the first, in each the segments in turn. Some may be empty.
__device__ __forceinline__ Part part_of_run(const ProductParams& p, int k2, const BlockRun& run, int i) {
  const int rows = p.blocks * 8, segment = p.segments > 1 ? i & 1 : 0;
  Part part;
  part.unit = run.last - (p.segments > 1 ? i >> 1 : i);
  const int start = part.unit * p.length + segment * rows;
  part.from = max(run.begin - start, 0);
  part.count = max(min(run.end - start, rows) - part.from, 0);
  const int first = part.unit * p.length;
  part.before = max(run.end - first - p.length, 0);
  if (segment == 1) part.before += max(min(run.end - first, rows) - max(run.begin - first, 0), 0);
  part.matrix = p.segments > 1 ? segment : matrix_of_unit(p, part.unit);
  const ProductMatrix& w = p.matrix[part.matrix];
  part.pitch = w.columns * 16 * k2;
  part.weights = w.trellis + (int64_t)(part.unit - (p.segments > 1 ? 0 : p.first_group[part.matrix])) * 128 * k2;
  return part;
}

// Sums of the 128 columns of one row from one thread block to another; the receiver leaves zeros. A sum of zero travels as -0.
__device__ __forceinline__ float never_zero(float v) { return __float_as_uint(v) == 0 ? -0.f : v; }
__device__ __forceinline__ void send(float* to, const float (&v)[4]) {
  ptx::store_relaxed(to, make_float4(never_zero(v[0]), never_zero(v[1]), never_zero(v[2]), never_zero(v[3])));
}
__device__ __forceinline__ bool arrived(const float4& v) {
  return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 && __float_as_uint(v.w) != 0;
}

// Adds what the blocks before have of one segment of a unit, nearest first.
__device__ __forceinline__ void receive_sums(const ProductParams& p, int block, int others, int segment, int unit_at, int row, float (&v)[4]) {
  constexpr int kTogether = 4;
  const int lane = threadIdx.x % 32, start = unit_at + segment * p.blocks * 8, end = start + p.blocks * 8;
  for (int first = 1; first <= others; first += kTogether) {
    float4 got[kTogether];
    float* from[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int other = block - first - i;
      const bool has = first + i <= others && max(first_work(p, other), start) < min(first_work(p, other + 1), end);
      from[i] = has ? p.inbox + ((int64_t)(other * p.segments + segment) * kRows + row) * 128 + 4 * lane : nullptr;
      got[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    for (bool all = false; !all;) {
      all = true;
#pragma unroll
      for (int i = 0; i < kTogether; i++)
        if (from[i] && !arrived(got[i])) got[i] = ptx::load_relaxed(from[i]);
#pragma unroll
      for (int i = 0; i < kTogether; i++) all &= !from[i] || arrived(got[i]);
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (!from[i]) continue;
      *(float4*)from[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      v[0] += got[i].x, v[1] += got[i].y, v[2] += got[i].z, v[3] += got[i].w;
    }
  }
}

static __device__ __noinline__ float activate_one(float v, int activation) { return activate(v, activation, nullptr); }

static __device__ __noinline__ void store_slowly(void* y, int columns, int dtype, float4 v) {
  const float all[4] = {v.x, v.y, v.z, v.w};
  for (int e = 0; e < 4 && e < columns; e++) store(y, e, dtype, all[e]);
}
__device__ __forceinline__ void store_columns(void* y, int columns, int dtype, float4 v) {
  if (dtype == EXL3_F32 && columns >= 4 && ((uintptr_t)y & 15) == 0) {
    *(float4*)y = v;
  } else if (dtype == EXL3_F16 && columns >= 4 && ((uintptr_t)y & 7) == 0) {
    const __half2 h[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
    *(uint2*)y = *(const uint2*)h;
  } else {
    store_slowly(y, columns, dtype, v);
  }
}

// Sums of a part lie in one of two buffers: a named barrier each. Those in it have been read: barriers in shared memory, for which the warps that
// multiply need not wait for one another.
constexpr int kFullBarrier = 1;
__device__ __forceinline__ uint64_t* free_sums(const ProductParams& p, uint8_t* shared, int buffer) {
  return (uint64_t*)(shared + p.shared.begun) + kMostWarps + buffer;
}

// The warps that finish: row after row of each part. While the others multiply they fetch scales and what other blocks send.
__device__ __forceinline__ void finish_parts(const ProductParams& p, const Part* parts, int count, const BlockRun& run,
                                             uint8_t* shared, const float* squares) {
  constexpr int kEach = kRows / kFinishers;  // rows of a warp
  const int first = threadIdx.x / 32 - (kAcross << p.row_shift), lane = threadIdx.x % 32, block = blockIdx.x;
  float norm[kEach], held[kEach][4];
#pragma unroll
  for (int r = 0; r < kEach; r++) {
    norm[r] = HADAMARD128_SCALE;
    if (p.norm_weight && first + r * kFinishers < p.rows) norm[r] *= norm_factor(p, squares, first + r * kFinishers);
  }
  const float* exchange = (const float*)(shared + p.shared.exchange);
  int used = 0;  // parts with products
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    const Part& part = parts[i];
    const int segment = p.segments > 1 ? i & 1 : 0, unit_at = part.unit * p.length;
    const bool sends = run.end < unit_at + p.length, last = !sends && segment + 1 == p.segments;  // another block finishes the unit; it ends here
    const int column = (p.segments > 1 ? part.unit : part.unit - p.first_group[part.matrix]) * 128 + 4 * lane;
    const ProductMatrix &m = p.matrix[part.matrix], &w = p.matrix[part.matrix - segment];
    float v[kEach][4] = {};
    uint2 svh{};
    if (!sends) {
      svh = *(const uint2*)(m.svh + column);
      int others = 0;
      if (run.begin > unit_at) do
          others++;
        while (first_work(p, block - others) > unit_at);
      if (others)
#pragma unroll 1
        for (int r = 0; r < kEach && first + r * kFinishers < p.rows; r++) {
          float got[4] = {};
          receive_sums(p, block, others, segment, unit_at, first + r * kFinishers, got);
#pragma unroll
          for (int e = 0; e < 4; e++) (r == 0 ? v[0][e] : v[kEach - 1][e]) = got[e];
        }
    }
    if (part.count > 0) {
      const float* sums = exchange + (used & 1) * (p.rows << p.row_shift) * kPitch + 4 * lane;
      ptx::named_sync(kFullBarrier + (used & 1), product_threads(p));
#pragma unroll
      for (int r = 0; r < kEach; r++) {
        const int row = first + r * kFinishers;
        if (row >= p.rows) break;
#pragma unroll
        for (int n = 0; n < kMostWarps / kAcross; n += 2) {
          if (n >= 1 << p.row_shift) break;
#pragma unroll
          for (int d = n; d < n + 2; d++) {
            const float4 f = *(const float4*)(sums + (d * p.rows + row) * kPitch);
            v[r][0] += f.x, v[r][1] += f.y, v[r][2] += f.z, v[r][3] += f.w;
          }
        }
      }
      ptx::barrier_arrive(free_sums(p, shared, used & 1));
      used++;
    }
#pragma unroll
    for (int r = 0; r < kEach; r++) {
      const int row = first + r * kFinishers;
      if (row >= p.rows) break;
      float (&u)[4] = v[r];
      if (sends) {
        if (part.count > 0) send(p.inbox + ((int64_t)(block * p.segments + segment) * kRows + row) * 128 + 4 * lane, u);
        continue;
      }
      quick_hadamard128(u, LaneSigns());
      const float2 low = __half22float2(*(const __half2*)&svh.x), high = __half22float2(*(const __half2*)&svh.y);
      u[0] *= norm[r] * low.x, u[1] *= norm[r] * low.y, u[2] *= norm[r] * high.x, u[3] *= norm[r] * high.y;
      if (m.bias) {
        const float4 bias = load_norm(m.bias, column, m.out_features);
        u[0] += bias.x, u[1] += bias.y, u[2] += bias.z, u[3] += bias.w;
      }
      if (!last) {
#pragma unroll
        for (int e = 0; e < 4; e++) held[r][e] = activate_one(u[e], p.activation);
        continue;
      }
      if (p.segments > 1)
#pragma unroll
        for (int e = 0; e < 4; e++) u[e] *= held[r][e];
      char* y = (char*)row_of(w.y, (int64_t)row * w.y_stride + column, p.y_dtype);
      if (p.accumulate) {
        const float4 before = load_norm((const float*)y, 0, w.out_features - column);
        u[0] += before.x, u[1] += before.y, u[2] += before.z, u[3] += before.w;
      }
      store_columns(y, w.out_features - column, p.y_dtype, make_float4(u[0], u[1], u[2], u[3]));
    }
  }
}

}  // namespace exl3
