// The input of the product: norm, scales, rotation, quantization to operands.
#pragma once
#include "even.h"
#include "rotate.cuh"

namespace exl3::even {

// The power of two that keeps a row's products with its scales below 4096, so that they stay below 46341 when they are turned. From bounds of
// both, as exponents: fp16 has room enough below.
__device__ __forceinline__ int exponent_of(int bits) { return (bits >> 23) - 127; }
__device__ __forceinline__ int input_shift(int largest_x, int largest_scale) {
  if (largest_x == 0 || largest_x >= 0x7f800000 || largest_scale == 0 || largest_scale >= 0x7f800000) return 0;
  return max(-126, min(126, 10 - exponent_of(largest_x) - exponent_of(largest_scale)));
}

// Four values of one lane of a rotated block of 128 become operands: lane l holds inputs 4l .. 4l+3. `out`: the block's image. Returns their sum.
__device__ __forceinline__ float store_operands(const EvenParams& p, const float (&v)[4], float factor, uint8_t* out, int column) {
  const int lane = threadIdx.x % 32, half = lane >> 1 & 1, place = lane >> 2 & 1;
  const __half2 h[2] = {__floats2half2_rn(v[0] * factor, v[1] * factor), __floats2half2_rn(v[2] * factor, v[3] * factor)};
  out += lane / 8 * image_bytes(2, p.columns) + column * 16 + place * 8 + lane % 2 * 4;
#pragma unroll
  for (int product = 0; product < 2; product++) *(__half2*)(out + (2 * product + half) * p.columns * 16) = h[product];
  return (__low2float(h[0]) + __high2float(h[0])) + (__low2float(h[1]) + __high2float(h[1]));
}

// The sum of squares and the largest magnitude of what a thread sees of a row. Magnitudes as integers: they order alike, and a NaN is the largest,
// so that it is not lost.
__device__ __forceinline__ void look_at(float v, float& squares, int& most) {
  squares += v * v;
  most = max(most, __float_as_int(v) & 0x7fffffff);
}
template <int DTYPE>
__device__ __forceinline__ void look(const char* x, int bytes, float& squares, int& most) {
  constexpr int kFlight = 4, kPace = kPrepareWarps * 32 * 16;
#pragma unroll 1
  for (int at = threadIdx.x * 16; at < bytes; at += kFlight * kPace) {
    uint4 raw[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; k++) raw[k] = at + k * kPace < bytes ? *(const uint4*)(x + at + k * kPace) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < kFlight; k++)
#pragma unroll
      for (uint32_t w : {raw[k].x, raw[k].y, raw[k].z, raw[k].w}) {
        if (DTYPE == EXL3_F32) {
          look_at(__uint_as_float(w), squares, most);
        } else {
          const float2 v = DTYPE == EXL3_F16 ? __half22float2(*(const __half2*)&w)
                                             : make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000));
          look_at(v.x, squares, most);
          look_at(v.y, squares, most);
        }
      }
  }
}
static __device__ __noinline__ void look_slowly(const void* x, int n, int dtype, float& squares, int& most) {
  for (int i = threadIdx.x; i < n; i += kPrepareWarps * 32) look_at(load(x, i, dtype), squares, most);
}

// Norm, scale, rotation, operands: block (part, row, rotation). Each looks at the whole row for its scale, and turns its part. What it needs of
// the scales it knows before the kernel before has ended.
static __global__ void __launch_bounds__(kPrepareWarps * 32) prepare_even(const __grid_constant__ EvenParams p) {
  constexpr int kThreads = kPrepareWarps * 32;
  __shared__ float squares_of[kPrepareWarps];
  __shared__ double sums_of[kPrepareWarps];
  __shared__ int largest_of[kPrepareWarps], largest_scales[kPrepareWarps];
  const int part = blockIdx.x, row = blockIdx.y, rotation = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint16_t* suh = p.matrix[rotation].suh;
  const int pass = row / p.columns, column = row - pass * p.columns;
  uint8_t* image = p.image + rotation * p.image_stride + pass * image_bytes(p);
  ptx::launch_dependents();
  auto scales_at = [&](int i, float(&v)[4]) {
    const uint2 h = *(const uint2*)(suh + i);
    const float2 low = __half22float2(*(const __half2*)&h.x), high = __half22float2(*(const __half2*)&h.y);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
    if (p.norm_weight) {
      const float4 w = load_norm(p.norm_weight, i, p.in_features);
      v[0] *= w.x, v[1] *= w.y, v[2] *= w.z, v[3] *= w.w;
    }
  };
  int most_scale = 0;
#pragma unroll 1
  for (int i = 4 * threadIdx.x; i < p.blocks * 128; i += 4 * kThreads) {
    float v[4];
    scales_at(i, v);
#pragma unroll
    for (int e = 0; e < 4; e++) most_scale = max(most_scale, __float_as_int(v[e]) & 0x7fffffff);
  }
  const char* x = (const char*)row_of(p.x, (int64_t)row * p.x_stride, p.x_dtype);
  const bool plain = p.in_features % 128 == 0 && ((uintptr_t)x & 15) == 0;
  const int blocks = p.steps * p.step_tiles / 8;  // with those beyond the inputs
  const int first = blocks * part / p.row_parts, last = blocks * (part + 1) / p.row_parts;
  const LaneSigns signs;
  ptx::wait_for_previous();
  auto load_block = [&](int b) {
    return b < min(last, p.blocks) ? load_raw(x, b * 128 + 4 * lane, p.in_features, p.x_dtype, plain) : make_uint4(0, 0, 0, 0);
  };
  uint4 next = load_block(first + warp);
  float squares = 0.f;
  double sum = 0;
  int most = 0;
  if (!plain)
    look_slowly(x, p.in_features, p.x_dtype, squares, most);
  else if (p.x_dtype == EXL3_F16)
    look<EXL3_F16>(x, p.in_features * 2, squares, most);
  else if (p.x_dtype == EXL3_BF16)
    look<EXL3_BF16>(x, p.in_features * 2, squares, most);
  else
    look<EXL3_F32>(x, p.in_features * 4, squares, most);
  most = ptx::warp_most(most);
  most_scale = ptx::warp_most(most_scale);
  if (p.norm_weight) squares = warp_sum(squares);
  if (lane == 0) {
    largest_of[warp] = most;
    largest_scales[warp] = most_scale;
    squares_of[warp] = squares;
  }
  __syncthreads();
  squares = 0.f;
#pragma unroll
  for (int w = 0; w < kPrepareWarps; w++) {
    most = max(most, largest_of[w]);
    most_scale = max(most_scale, largest_scales[w]);
    squares += squares_of[w];
  }
  const int shift = input_shift(most, most_scale);
#pragma unroll 1
  for (int b = first + warp; b < last; b += kPrepareWarps) {
    float v[4], scales[4] = {};
    from_raw(next, p.x_dtype, v);
    next = load_block(b + kPrepareWarps);
    if (b < p.blocks) scales_at(b * 128 + 4 * lane, scales);
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] *= scales[e];
    quick_hadamard128(v, signs);
    sum += store_operands(p, v, power_of_two(shift) * HADAMARD128_SCALE, image + (int64_t)b * image_bytes(8, p.columns), column);
  }
  for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
  if (lane == 0) sums_of[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0;
#pragma unroll
  for (int w = 0; w < kPrepareWarps; w++) sum += sums_of[w];
  RowInput& out = p.inputs[(int64_t)rotation * p.all_rows + row];
  out.sums[part] = sum;
  if (part == 0) {
    for (int k = p.row_parts; k < kMostParts; k++) out.sums[k] = 0;
    out.scale = power_of_two(-shift) * (p.norm_weight ? rsqrtf(squares / (float)p.in_features + p.norm_eps) : 1.f);
  }
}

}  // namespace exl3::even
