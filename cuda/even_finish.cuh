// What follows the products of one part of a block's run: sums of the warps, their way to the block that finishes the unit, the epilogue.
#pragma once
#include "even_input.cuh"

namespace exl3::even {

// Sums of the block of 128 columns of one row from one thread block to another; the receiver leaves zeros.
__device__ __forceinline__ float never_zero(float v) { return __float_as_uint(v) == 0 ? -0.f : v; }
__device__ __forceinline__ void send(float* to, const float (&v)[4]) {
  ptx::store_relaxed(to, make_float4(never_zero(v[0]), never_zero(v[1]), never_zero(v[2]), never_zero(v[3])));
}
__device__ __forceinline__ float4 receive(float* from) {
  float4 v;
  do v = ptx::load_relaxed(from);
  while (__float_as_uint(v.x) == 0 || __float_as_uint(v.y) == 0 || __float_as_uint(v.z) == 0 || __float_as_uint(v.w) == 0);
  *(float4*)from = make_float4(0.f, 0.f, 0.f, 0.f);
  return v;
}

static __device__ __noinline__ float activate_one(float v, int activation) { return activate(v, activation, nullptr); }
static __device__ __noinline__ void store_slowly(void* y, int column, int columns, int dtype, bool add, float4 v) {
  const float all[4] = {v.x, v.y, v.z, v.w};
  for (int e = 0; e < 4 && column + e < columns; e++) store(y, column + e, dtype, add ? ((const float*)y)[column + e] + all[e] : all[e]);
}

// The part of a block's run of work that lies in one matrix and column group.
struct Part {
  const uint8_t* weights;  // of its first block of 128 inputs
  const uint8_t* inputs;   // operands that go with them, where they are in memory
  int32_t pitch;           // bytes from the weights of one block of inputs to those of the next
  int32_t from, count;     // blocks of inputs
  int32_t unit, matrix;
};
static_assert(sizeof(Part) <= kPartBytes);

// Part i of a run: units from the last to the first, in each the segments in turn. Some may be empty.
__device__ __forceinline__ Part part_of_run(const EvenParams& p, int k2, int begin, int end, int i) {
  const int length = p.segments * p.blocks, segment = p.segments > 1 ? i & 1 : 0;
  Part part;
  part.unit = (end - 1) / length - (p.segments > 1 ? i >> 1 : i);
  const int start = part.unit * length + segment * p.blocks;
  part.from = max(begin - start, 0);
  part.count = max(min(end - start, p.blocks) - part.from, 0);
  part.matrix = segment;
  if (p.segments == 1)
    while (part.matrix + 1 < p.count && part.unit >= p.first_group[part.matrix + 1]) part.matrix++;
  const ProductMatrix& w = p.matrix[part.matrix];
  const int group = part.unit - (p.segments > 1 ? 0 : p.first_group[part.matrix]);
  part.pitch = w.columns * 128 * k2;
  part.weights = w.trellis + (int64_t)part.from * part.pitch + (int64_t)group * 128 * k2;
  part.inputs = p.image + (p.rotations > 1 ? part.matrix : 0) * p.image_stride + (int64_t)part.from * 8 * p.columns * 32;
  return part;
}

// After part i of the run, whose warps' sums lie in the exchange area. Every thread of the block calls it.
template <int MODE, int NB>
__device__ __forceinline__ void finish_part(const EvenParams& p, int k2, uint8_t* shared, int i, int turn) {
  constexpr int kDown = kWarps / warps_across(NB), kSlots = exchange_slots(NB);
  const EvenShared layout = even_shared(p, k2, NB);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, begin = first_work(p, block), end = first_work(p, block + 1), length = p.segments * p.blocks;
  const Part& part = ((const Part*)(shared + layout.parts))[i];
  const int unit = part.unit, count = part.count, m = part.matrix, segment = p.segments > 1 ? i & 1 : 0;
  const bool sends = end < (unit + 1) * length;  // another block finishes the unit
  const float* exchange = (const float*)(shared + layout.exchange);
  const RowInput* inputs = (const RowInput*)(shared + layout.scales) + turn * p.segments * p.rows;
  float* held = (float*)(shared + layout.held);
  if (count > 0)
    for (int row = warp; row < p.rows; row += kWarps) {
      float v[4] = {};
#pragma unroll
      for (int s = 0; s < kSlots; s++) {
        const float4 f = *(const float4*)(exchange + (s * p.columns + row) * kPitch + 4 * lane);
        v[0] += f.x;
        v[1] += f.y;
        v[2] += f.z;
        v[3] += f.w;
      }
      if (sends)
        send(p.inbox + ((int64_t)(block * p.segments + segment) * p.rows + row) * 128 + 4 * lane, v);
      else
        *(float4*)(held + (segment * p.rows + row) * 128 + 4 * lane) = make_float4(v[0], v[1], v[2], v[3]);
    }
  if (count == 0 && !sends && segment == 0)  // nothing of the first segment here, its sums come from others
    for (int row = warp; row < p.rows; row += kWarps) *(float4*)(held + row * 128 + 4 * lane) = make_float4(0.f, 0.f, 0.f, 0.f);
  if (sends || segment + 1 < p.segments) return;

  // sums of the blocks with the unit's earlier parts, nearest first; then rotate, scale, bias, activation
  const int unit_at = unit * length, m0 = m - segment;
  int others = 0;
  if (begin > unit_at) do
      others++;
    while (first_work(p, block - others) > unit_at);
  const int parcels = others * p.segments * p.rows, places = (layout.held - layout.exchange) / 512;
  float* arrived = (float*)(shared + layout.exchange);
  for (int done = 0; done < parcels; done += places) {
    __syncthreads();  // the area is free
    const int some = min(parcels - done, places);
    for (int n = warp; n < some; n += kWarps) {
      const int row = (done + n) % p.rows, which = (done + n) / p.rows, s = p.segments > 1 ? which & 1 : 0;
      const int other = block - 1 - (p.segments > 1 ? which >> 1 : which), start = unit_at + s * p.blocks;
      const bool has = max(first_work(p, other), start) < min(first_work(p, other + 1), start + p.blocks);
      *(float4*)(arrived + n * 128 + 4 * lane) =
          has ? receive(p.inbox + ((int64_t)(other * p.segments + s) * p.rows + row) * 128 + 4 * lane) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    __syncthreads();
    for (int row = warp; row < p.rows; row += kWarps)
      for (int n = (row - done % p.rows + p.rows) % p.rows; n < some; n += p.rows) {
        const int s = p.segments > 1 ? (done + n) / p.rows & 1 : 0;
        const float4 parcel = *(const float4*)(arrived + n * 128 + 4 * lane);
        float4& sum = *(float4*)(held + (s * p.rows + row) * 128 + 4 * lane);
        sum = make_float4(sum.x + parcel.x, sum.y + parcel.y, sum.z + parcel.z, sum.w + parcel.w);
      }
  }
  const ProductMatrix& w = p.matrix[m0];
  const int column = (p.segments > 1 ? unit : unit - p.first_group[m0]) * 128 + 4 * lane;
  const LaneSigns signs;
  for (int row = warp; row < p.rows; row += kWarps) {
    float v[4], gate[4];
    for (int s = 0; s < p.segments; s++) {
      const ProductMatrix& w = p.matrix[m0 + s];
      const uint2 h = *(const uint2*)(w.svh + column);
      const float4 total = *(const float4*)(held + (s * p.rows + row) * 128 + 4 * lane);
      v[0] = total.x, v[1] = total.y, v[2] = total.z, v[3] = total.w;
      const RowInput& input = inputs[s * p.rows + row];
      if (MODE == kDecodeBytes) {
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < kRowParts; k++) sum += input.sums[k];
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = kMul1Scale * v[e] + kMul1Shift * sum;
      }
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] *= input.scale;
      quick_hadamard128(v, signs);
      const float2 low = __half22float2(*(const __half2*)&h.x), high = __half22float2(*(const __half2*)&h.y);
      v[0] *= low.x * HADAMARD128_SCALE;
      v[1] *= low.y * HADAMARD128_SCALE;
      v[2] *= high.x * HADAMARD128_SCALE;
      v[3] *= high.y * HADAMARD128_SCALE;
      if (w.bias) {
        const float4 bias = load_norm(w.bias, column, w.out_features);
        v[0] += bias.x, v[1] += bias.y, v[2] += bias.z, v[3] += bias.w;
      }
      if (p.segments > 1 && s == 0)
#pragma unroll
        for (int e = 0; e < 4; e++) gate[e] = activate_one(v[e], p.activation);
    }
    if (p.segments > 1)
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] *= gate[e];
    char* y = (char*)row_of(w.y, (int64_t)(p.row0 + row) * w.y_stride + column, p.y_dtype);
    if (column + 4 > w.out_features || ((uintptr_t)y & 15) != 0 && (p.y_dtype == EXL3_F32 || ((uintptr_t)y & 7) != 0) || p.y_dtype == EXL3_BF16) {
      store_slowly(y, 0, w.out_features - column, p.y_dtype, p.accumulate, make_float4(v[0], v[1], v[2], v[3]));
    } else if (p.y_dtype == EXL3_F32) {
      float4 all = make_float4(v[0], v[1], v[2], v[3]);
      if (p.accumulate) {
        const float4 before = *(const float4*)y;
        all = make_float4(all.x + before.x, all.y + before.y, all.z + before.z, all.w + before.w);
      }
      *(float4*)y = all;
    } else {
      const __half2 h[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
      *(uint2*)y = *(const uint2*)h;
    }
  }
}

}  // namespace exl3::even
