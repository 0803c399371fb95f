// The product of few rows with trellis weights: memory-bound decode, and up to 32 rows a pass above it.
//
// A block of eight warps owns 128 output columns and a slice of the inner dimension. Each warp streams its own rows of tiles through a
// private ring of asynchronous copies (no barrier between warps), turns bits into matrix operands in registers, and multiplies with the tensor
// cores: the weights are the A operand (output columns are its rows), the input is B. For up to eight rows the operand is the hash
// product itself (spec: its bytes, or its two halves, sum to the weight), so nothing is decoded at all; int8 activations come in two planes,
// which makes 16 bits. The slices of one column group form a cluster: they add up over distributed shared memory in a fixed order, and
// each rotates, scales and stores some of the rows. Weights are fetched before the wait for the previous kernel.
//
// Results depend on shapes only: integer sums are exact, and floating-point sums have one fixed order.
#pragma once
#include <type_traits>

#include "product.h"
#include "ptx.cuh"
#include "trellis.cuh"

#include "../cpp/gpu/product.h"

namespace exl3 {

// ------------------------------------------------------------------------------------------------ input: norm, rotate, quantize
// 1 / rms of one row, the same bits in whichever block computes it.
__device__ inline float row_scale(const ProductParams& p, int row, float* space) {
  const void* x = row_of(p.x, (int64_t)row * p.x_stride, p.x_dtype);
  float sum = 0.f;
  for (int i = threadIdx.x * 4; i < p.in_features; i += kWarps * 32 * 4) {
    float v[4];
    load4(x, i, p.in_features, p.x_dtype, v);
#pragma unroll
    for (int e = 0; e < 4; e++) sum += v[e] * v[e];
  }
  return rsqrtf(block_sum<kWarps * 32>(sum, space) / (float)p.in_features + p.norm_eps);
}

struct InputSpace {  // shared memory of prepare_slice; `largest`, `high` and `low` are zero before it
  float sums[kWarps];
  float norm[kRows];
  int largest[kRows];
  int high[kRows], low[kRows];
};
__device__ __forceinline__ void clear(InputSpace& space) {
  if (threadIdx.x < kRows) space.largest[threadIdx.x] = space.high[threadIdx.x] = space.low[threadIdx.x] = 0;
}
// The power of two that brings the largest of a row to 256 .. 512: exact, and far from both ends of fp16. Returned as an exponent.
__device__ __forceinline__ int half_shift(float largest) {
  const int exponent = largest > 0.f && largest < 3e38f ? ((__float_as_int(largest) >> 23) & 255) - 127 : 0;
  return max(-126, min(126, 8 - exponent));
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Rotates rows row0 .. row0+rows-1 of one slice and writes their operands. `stage`: rows * slice * 128 floats. image: of this slice;
// columns: its stride in columns; scales: [row] with `scale_stride` between rows. Every thread of the block calls it; it ends with a barrier.
template <int MODE>
__device__ inline void prepare_slice(const ProductParams& p, const uint16_t* suh, int slice, int row0, int rows, int first_column, int columns,
                                     float* stage, uint8_t* image, SliceScale* scales, int scale_stride, InputSpace& space, bool norms_known) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = slice_begin(p, slice), blocks = slice_begin(p, slice + 1) - begin;
  if (p.norm_weight && !norms_known) {
    for (int r = 0; r < rows; r++) {
      const float s = row_scale(p, row0 + r, space.sums);
      if (threadIdx.x == 0) space.norm[r] = s;
    }
    __syncthreads();
  }
  for (int r = 0; r < rows; r++) {
    const void* x = row_of(p.x, (int64_t)(row0 + r) * p.x_stride, p.x_dtype);
    int most = 0;  // magnitudes as integers: they order alike, and a NaN is the largest, so that it is not lost
    constexpr int kBatch = 4;  // loads of several blocks under way together
    for (int first = warp; first < blocks; first += kBatch * kWarps) {
      float v[kBatch][4], w[kBatch][4];
      uint2 signs[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; k++) {
        const int b = first + k * kWarps, i = (begin + b) * 128 + 4 * lane;
        if (b >= blocks) break;
        load4(x, i, p.in_features, p.x_dtype, v[k]);
        if (p.norm_weight) load4(p.norm_weight, i, p.in_features, EXL3_F32, w[k]);
        signs[k] = *(const uint2*)(suh + i);
      }
#pragma unroll
      for (int k = 0; k < kBatch; k++) {
        const int b = first + k * kWarps;
        if (b >= blocks) break;
        if (p.norm_weight)
#pragma unroll
          for (int e = 0; e < 4; e++) v[k][e] *= space.norm[r] * w[k][e];
        v[k][0] *= half_to_float((uint16_t)signs[k].x);
        v[k][1] *= half_to_float((uint16_t)(signs[k].x >> 16));
        v[k][2] *= half_to_float((uint16_t)signs[k].y);
        v[k][3] *= half_to_float((uint16_t)(signs[k].y >> 16));
        hadamard128(v[k]);
#pragma unroll
        for (int e = 0; e < 4; e++) most = max(most, __float_as_int(v[k][e] *= HADAMARD128_SCALE) & 0x7fffffff);
        *(float4*)(stage + (r * blocks + b) * 128 + 4 * lane) = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
      }
    }
    most = ptx::warp_most(most);
    if (lane == 0 && warp < blocks) atomicMax(&space.largest[r], most);
  }
  __syncthreads();
  for (int r = 0; r < rows; r++) {
    const float largest = __int_as_float(space.largest[r]);
    int high_sum = 0, low_sum = 0;
    for (int b = warp; b < blocks; b += kWarps) {
      const float4 f = *(const float4*)(stage + (r * blocks + b) * 128 + 4 * lane);
      const float v[4] = {f.x, f.y, f.z, f.w};
      // lane l holds inputs 4(l%4) .. +3 of row of tiles b*8 + l/4; each pair of them goes to one word
      const int tile_row = b * 8 + lane / 4, c = lane % 4;
      uint8_t* out = image + (int64_t)(tile_row * columns + first_column) * image_column_bytes(MODE);
      if constexpr (MODE == kBytes) {
        const bool two = p.planes == 2;
        const float inverse = largest > 0.f ? (two ? 32512.f : 127.f) / largest : 0.f;
        uint32_t bytes_high = 0, bytes_low = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int q = __float2int_rn(v[e] * inverse), h = two ? (q + 128) >> 8 : q, l = q - (h << 8);
          high_sum += h;
          bytes_high |= (uint32_t)(h & 255) << (8 * e);
          if (two) {
            low_sum += l;
            bytes_low |= (uint32_t)(l & 255) << (8 * e);
          }
        }
        const int low_column = (columns == 16 ? 8 : p.rows) + r, at = 2 * (c & 1) * 4 + (c >> 1) * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          *(uint16_t*)(out + r * 16 + at + 4 * half) = (uint16_t)(bytes_high >> (16 * half));
          if (two) *(uint16_t*)(out + low_column * 16 + at + 4 * half) = (uint16_t)(bytes_low >> (16 * half));
        }
      } else {
        const float scale = power_of_two(half_shift(largest));
        float sum = 0.f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const __half2 h = __floats2half2_rn(v[2 * half] * scale, v[2 * half + 1] * scale);
          sum += __low2float(h) + __high2float(h);
          *(__half2*)(out + r * 32 + (2 * (c & 1) + half) * 8 + (c >> 1) * 4) = h;
        }
        if (MODE == kDecodeBytes) {  // partial sums stay with their block: added up in order below
          sum = warp_sum(sum);
          if (lane == 0) stage[(r * blocks + b) * 128] = sum;
        }
      }
    }
    if constexpr (MODE == kBytes) {
      high_sum = ptx::warp_total(high_sum);
      low_sum = ptx::warp_total(low_sum);
      if (lane == 0 && warp < blocks) {
        atomicAdd(&space.high[r], high_sum);
        atomicAdd(&space.low[r], low_sum);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < rows) {
    const int r = threadIdx.x;
    const float largest = __int_as_float(space.largest[r]);
    SliceScale s{};
    if constexpr (MODE == kBytes) {
      s.scale = largest / (p.planes == 2 ? 32512.f : 127.f);
      s.sum_high = space.high[r];
      s.sum_low = space.low[r];
    } else {
      s.scale = power_of_two(-half_shift(largest));
      if (MODE == kDecodeBytes)
        for (int b = 0; b < blocks; b++) s.sum += stage[(r * blocks + b) * 128];
    }
    scales[(int64_t)r * scale_stride] = s;  // read after the barriers that follow the products
  }
}

// The same as a kernel of its own: block (slice, row, rotation).
template <int MODE>
__global__ void __launch_bounds__(kWarps * 32, 2) prepare_input(const __grid_constant__ ProductParams p) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ InputSpace space;
  ptx::launch_dependents();
  clear(space);
  __syncthreads();
  ptx::wait_for_previous();
  const int slice = blockIdx.x, row = blockIdx.y, rotation = blockIdx.z;
  const int wide = MODE >= kDecodeBytes;  // rows in tiles of image_columns; else columns: planes times rows
  const int tile = wide ? row / p.image_columns : 0, column = wide ? row % p.image_columns : row;
  const int64_t tile_rows = p.blocks * 8;
  const int tiles = wide ? (p.rows + p.image_columns - 1) / p.image_columns : 1;
  uint8_t* image = p.image + ((int64_t)(rotation * tiles + tile) * tile_rows + slice_begin(p, slice) * 8) * p.image_columns * image_column_bytes(MODE);
  SliceScale* scale = p.scales + ((int64_t)rotation * p.rows + row) * p.slices + slice;
  prepare_slice<MODE>(p, p.matrix[rotation].suh, slice, row, 1, column, p.image_columns, (float*)shared, image, scale, 0, space, false);
}

// ------------------------------------------------------------------------------------------------ the ring of one warp
// Copies of 16 bytes a lane cost fewer instructions here than bulk copies of a row of tiles: those need uniform addresses and a barrier.
template <int BYTES, int ROWS>
struct Feed {
  const uint8_t* next;  // the lane's own 16 bytes of the next row
  int pitch, left, segment;

  // Starts the copies of up to ROWS more rows into a slot (the lane's own place in it); open(feed, segment) goes on to another segment.
  template <class Open>
  __device__ __forceinline__ void fill(uint8_t* to, int lane, int segments, Open open) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (r < left)
#pragma unroll
        for (int at = 0; at < BYTES; at += 512)
          if (at + 512 <= BYTES || lane * 16 < BYTES - at) ptx::copy16(to + r * BYTES + at, next + at);
      next += pitch;
    }
    left -= min(ROWS, left);
    if (left == 0 && segment + 1 < segments) open(*this, segment + 1);
  }
};

// ------------------------------------------------------------------------------------------------ the kernel
template <int K2, int MODE, int NB>
struct ProductTraits {
  using Sum = typename std::conditional<MODE == kBytes, int, float>::type;
  // three blocks leave room for the next kernel's first ones
  static constexpr int kBlocksPerSm = NB >= 4 ? 1 : MODE < kDecodeBytes && NB == 1 ? 3 : 2;
};

template <int K2, int MODE, int NB>
__global__ void __launch_bounds__(kWarps * 32, ProductTraits<K2, MODE, NB>::kBlocksPerSm) product_kernel(const __grid_constant__ ProductParams p) {
#if __CUDA_ARCH__ >= 800
  using Sum = typename ProductTraits<K2, MODE, NB>::Sum;
  constexpr int kTileRow = 128 * K2, kIn = rows_in_slot(K2), kImage = MODE >= kDecodeBytes ? NB * 8 * 32 : 0, kSlot = kIn * (kTileRow + kImage);
  constexpr bool kResident = MODE < kDecodeBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ InputSpace space;
  __shared__ SliceScale scales[2][kResident ? kRows : 1];
#if __CUDA_ARCH__ >= 900
  __shared__ __align__(8) uint64_t image_full, received_full;
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int slice = blockIdx.x, unit = blockIdx.y, row_tile = blockIdx.z;
  int m = 0;
  while (m + 1 < p.count && unit >= p.first_group[m + 1]) m++;
  const int group = unit - p.first_group[m];
  const int row0 = kResident ? 0 : row_tile * NB * 8, rows = min(p.rows - row0, kResident ? kRows : NB * 8);
  const int columns = kResident ? p.image_columns : NB * 8;
  const ProductShared layout = product_shared(p, K2, MODE, columns, kResident ? p.rows : NB * 8);
  const int begin = slice_begin(p, slice), blocks = slice_begin(p, slice + 1) - begin;
  const bool two_images = p.rotations > 1 && p.segments > 1;

  uint8_t* ring = shared + warp * p.ring_slots * kSlot;
  const int steps = (blocks + kIn - 1) / kIn;  // of a segment
  const int64_t image_row = (int64_t)columns * image_column_bytes(MODE);
  const int row_tiles = kResident ? 1 : (p.rows + NB * 8 - 1) / (NB * 8);
  const int64_t image_size = (int64_t)p.blocks * 8 * image_row;
  Feed<kTileRow, kIn> weights;
  auto open_weights = [&](Feed<kTileRow, kIn>& f, int segment) {
    const ProductMatrix& w = p.matrix[p.segments > 1 ? segment : m];
    const int64_t row_bytes = (int64_t)w.columns * 16 * K2;
    f.next = w.trellis + (begin * 8 + warp) * row_bytes + group * kTileRow + lane * 16;
    f.pitch = (int)(8 * row_bytes);
    f.left = blocks;
    f.segment = segment;
  };
  open_weights(weights, 0);
  Feed<kImage, kIn> inputs;
  auto open_inputs = [&](Feed<kImage, kIn>& f, int segment) {
    const int rotation = two_images ? segment : p.rotations > 1 ? m : 0;
    f.next = p.image + (rotation * row_tiles + row_tile) * image_size + (begin * 8 + warp) * image_row + lane * 16;
    f.pitch = (int)(8 * image_row);
    f.left = blocks;
    f.segment = segment;
  };

  const int each = (rows + p.slices - 1) / p.slices;                         // rows a slice finishes at most
  const int finishes = slice < rows ? (rows - slice - 1) / p.slices + 1 : 0;  // and this one: rows slice, slice + slices, ...
  ptx::launch_dependents();
  // scales are weights too: on their way before they are asked for
  for (int s = 0; s < p.segments; s++) {
    const ProductMatrix& w = p.matrix[p.segments > 1 ? s : m];
    const int i = threadIdx.x;
    if (i < blocks * 2) ptx::prefetch(w.suh + begin * 128 + i * 64);
    if (i < 2) ptx::prefetch(w.svh + group * 128 + i * 64);
  }
  if constexpr (kResident) clear(space);
#pragma unroll
  for (int i = 0; i < kRingSlots; i++) {  // one group of copies a step, empty ones too: so the oldest of the last three is the next step's
    if (i < p.ring_slots) weights.fill(ring + i * kSlot + lane * 16, lane, p.segments, open_weights);
    if (kResident) ptx::copy_commit();
  }
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    ptx::barrier_init(&image_full, 1);
    ptx::barrier_init(&received_full, 1);
    ptx::barrier_init_done();
    if (p.slices > 1 && finishes > 0) ptx::barrier_expect(&received_full, finishes * p.segments * p.slices * 512);
  }
  __syncthreads();
  if (p.slices > 1) ptx::cluster_arrive();
#else
  __syncthreads();
#endif
  ptx::wait_for_previous();
  if constexpr (!kResident) {
    open_inputs(inputs, 0);
#pragma unroll
    for (int i = 0; i < kRingSlots; i++) {
      if (i < p.ring_slots) inputs.fill(ring + i * kSlot + kIn * kTileRow + lane * 16, lane, p.segments, open_inputs);
      ptx::copy_commit();
    }
  }

  // the input of this slice: rotated here, or fetched
  float* exchange = (float*)(shared + layout.exchange);
  uint8_t* image = shared + layout.image;
  if constexpr (kResident) {
    const int images = two_images ? 2 : 1;
    const int64_t slice_bytes = (int64_t)blocks * 8 * image_row;
    if (p.fused) {
      for (int i = 0; i < images; i++) {
        if (i > 0) {
          __syncthreads();
          clear(space);
          __syncthreads();
        }
        prepare_slice<MODE>(p, p.matrix[two_images ? i : p.rotations > 1 ? m : 0].suh, slice, 0, p.rows, 0, columns, exchange,
                            image + i * slice_bytes, scales[i], 1, space, i > 0);
      }
    } else {
      for (int i = 0; i < images; i++) {
        const int rotation = two_images ? i : p.rotations > 1 ? m : 0;
        const uint8_t* from = p.image + rotation * image_size + begin * 8 * image_row;
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
          if (i == 0) ptx::barrier_expect(&image_full, (int)slice_bytes * images);
          for (int64_t at = 0; at < slice_bytes; at += 32768)
            ptx::bulk_load(image + i * slice_bytes + at, from + at, (int)min((int64_t)32768, slice_bytes - at), &image_full);
        }
#else
        for (int64_t at = threadIdx.x * 16; at < slice_bytes; at += kWarps * 32 * 16) *(uint4*)(image + i * slice_bytes + at) = *(const uint4*)(from + at);
#endif
        if (threadIdx.x < p.rows) scales[i][threadIdx.x] = p.scales[((int64_t)rotation * p.rows + threadIdx.x) * p.slices + slice];
      }
#if __CUDA_ARCH__ >= 900
      ptx::barrier_wait(&image_full, 0);
#else
      __syncthreads();
#endif
    }
  }

  const Run<K2> run(lane);
  Sum sum[8][NB][4];
#pragma unroll
  for (int t = 0; t < 8; t++)
#pragma unroll
    for (int b = 0; b < NB; b++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[t][b][e] = 0;

  float* received = (float*)(shared + layout.received);
#if __CUDA_ARCH__ >= 900
  bool started = p.slices == 1;
#endif
  int slot = 0;
  const int operand_row = 8 * columns * image_column_bytes(MODE);  // bytes from one row of tiles of this warp to its next
  for (int segment = 0; segment < p.segments; segment++) {
    const uint32_t multiplier = p.matrix[p.segments > 1 ? segment : m].multiplier, addend = p.matrix[p.segments > 1 ? segment : m].addend;
    // columns past the last repeat it: their products are not used
    const uint8_t* operand = image + (two_images ? segment * (int64_t)blocks * 8 * image_row : 0) +
                             (warp * columns + min(g, columns - 1)) * image_column_bytes(MODE) + q * (MODE == kBytes ? 4 : 8);
    for (int step = 0; step < steps; step++) {
      ptx::copy_wait<kRingSlots - 1>();
      __syncwarp();
      uint8_t* in_slot = ring + slot * kSlot;
      const int in_step = min(kIn, blocks - step * kIn);
#pragma unroll
      for (int r = 0; r < kIn; r++) {
        if (r >= in_step) break;
        uint32_t b[NB][4];
#pragma unroll
        for (int n = 0; n < NB; n++) {
          if constexpr (MODE == kBytes) {
            const uint32_t v = *(const uint32_t*)(operand + n * 128);
#pragma unroll
            for (int e = 0; e < 4; e++) b[n][e] = __byte_perm(v, 0, 0x1111 * e);
          } else if constexpr (MODE == kPairs) {
            const uint2 v = *(const uint2*)operand;
            b[n][0] = __byte_perm(v.x, 0, 0x1010);
            b[n][1] = __byte_perm(v.x, 0, 0x3232);
            b[n][2] = __byte_perm(v.y, 0, 0x1010);
            b[n][3] = __byte_perm(v.y, 0, 0x3232);
          } else {
            const uint2 v = *(const uint2*)(in_slot + kIn * kTileRow + r * kImage + (n * 8 + g) * 32 + q * 8);
            b[n][0] = v.x;
            b[n][1] = v.y;
          }
        }
        operand += operand_row;
#pragma unroll
        for (int t = 0; t < 8; t++) {
          uint32_t s[8];
          read_states<K2>((const uint32_t*)(in_slot + r * kTileRow + t * 16 * K2), run, s);
          if constexpr (MODE == kBytes || MODE == kPairs) {
#pragma unroll
            for (int j = 0; j < 8; j++) s[j] = MODE == kBytes ? s[j] * multiplier : half_pair_of(s[j], multiplier, addend);
#pragma unroll
            for (int n = 0; n < NB; n++) {
              ptx::mma(sum[t][n], s[0], s[4], s[1], s[5], b[n][0], b[n][1]);
              ptx::mma(sum[t][n], s[2], s[6], s[3], s[7], b[n][2], b[n][3]);
            }
          } else {
            uint32_t a[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {  // (g; low k), (g+8; low k), (g; high k), (g+8; high k)
              const int j = 4 * (e & 1) + 2 * (e >> 1);
              a[e] = MODE == kDecodeBytes ? decode_bytes(s[j], s[j + 1], multiplier) : decode_pairs(s[j], s[j + 1], multiplier, addend);
            }
#pragma unroll
            for (int n = 0; n < NB; n++) ptx::mma(sum[t][n], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
          }
        }
      }
      __syncwarp();
      weights.fill(in_slot + lane * 16, lane, p.segments, open_weights);
      if constexpr (!kResident) inputs.fill(in_slot + kIn * kTileRow + lane * 16, lane, p.segments, open_inputs);
      ptx::copy_commit();
      if (++slot == p.ring_slots) slot = 0;
    }

    // add up the eight warps: the last ones hand their sums on until as many are left as have a slot; all threads add up the slots
    const int pairs = operand_pairs(columns), slots = exchange_slots(columns, MODE);
    auto slot_of_warp = [&](int s, int t, int n, int h) { return (Sum*)exchange + (s * 128 + t * 16 + g + 8 * h) * pairs + n * 8 + 2 * q; };
    auto each_sum = [&](auto f) {
#pragma unroll
      for (int t = 0; t < 8; t++)
#pragma unroll
        for (int n = 0; n < NB; n++)
          if (n * 8 + 2 * q < pairs)
#pragma unroll
            for (int h = 0; h < 2; h++) f(t, n, h);
    };
    auto write = [&](int s) {
      each_sum([&](int t, int n, int h) {
        Sum* to = slot_of_warp(s, t, n, h);
        to[0] = sum[t][n][2 * h];
        to[1] = sum[t][n][2 * h + 1];
      });
    };
    if (segment > 0) __syncthreads();  // the area is free again
    for (int live = kWarps; live > slots; live -= slots) {
      if (warp >= live - slots && warp < live) write(warp - (live - slots));
      __syncthreads();
      if (warp >= live - 2 * slots && warp < live - slots)
        each_sum([&](int t, int n, int h) {
          const Sum* from = slot_of_warp(warp - (live - 2 * slots), t, n, h);
          sum[t][n][2 * h] += from[0];
          sum[t][n][2 * h + 1] += from[1];
        });
    }
    if (warp < slots) write(warp);
    if (p.segments > 1)
#pragma unroll
      for (int t = 0; t < 8; t++)
#pragma unroll
        for (int n = 0; n < NB; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) sum[t][n][e] = 0;
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (!started) {  // all blocks of the cluster run: their shared memory may be written
      ptx::cluster_wait();
      started = true;
    }
#endif
    for (int i = threadIdx.x; i < rows * 128; i += kWarps * 32) {
      const int row = i / 128, n = i % 128;
      const Sum* from = (const Sum*)exchange + n * pairs;
      float v;
      if constexpr (MODE == kBytes) {
        const SliceScale s = scales[two_images ? segment : 0][row];
        const int low_column = NB == 2 ? 8 + row : p.rows + row;
        int high = 0, low = 0;
        for (int w = 0; w < slots; w++) {
          high += from[w * 128 * pairs + row];
          if (p.planes == 2) low += from[w * 128 * pairs + low_column];
        }
        // 510 is the middle of the byte sum; wrapping int32 arithmetic keeps this exact for every slice up to 33,000 inputs
        const float d = (float)(high - 510 * s.sum_high), sums = (float)s.sum_high;
        if (p.planes == 2)
          v = kMul1Scale * fmaf(256.f, d, (float)(low - 510 * s.sum_low)) +
              (1534.f * kMul1Scale + kMul1Shift) * fmaf(256.f, sums, (float)s.sum_low);
        else
          v = kMul1Scale * d + (1534.f * kMul1Scale + kMul1Shift) * sums;
        v *= s.scale;
      } else {
        v = 0.f;
        for (int w = 0; w < slots; w++) v += from[w * 128 * pairs + row];
        if constexpr (kResident) {
          v *= scales[two_images ? segment : 0][row].scale;
        } else {
          const int rotation = two_images ? segment : p.rotations > 1 ? m : 0;
          const SliceScale s = p.scales[((int64_t)rotation * p.rows + row0 + row) * p.slices + slice];
          if (MODE == kDecodeBytes) v = kMul1Scale * v + kMul1Shift * s.sum;
          v *= s.scale;
        }
      }
#if __CUDA_ARCH__ >= 900
      float* to = received + ((slice * p.segments + segment) * each + row / p.slices) * 128 + n;
      if (p.slices == 1)
        *to = v;
      else
        ptx::store_in_cluster(ptx::address_in_cluster(to, row % p.slices), v, ptx::address_in_cluster(&received_full, row % p.slices));
#else
      if (p.slices == 1)
        received[(segment * each + row) * 128 + n] = v;
      else
        p.partial[((((int64_t)row_tile * gridDim.y + unit) * p.slices + slice) * p.segments + segment) * NB * 8 * 128 + i] = v;
#endif
    }
  }

  // finish: rotate, scale, bias, activation
  struct Scales {
    float scale[4], bias[4];
  };
  const int column = group * 128 + 4 * lane;
  auto load_scales = [&](const ProductMatrix& w, Scales& s) {
    const uint2 h = *(const uint2*)(w.svh + column);
    s.scale[0] = half_to_float((uint16_t)h.x) * HADAMARD128_SCALE;
    s.scale[1] = half_to_float((uint16_t)(h.x >> 16)) * HADAMARD128_SCALE;
    s.scale[2] = half_to_float((uint16_t)h.y) * HADAMARD128_SCALE;
    s.scale[3] = half_to_float((uint16_t)(h.y >> 16)) * HADAMARD128_SCALE;
#pragma unroll
    for (int e = 0; e < 4; e++) s.bias[e] = w.bias && column + e < w.out_features ? w.bias[column + e] : 0.f;
  };
  Scales ours, ups;
#if __CUDA_ARCH__ >= 900
  const int first = slice, stride = p.slices, wanted = finishes;
  if (warp < wanted) {
    load_scales(p.matrix[m], ours);
    if (p.segments > 1) load_scales(p.matrix[1], ups);
  }
  if (p.slices > 1) {
    if (warp >= wanted) return;
    ptx::barrier_wait(&received_full, 0);
  } else {
    __syncthreads();
  }
  const float* parts = received;
  const int64_t part_stride = (int64_t)p.segments * each * 128, segment_stride = (int64_t)each * 128;
#else
  const int first = 0, stride = 1, wanted = rows;
  load_scales(p.matrix[m], ours);
  if (p.segments > 1) load_scales(p.matrix[1], ups);
  const float* parts = received;
  int64_t part_stride = 0, segment_stride = (int64_t)each * 128;
  __syncthreads();
  if (p.slices > 1) {  // the last slice to arrive finishes all rows
    __shared__ int last;
    const int place = row_tile * gridDim.y + unit;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&p.counters[place], 1) == p.slices - 1;
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) p.counters[place] = 0;
    __threadfence();
    segment_stride = NB * 8 * 128;
    part_stride = segment_stride * p.segments;
    parts = p.partial + (int64_t)place * p.slices * part_stride;
  }
#endif
  for (int i = warp; i < wanted; i += kWarps) {
    const int row = i * stride + first;
    auto add_up = [&](int segment, float(&v)[4]) {  // over the slices, in order
      v[0] = v[1] = v[2] = v[3] = 0.f;
      for (int s = 0; s < p.slices; s++) {
        const float4 f = *(const float4*)(parts + s * part_stride + segment * segment_stride + i * 128 + 4 * lane);
        v[0] += f.x;
        v[1] += f.y;
        v[2] += f.z;
        v[3] += f.w;
      }
      hadamard128(v);
    };
    float v[4], other[4];
    add_up(0, v);
    if (p.segments > 1) add_up(1, other);
    const ProductMatrix& w = p.matrix[m];
    void* y = row_of(w.y, (int64_t)(row0 + row) * w.y_stride, p.y_dtype);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[e] = v[e] * ours.scale[e] + ours.bias[e];
      if (p.segments > 1) v[e] = activate(v[e], p.activation, nullptr) * (other[e] * ups.scale[e] + ups.bias[e]);
      if (column + e >= w.out_features) continue;
      if (p.accumulate) v[e] += ((const float*)y)[column + e];
      store(y, column + e, p.y_dtype, v[e]);
    }
  }
#endif
}

}  // namespace exl3
