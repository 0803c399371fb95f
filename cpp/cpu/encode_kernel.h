// One step of the trellis search over registers; included by the tiers' files, which define the registers V16 (16-bit costs) and V32 (fp32).
// An edge costs four operations on 16-bit numbers (subtract, square, add, minimum), three in fp32. A register of values serves two rings.
#pragma once
#include <stddef.h>

#include "cpu/encode.h"

namespace exl3::cpu {

namespace {

// The costs of one ring on their way out: subtracts, cuts, keeps the minimum and, where asked, what differs from before.
template <class V> struct Out {
  using T = typename V::T;
  T minus, least = V::worst(), differ = V::zero();
  explicit Out(const Step& s) : minus(V::set(s.least)) {}
  T settle(T v) {
    v = V::settle(v, minus);
    least = V::min(least, v);
    return v;
  }
  template <bool Compare> void store(typename V::Cost* to, T v) {
    if (Compare) differ = V::either(differ, V::different(v, V::load(to)));
    V::store(to, v);
  }
  void finish(Step& s) const {
    s.least = V::smallest(least);
    s.same = s.compare && V::none(differ);
  }
};

// From [x][lane] to [lane][x]: a register's lanes are groups, whose targets lie together. Interleaving works on 128-bit parts of registers, so
// each part is stored by itself: part p of the i-th register is the i-th piece of groups 8 p .. 8 p + 7.
template <bool Compare, int X> inline void transpose(const V16::T* v, uint16_t* to, Out<V16>& out) {
  V16::T w[2][X];
  const V16::T* from = v;
  for (int round = 0; 1 << round < X; round++) {
    V16::T* next = w[round & 1];
    // interleaving x with x + X / 2 over and over brings x to the fast side
    for (int i = 0; i < X / 2; i++) {
      next[2 * i] = V16::interleave_low(from[i], from[i + X / 2]);
      next[2 * i + 1] = V16::interleave_high(from[i], from[i + X / 2]);
    }
    from = next;
  }
  for (int i = 0; i < X; i++) {
    if (Compare) out.differ = V16::either(out.differ, V16::different(from[i], V16::load_parts(to + 8 * i, 8 * X)));
    V16::store_parts(to + 8 * i, 8 * X, from[i]);
  }
}

// Lanes over groups: the costs of `lanes` neighbouring nodes are one load. V::pin keeps the compiler from interleaving edges, which takes
// more registers than there are; the CPU does that by itself.
template <int Rings, int X> void over_groups(const StepTable& t, Step* steps) {
  using V = V16;
  using T = V::T;
  constexpr int Block = X < 4 ? X : 4;
  const int groups = kStates >> (t.fresh + t.next_fresh), c_count = 1 << t.next_fresh;
  const uint16_t* value = (const uint16_t*)t.ordered;
  T target[Rings];
  Out<V> out[2] = {Out<V>(steps[0]), Out<V>(steps[Rings - 1])};
  for (int r = 0; r < Rings; r++) target[r] = V::set(steps[r].target);
  for (int g = 0; g < groups; g += V::lanes) {
    T all[Rings][X];
    for (int x = 0; x < X; x += Block) {
      T best[Rings][Block];
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) best[r][j] = V::worst();
      const uint16_t* from[2] = {(const uint16_t*)steps[0].from + g, (const uint16_t*)steps[Rings - 1].from + g};
      for (int c = 0; c < c_count; c++) {
        T cost[Rings];
        for (int r = 0; r < Rings; r++) cost[r] = V::load(from[r] + (ptrdiff_t)c * groups);
        for (int j = 0; j < Block; j++) {
          const T v = V::load(value + j * V::lanes);
          for (int r = 0; r < Rings; r++) {
            best[r][j] = V::min(best[r][j], V::edge(v, target[r], cost[r]));
            V::pin(best[r][j]);
          }
        }
        value += Block * V::lanes;
      }
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) all[r][x + j] = out[r].settle(best[r][j]);
    }
    for (int r = 0; r < Rings; r++) {
      uint16_t* to = (uint16_t*)steps[r].to + (ptrdiff_t)g * X;
      steps[r].compare ? transpose<true, X>(all[r], to, out[r]) : transpose<false, X>(all[r], to, out[r]);
    }
  }
  for (int r = 0; r < Rings; r++) out[r].finish(steps[r]);
}

// Lanes over the targets of one group, which share their candidates: one cost is spread over the register.
template <class V, int Rings, int Block> void over_targets(const StepTable& t, Step* steps) {
  using T = typename V::T;
  using Cost = typename V::Cost;
  const int groups = kStates >> (t.fresh + t.next_fresh), x_count = 1 << t.fresh, c_count = 1 << t.next_fresh;
  const Cost* value = (const Cost*)t.ordered;
  T target[Rings];
  Out<V> out[2] = {Out<V>(steps[0]), Out<V>(steps[Rings - 1])};
  for (int r = 0; r < Rings; r++) target[r] = V::set(steps[r].target);
  for (int g = 0; g < groups; g++)
    for (int x = 0; x < x_count; x += Block * V::lanes) {
      T best[Rings][Block];
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) best[r][j] = V::worst();
      const Cost* from[2] = {(const Cost*)steps[0].from + g, (const Cost*)steps[Rings - 1].from + g};
      for (int c = 0; c < c_count; c++) {
        T cost[Rings];
        for (int r = 0; r < Rings; r++) cost[r] = V::spread(from[r] + (ptrdiff_t)c * groups);
        for (int j = 0; j < Block; j++) {
          const T v = V::load(value + j * V::lanes);
          for (int r = 0; r < Rings; r++) {
            best[r][j] = V::min(best[r][j], V::edge(v, target[r], cost[r]));
            V::pin(best[r][j]);
          }
        }
        value += Block * V::lanes;
      }
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) {
          Cost* to = (Cost*)steps[r].to + (ptrdiff_t)g * x_count + x + j * V::lanes;
          const T v = out[r].settle(best[r][j]);
          steps[r].compare ? out[r].template store<true>(to, v) : out[r].template store<false>(to, v);
        }
    }
  for (int r = 0; r < Rings; r++) out[r].finish(steps[r]);
}

template <class V, int Rings> void targets(const StepTable& t, Step* steps) {
  const int registers = (1 << t.fresh) / V::lanes;
  if (registers >= 4) over_targets<V, Rings, 4>(t, steps);
  else if (registers == 2) over_targets<V, Rings, 2>(t, steps);
  else over_targets<V, Rings, 1>(t, steps);
}

template <int Rings> void search(const StepTable& t, Step* steps) {
  if (t.fp32) return targets<V32, Rings>(t, steps);
  if (!lanes_over_groups(V16::lanes, t.fresh, t.next_fresh)) return targets<V16, Rings>(t, steps);
  if (t.fresh == 1) over_groups<Rings, 2>(t, steps);
  else if (t.fresh == 2) over_groups<Rings, 4>(t, steps);
  else if (t.fresh == 3) over_groups<Rings, 8>(t, steps);
  else over_groups<Rings, 16>(t, steps);
}

void step(const StepTable& t, Step* steps, int count) { count == 2 ? search<2>(t, steps) : search<1>(t, steps); }

}  // namespace

}  // namespace exl3::cpu
