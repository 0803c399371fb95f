// One lane's eight weights of a tile: from the bits in shared memory to states, and from states to matrix operands.
//
// Lane l = 4g + q owns stream positions 8l .. 8l+7: rows 2q, 2q+1, 2q+8, 2q+9 of column g, then of column g+8. That is exactly what one
// lane holds of the A operand of m16n8k16 when the output columns are its rows, so nothing is permuted.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace exl3 {

constexpr int larger_of(int a, int b) { return a > b ? a : b; }

// How a lane finds its run of POSITIONS K + 16 - K bits in a tile of 4*K2 words; POSITIONS is 8, or 16 where a lane has those of two lanes.
template <int K2, int POSITIONS = 8>
struct Run {
  static constexpr int kWords = 4 * K2;
  static constexpr int kBits = POSITIONS / 2 * K2;  // fresh bits of a run
  // distance of window j's end from the end of the run
  static constexpr __host__ __device__ int offset(int j) { return kBits - (((j + 1) * K2) >> 1); }
  static constexpr int kSpan = offset(0) + 16;
  static constexpr int kRegisters = (kSpan + 31) / 32;
  static constexpr bool kShifted = kBits % 32 != 0;  // not every run ends at a word's end
  static constexpr int words_read() {
    int n = 0;
    for (int run = 0; run < 256 / POSITIONS; run++) {
      const int end = (run + 1) * kBits, shift = (32 - end % 32) % 32;
      n = larger_of(n, (shift + kSpan + 31) / 32);
    }
    return n;
  }
  static constexpr int kRead = words_read();
  static constexpr int kVector = kBits == 64 ? 2 : kBits == 128 ? 4 : 1;  // words that one load brings

  int word[kRead];  // the last word of the run, the one before it, ... round the ring
  int shift;
  __device__ __forceinline__ explicit Run(int index) {  // of the run in its tile
    const int end = (index + 1) * kBits, last = (end - 1) / 32;
    shift = (last + 1) * 32 - end;
#pragma unroll
    for (int j = 0; j < kRead; j++) word[j] = last - j + (last < j ? kWords : 0);
  }
};

template <int K2, int POSITIONS>
__device__ __forceinline__ void read_words(const uint32_t* tile, const Run<K2, POSITIONS>& run, uint32_t (&w)[Run<K2, POSITIONS>::kRead]) {
  using R = Run<K2, POSITIONS>;
  if constexpr (R::kVector == 2) {
    const uint2 v = *(const uint2*)(tile + run.word[1]);
    w[0] = v.y, w[1] = v.x;
  } else if constexpr (R::kVector == 4) {
    const uint4 v = *(const uint4*)(tile + run.word[3]);
    w[0] = v.w, w[1] = v.z, w[2] = v.y, w[3] = v.x;
  }
#pragma unroll
  for (int j = R::kVector > 1 ? R::kVector : 0; j < R::kRead; j++) w[j] = tile[run.word[j]];
}

// The run's bits from the end of it on, 32 a word.
template <int K2, int POSITIONS>
__device__ __forceinline__ void align_words(const uint32_t (&words)[Run<K2, POSITIONS>::kRead], const Run<K2, POSITIONS>& run,
                                            uint32_t (&r)[Run<K2, POSITIONS>::kRegisters + 1]) {
  using R = Run<K2, POSITIONS>;
#pragma unroll
  for (int j = 0; j < R::kRegisters; j++)
    r[j] = R::kShifted ? __funnelshift_r(words[j], j + 1 < R::kRead ? words[j + 1] : 0u, run.shift) : words[j];
  r[R::kRegisters] = 0;
}

// The states of the run's positions. All shift amounts but one are known at compile time; windows whose offsets agree modulo 8
// share one funnel shift and cost one byte permutation each.
template <int K2, int POSITIONS>
__device__ __forceinline__ void states_of(const uint32_t (&words)[Run<K2, POSITIONS>::kRead], const Run<K2, POSITIONS>& run,
                                          uint32_t (&state)[POSITIONS]) {
  using R = Run<K2, POSITIONS>;
  uint32_t r[R::kRegisters + 1];
  align_words(words, run, r);
#pragma unroll
  for (int j = 0; j < POSITIONS; j++) {
    constexpr int kByte = 8;
    const int o = R::offset(j), i = o / 32, s = o % 32;
    if (s < 24) {
      const uint32_t aligned = s % kByte ? __funnelshift_r(r[i], r[i + 1], s % kByte) : r[i];
      state[j] = __byte_perm(aligned, 0, s / kByte == 0 ? 0x4410 : s / kByte == 1 ? 0x4421 : 0x4432);
    } else {
      state[j] = __funnelshift_r(r[i], r[i + 1], s) & 0xffff;
    }
  }
}

// The same with fewer shifts and permutations, which one pipe of the multiprocessor does alone: a window reaches a byte's edge by a multiplication.
// power[j] is 1 << j, a number that the compiler does not know. Where windows share few of these, some are shifts, so that both pipes have their half.
template <int K2, int POSITIONS>
__device__ __forceinline__ void states_by_products(const uint32_t (&words)[Run<K2, POSITIONS>::kRead], const Run<K2, POSITIONS>& run,
                                                   const uint32_t (&power)[8], bool shifts_too, uint32_t (&state)[POSITIONS]) {
  using R = Run<K2, POSITIONS>;
  uint32_t r[R::kRegisters + 1];
  align_words(words, run, r);
#pragma unroll
  for (int j = 0; j < POSITIONS; j++) {
    constexpr int kByte = 8;
    const int o = R::offset(j), i = o / 32, s = o % 32, t = s % 16, up = (kByte - t % kByte) % kByte;
    if (s == 16) {
      state[j] = __byte_perm(r[i], 0, 0x4432);
      continue;
    }
    const uint32_t half = s < 16 ? r[i] : __byte_perm(r[i], r[i + 1], 0x5432);  // the window begins in its lower half
    const uint32_t moved = up == 0 ? half : shifts_too && up >= 6 ? __funnelshift_l(half, half, up) : half * power[up];
    state[j] = __byte_perm(moved, 0, t == 0 ? 0x4410 : t <= kByte ? 0x4421 : 0x4432);
  }
}

template <int K2, int POSITIONS>
__device__ __forceinline__ void read_states(const uint32_t* tile, const Run<K2, POSITIONS>& run, uint32_t (&state)[POSITIONS]) {
  uint32_t w[Run<K2, POSITIONS>::kRead];
  read_words(tile, run, w);
  states_of(w, run, state);
}

// 3inst and mcg: the hash is two halves whose sum is the weight. In the multiply-add the addend (0 for mcg) is free.
__device__ __forceinline__ uint32_t half_pair_of(uint32_t state, uint32_t multiplier, uint32_t addend) {
  uint32_t p = state * multiplier + addend;
  asm("lop3.b32 %0, %0, 0x8fff8fff, 0x3b603b60, 0x6a;" : "+r"(p));
  return p;
}

// Two weights as a half2. mul1: 1024 + byte sum, exact; its scale and shift belong to the epilogue.
__device__ __forceinline__ uint32_t decode_bytes(uint32_t s0, uint32_t s1, uint32_t multiplier) {
  const uint32_t a = __dp4a(s0 * multiplier, 0x01010101u, 0x6400u), b = __dp4a(s1 * multiplier, 0x01010101u, 0x6400u);
  return __byte_perm(a, b, 0x5410);
}
// And less their middle, exact too: sums over a part of the inputs stay small enough for halves.
constexpr float kMul1Middle = 1534.f;
__device__ __forceinline__ uint32_t decode_centred(uint32_t s0, uint32_t s1, uint32_t multiplier) {
  const uint32_t h = decode_bytes(s0, s1, multiplier), middle = 0xe5fee5fe;  // -1534
  const __half2 centred = __hadd2(*(const __half2*)&h, *(const __half2*)&middle);
  return *(const uint32_t*)&centred;
}
__device__ __forceinline__ uint32_t decode_pairs(uint32_t s0, uint32_t s1, uint32_t multiplier, uint32_t addend) {
  const uint32_t a = half_pair_of(s0, multiplier, addend), b = half_pair_of(s1, multiplier, addend);
  const uint32_t low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
  const __half2 sum = __hadd2(*(const __half2*)&low, *(const __half2*)&high);
  return *(const uint32_t*)&sum;
}

}  // namespace exl3
