// What follows the products of one part of a block's run: sums of the warps, their way to the block that finishes the unit, the epilogue.
#pragma once
#include "even_ring.cuh"
#include "rotate.cuh"

namespace exl3::even {

// Sums of the block of 128 columns of one row from one thread block to another; the receiver leaves zeros.
__device__ __forceinline__ float never_zero(float v) { return __float_as_uint(v) == 0 ? -0.f : v; }
__device__ __forceinline__ void send(float* to, const float* v) {
  ptx::store_relaxed(to, make_float4(never_zero(v[0]), never_zero(v[1]), never_zero(v[2]), never_zero(v[3])));
}
// `v`: what a first look has found.
__device__ __forceinline__ float4 receive(float* from, float4 v) {
  while (__float_as_uint(v.x) == 0 || __float_as_uint(v.y) == 0 || __float_as_uint(v.z) == 0 || __float_as_uint(v.w) == 0)
    v = ptx::load_relaxed(from);
  *(float4*)from = make_float4(0.f, 0.f, 0.f, 0.f);
  return v;
}

static __device__ __noinline__ float activate_one(float v, int activation) { return activate(v, activation, nullptr); }
static __device__ __noinline__ float4 load_bias(const float* bias, int column, int columns) { return load_norm(bias, column, columns); }
// Four columns of a row to y.
static __device__ __noinline__ void store_columns(void* y, int column, int columns, int dtype, bool add, float4 v) {
  const float all[4] = {v.x, v.y, v.z, v.w};
  for (int e = 0; e < 4 && column + e < columns; e++) store(y, column + e, dtype, add ? ((const float*)y)[column + e] + all[e] : all[e]);
}

// Sums of a part in a warp's registers, d[4j .. 4j+3]: columns g, g, g+8, g+8 of its sixteen, rows 8j + 2q and 8j + 2q + 1 in turn.
// They travel as they are.
__device__ __forceinline__ bool is_live(const EvenParams& p, int j) { return j * 8 + 2 * (threadIdx.x % 4) < p.rows; }
template <int NB>
__device__ __forceinline__ float* parcel(const EvenParams& p, int block, int segment, int j) {
  return p.inbox + ((int64_t)((block * p.segments + segment) * NB + j) * 32 * kWarps + threadIdx.x) * 4;
}
template <int NB>
__device__ __forceinline__ void add_received(const EvenParams& p, int unit, int segment, float (&d)[4 * NB]) {
  const int start = (unit * p.segments + segment) * p.steps;
  constexpr int kAtOnce = 8 / NB;  // blocks: many loads are on their way at a time
#pragma unroll 1
  for (int other = (int)blockIdx.x - 1; first_work(p, other + 1) > start; other -= kAtOnce) {  // nearest first
    float4 v[kAtOnce][NB];
    bool has[kAtOnce];
#pragma unroll
    for (int o = 0; o < kAtOnce; o++) {
      has[o] = first_work(p, other - o + 1) > start && first_work(p, other - o) < start + p.steps;
#pragma unroll
      for (int j = 0; j < NB; j++)
        if (has[o] && is_live(p, j)) v[o][j] = ptx::load_relaxed(parcel<NB>(p, other - o, segment, j));
    }
#pragma unroll
    for (int o = 0; o < kAtOnce; o++)
#pragma unroll
      for (int j = 0; j < NB; j++)
        if (has[o] && is_live(p, j)) {
          const float4 u = receive(parcel<NB>(p, other - o, segment, j), v[o][j]);
          d[4 * j] += u.x, d[4 * j + 1] += u.y, d[4 * j + 2] += u.z, d[4 * j + 3] += u.w;
        }
  }
}

// What finishing needs of a segment: the lane's output scales, and scale and sums of one of the warp's rows.
template <int NB>
struct Factors {
  static constexpr int kEach = NB < 4 ? NB : 4;  // rows of a warp at a time
  uint2 svh;
  float scale, shift;
  __device__ __forceinline__ void load(const EvenParams& p, const Part& part, int m) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = (lane / kEach * kWarps + warp) * kEach + lane % kEach;
    svh = *(const uint2*)(p.matrix[m].svh + group_of(p, part) * 128 + 4 * lane);
    scale = shift = 0.f;
    if (lane < 2 * kEach && row < p.rows) {
      const RowInput& in = p.inputs[(int64_t)(p.rotations > 1 ? m : 0) * p.all_rows + p.row0 + row];
      scale = in.scale;
      double sum = 0;
#pragma unroll
      for (int k = 0; k < kMostParts; k++) sum += in.sums[k];
      shift = (float)sum;
    }
  }
  static __device__ __forceinline__ int group_of(const EvenParams& p, const Part& part) {
    return p.segments > 1 ? part.unit : part.unit - p.first_group[part.matrix];
  }
};

// The epilogue of a unit whose sums lie in `area`, [segment, up first][row][column]: scales, Hadamard transform, activation, store. `f`: of the first
// segment.
template <int MODE, int NB>
__device__ __forceinline__ void finish_rows(const EvenParams& p, const Part& part, int segment, const float* area, Factors<NB> f) {
  constexpr int kEach = Factors<NB>::kEach, kArea = 8 * NB * kPitch;  // words of a segment
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = f.group_of(p, part), column = group * 128 + 4 * lane;
  ptx::named_sync(2, 32 * kWarps);
  const LaneSigns signs;
  const ProductMatrix& out = p.matrix[part.matrix - segment];
  const bool plain = p.y_dtype != EXL3_BF16 && (p.segments == 1 || p.activation == EXL3_ACT_SILU) && ((uintptr_t)out.y & 15) == 0 &&
                     out.y_stride % 4 == 0 && group * 128 + 128 <= out.out_features;
#pragma unroll 1
  for (int turn = 0; turn * kWarps * kEach < p.rows; turn++) {
    const int first = (turn * kWarps + warp) * kEach;
    float v[kEach][4], gate[kEach][4];
#pragma unroll 1
    for (int s = 0; s < p.segments; s++) {
      const ProductMatrix& w = p.matrix[part.matrix - segment + s];
      if (p.segments > 1 && (s > 0 || turn > 0)) f.load(p, part, part.matrix - segment + s);
      const float2 low = __half22float2(*(const __half2*)&f.svh.x), high = __half22float2(*(const __half2*)&f.svh.y);
      const float svhs[4] = {low.x * HADAMARD128_SCALE, low.y * HADAMARD128_SCALE, high.x * HADAMARD128_SCALE, high.y * HADAMARD128_SCALE};
#pragma unroll
      for (int r = 0; r < kEach; r++) {
        if (s > 0)
#pragma unroll
          for (int e = 0; e < 4; e++) gate[r][e] = v[r][e];
        const float4 sum = *(const float4*)(area + (s < segment ? kArea : 0) + (first + r) * kPitch + 4 * lane);
        v[r][0] = sum.x, v[r][1] = sum.y, v[r][2] = sum.z, v[r][3] = sum.w;
        const float row_scale = __shfl_sync(~0u, f.scale, turn * kEach + r), row_shift = __shfl_sync(~0u, f.shift, turn * kEach + r);
#pragma unroll
        for (int e = 0; e < 4; e++) v[r][e] = (MODE == kDecodeBytes ? kMul1Scale * v[r][e] + kMul1Shift * row_shift : v[r][e]) * row_scale;
      }
#pragma unroll
      for (int r = 0; r < kEach; r++) quick_hadamard128(v[r], signs);
#pragma unroll
      for (int r = 0; r < kEach; r++)
#pragma unroll
        for (int e = 0; e < 4; e++) v[r][e] *= svhs[e];
      if (w.bias) {
        const float4 b = load_bias(w.bias, column, w.out_features);
#pragma unroll
        for (int r = 0; r < kEach; r++) v[r][0] += b.x, v[r][1] += b.y, v[r][2] += b.z, v[r][3] += b.w;
      }
    }
#pragma unroll
    for (int r = 0; r < kEach; r++) {
      const int row = first + r;
      if (row >= p.rows) break;
      if (p.segments > 1) {
        if (p.activation == EXL3_ACT_SILU)
#pragma unroll
          for (int e = 0; e < 4; e++) v[r][e] *= __fdividef(gate[r][e], 1.f + fast_exp(-gate[r][e]));
        else
          for (int e = 0; e < 4; e++) v[r][e] *= activate_one(gate[r][e], p.activation);
      }
      void* y = row_of(out.y, (int64_t)(p.row0 + row) * out.y_stride, p.y_dtype);
      if (!plain) {
        store_columns(y, column, out.out_features, p.y_dtype, p.accumulate, make_float4(v[r][0], v[r][1], v[r][2], v[r][3]));
      } else if (p.y_dtype == EXL3_F16) {
        const __half2 h[2] = {__floats2half2_rn(v[r][0], v[r][1]), __floats2half2_rn(v[r][2], v[r][3])};
        *(uint2*)((uint16_t*)y + column) = *(const uint2*)h;
      } else {
        float4& to = *(float4*)((float*)y + column);
        const float4 old = p.accumulate ? to : make_float4(0.f, 0.f, 0.f, 0.f);
        to = make_float4(v[r][0] + old.x, v[r][1] + old.y, v[r][2] + old.z, v[r][3] + old.w);
      }
    }
  }
}

// After part i of the run: its sums go to the block that finishes the unit; or those of others come, then the epilogue. All warps that
// multiply call it.
// A gate's sums wait in shared memory for those of up: so what others send of it comes in the meantime.
template <int MODE, int NB>
__device__ __forceinline__ void finish_part(const EvenParams& p, const Part& part, int i, float (&d)[4 * NB], float* area) {
  constexpr int kCallers = 32 * kWarps, kArea = 8 * NB * kPitch;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, segment = p.segments > 1 ? i & 1 : 0;
  if (part.sends) {
    if (part.count > 0)
#pragma unroll
      for (int j = 0; j < NB; j++)
        if (is_live(p, j)) send(parcel<NB>(p, blockIdx.x, segment, j), d + 4 * j);
    return;
  }
  float4* waiting = (float4*)(area + kArea) + threadIdx.x;
  if (segment + 1 < p.segments) {
    ptx::named_sync(2, kCallers);  // the area is free
#pragma unroll
    for (int j = 0; j < NB; j++) waiting[j * kCallers] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
    return;
  }
  Factors<NB> factors;  // on their way while others' sums come
  factors.load(p, part, part.matrix - segment);
#pragma unroll 1
  for (int s = p.segments - 1; s >= 0; s--) {
    if (s < segment)
#pragma unroll
      for (int j = 0; j < NB; j++) {
        const float4 v = waiting[j * kCallers];
        d[4 * j] = v.x, d[4 * j + 1] = v.y, d[4 * j + 2] = v.z, d[4 * j + 3] = v.w;
      }
    add_received<NB>(p, part.unit, s, d);
    ptx::named_sync(2, kCallers);  // the area is free, and its waiting sums are read
    float* to = area + (s < segment ? kArea : 0) + warp * 16 + g;
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) to[(j * 8 + 2 * q + (e & 1)) * kPitch + 8 * (e >> 1)] = d[4 * j + e];
  }
  finish_rows<MODE, NB>(p, part, segment, area, factors);
}

}  // namespace exl3::even
