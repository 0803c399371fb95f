// One step of the trellis search over registers of V::lanes 16-bit numbers; included by the tiers' files, which define V. Four operations
// an edge at low rates: subtract, square, add, minimum. Each register of values serves two rings.
#pragma once
#include <stddef.h>

#include "cpu/encode.h"

namespace exl3::cpu {

namespace {

struct Target {
  typename V::T target;
  typename V::T least;       // running minimum
};

template <bool Clamped> inline typename V::T edge(typename V::T value, typename V::T target, typename V::T cost) {
  typename V::T d = V::subs(value, target);
  if (!Clamped) return V::add(V::square(d), cost);
  d = V::max(V::min(d, V::set(kClamp)), V::set(-kClamp));
  return V::add(V::mullo(d, d), cost);
}

// Lanes over groups: the costs of `lanes` neighbouring nodes are one load. raw: [ring][group / lanes][x][lane].
template <bool Clamped, int Rings, int Block> void over_groups(const StepTable& t, Step* steps, uint16_t* raw, Target* state) {
  const int groups = kStates >> (t.fresh + t.next_fresh), x_count = 1 << t.fresh, c_count = 1 << t.next_fresh;
  const int16_t* value = t.ordered;
  typename V::T target[Rings], least[Rings];
  for (int r = 0; r < Rings; r++) target[r] = state[r].target, least[r] = V::set(-1);
  uint16_t* out = raw;
  for (int g = 0; g < groups; g += V::lanes)
    for (int x = 0; x < x_count; x += Block) {
      typename V::T best[Rings][Block];
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) best[r][j] = V::set(-1);
      const uint16_t* from[Rings];
      for (int r = 0; r < Rings; r++) from[r] = steps[r].from + g;
      for (int c = 0; c < c_count; c++) {
        typename V::T cost[Rings];
        for (int r = 0; r < Rings; r++) cost[r] = V::load(from[r] + (ptrdiff_t)c * groups);
        for (int j = 0; j < Block; j++) {
          const typename V::T v = V::load((const uint16_t*)value + j * V::lanes);
          for (int r = 0; r < Rings; r++) best[r][j] = V::minu(best[r][j], edge<Clamped>(v, target[r], cost[r]));
        }
        value += Block * V::lanes;
      }
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) {
          V::store(out + r * (kStates / 2) + j * V::lanes, best[r][j]);
          least[r] = V::minu(least[r], best[r][j]);
        }
      out += Block * V::lanes;
    }
  for (int r = 0; r < Rings; r++) state[r].least = least[r];
}

// Lanes over the targets of one group, which share their candidates: one cost is spread over the register.
template <bool Clamped, int Rings, int Block> void over_targets(const StepTable& t, Step* steps, uint16_t* raw, Target* state) {
  const int groups = kStates >> (t.fresh + t.next_fresh), x_count = 1 << t.fresh, c_count = 1 << t.next_fresh;
  const int16_t* value = t.ordered;
  typename V::T target[Rings], least[Rings];
  for (int r = 0; r < Rings; r++) target[r] = state[r].target, least[r] = V::set(-1);
  uint16_t* out = raw;
  for (int g = 0; g < groups; g++)
    for (int x = 0; x < x_count; x += Block * V::lanes) {
      typename V::T best[Rings][Block];
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) best[r][j] = V::set(-1);
      for (int c = 0; c < c_count; c++) {
        typename V::T cost[Rings];
        for (int r = 0; r < Rings; r++) cost[r] = V::set((short)steps[r].from[c * groups + g]);
        for (int j = 0; j < Block; j++) {
          const typename V::T v = V::load((const uint16_t*)value + j * V::lanes);
          for (int r = 0; r < Rings; r++) best[r][j] = V::minu(best[r][j], edge<Clamped>(v, target[r], cost[r]));
        }
        value += Block * V::lanes;
      }
      for (int r = 0; r < Rings; r++)
        for (int j = 0; j < Block; j++) {
          V::store(out + r * (kStates / 2) + j * V::lanes, best[r][j]);
          least[r] = V::minu(least[r], best[r][j]);
        }
      out += Block * V::lanes;
    }
  for (int r = 0; r < Rings; r++) state[r].least = least[r];
}

template <bool Clamped, int Rings> void search(const StepTable& t, Step* steps, uint16_t* raw, Target* state) {
  if (lanes_over_groups(V::lanes, t.fresh, t.next_fresh))
    t.fresh == 1 ? over_groups<Clamped, Rings, 2>(t, steps, raw, state) : over_groups<Clamped, Rings, 4>(t, steps, raw, state);
  else if ((1 << t.fresh) / V::lanes >= 4) over_targets<Clamped, Rings, 4>(t, steps, raw, state);
  else if ((1 << t.fresh) / V::lanes == 2) over_targets<Clamped, Rings, 2>(t, steps, raw, state);
  else over_targets<Clamped, Rings, 1>(t, steps, raw, state);
}

struct Differences {
  __m128i any = _mm_setzero_si128();
  // Stores 8 costs, noting whether others stood there.
  void store(uint16_t* to, __m128i v) {
    any = _mm_or_si128(any, _mm_xor_si128(v, _mm_loadu_si128((const __m128i*)to)));
    _mm_storeu_si128((__m128i*)to, v);
  }
  bool none() const { return _mm_testz_si128(any, any); }
};

// Subtracts the minimum, cuts, and brings over_groups' order [group / lanes][x][lane] back to [group][x]: 8 x 8 transposes of words.
inline void settle_groups(const StepTable& t, const uint16_t* raw, int least, uint16_t* to, Differences& differ) {
  const __m128i low = _mm_set1_epi16((short)least), limit = _mm_set1_epi16(kCostLimit);
  const int x_count = 1 << t.fresh, groups = kStates >> (t.fresh + t.next_fresh);
  const auto get = [&](const uint16_t* p) { return _mm_min_epu16(_mm_subs_epu16(_mm_load_si128((const __m128i*)p), low), limit); };
  for (int g = 0; g < groups; g += V::lanes, raw += (ptrdiff_t)x_count * V::lanes)
    for (int part = 0; part < V::lanes; part += 8) {
      uint16_t* out = to + (ptrdiff_t)(g + part) * x_count;
      const uint16_t* in = raw + part;
      if (x_count == 2) {
        const __m128i a = get(in), b = get(in + V::lanes);
        differ.store(out, _mm_unpacklo_epi16(a, b));
        differ.store(out + 8, _mm_unpackhi_epi16(a, b));
      } else if (x_count == 4) {
        const __m128i a = get(in), b = get(in + V::lanes), c = get(in + 2 * V::lanes), d = get(in + 3 * V::lanes);
        const __m128i ab = _mm_unpacklo_epi16(a, b), cd = _mm_unpacklo_epi16(c, d), ab2 = _mm_unpackhi_epi16(a, b), cd2 = _mm_unpackhi_epi16(c, d);
        differ.store(out, _mm_unpacklo_epi32(ab, cd));
        differ.store(out + 8, _mm_unpackhi_epi32(ab, cd));
        differ.store(out + 16, _mm_unpacklo_epi32(ab2, cd2));
        differ.store(out + 24, _mm_unpackhi_epi32(ab2, cd2));
      } else {
        for (int x = 0; x < x_count; x += 8) {
          __m128i v[8], w[8];
          for (int i = 0; i < 8; i++) v[i] = get(in + (x + i) * V::lanes);
          for (int i = 0; i < 4; i++) w[i] = _mm_unpacklo_epi16(v[2 * i], v[2 * i + 1]), w[4 + i] = _mm_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
          for (int h = 0; h < 2; h++) {
            const __m128i *p = w + 4 * h;
            const __m128i a = _mm_unpacklo_epi32(p[0], p[1]), b = _mm_unpackhi_epi32(p[0], p[1]), c = _mm_unpacklo_epi32(p[2], p[3]), d = _mm_unpackhi_epi32(p[2], p[3]);
            uint16_t* q = out + (ptrdiff_t)4 * h * x_count + x;
            differ.store(q, _mm_unpacklo_epi64(a, c));
            differ.store(q + x_count, _mm_unpackhi_epi64(a, c));
            differ.store(q + 2 * x_count, _mm_unpacklo_epi64(b, d));
            differ.store(q + 3 * x_count, _mm_unpackhi_epi64(b, d));
          }
        }
      }
    }
}

void step(const StepTable& t, Step* steps, int count, uint16_t* raw) {
  Target state[2];
  for (int r = 0; r < count; r++) state[r].target = V::set(steps[r].target);
  if (count == 2) t.clamped ? search<true, 2>(t, steps, raw, state) : search<false, 2>(t, steps, raw, state);
  else t.clamped ? search<true, 1>(t, steps, raw, state) : search<false, 1>(t, steps, raw, state);
  for (int r = 0; r < count; r++) {
    const int least = V::smallest(state[r].least);
    const uint16_t* from = raw + r * (kStates / 2);
    Differences differ;
    if (lanes_over_groups(V::lanes, t.fresh, t.next_fresh)) {
      settle_groups(t, from, least, steps[r].to, differ);
    } else {
      const __m128i low = _mm_set1_epi16((short)least), limit = _mm_set1_epi16(kCostLimit);
      for (int o = 0; o < t.next_nodes(); o += 8)
        differ.store(steps[r].to + o, _mm_min_epu16(_mm_subs_epu16(_mm_load_si128((const __m128i*)(from + o)), low), limit));
    }
    steps[r].same = differ.none();
  }
}

}  // namespace

}  // namespace exl3::cpu
