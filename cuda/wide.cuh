// The product of many rows on sm_90a: weights decoded in registers, straight into wgmma's A operand.
//
// A block owns 128 output columns and ROWS rows of x. One tile of weights is one A fragment of one warp, with output columns as its rows;
// x is the B operand: the more rows, the less a decoded weight costs. The input is rotated once by prepare_wide and laid out in the very order,
// swizzle included, that wgmma reads, so plain bulk copies fetch it. A ninth warp feeds a ring of stages of 64 inputs. mul1 weights go in as
// 1024 + byte sum, exact in fp16; scale and shift belong to the epilogue, which turns each row's 128 sums by the Hadamard transform.
#pragma once
#include "product.h"
#include "ptx.cuh"
#include "trellis.cuh"

#include "../cpp/gpu/numbers.h"

namespace exl3 {

// Two warpgroups multiply, one warp more fetches. kWidePitch: floats of a row of sums, free of bank conflicts.
constexpr int kWideThreads = 288, kWidePitch = 132;

struct WideParams {
  ProductMatrix matrix[EXL3_MAX_GROUP];
  int32_t first_group[EXL3_MAX_GROUP + 1];
  int32_t count, rows, tile_rows, row_tiles, steps;  // tile_rows: 128 or 256, of a block; steps: in_padded / 64
  int32_t in_features, x_dtype, y_dtype, accumulate;
  int32_t activation;   // y = act(y) * result: y holds the gate
  int32_t rotations;
  const void* x;
  const float* norm_weight;
  int64_t x_stride;
  float norm_eps;
  uint8_t* image;       // [rotation][64 inputs][rows / 8][8 rows][128 bytes, 16-byte pieces swapped by row]
  SliceScale* scales;   // [rotation][row]
};

// Input and four rows of tiles, rounded up as the swizzle repeats every 1024 bytes.
inline constexpr __host__ __device__ int wide_stage(int k2, int rows) { return rows * 128 + (4 * 128 * k2 + 1023) / 1024 * 1024; }
inline constexpr __host__ __device__ int wide_stages(int k2, int rows) {
  const int fit = 216 * 1024 / wide_stage(k2, rows);
  return fit < 6 ? fit : 6;
}
inline constexpr __host__ __device__ int wide_shared(int k2, int rows) {
  const int ring = wide_stages(k2, rows) * wide_stage(k2, rows), sums = rows * kWidePitch * 4;
  return (ring > sums ? ring : sums) + 1024;
}

struct WideEntry {
  void (*kernel[2][2])(WideParams);  // [kDecodeBytes, kDecodePairs][128, 256 rows]
};

#ifdef __CUDACC__
// One block a row and rotation: norm, scales, rotation; twice, the first time for the largest value.
static __global__ void __launch_bounds__(256) prepare_wide(const __grid_constant__ WideParams p) {
  __shared__ float space[8];
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const int row = blockIdx.x, rotation = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const void* x = row_of(p.x, (int64_t)row * p.x_stride, p.x_dtype);
  const uint16_t* suh = p.matrix[rotation].suh;
  float norm = 1.f;
  if (p.norm_weight) {
    float sum = 0.f;
    for (int i = threadIdx.x * 4; i < p.in_features; i += 1024) {
      float v[4];
      load4(x, i, p.in_features, p.x_dtype, v);
      sum += v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
    }
    norm = rsqrtf(block_sum<256>(sum, space) / (float)p.in_features + p.norm_eps);
  }
  auto rotated = [&](int block, float(&v)[4]) {
    const int i = block * 128 + 4 * lane;
    load4(x, i, p.in_features, p.x_dtype, v);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (p.norm_weight && i + e < p.in_features) v[e] *= norm * p.norm_weight[i + e];
      v[e] *= half_to_float(suh[i + e]);
    }
    hadamard128(v);
  };
  const int blocks = p.steps / 2;
  float largest = 0.f;
  for (int b = warp; b < blocks; b += 8) {
    float v[4];
    rotated(b, v);
#pragma unroll
    for (int e = 0; e < 4; e++) largest = fmaxf(largest, fabsf(v[e]));
  }
  largest = warp_max(largest);
  __syncthreads();
  if (lane == 0) space[warp] = largest;
  __syncthreads();
  for (int w = 0; w < 8; w++) largest = fmaxf(largest, space[w]);
  // a power of two that brings the largest to 256 .. 512; the transform's 1/sqrt(128) goes to the scale
  const int exponent = largest > 0.f && largest < 3e38f ? ((__float_as_int(largest) >> 23) & 255) - 127 : 0;
  const int shift = max(-126, min(126, 8 - exponent));
  const float factor = __int_as_float((127 + shift) << 23);
  const int64_t step_bytes = (int64_t)p.row_tiles * p.tile_rows * 128;
  uint8_t* image = p.image + (int64_t)rotation * p.steps * step_bytes + (row / 8) * 1024 + (row % 8) * 128;
  float sum = 0.f;
  for (int b = warp; b < blocks; b += 8) {
    float v[4];
    rotated(b, v);
    const __half2 h[2] = {__floats2half2_rn(v[0] * factor, v[1] * factor), __floats2half2_rn(v[2] * factor, v[3] * factor)};
    sum += (__low2float(h[0]) + __high2float(h[0])) + (__low2float(h[1]) + __high2float(h[1]));
    const int piece = (lane % 16) / 2;  // of 16 bytes
    *(uint2*)(image + (2 * b + lane / 16) * step_bytes + ((piece ^ (row % 8)) * 16) + (lane % 2) * 8) = *(const uint2*)h;
  }
  sum = block_sum<256>(sum, space);
  if (threadIdx.x == 0) p.scales[(int64_t)rotation * p.rows + row] = {__int_as_float((127 - shift) << 23) * HADAMARD128_SCALE, 0, 0, sum};
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// d += a b of one warpgroup: a 64 x 16 halves from registers, b 16 x N halves from shared memory (N rows of 64, swizzled by 128 bytes).
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

template <int K2, int MODE, int ROWS>
__global__ void __launch_bounds__(kWideThreads, 1) wide_kernel(const __grid_constant__ WideParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = wide_stages(K2, ROWS), kImage = ROWS * 128, kTileRow = 128 * K2, kStage = wide_stage(K2, ROWS);
  extern __shared__ uint8_t raw[];
  uint8_t* shared = (uint8_t*)(((uintptr_t)raw + 1023) & ~(uintptr_t)1023);
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
  const int tile = blockIdx.x % p.row_tiles, unit = blockIdx.x / p.row_tiles, warp = threadIdx.x / 32, thread = threadIdx.x, lane = threadIdx.x % 32;
  int m = 0;
  while (m + 1 < p.count && unit >= p.first_group[m + 1]) m++;
  const int group = unit - p.first_group[m];
  const ProductMatrix& w = p.matrix[m];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, 8);
    }
    ptx::barrier_init_done();
  }
  __syncthreads();
  ptx::launch_dependents();

  if (warp == 8) {  // fetches; weights before the wait for the previous kernel
    if (lane != 0) return;
    const int64_t pitch = (int64_t)w.columns * 16 * K2, step_bytes = (int64_t)p.row_tiles * kImage;
    const uint8_t* weights = w.trellis + group * kTileRow;
    const uint8_t* image = p.image + (int64_t)(p.rotations > 1 ? m : 0) * p.steps * step_bytes + (int64_t)tile * kImage;
    auto fetch_weights = [&](int step, int stage) {
      ptx::barrier_expect(full + stage, kImage + 4 * kTileRow);
      for (int r = 0; r < 4; r++)
        ptx::bulk_load(shared + stage * kStage + kImage + r * kTileRow, weights + (step * 4 + r) * pitch, kTileRow, full + stage);
    };
    auto fetch_image = [&](int step, int stage) { ptx::bulk_load(shared + stage * kStage, image + step * step_bytes, kImage, full + stage); };
    const int ahead = min(kStages, p.steps);
    for (int i = 0; i < ahead; i++) fetch_weights(i, i);
    ptx::wait_for_previous();
    for (int i = 0; i < ahead; i++) fetch_image(i, i);
    for (int i = ahead; i < p.steps; i++) {
      const int stage = i % kStages;
      ptx::barrier_wait(empty + stage, (i / kStages - 1) & 1);
      fetch_weights(i, stage);
      fetch_image(i, stage);
    }
    return;
  }
  ptx::wait_for_previous();
  float d[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) d[i] = 0.f;
  {
    const Run<K2> run(lane);
    const uint32_t multiplier = w.multiplier, addend = w.addend;
    uint32_t a[2][4];
    int stage = 0, phase = 0;
    for (int step = 0; step < p.steps; step++) {
      ptx::barrier_wait(full + stage, phase);
      const uint8_t* in = shared + stage * kStage;
      // descriptor: address, 1024 bytes from one group of eight rows to the next, swizzle of 128 bytes
      const uint64_t b = (uint64_t)((ptx::shared_address(in) & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        uint32_t s[8];
        read_states<K2>((const uint32_t*)(in + kImage + r * kTileRow + warp * 16 * K2), run, s);
        uint32_t(&now)[4] = a[r & 1];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int j = 4 * (e & 1) + 2 * (e >> 1);
          now[e] = MODE == kDecodeBytes ? decode_bytes(s[j], s[j + 1], multiplier) : decode_pairs(s[j], s[j + 1], multiplier, addend);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        wgmma(d, now, b + r * 2);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the product before is done: its operand may go
        if (r == 0 && step > 0 && lane == 0) ptx::barrier_arrive(empty + (stage ? stage - 1 : kStages - 1));  // and the stage before
      }
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }

  // sums to shared memory, [row of x][output column]
  const int g = lane / 4, q = lane % 4;
  float* sums = (float*)shared;
  asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++) {
    float* to = sums + (j * 8 + 2 * q) * kWidePitch + warp * 16 + g;
    to[0] = d[4 * j];
    to[kWidePitch] = d[4 * j + 1];
    to[8] = d[4 * j + 2];
    to[kWidePitch + 8] = d[4 * j + 3];
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
  const int row0 = tile * ROWS, rows = min(ROWS, p.rows - row0);
  for (int pass = 0; pass < ROWS; pass += 128) {  // the Hadamard transform: two threads a row, 64 columns each, then the last level between them
    const int row = pass + thread / 2, side = thread % 2;
    float v[64];
    float* mine = sums + row * kWidePitch + side * 64;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float4 f = *(const float4*)(mine + 4 * i);
      v[4 * i] = f.x;
      v[4 * i + 1] = f.y;
      v[4 * i + 2] = f.z;
      v[4 * i + 3] = f.w;
    }
#pragma unroll
    for (int step = 1; step < 64; step <<= 1)
#pragma unroll
      for (int i = 0; i < 64; i++)
        if (!(i & step)) {
          const float x = v[i], y = v[i | step];
          v[i] = x + y;
          v[i | step] = x - y;
        }
    float scale = 0.f, sum = 0.f;
    if (row < rows) {
      const SliceScale s = p.scales[(int64_t)(p.rotations > 1 ? m : 0) * p.rows + row0 + row];
      scale = s.scale * HADAMARD128_SCALE * (MODE == kDecodeBytes ? kMul1Scale : 1.f);
      // a constant under the transform is its first value
      if (MODE == kDecodeBytes && side == 0) sum = s.sum * s.scale * HADAMARD128_SCALE * kMul1Shift * 128.f;
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
      const float other = __shfl_xor_sync(~0u, v[i], 1);
      v[i] = (side ? other - v[i] : v[i] + other) * scale;
    }
    v[0] += sum;
#pragma unroll
    for (int i = 0; i < 16; i++) *(float4*)(mine + 4 * i) = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
  const int c = group * 128 + 4 * lane;
  float scale[4], bias[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    scale[e] = half_to_float(w.svh[c + e]);
    bias[e] = w.bias && c + e < w.out_features ? w.bias[c + e] : 0.f;
  }
  const bool whole = c + 4 <= w.out_features && w.y_stride % 4 == 0 && ((uintptr_t)w.y & 15) == 0;
  for (int r = warp; r < rows; r += 8) {
    const float4 f = *(const float4*)(sums + r * kWidePitch + 4 * lane);
    float v[4] = {f.x, f.y, f.z, f.w};
    void* y = row_of(w.y, (int64_t)(row0 + r) * w.y_stride, p.y_dtype);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[e] = v[e] * scale[e] + bias[e];
      if (c + e >= w.out_features) continue;
      if (p.activation) v[e] *= activate(load(y, c + e, p.y_dtype), p.activation, nullptr);
      if (p.accumulate) v[e] += ((const float*)y)[c + e];
    }
    if (whole && p.y_dtype == EXL3_F16) {
      const __half2 h[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
      *(uint2*)((uint16_t*)y + c) = *(const uint2*)h;
    } else if (whole && p.y_dtype == EXL3_F32) {
      *(float4*)((float*)y + c) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (c + e < w.out_features) store(y, c + e, p.y_dtype, v[e]);
    }
  }
#endif
}
#endif

}  // namespace exl3
