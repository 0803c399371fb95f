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

constexpr int kSampleThreads = 512;

// Descends from the largest key to where the weight of the keys passed first reaches `wanted` (> 0): four rounds over histograms of eight
// bits. Returns the key, and in *above the weight strictly above it. weight(i): of column i, 0 for one that is out.
template <class Weight>
GPU_FN uint32_t descend(const float* x, int vocab, unsigned long long wanted, unsigned long long* bins, unsigned long long* result,
                        unsigned long long* above, Weight weight) {
  const int t = thread_id();
  uint32_t prefix = 0;
  unsigned long long passed = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    block_sync();
    if (t < 256) bins[t] = 0;
    block_sync();
    for (int i = t; i < vocab; i += kSampleThreads) {
      const uint32_t k = order_key(x[i]);
      if (shift == 24 || k >> (shift + 8) == prefix) {
        const unsigned long long w = weight(x[i]);
        if (w) shared_add(&bins[k >> shift & 255], w);
      }
    }
    block_sync();
    if (t == 0) {
      int b = 255;
      unsigned long long sum = passed;
      while (b > 0 && sum + bins[b] < wanted) sum += bins[b--];
      result[0] = (unsigned long long)b;
      result[1] = sum;
    }
    block_sync();
    prefix = prefix << 8 | (uint32_t)result[0];
    passed = result[1];
  }
  *above = passed;
  return prefix;
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
  for (int w = 1; w < kSampleThreads / 32; w++)
    if (values[w] > v.value || (values[w] == v.value && ids[w] < v.id)) v = {values[w], ids[w]};
  return v;
}

// One block a row. Workspace: a float and an int a logit.
GPU_FN void sample(const exl3_sample_args& a) {
  GPU_SHARED(float, space, kSampleThreads / 32);
  GPU_SHARED(int, space_ids, kSampleThreads / 32);
  GPU_SHARED(unsigned long long, bins, 256);
  GPU_SHARED(unsigned long long, result, 2);
  GPU_SHARED(double, sums, kSampleThreads);
  GPU_SHARED(int, ties, kSampleThreads);
  begin_kernel();
  const int row = block_x(), t = thread_id(), vocab = a.vocab;
  const float* x = a.logits + row * a.logits_stride;
  const exl3_sample_params p = a.params[row];
  const int past = a.history ? a.history_len[row] : 0;
  if (past > 0) {
    float* changed = (float*)a.workspace + (int64_t)row * vocab * 2;
    int* count = (int*)changed + vocab;
    const int* history = a.history + row * a.history_stride;
    for (int i = t; i < vocab; i += kSampleThreads) changed[i] = x[i];
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
    x = changed;
  }
  TopId top = {-3.4e38f, vocab};
  float bad = 0.f;
  constexpr int kAtOnce = 8;  // loads in flight
  for (int first = t; first < vocab; first += kAtOnce * kSampleThreads) {
    float v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int i = first + j * kSampleThreads;
      v[j] = i < vocab ? x[i] : -3.4e38f;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (!(v[j] <= 3.4028235e38f)) bad = 1.f;  // NaN or +inf
      if (v[j] > top.value) top = {v[j], first + j * kSampleThreads};
    }
  }
  bad = block_sum<kSampleThreads>(bad, space);
  top = block_top(top, space, space_ids);
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
  const float late = greedy ? 1.f : 1.f / p.temperature;
  const float best = top.value;
  uint32_t lowest = order_key(-3.4028235e38f);  // key of the smallest value kept
  int kept_ties = vocab;                        // and how many equal to it, in order of ids
  if (!greedy) {
    if (p.top_k > 0 && p.top_k < vocab) {
      unsigned long long above;
      lowest = descend(x, vocab, (unsigned long long)p.top_k, bins, result, &above,
                       [](float v) { return v >= -3.4028235e38f ? 1ull : 0ull; });
    }
    if (p.top_p < 1.f) {
      // weights in units of 2^-32 of the largest: whole numbers, so that no order of adding matters
      const float floor_value = key_value(lowest);
      auto mass = [=](float v) { return v >= floor_value ? (unsigned long long)(fast_exp((v - best) * early) * 4294967296.f) : 0ull; };
      double sum = 0.0;
      for (int i = t; i < vocab; i += kSampleThreads) sum += (double)mass(x[i]);
      block_sync();
      sums[t] = sum;
      block_sync();
      sum = 0.0;
      for (int i = 0; i < kSampleThreads; i++) sum += sums[i];
      const double target = (double)p.top_p * sum;
      const unsigned long long wanted = target < 1.0 ? 1ull : (unsigned long long)target;
      unsigned long long above;
      const uint32_t k = descend(x, vocab, wanted, bins, result, &above, mass);
      lowest = k > lowest ? k : lowest;
      const double one = (double)mass(key_value(lowest));
      const double fit = one > 0.0 ? (target - (double)above) / one : 1.0;
      kept_ties = fit > (double)vocab ? vocab : (int)fit;
      if ((double)kept_ties < fit) kept_ties++;
      if (kept_ties < 1) kept_ties = 1;
    }
    if (p.min_p > 0.f) {
      const float cut = best + fast_log(p.min_p) / early;
      const uint32_t k = order_key(cut);
      if (k > lowest) {
        lowest = k;
        kept_ties = vocab;
      }
    }
  }
  // cumulative weights in order of ids: each thread a run of columns
  const int run = (vocab + kSampleThreads - 1) / kSampleThreads, from = t * run, to = from + run < vocab ? from + run : vocab;
  int equal = 0;
  for (int i = from; i < to; i++) equal += order_key(x[i]) == lowest;
  ties[t] = equal;
  block_sync();
  int before = 0;
  for (int i = 0; i < t; i++) before += ties[i];
  auto weight = [&](int i, int& seen) {
    const uint32_t k = order_key(x[i]);
    if (k < lowest || (k == lowest && seen++ >= kept_ties)) return 0.0;
    return (double)fast_exp((x[i] - best) * late);
  };
  double sum = 0.0;
  int seen = before;
  for (int i = from; i < to; i++) sum += weight(i, seen);
  sums[t] = sum;
  block_sync();
  double start = 0.0, total = 0.0;
  for (int i = 0; i < kSampleThreads; i++) {
    if (i == t) start = total;
    total += sums[i];
  }
  if (greedy) {
    if (t == 0) {
      a.ids[row] = top.id;
      if (a.probs) a.probs[row] = (float)(1.0 / total);
    }
    return;
  }
  const double target = ((double)philox(p.seed, p.counter) + 0.5) / 4294967296.0 * total;
  if (start <= target && (target < start + sum || t == kSampleThreads - 1) && (sum > 0.0 || t == kSampleThreads - 1)) {
    int chosen = top.id;  // rounding at the very end
    double at = start, w = 0.0;
    seen = before;
    for (int i = from; i < to; i++) {
      const double one = weight(i, seen);
      if (one == 0.0) continue;
      chosen = i;
      w = one;
      at += one;
      if (at > target) break;
    }
    a.ids[row] = chosen;
    if (a.probs) a.probs[row] = (float)((w > 0.0 ? w : 1.0) / total);
  }
}
