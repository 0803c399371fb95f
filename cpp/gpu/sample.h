// One token per row of logits. The order of the steps is that of exl3.ops.reference.sample.
#pragma once
#include "numbers.h"

// The first word of Philox4x32-10 (Salmon et al. 2011) with key `seed` and counter (counter, 0).
GPU_FN uint32_t philox(uint64_t seed, uint64_t counter) {
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int i = 0; i < 10; i++) {
    const uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
    const uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)b;
    c3 = (uint32_t)a;
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}
// Unsigned keys in the order of the floats.
GPU_FN uint32_t order_key(float x) {
  const uint32_t u = (uint32_t)as_int(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
GPU_FN float key_value(uint32_t k) { return as_float((int)(k & 0x80000000u ? k ^ 0x80000000u : ~k)); }

constexpr int kSampleThreads = 1024, kSampleWarps = kSampleThreads / 32;
constexpr int kSampleList = 1024;      // values of one histogram bin that are ranked one by one
constexpr float kSampleSpan = 22.3f;   // exp(-22.3) is below 2^-32

GPU_FN unsigned long long lane_xor(unsigned long long v, int mask) {
  const unsigned low = (unsigned)lane_xor((int)(unsigned)v, mask), high = (unsigned)lane_xor((int)(unsigned)(v >> 32), mask);
  return (unsigned long long)high << 32 | low;
}
GPU_FN double lane_xor(double v, int mask) {
  union {
    double d;
    unsigned long long u;
  } bits;
  bits.d = v;
  bits.u = lane_xor(bits.u, mask);
  return bits.d;
}
template <class T>
GPU_FN T wide_warp_sum(T v) {
  for (int m = 16; m; m >>= 1) v += lane_xor(v, m);
  return v;
}

// f(column, value) for all columns, several loads in flight.
template <class F>
GPU_FN void for_columns(const float* x, int vocab, F f) {
  constexpr int kAtOnce = 8;
  for (int first = thread_id(); first < vocab; first += kAtOnce * kSampleThreads) {
    float v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int i = first + j * kSampleThreads;
      v[j] = i < vocab ? x[i] : 0.f;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (first + j * kSampleThreads < vocab) f(first + j * kSampleThreads, v[j]);
  }
}

// What the search for a threshold keeps in shared memory: sums of the bins in two words, the values of one bin, results.
struct ThresholdSpace {
  unsigned *low, *high, *keys, *count;
  unsigned long long *weights, *warps, *result;
};

// Adds up what goes to one bin in a row, so that many equal values don't queue for one word of shared memory. bin -1 begins and ends.
struct Run {
  int bin;
  unsigned long long sum;
};
template <class Flush>
GPU_FN void add_to(Run& run, int bin, unsigned long long w, Flush flush) {
  if (bin != run.bin) {
    if (run.sum) flush(run.bin, run.sum);
    run = {bin, 0};
  }
  run.sum += w;
}

// Where very many values lie close together: four rounds over eight bits of the key each. `passed`: weight above all that `weight` lets in.
template <class Weight>
GPU_FN uint32_t descend(const float* x, int vocab, unsigned long long wanted, unsigned long long passed, const ThresholdSpace& s, Weight weight) {
  const int t = thread_id();
  unsigned long long* bins = s.weights;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    block_sync();
    if (t < 256) bins[t] = 0;
    block_sync();
    Run run = {-1, 0};
    auto flush = [&](int b, unsigned long long w) { shared_add(&bins[b], w); };
    for_columns(x, vocab, [&](int, float v) {
      const uint32_t k = order_key(v);
      if (shift == 24 || k >> (shift + 8) == prefix)
        if (const unsigned long long w = weight(v)) add_to(run, (int)(k >> shift & 255), w, flush);
    });
    add_to(run, -1, 0, flush);
    block_sync();
    if (t == 0) {
      int b = 255;
      unsigned long long sum = passed;
      while (b > 0 && sum + bins[b] < wanted) sum += bins[b--];
      s.result[0] = (unsigned long long)b;
      s.result[1] = sum;
    }
    block_sync();
    prefix = prefix << 8 | (uint32_t)s.result[0];
    passed = s.result[1];
  }
  return prefix;
}

GPU_FN void add_to_bin(const ThresholdSpace& s, int b, unsigned long long w) {
  const unsigned old = shared_fetch_add(&s.low[b], (unsigned)w), high = (unsigned)(w >> 32) + (old + (unsigned)w < old ? 1u : 0u);
  if (high) shared_add(&s.high[b], high);
}
GPU_FN void clear_bins(const ThresholdSpace& s) {
  const int t = thread_id();
  block_sync();
  s.low[t] = s.high[t] = 0;
  if (t == 0) *s.count = 0;
  block_sync();
}
// The bin where passed + sums reach `wanted` in result[0], what lies above it in result[1]; kSampleThreads: none. share >= 0: wanted is that
// share of all weight, which is left in result[2].
GPU_FN void select_bin(const ThresholdSpace& s, double share, unsigned long long& wanted, unsigned long long passed) {
  const int t = thread_id();
  block_sync();
  const unsigned long long mine = wide_warp_sum((unsigned long long)s.high[t] << 32 | s.low[t]);
  if (lane_id() == 0) s.warps[warp_id()] = mine;
  block_sync();
  unsigned long long all = passed;
  for (int w = 0; w < kSampleWarps; w++) all += s.warps[w];
  if (share >= 0.0) {
    const double target = share * (double)all;
    wanted = target < 1.0 ? 1ull : (unsigned long long)target;
    if (t == 0) s.result[2] = all;
  }
  if (t == 0) {
    s.result[0] = kSampleThreads;
    s.result[1] = all;
    for (int b = 0; b < kSampleThreads && all >= wanted;) {
      if (b % 32 == 0 && passed + s.warps[b / 32] < wanted) {
        passed += s.warps[b / 32];
        b += 32;
        continue;
      }
      const unsigned long long here = (unsigned long long)s.high[b] << 32 | s.low[b];
      if (passed + here >= wanted) {
        s.result[0] = (unsigned long long)b;
        s.result[1] = passed;
        break;
      }
      passed += here;
      b++;
    }
  }
  block_sync();
}
// Among `count` listed values the key at which passed + weights reach `wanted`; in result[1] the weight strictly above it. bin_of: a finer bin.
template <class Bin>
GPU_FN uint32_t rank_list(int count, unsigned long long wanted, unsigned long long passed, const ThresholdSpace& s, Bin bin_of) {
  const int t = thread_id();
  int left = count;
  if (count > 32) {
    clear_bins(s);
    const int mine = t < count ? bin_of(key_value(s.keys[t])) : -1;
    if (t < count) add_to_bin(s, mine, s.weights[t]);
    select_bin(s, -1.0, wanted, passed);
    const int bin = (int)s.result[0];
    passed = s.result[1];
    if (mine == bin) s.low[shared_fetch_add(s.count, 1u)] = (unsigned)t;
    block_sync();
    left = (int)*s.count;
  } else {
    block_sync();
    s.low[t] = (unsigned)t;
    block_sync();
  }
  if (t < left) {
    const uint32_t key = s.keys[s.low[t]];
    unsigned long long above = passed, own = 0;
    for (int i = 0; i < left; i++) {
      const unsigned other = s.low[i];
      if (s.keys[other] > key) above += s.weights[other];
      if (s.keys[other] == key) own += s.weights[other];
    }
    if (above < wanted && above + own >= wanted) {  // true of one key; its ties write the same
      s.result[0] = key;
      s.result[1] = above;
    }
  }
  block_sync();
  return (uint32_t)s.result[0];
}

// The largest key such that the weights of the values at or above it reach `wanted` (> 0), or, where share >= 0, `share` of all weight; in
// s.result[1] the weight strictly above it, in s.result[2] all weight. Weights are whole numbers, so no order of adding matters; 0: of a
// value that is out. The values are sorted into bins by their distance from `best`, the largest, up to `span`; those of the bin where
// `wanted` is reached are listed, or sorted once more if they are very many.
template <class Weight>
GPU_FN uint32_t threshold(const float* x, int vocab, float best, float span, double share, unsigned long long wanted,
                          const ThresholdSpace& s, Weight weight) {
  constexpr float kBins = (float)kSampleThreads;
  const float scale = kBins / span;
  auto clamped = [](float b) { return b < kBins - 1.f ? (int)b : kSampleThreads - 1; };
  unsigned long long passed = 0;
  int coarse = -1, bin = 0;  // the bin of the first round, once it is known
  auto bin_of = [&](float v) {
    const float b = (best - v) * scale;
    const int whole = clamped(b);
    return coarse < 0 ? whole : whole != coarse ? -1 : clamped((b - (float)whole) * kBins);
  };
  auto finer_bin = [&](float v) {
    float b = (best - v) * scale;
    if (coarse >= 0) b = (b - (float)clamped(b)) * kBins;
    return clamped((b - (float)clamped(b)) * kBins);
  };
  for (int round = 0; round < 2; round++) {
    clear_bins(s);
    Run run = {-1, 0};
    auto flush = [&](int b, unsigned long long w) { add_to_bin(s, b, w); };
    for_columns(x, vocab, [&](int, float v) {
      const unsigned long long w = weight(v);
      const int b = bin_of(v);
      if (w && b >= 0) add_to(run, b, w, flush);
    });
    add_to(run, -1, 0, flush);
    select_bin(s, round == 0 ? share : -1.0, wanted, passed);
    bin = (int)s.result[0];
    if (bin == kSampleThreads) return 0;  // all together are less: everything stays
    passed = s.result[1];
    for_columns(x, vocab, [&](int, float v) {
      if (bin_of(v) != bin) return;
      const unsigned long long w = weight(v);
      if (!w) return;
      const unsigned at = shared_fetch_add(s.count, 1u);
      if (at >= (unsigned)kSampleList) return;
      s.keys[at] = order_key(v);
      s.weights[at] = w;
    });
    block_sync();
    const int count = (int)*s.count;
    if (count <= kSampleList) return rank_list(count, wanted, passed, s, finer_bin);
    if (round == 0) coarse = bin;
  }
  return descend(x, vocab, wanted, passed, s, [&](float v) { return bin_of(v) == bin ? weight(v) : 0ull; });
}

struct TopId {
  float value;
  int id;
};
// Largest value over the block, the lowest id among equals.
GPU_FN TopId block_top(TopId v, float* values, int* ids) {
  for (int m = 16; m; m >>= 1) {
    const TopId o = {lane_xor(v.value, m), lane_xor(v.id, m)};
    if (o.value > v.value || (o.value == v.value && o.id < v.id)) v = o;
  }
  block_sync();
  if (lane_id() == 0) {
    values[warp_id()] = v.value;
    ids[warp_id()] = v.id;
  }
  block_sync();
  v = {values[0], ids[0]};
  for (int w = 1; w < kSampleWarps; w++)
    if (values[w] > v.value || (values[w] == v.value && ids[w] < v.id)) v = {values[w], ids[w]};
  return v;
}

// The logits after the penalties, in the workspace: a float and an int a logit.
GPU_FN const float* penalized(const exl3_sample_args& a, const exl3_sample_params& p, const float* x, int row, int past) {
  const int t = thread_id(), vocab = a.vocab;
  float* changed = (float*)a.workspace + (int64_t)row * vocab * 2;
  int* count = (int*)changed + vocab;
  const int* history = a.history + row * a.history_stride;
  for_columns(x, vocab, [&](int i, float v) { changed[i] = v; });
  for (int i = t; i < past; i += kSampleThreads)
    if (history[i] >= 0 && history[i] < vocab) count[history[i]] = 0;
  block_sync();
  for (int i = t; i < past; i += kSampleThreads)
    if (history[i] >= 0 && history[i] < vocab) global_add(&count[history[i]], 1);
  block_sync();
  for (int i = t; i < past; i += kSampleThreads) {
    const int id = history[i];
    if (id < 0 || id >= vocab) continue;
    const int n = global_exchange(&count[id], 0);  // one thread of those that hold the id gets its count
    if (n == 0) continue;
    float v = changed[id];
    v = v > 0.f ? v / p.repetition_penalty : v * p.repetition_penalty;
    changed[id] = v - p.presence_penalty - p.frequency_penalty * (float)n;
  }
  block_sync();
  return changed;
}

// What is drawn from: values with a key above `lowest`, and the first `ties` in order of ids of those equal to it.
struct Kept {
  uint32_t lowest;
  int ties;
  float best, factor;  // weight of a value: exp((value - best) * factor)
};
GPU_FN double weight_of(const Kept& k, float v) { return (double)fast_exp((v - k.best) * k.factor); }

// Weights of [from, to) in as many parts as there are warps, in order of ids: sums[w] above the lowest key, equals[w] of it.
GPU_FN void weigh_parts(const float* x, const Kept& k, int from, int to, double* sums, int* equals) {
  constexpr int kAtOnce = 8;
  const int part = (to - from + kSampleWarps - 1) / kSampleWarps, begin = from + warp_id() * part;
  const int end = begin + part < to ? begin + part : to;
  double sum = 0.0;
  int equal = 0;
  for (int first = begin + lane_id(); first < end; first += kAtOnce * 32) {
    float v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) v[j] = first + j * 32 < end ? x[first + j * 32] : 0.f;
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (first + j * 32 < end) {
        const uint32_t key = order_key(v[j]);
        if (key > k.lowest) sum += weight_of(k, v[j]);
        equal += key == k.lowest;
      }
  }
  sum = wide_warp_sum(sum);
  equal = warp_sum(equal);
  block_sync();
  if (lane_id() == 0) {
    sums[warp_id()] = sum;
    equals[warp_id()] = equal;
  }
  block_sync();
}

// One block a row.
GPU_FN void sample(const exl3_sample_args& a) {
  GPU_SHARED(float, space, kSampleWarps);
  GPU_SHARED(int, equals, kSampleWarps);
  GPU_SHARED(double, sums, kSampleWarps);
  GPU_SHARED(unsigned, low, kSampleThreads);
  GPU_SHARED(unsigned, high, kSampleThreads);
  GPU_SHARED(unsigned, keys, kSampleList);
  GPU_SHARED(unsigned, count, 1);
  GPU_SHARED(unsigned long long, weights, kSampleList);
  GPU_SHARED(unsigned long long, warps, kSampleWarps);
  GPU_SHARED(unsigned long long, result, 3);
  begin_kernel();
  const ThresholdSpace s = {low, high, keys, count, weights, warps, result};
  const int row = block_x(), t = thread_id(), vocab = a.vocab;
  const float* x = a.logits + row * a.logits_stride;
  const exl3_sample_params p = a.params[row];
  const int past = a.history ? a.history_len[row] : 0;
  if (past > 0) x = penalized(a, p, x, row, past);
  TopId top = {-3.4e38f, vocab};
  float bad = 0.f;
  for_columns(x, vocab, [&](int i, float v) {
    if (!(v <= 3.4028235e38f)) bad = 1.f;  // NaN or +inf
    if (v > top.value) top = {v, i};
  });
  bad = block_sum<kSampleThreads>(bad, space);
  top = block_top(top, space, equals);
  if (bad != 0.f || top.id >= vocab) {
    if (t == 0) {
      a.ids[row] = -1;
      if (a.probs) a.probs[row] = 0.f;
    }
    return;
  }
  const bool greedy = p.temperature == 0.f;
  if (greedy && !a.probs) {
    if (t == 0) a.ids[row] = top.id;
    return;
  }
  const float early = greedy || p.temperature_last ? 1.f : 1.f / p.temperature;  // temperature the filters see
  const float best = top.value;
  Kept kept = {order_key(-3.4028235e38f), vocab, best, greedy ? 1.f : 1.f / p.temperature};
  if (!greedy && p.top_k > 0 && p.top_k < vocab)
    kept.lowest = threshold(x, vocab, best, 32.f, -1.0, (unsigned long long)p.top_k, s,
                            [](float v) { return v >= -3.4028235e38f ? 1ull : 0ull; });
  if (!greedy && p.top_p < 1.f) {
    // weights in units of 2^-32 of the largest
    const float floor_value = key_value(kept.lowest);
    auto mass = [=](float v) { return v >= floor_value ? (unsigned long long)(fast_exp((v - best) * early) * 4294967296.f) : 0ull; };
    const uint32_t k = threshold(x, vocab, best, kSampleSpan / early, (double)p.top_p, 0, s, mass);
    const unsigned long long all = result[2];
    kept.lowest = k > kept.lowest ? k : kept.lowest;
    const double one = (double)mass(key_value(kept.lowest)), left = (double)p.top_p * (double)all - (double)result[1];
    const double fit = one > 0.0 ? left / one : 1.0;
    kept.ties = fit > (double)vocab ? vocab : (int)fit;
    if ((double)kept.ties < fit) kept.ties++;
    if (kept.ties < 1) kept.ties = 1;
  }
  if (!greedy && p.min_p > 0.f) {
    const uint32_t k = order_key(best + fast_log(p.min_p) / early);
    if (k > kept.lowest) {
      kept.lowest = k;
      kept.ties = vocab;
    }
  }
  // the draw: ever smaller parts, each of a warp's, down to a few columns
  const double tie = weight_of(kept, key_value(kept.lowest));
  int from = 0, to = vocab, ties = kept.ties;
  double total = -1.0, target = 0.0;
  do {
    weigh_parts(x, kept, from, to, sums, equals);
    if (total < 0.0) {
      total = 0.0;
      int left = ties;
      for (int w = 0; w < kSampleWarps; w++) {
        const int taken = equals[w] < left ? equals[w] : left;
        total += sums[w] + (taken > 0 ? (double)taken * tie : 0.0);
        left -= taken;
      }
      if (greedy) {
        if (t == 0) {
          a.ids[row] = top.id;
          a.probs[row] = (float)(1.0 / total);
        }
        return;
      }
      target = ((double)philox(p.seed, p.counter) + 0.5) / 4294967296.0 * total;
    }
    const int part = (to - from + kSampleWarps - 1) / kSampleWarps;
    int left = ties, chosen = 0;
    double passed = 0.0, before = 0.0;
    for (int w = 0; w < kSampleWarps; w++) {
      const int taken = equals[w] < left ? equals[w] : left;
      const double here = sums[w] + (taken > 0 ? (double)taken * tie : 0.0);
      if (here > 0.0) {  // rounding at the very end leaves the last part that has any
        chosen = w;
        before = passed;
        ties = left;
        if (target < passed + here) break;
      }
      passed += here;
      left -= taken;
    }
    target -= before;
    from += chosen * part;
    to = from + part < to ? from + part : to;
  } while (to - from > 8);
  if (t != 0) return;
  int chosen = top.id;
  double at = 0.0, weight = 1.0;
  for (int i = from; i < to; i++) {
    const uint32_t key = order_key(x[i]);
    if (key < kept.lowest || (key == kept.lowest && ties-- <= 0)) continue;
    const double one = weight_of(kept, x[i]);
    if (one == 0.0) continue;
    chosen = i;
    weight = one;
    at += one;
    if (at > target) break;
  }
  a.ids[row] = chosen;
  if (a.probs) a.probs[row] = (float)(weight / total);
}
