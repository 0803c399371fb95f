// One step of the trellis search over registers of V::lanes 16-bit numbers; included by the tiers' files, which define V. Four operations
// an edge at low rates: subtract, square, add, minimum. Each register of values serves two rings.
#pragma once
#include <stddef.h>

#include "cpu/encode.h"

namespace exl3::cpu {

namespace {

using T = typename V::T;

template <bool Clamped> inline T edge(T value, T target, T cost, T far) {
  T d = V::subs(value, target);
  if (!Clamped) return V::add(V::square(d), cost);
  d = V::abs(d);
  const T near = V::minu(d, V::set(kClamp));
  return V::add(V::add(V::mullo(near, near), V::half(V::mullo(V::sub(d, near), far))), cost);
}

// The costs of one ring on their way out: subtracts, cuts, keeps the minimum and, where asked, what differs from before.
struct Out {
  T minus, limit = V::set(kCostLimit), least = V::set(-1), differ = V::set(0);
  explicit Out(const Step& s) : minus(V::set((short)s.least)) {}
  T settle(T v) {
    v = V::minu(V::sub(v, minus), limit);
    least = V::minu(least, v);
    return v;
  }
  template <bool Compare> void store(uint16_t* to, T v) {
    if (Compare) differ = V::either(differ, V::different(v, V::load(to)));
    V::store(to, v);
  }
  void finish(Step& s) const {
    s.least = (uint16_t)V::smallest(least);
    s.same = s.compare && V::none(differ);
  }
};

// From [x][lane] to [lane][x]: a register's lanes are groups, whose targets lie together.
template <bool Compare> inline void transpose(const T* v, int x_count, uint16_t* to, Out& out) {
  if (x_count == 2) {
    T a, b;
    V::zip(v[0], v[1], a, b);
    out.store<Compare>(to, a), out.store<Compare>(to + V::lanes, b);
    return;
  }
  // zipping x with x + count / 2 over and over brings x to the fast side
  T w[2][16];
  const T* from = v;
  for (int round = 0, count = x_count; 1 << round < x_count; round++) {
    T* next = w[round & 1];
    for (int i = 0; i < count / 2; i++) V::zip(from[i], from[i + count / 2], next[2 * i], next[2 * i + 1]);
    from = next;
  }
  for (int i = 0; i < x_count; i++) out.store<Compare>(to + i * V::lanes, from[i]);
}

// Lanes over groups: the costs of `lanes` neighbouring nodes are one load.
template <bool Clamped, int Rings, int X> void over_groups(const StepTable& t, Step* steps) {
  constexpr int Block = X < 4 ? X : 4;
  const int groups = kStates >> (t.fresh + t.next_fresh), c_count = 1 << t.next_fresh;
  const int16_t* value = t.ordered;
  const T far = V::set((short)t.far);
  T target[Rings];
  Out out[2] = {Out(steps[0]), Out(steps[Rings - 1])};
  for (int r = 0; r < Rings; r++) target[r] = V::set(steps[r].target);
  for (int g = 0; g < groups; g += V::lanes) {
    T all[Rings][X];
    for (int x = 0; x < X; x += Block) {
      T best[Rings][Block];
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) best[r][j] = V::set(-1);
      const uint16_t* from[2] = {steps[0].from + g, steps[Rings - 1].from + g};
      for (int c = 0; c < c_count; c++) {
        T cost[Rings];
        for (int r = 0; r < Rings; r++) cost[r] = V::load(from[r] + (ptrdiff_t)c * groups);
        for (int j = 0; j < Block; j++) {
          const T v = V::load((const uint16_t*)value + j * V::lanes);
          for (int r = 0; r < Rings; r++) {
            best[r][j] = V::minu(best[r][j], edge<Clamped>(v, target[r], cost[r], far));
            V::pin(best[r][j]);
          }
        }
        value += Block * V::lanes;
      }
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) all[r][x + j] = out[r].settle(best[r][j]);
    }
    for (int r = 0; r < Rings; r++) {
      uint16_t* to = steps[r].to + (ptrdiff_t)g * X;
      steps[r].compare ? transpose<true>(all[r], X, to, out[r]) : transpose<false>(all[r], X, to, out[r]);
    }
  }
  for (int r = 0; r < Rings; r++) out[r].finish(steps[r]);
}

// Lanes over the targets of one group, which share their candidates: one cost is spread over the register.
template <bool Clamped, int Rings, int Block> void over_targets(const StepTable& t, Step* steps) {
  const int groups = kStates >> (t.fresh + t.next_fresh), x_count = 1 << t.fresh, c_count = 1 << t.next_fresh;
  const int16_t* value = t.ordered;
  const T far = V::set((short)t.far);
  T target[Rings];
  Out out[2] = {Out(steps[0]), Out(steps[Rings - 1])};
  for (int r = 0; r < Rings; r++) target[r] = V::set(steps[r].target);
  for (int g = 0; g < groups; g++)
    for (int x = 0; x < x_count; x += Block * V::lanes) {
      T best[Rings][Block];
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) best[r][j] = V::set(-1);
      const uint16_t* from[2] = {steps[0].from + g, steps[Rings - 1].from + g};
      for (int c = 0; c < c_count; c++) {
        T cost[Rings];
        for (int r = 0; r < Rings; r++) cost[r] = V::set((short)from[r][(ptrdiff_t)c * groups]);
        for (int j = 0; j < Block; j++) {
          const T v = V::load((const uint16_t*)value + j * V::lanes);
          for (int r = 0; r < Rings; r++) {
            best[r][j] = V::minu(best[r][j], edge<Clamped>(v, target[r], cost[r], far));
            V::pin(best[r][j]);
          }
        }
        value += Block * V::lanes;
      }
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) {
          uint16_t* to = steps[r].to + (ptrdiff_t)g * x_count + x + j * V::lanes;
          const T v = out[r].settle(best[r][j]);
          steps[r].compare ? out[r].store<true>(to, v) : out[r].store<false>(to, v);
        }
    }
  for (int r = 0; r < Rings; r++) out[r].finish(steps[r]);
}

template <bool Clamped, int Rings> void search(const StepTable& t, Step* steps) {
  if (lanes_over_groups(V::lanes, t.fresh, t.next_fresh)) {
    if (t.fresh == 1) over_groups<Clamped, Rings, 2>(t, steps);
    else if (t.fresh == 2) over_groups<Clamped, Rings, 4>(t, steps);
    else if (t.fresh == 3) over_groups<Clamped, Rings, 8>(t, steps);
    else over_groups<Clamped, Rings, 16>(t, steps);
  } else if ((1 << t.fresh) / V::lanes >= 4) over_targets<Clamped, Rings, 4>(t, steps);
  else if ((1 << t.fresh) / V::lanes == 2) over_targets<Clamped, Rings, 2>(t, steps);
  else over_targets<Clamped, Rings, 1>(t, steps);
}

void step(const StepTable& t, Step* steps, int count) {
  if (count == 2) t.clamped ? search<true, 2>(t, steps) : search<false, 2>(t, steps);
  else t.clamped ? search<true, 1>(t, steps) : search<false, 1>(t, steps);
}

}  // namespace

}  // namespace exl3::cpu
