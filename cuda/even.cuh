// The product of nine to 64 rows with trellis weights: decoded in registers, multiplied by mma.sync.
//
// One block of sixteen warps on each multiprocessor. The work, blocks of 128 inputs by 128 output columns, is one long list that the thread
// blocks share out evenly: each has one run of it, which may end in the middle of a column group. Each warp streams its own tiles through a
// private ring of asynchronous copies and turns bits into the A operand in registers (output columns are its rows); the input is B, through
// a ring that the block shares.
//
// The block with the end of a column group finishes it: rotates, scales, stores. Blocks with earlier parts send it their sums through
// memory, without flags or fences: a word that is zero has not arrived (a sum of zero travels as -0). Each block works first on the group that
// it does not finish, so sums travel while it works on, and no block waits before it has sent. Weights are fetched before the wait for the
// previous kernel. Floating-point sums have one fixed order: results depend on shapes and the number of multiprocessors only.
#pragma once
#include "even.h"
#include "even_finish.cuh"
#include "even_input.cuh"
#include "ptx.cuh"
#include "trellis.cuh"

namespace exl3::even {

template <int K2, int NB>
struct EvenTraits {
  static constexpr int kAcross = warps_across(NB), kDown = kWarps / kAcross;  // warps by columns and by rows of tiles
  static constexpr int kTiles = 8 / kAcross, kInBlock = 8 / kDown;            // of a warp: tiles side by side, rows of tiles in a block of inputs
  static constexpr int kChunk = 16 * K2 * kTiles, kSlot = ring_slot(K2), kImageSlot = 8 * NB * 8 * 32;
  static_assert(kInBlock * kChunk == kSlot);
};

// One thread's copies, step by step along the block's run of work.
template <class T>
struct Feed {
  const uint8_t* next;    // the lane's own 16 bytes
  const uint8_t* inputs;  // and of the operands that go with it
  int pitch, left, part;

  __device__ __forceinline__ void put(const Feed& f) volatile { next = f.next, inputs = f.inputs, pitch = f.pitch, left = f.left, part = f.part; }
  __device__ __forceinline__ void get(const volatile Feed& f) { next = f.next, inputs = f.inputs, pitch = f.pitch, left = f.left, part = f.part; }
  __device__ __forceinline__ void open(const Part* parts, int warp, int lane) {
    const Part& at = parts[part];
    pitch = at.pitch;
    left = at.count;
    next = at.weights + (warp / T::kAcross) * (pitch / 8) + warp % T::kAcross * T::kChunk + lane * 16;
    inputs = at.inputs + (warp * 32 + lane) * 16;
  }
  __device__ __forceinline__ void weights(uint32_t to, int lane) {
#pragma unroll
    for (int r = 0; r < T::kInBlock; r++)
      if (left > 0)
#pragma unroll
        for (int at = 0; at < T::kChunk; at += 512)
          if (at + 512 <= T::kChunk || lane * 16 < T::kChunk - at) ptx::copy16(to + r * T::kChunk + at, next + r * (pitch / T::kInBlock) + at);
  }
  __device__ __forceinline__ void operands(uint32_t to) {
    if (left > 0)
#pragma unroll
      for (int at = 0; at < T::kImageSlot; at += kWarps * 512)
        if (at + kWarps * 512 <= T::kImageSlot || (int)threadIdx.x * 16 < T::kImageSlot - at) ptx::copy16(to + at, inputs + at);
  }
  __device__ __forceinline__ void advance(const Part* parts, int count, int warp, int lane) {
    next += pitch;
    inputs += T::kImageSlot;
    left--;
    while (left <= 0 && part + 1 < count) {
      part++;
      open(parts, warp, lane);
    }
  }
};

// Keeps a value in its register: else threads compute it again in every step.
__device__ __forceinline__ void keep(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void keep(uint32_t& v) { asm volatile("" : "+r"(v)); }

template <int K2, int MODE, int NB>
__global__ void __launch_bounds__(kWarps * 32) even_kernel(const __grid_constant__ EvenParams p) {
#if __CUDA_ARCH__ >= 800
  using T = EvenTraits<K2, NB>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int across = warp % T::kAcross, down = warp / T::kAcross;
  const EvenShared layout = even_shared(p, K2, NB);
  const int block = blockIdx.x, begin = first_work(p, block), end = first_work(p, block + 1);
  const int length = p.segments * p.blocks;  // of a unit
  const int parts_count = ((end - 1) / length - begin / length + 1) * p.segments;
  Part* parts = (Part*)(shared + layout.parts);

  ptx::launch_dependents();
  for (int i = threadIdx.x; i < parts_count; i += kWarps * 32) parts[i] = part_of_run(p, K2, begin, end, i);
  __syncthreads();
  uint32_t copies = ptx::shared_address(shared) + warp * kRingSlots * T::kSlot + lane * 16;  // where this lane's go in the first slot
  keep(copies);
  uint8_t* image = shared + layout.image;
  const uint32_t image_copies = ptx::shared_address(image) + threadIdx.x * 16;
  for (int i = threadIdx.x; i < 2 * parts_count; i += kWarps * 32)
    ptx::prefetch(p.matrix[parts[i / 2].matrix].svh + (parts[i / 2].unit - (p.segments > 1 ? 0 : p.first_group[parts[i / 2].matrix])) * 128 +
                  i % 2 * 64);
  Feed<T> feed;
  feed.part = 0;
  feed.open(parts, warp, lane);
  if (feed.left <= 0) {
    feed.left = 1;
    feed.advance(parts, parts_count, warp, lane);
  }
  Feed<T> ahead = feed;  // the operands of each step are copied with it, after the wait
#pragma unroll 1
  for (int i = 0; i < kRingSlots; i++) {
    ahead.weights(copies + i * T::kSlot, lane);
    ahead.advance(parts, parts_count, warp, lane);
  }
  ptx::wait_for_previous();
#pragma unroll 1
  for (int i = 0; i < kRingSlots; i++) {
    feed.operands(image_copies + i * T::kImageSlot);
    if (i & 1) ptx::copy_commit();  // blocks of inputs go in pairs: one barrier for two
    feed.advance(parts, parts_count, warp, lane);
  }

  Run<K2> run(lane);
#pragma unroll
  for (int j = 0; j < Run<K2>::kRead; j++) {
    run.word[j] += warp * kRingSlots * T::kSlot / 4;
    keep(run.word[j]);
  }
  // sums and the loop have the registers to themselves in turn
  volatile Feed<T> waiting;
  waiting.put(feed);
  float sum[T::kTiles][NB][4];
  auto each_sum = [&](auto f) {
#pragma unroll
    for (int t = 0; t < T::kTiles; t++)
#pragma unroll
      for (int n = 0; n < NB; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(t, n, e);
  };
  each_sum([&](int t, int n, int e) { sum[t][n][e] = 0; });

  float* exchange = (float*)(shared + layout.exchange);
  static_assert(kRingSlots == 4, "two pairs");
  int slot = 0;  // bytes
  bool first_pair = true;
  bool first_part = true;
  int turn = 0;  // scales of the unit before may still be read
  for (int i = 0; i < parts_count; i++) {
    const int count = parts[i].count, m = parts[i].matrix;
    if (count > 0) {
      const uint32_t multiplier = p.matrix[m].multiplier, addend = p.matrix[m].addend;
      turn ^= 1;
      // what the rows are worth, should the unit end here
      const int pieces = p.segments * p.rows * 2;
      const bool brings = (p.segments == 1 || (i & 1)) && (int)threadIdx.x < pieces;
      uint4 piece{};
      if (brings) {
        const int rotation = p.rotations > 1 ? m - (p.segments - 1) + threadIdx.x / (2 * p.rows) : 0;
        piece = ((const uint4*)(p.inputs + (int64_t)rotation * p.all_rows + p.row0 + threadIdx.x / 2 % p.rows))[threadIdx.x % 2];
      }
      feed.get(waiting);
#pragma unroll 1
      for (int left = count; left > 0; left--) {
        if (slot % (2 * T::kSlot) == 0) {
          if (first_pair)
            ptx::copy_wait<1>();
          else
            ptx::copy_wait<0>();
          __syncthreads();
          if (!first_pair) {  // everyone is done with the other pair
            const int free = 2 * T::kSlot - slot;
#pragma unroll 1
            for (int k = 0; k < 2; k++) {
              feed.weights(copies + free + k * T::kSlot, lane);
              feed.operands(image_copies + (free / T::kSlot + k) * T::kImageSlot);
              feed.advance(parts, parts_count, warp, lane);
            }
            ptx::copy_commit();
          }
          first_pair = false;
        }
        const uint8_t* in_slot = shared + slot;
        const uint8_t* operands_in_slot = image + slot / T::kSlot * T::kImageSlot;
        slot += T::kSlot;
        if (slot == kRingSlots * T::kSlot) slot = 0;
#pragma unroll
        for (int r = 0; r < T::kInBlock; r++) {
          uint32_t operand[NB][2];
#pragma unroll
          for (int n = 0; n < NB; n++) {
            const uint2 v = *(const uint2*)(operands_in_slot + ((r * T::kDown + down) * NB * 8 + n * 8 + g) * 32 + q * 8);
            operand[n][0] = v.x;
            operand[n][1] = v.y;
          }
#pragma unroll
          for (int t = 0; t < T::kTiles; t++) {
            uint32_t s[8];
            read_states<K2>((const uint32_t*)(in_slot + r * T::kChunk + t * 16 * K2), run, s);
            uint32_t a[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {  // (g; low k), (g+8; low k), (g; high k), (g+8; high k)
              const int j = 4 * (e & 1) + 2 * (e >> 1);
              a[e] = MODE == kDecodeBytes ? decode_bytes(s[j], s[j + 1], multiplier) : decode_pairs(s[j], s[j + 1], multiplier, addend);
            }
#pragma unroll
            for (int n = 0; n < NB; n++) ptx::mma(sum[t][n], a[0], a[1], a[2], a[3], operand[n][0], operand[n][1]);
          }
        }
      }
      waiting.put(feed);
      if (brings) ((uint4*)(shared + layout.scales))[turn * pieces + threadIdx.x] = piece;

      // add up the warps: the last ones hand their sums on until as many are left as have a slot
      constexpr int kSlots = exchange_slots(NB);
      auto place = [&](int s, int t, int n, int e) {
        return exchange + (s * p.columns + n * 8 + 2 * q + (e & 1)) * kPitch + across * T::kTiles * 16 + t * 16 + g + 8 * (e >> 1);
      };
      auto each_live = [&](auto f) {
        each_sum([&](int t, int n, int e) {
          if (n * 8 + 2 * q + (e & 1) < p.columns) f(t, n, e);
        });
      };
      if (!first_part) __syncthreads();  // the area is free again
      first_part = false;
      for (int live = T::kDown; live > kSlots; live -= kSlots) {
        if (down >= live - kSlots && down < live) each_live([&](int t, int n, int e) { *place(down - (live - kSlots), t, n, e) = sum[t][n][e]; });
        __syncthreads();
        if (down >= live - 2 * kSlots && down < live - kSlots)
          each_live([&](int t, int n, int e) { sum[t][n][e] += *place(down - (live - 2 * kSlots), t, n, e); });
        __syncthreads();
      }
      if (down < kSlots) each_live([&](int t, int n, int e) { *place(down, t, n, e) = sum[t][n][e]; });
      each_sum([&](int t, int n, int e) { sum[t][n][e] = 0; });
      __syncthreads();
    }
    finish_part<MODE, NB>(p, K2, shared, i, turn);
  }
#endif
}

}  // namespace exl3::even
