// From trellis bits to pairs of halves, one column of a tile a lane.
//
// A column of a tile stands in four runs of four consecutive positions of the ring (format 2.1): run q of column c holds rows 2q, 2q+1,
// 2q+8, 2q+9 and is run 8 (c % 8) + 2q + c / 8 of the ring's 64. So no lane needs a value of another one, pairs of neighbouring rows come
// out in one register, and the column is what a matrix product of the wave takes as operand B. Rows of activations are stored in the
// same order (kRowOrder).
//
// A run of n new bits ends at bit (run + 1) * 2 * k2 of the ring. Each lane shifts the words it reads once, so that its first run ends at
// the end of a register; from there on every window stands at a place known at compile time and costs at most one shift.
#pragma once
#include "rdna.h"

#include "exl3/codec.h"
#include "exl3/ops.h"

// Row of a tile at place p of the stored order.
GPU_FN int row_order(int p) { return 2 * (p >> 2) + (p & 1) + 8 * (p >> 1 & 1); }
// Place of row r: the inverse.
GPU_FN int row_place(int r) { return 4 * ((r & 7) >> 1) + (r & 1) + 2 * (r >> 3); }

// Bits from the end of a lane's first run to the end of window j of its run q (0 .. 3 each), negative within the first.
constexpr int window_end(int k2, int q, int j) { return 4 * k2 * q + (((j + 1) * k2) >> 1) - 2 * k2; }
constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// The aligned registers of RUNS runs: a[i] ends 32 * (i - kBefore) bits behind the end of the first run.
template <int K2, int RUNS>
struct Windows {
  static constexpr int kBefore = window_end(K2, 0, 0) - 16 < -32 ? 1 : 0;
  static constexpr int kBehind = (window_end(K2, RUNS - 1, 3) + 31) / 32;
  static constexpr int kCount = kBefore + 1 + kBehind;
  static constexpr bool kWhole = (2 * K2) % 32 == 0;  // every run ends at the end of a word
  static constexpr int kRaw = kWhole ? kCount : kCount + 1;
  static constexpr int kWrapped = kRaw - kCount + kBefore;  // words that may lie before the ring's first one
  static constexpr bool kOverhangs = window_end(K2, RUNS - 1, 3) % 32 != 0;  // the last word may lie behind its last one
};

// What a lane knows of its runs, the same for every tile of a matrix: where its words are and how far to shift them.
struct LaneWindows {
  int first, before[2], last, shift;  // word of the first run's end; the words one and two before it; the last word
};
template <int K2, int RUNS>
GPU_FN LaneWindows lane_windows(int run) {
  const int end = (run + 1) * 2 * K2, word = (end - 1) >> 5, count = 4 * K2;
  LaneWindows l;
  l.first = word;
  l.before[0] = word >= 1 ? word - 1 : word - 1 + count;
  l.before[1] = word >= 2 ? word - 2 : word - 2 + count;
  l.last = word + Windows<K2, RUNS>::kBehind < count ? word + Windows<K2, RUNS>::kBehind : count - 1;  // no bit of an overhang is used
  l.shift = (32 - (end & 31)) & 31;
  return l;
}

template <int K2, int RUNS>
GPU_FN void read_words(const uint32_t* tile, const LaneWindows& l, uint32_t (&raw)[Windows<K2, RUNS>::kRaw]) {
  constexpr int n = Windows<K2, RUNS>::kWrapped;
  if constexpr (n >= 2) raw[n - 2] = tile[l.before[1]];
  if constexpr (n >= 1) raw[n - 1] = tile[l.before[0]];
#pragma unroll
  for (int i = n; i < Windows<K2, RUNS>::kRaw; i++)
    raw[i] = Windows<K2, RUNS>::kOverhangs && i + 1 == Windows<K2, RUNS>::kRaw ? tile[l.last] : tile[l.first + (i - n)];
}
template <int K2, int RUNS>
GPU_FN void align_words(const uint32_t (&raw)[Windows<K2, RUNS>::kRaw], const LaneWindows& l, uint32_t (&a)[Windows<K2, RUNS>::kCount]) {
#pragma unroll
  for (int i = 0; i < Windows<K2, RUNS>::kCount; i++) {
    if constexpr (Windows<K2, RUNS>::kWhole)
      a[i] = raw[i];
    else
      a[i] = funnel(raw[i], raw[i + 1], l.shift);
  }
}

// One weight's 32-bit product. MUL1 or not: without addend or with.
template <int K2, int RUNS, bool MUL1, int Q, int J>
GPU_FN uint32_t product_of(const uint32_t (&a)[Windows<K2, RUNS>::kCount], const Hash& hash) {
  constexpr int end = window_end(K2, Q, J), index = floor_div(end + 31, 32), below = 32 * index - end;  // bits under the window in its register
  constexpr int at = index + Windows<K2, RUNS>::kBefore;
  static_assert(at >= 0 && at < Windows<K2, RUNS>::kCount && (below <= 16 || at > 0), "the window lies in the registers");
  if constexpr (below == 16) {
    if constexpr (MUL1) return hash_plain<true>(a[at], hash);
    return hash_add<true>(a[at], hash);
  } else {
    uint32_t x = a[at];
    if constexpr (below > 16)
      x = funnel(a[at > 0 ? at - 1 : 0], x, below);
    else if constexpr (below > 0)
      x >>= below;
    if constexpr (MUL1) return hash_plain<false>(x, hash);
    return hash_add<false>(x, hash);
  }
}
// A pair of weights as halves. mul1: 1024 + the byte sum, exact, of which the weight is kMul1Scale * that + kMul1Shift.
template <int K2, int RUNS, bool MUL1, int Q, int J>
GPU_FN uint32_t weight_pair(const uint32_t (&a)[Windows<K2, RUNS>::kCount], const Hash& hash) {
  const uint32_t p = product_of<K2, RUNS, MUL1, Q, J>(a, hash), q = product_of<K2, RUNS, MUL1, Q, J + 1>(a, hash);
  if constexpr (MUL1) return add_bytes_high(q, add_bytes(p, 0x64006400u));
  return add_halves((p & 0x8FFF8FFFu) ^ 0x3B603B60u, (q & 0x8FFF8FFFu) ^ 0x3B603B60u);
}
template <int K2, int RUNS, bool MUL1, int Q>
GPU_FN void decode_runs(const uint32_t (&a)[Windows<K2, RUNS>::kCount], const Hash& hash, uint32_t* out) {
  out[2 * Q] = weight_pair<K2, RUNS, MUL1, Q, 0>(a, hash);
  out[2 * Q + 1] = weight_pair<K2, RUNS, MUL1, Q, 2>(a, hash);
  if constexpr (Q + 1 < RUNS) decode_runs<K2, RUNS, MUL1, Q + 1>(a, hash, out);
}
template <bool MUL1>
GPU_FN Hash weight_hash(const exl3_weight& w) {
  return make_hash(w.multiplier, MUL1 || w.codebook == EXL3_MCG ? 0u : exl3::k3instAddend);
}
