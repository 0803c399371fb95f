// The trellis search in integers (quantizer spec 7.2). A node is the overlap of two neighbouring states; before position i it has
// 16 - D(i) bits. One step takes the cost of every node before a position to the cost of every node behind it:
//   next[o] = min over c of  from[c << (16 - Dn - D) | o >> D] + error(value[c << (16 - Dn) | o] - target),   D = D(i), Dn = D(i + 1),
// for 2^Dn candidates c; the smallest cost of `from` is subtracted from all, so that numbers stay small. No back pointers: costs before
// every position are kept, and the way back finds each chosen candidate again (the smallest c among equals). All tiers compute the same
// numbers.
//
// Values and targets are whole numbers, the codebook's times 8192, below 2 bits times 4096.
//   Low rates: 16-bit costs, cut at kCostLimit; the error is (d * d + 2^14) >> 15, d saturated to 16 bits.
//   High rates, whose errors 16 bits can't hold next to those of an outlier: the same in fp32, d * d itself, exact below 2^24.
#pragma once
#include <math.h>
#include <stdint.h>

namespace exl3::cpu {

constexpr int kCostLimit = 32767;
constexpr int kStates = 65536;

struct StepTable {
  int fresh, next_fresh;            // D, Dn
  bool fp32;                        // costs and values are float, else uint16_t and int16_t
  const void* value;                // [65536] by state
  const void* ordered;              // the same in the order in which the tier's step reads it, 64-byte aligned
  const void* candidates;           // [next_nodes][2^Dn]: the values a node behind the position can come by
  int nodes() const { return kStates >> fresh; }
  int next_nodes() const { return kStates >> next_fresh; }
};

struct Step {
  const void* from;                 // costs [nodes]
  void* to;                         // costs [next_nodes], may hold those of an earlier pass
  float target, least;              // least: smallest cost in `from`; behind the step, in `to`
  bool compare;                     // asks whether `to` held the result already
  bool same;                        // the answer, where asked
};

struct EncodeTier {
  int bytes;                        // of a register; 0: scalar
  // Runs one step for each of `count` rings (1 or 2) at positions of one kind.
  void (*step)(const StepTable& table, Step* steps, int count);
  // The smallest best candidate of a node; costs `from` that node's first predecessor on.
  int (*choose)(const StepTable& table, const void* from, int node, float target);
  int lanes(bool fp32) const { return bytes / (fp32 ? 4 : 2); }
};

// Whether lanes run over groups of 2^D targets (o >> D), or over the targets of one group; and the order of `ordered` that goes with it:
//   groups:   [group / lanes][x / block][c][x % block][lane], block = min(4, 2^D)
//   targets:  [group][x / (block * lanes)][c][block][lane], block = min(4, 2^D / lanes)
static inline bool lanes_over_groups(int lanes, int fresh, int next_fresh) { return (kStates >> (fresh + next_fresh)) >= lanes && fresh < 5; }

const EncodeTier& scalar_encode();
const EncodeTier& avx2_encode();
const EncodeTier& avx512_encode();
int choose_avx2(const StepTable& table, const void* from, int node, float target);

// One edge, in the words of this page.
static inline uint32_t edge_cost(uint16_t from, int16_t value, float target) {
  int d = value - (int)target;
  d = d > 32767 ? 32767 : d < -32768 ? -32768 : d;
  return from + (((uint32_t)(d * d) + 0x4000) >> 15);
}
static inline float edge_cost(float from, float value, float target) { return fmaf(value - target, value - target, from); }

}  // namespace exl3::cpu
