// The input of the product: norm, scales, rotation, quantization to operands.
#pragma once
#include "even.h"
#include "rotate.cuh"

namespace exl3::even {

// The power of two that brings the largest of a row to 2048 .. 4096 before it is turned, so that it stays below 46341. Returned as an exponent.
__device__ __forceinline__ int input_shift(float largest) {
  const int exponent = largest > 0.f && largest < 3e38f ? ((__float_as_int(largest) >> 23) & 255) - 127 : 0;
  return max(-126, min(126, 11 - exponent));
}

// Four values of one lane of a rotated block of 128 become operands: lane l holds inputs 4(l%4) .. +3 of row of tiles l/4; each pair of
// them goes to one word. `out`: the block's image. Returns their sum.
__device__ __forceinline__ float store_operands(const EvenParams& p, const float (&v)[4], float factor, uint8_t* out, int column) {
  const int lane = threadIdx.x % 32, c = lane % 4;
  out += ((lane / 4) * p.columns + column) * 32 + (c >> 1) * 4;
  float sum = 0.f;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const __half2 h = __floats2half2_rn(v[2 * half] * factor, v[2 * half + 1] * factor);
    sum += __low2float(h) + __high2float(h);
    *(__half2*)(out + (2 * (c & 1) + half) * 8) = h;
  }
  return sum;
}

// Norm, scale, rotation, operands: block (part, row, rotation). Each looks at the whole row for its scale, and turns its part.
static __global__ void __launch_bounds__(kPrepareWarps * 32) prepare_even(const __grid_constant__ EvenParams p) {
  __shared__ float squares_of[kPrepareWarps], sums_of[kPrepareWarps];
  __shared__ int largest_of[kPrepareWarps];
  const int part = blockIdx.x, row = blockIdx.y, rotation = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint16_t* suh = p.matrix[rotation].suh;
  const int pass = row / p.columns, column = row - pass * p.columns;
  uint8_t* image = p.image + rotation * p.image_stride + (int64_t)pass * p.blocks * 8 * p.columns * 32;
  ptx::launch_dependents();
  for (int i = threadIdx.x; i < p.blocks * 2; i += kPrepareWarps * 32) ptx::prefetch(suh + i * 64);  // a weight: early
  ptx::wait_for_previous();
  const char* x = (const char*)row_of(p.x, (int64_t)row * p.x_stride, p.x_dtype);
  const bool plain = p.in_features % 128 == 0 && ((uintptr_t)x & 15) == 0;
  float squares = 0.f;
  int most = 0;  // magnitudes as integers: they order alike, and a NaN is the largest, so that it is not lost
  auto load_block = [&](int b, float(&v)[4], auto see) {
    const int i = b * 128 + 4 * lane;
    from_raw(load_raw(x, i, p.in_features, p.x_dtype, plain), p.x_dtype, v);
    see(v);
    const uint2 h = *(const uint2*)(suh + i);
    const float2 low = __half22float2(*(const __half2*)&h.x), high = __half22float2(*(const __half2*)&h.y);
    if (p.norm_weight) {
      const float4 w = load_norm(p.norm_weight, i, p.in_features);
      v[0] *= w.x, v[1] *= w.y, v[2] *= w.z, v[3] *= w.w;
    }
    v[0] *= low.x, v[1] *= low.y, v[2] *= high.x, v[3] *= high.y;
  };
#pragma unroll 4
  for (int b = warp; b < p.blocks; b += kPrepareWarps) {
    float v[4];
    load_block(b, v, [&](const float(&u)[4]) { squares += u[0] * u[0] + u[1] * u[1] + (u[2] * u[2] + u[3] * u[3]); });
#pragma unroll
    for (int e = 0; e < 4; e++) most = max(most, __float_as_int(v[e]) & 0x7fffffff);
  }
  most = ptx::warp_most(most);
  if (p.norm_weight) squares = warp_sum(squares);
  if (lane == 0) {
    largest_of[warp] = most;
    squares_of[warp] = squares;
  }
  __syncthreads();
  squares = 0.f;
#pragma unroll
  for (int w = 0; w < kPrepareWarps; w++) {
    most = max(most, largest_of[w]);
    squares += squares_of[w];
  }
  const int shift = input_shift(__int_as_float(most)), first = p.blocks * part / kRowParts, last = p.blocks * (part + 1) / kRowParts;
  const LaneSigns signs;
  float sum = 0.f;
#pragma unroll 1
  for (int b = first + warp; b < last; b += kPrepareWarps) {
    float v[4];
    load_block(b, v, [](const float(&)[4]) {});
    quick_hadamard128(v, signs);
    sum += store_operands(p, v, power_of_two(shift) * HADAMARD128_SCALE, image + (int64_t)b * 8 * p.columns * 32, column);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums_of[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0.f;
#pragma unroll
  for (int w = 0; w < kPrepareWarps; w++) sum += sums_of[w];
  RowInput& out = p.inputs[(int64_t)rotation * p.all_rows + row];
  out.sums[part] = sum;
  if (part == 0) out.scale = power_of_two(-shift) * (p.norm_weight ? rsqrtf(squares / (float)p.in_features + p.norm_eps) : 1.f);
}

}  // namespace exl3::even
