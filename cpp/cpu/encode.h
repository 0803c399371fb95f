// The trellis search in integers (quantizer spec 7.2). A node is the overlap of two neighbouring states; before position i it has
// 16 - D(i) bits. One step takes the cost of every node before a position to the cost of every node behind it:
//   next[o] = min over c of  from[c << (16 - Dn - D) | o >> D] + error(value[c << (16 - Dn) | o] - target),   D = D(i), Dn = D(i + 1),
// for 2^Dn candidates c; the smallest cost of `from` is subtracted from all, so that numbers stay small. No back pointers: costs before
// every position are kept, and the way back finds each chosen candidate again (the smallest c among equals). All tiers compute the same
// integers.
//
// Costs are unsigned 16-bit, cut at kCostLimit. Values and targets are 16-bit fixed point; the squared error of d is
//   rounded:  (d * d + 2^14) >> 15 with d saturated to 16 bits         (coarse: low rates)
//   clamped:  d * d up to |d| = kClamp, then nearly flat: half of `far` times the rest, so that of two far values the nearer one wins
//             (fine: high rates; targets in the tails of the codebook often have no value nearby)
#pragma once
#include <stdint.h>

namespace exl3::cpu {

constexpr int kCostLimit = 32767;
constexpr int kClamp = 160;         // its square, the flat part (below 7000) and kCostLimit together fit 16 bits
constexpr int kStates = 65536;

struct StepTable {
  int fresh, next_fresh;            // D, Dn
  bool clamped;
  int far;                          // slope of the flat part, in halves
  const int16_t* value;             // [65536] by state
  const int16_t* ordered;           // the same in the order in which the tier's step reads it, 64-byte aligned
  const int16_t* candidates;        // [next_nodes][2^Dn]: the values a node behind the position can come by
  int nodes() const { return kStates >> fresh; }
  int next_nodes() const { return kStates >> next_fresh; }
};

struct Step {
  const uint16_t* from;             // [nodes]
  uint16_t* to;                     // [next_nodes], may hold the costs of an earlier pass
  int16_t target;
  uint16_t least;                   // smallest cost in `from`; behind the step, in `to`
  bool compare;                     // asks whether `to` held the result already
  bool same;                        // the answer, where asked
};

struct EncodeTier {
  int lanes;                        // 16-bit lanes of a register; 1: scalar
  // Runs one step for each of `count` rings (1 or 2) at positions of one kind.
  void (*step)(const StepTable& table, Step* steps, int count);
  // The smallest best candidate of a node, costs `from` that node's first predecessor on.
  int (*choose)(const StepTable& table, const uint16_t* from, int node, int16_t target);
};

// Whether lanes run over groups of 2^D targets (o >> D) or over the targets of one group, and the order of `ordered` that goes with it:
//   groups:   [group / lanes][x / block][c][x % block][lane], block = min(4, 2^D)
//   targets:  [group][x / (block * lanes)][c][block][lane], block = min(4, 2^D / lanes)
static inline bool lanes_over_groups(int lanes, int fresh, int next_fresh) { return (kStates >> (fresh + next_fresh)) >= lanes && fresh < 5; }

int choose_scalar(const StepTable& table, const uint16_t* from, int node, int16_t target);
int choose_avx2(const StepTable& table, const uint16_t* from, int node, int16_t target);

const EncodeTier& scalar_encode();
const EncodeTier& avx2_encode();
const EncodeTier& avx512_encode();

static inline uint32_t squared_error(int value, int target, const StepTable& t) {
  int d = value - target;
  d = d > 32767 ? 32767 : d < -32768 ? -32768 : d;
  if (!t.clamped) return ((uint32_t)(d * d) + 0x4000) >> 15;
  const int size = d < 0 ? -d : d, near = size < kClamp ? size : kClamp;
  return (uint32_t)(near * near + ((size - near) * t.far >> 1));
}

}  // namespace exl3::cpu
