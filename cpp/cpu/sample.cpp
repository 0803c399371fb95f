// sample: penalties, temperature, top-k, top-p, min-p and one draw per row. The contract is the docstring of exl3.ops.reference.sample.
#include "cpu/small.h"

EXL3_TIER_BEGIN

static const int kBuckets = 4096;

// Ascending order of floats as unsigned integers.
static inline uint32_t order_key(float x) {
  const uint32_t u = float_to_bits(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Philox4x32-10 (Salmon et al. 2011), first word.
static uint32_t philox(uint64_t seed, uint64_t counter) {
  uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
    memcpy(c, next, sizeof c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c[0];
}

// What one row needs: the tokens still in the running, in order of their ids, and scratch.
struct Row {
  float* x;        // [n] logits
  float* e;        // [n] scratch
  int32_t* id;     // [n] ids; the token's own place while all are in the running
  int32_t* list;   // [n] places of the candidates of one bucket
  double* mass;    // [kBuckets]
  int n;
};

static int64_t row_bytes(int vocab) { return (int64_t)((vocab + 15) / 16 * 16) * 16 + kBuckets * 8; }

static void penalise(const Row& r, const exl3_sample_params& p, const int32_t* history, int n) {
  int32_t* count = (int32_t*)r.e;
  for (int i = 0; i < n; i++)
    if (history[i] >= 0 && history[i] < r.n) count[history[i]] = 0;
  for (int i = 0; i < n; i++)
    if (history[i] >= 0 && history[i] < r.n) count[history[i]]++;
  for (int i = 0; i < n; i++) {
    const int id = history[i];
    if (id < 0 || id >= r.n || !count[id]) continue;
    float v = r.x[id];
    v = v > 0 ? v / p.repetition_penalty : v * p.repetition_penalty;
    r.x[id] = v - p.presence_penalty - p.frequency_penalty * (float)count[id];
    count[id] = 0;
  }
}

static int arg_max(const float* x, int n) {
  float best = -INFINITY;
#pragma omp simd reduction(max : best)
  for (int i = 0; i < n; i++) best = x[i] > best ? x[i] : best;
  for (int i = 0; i < n; i++)
    if (x[i] == best) return i;
  return 0;
}

// Larger value first, then smaller id.
static inline bool before(const float* x, int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); }

static void sift(const float* x, int32_t* heap, int n, int at) {
  for (int child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && before(x, heap[child + 1], heap[child])) child++;
    if (!before(x, heap[child], heap[at])) return;
    const int32_t swap = heap[at];
    heap[at] = heap[child];
    heap[child] = swap;
  }
}

// A heap gives the candidates of a bucket in order, only as many as are asked for.
static void make_heap(const float* x, int32_t* heap, int n) {
  for (int i = n / 2; i-- > 0;) sift(x, heap, n, i);
}
static int32_t pop(const float* x, int32_t* heap, int* n) {
  const int32_t top = heap[0];
  heap[0] = heap[--*n];
  sift(x, heap, *n, 0);
  return top;
}

static int collect(const Row& r, int bucket) {
  int n = 0;
  for (int i = 0; i < r.n; i++)
    if ((int)(order_key(r.x[i]) >> 20) == bucket) r.list[n++] = i;
  return n;
}

// Only tokens of at least `limit` stay; of those that equal it the ones behind place `last` go.
static void keep(Row& r, float limit, int last) {
  int n = 0;
  for (int i = 0; i < r.n; i++) {
    if (!(r.x[i] > limit || (r.x[i] == limit && i <= last))) continue;
    r.x[n] = r.x[i];
    r.id[n++] = r.id[i];
  }
  r.n = n;
}

// Keeps the k largest and the ties of the k-th.
static void keep_top_k(Row& r, int k, float top) {
  // halve the range that holds the k-th until few candidates stand above its lower end
  float low = top - 1;
  int above = 0;
  for (float width = 1;; width *= 2) {
    low = top - width;
    above = 0;
#pragma omp simd reduction(+ : above)
    for (int i = 0; i < r.n; i++) above += r.x[i] >= low;
    if (above >= k || !(low > -3e38f)) break;
  }
  if (above >= k) keep(r, low, r.n);
  int32_t* histogram = (int32_t*)r.mass;
  memset(histogram, 0, sizeof(int32_t) * kBuckets);
  for (int i = 0; i < r.n; i++) histogram[order_key(r.x[i]) >> 20]++;
  int bucket = kBuckets - 1;
  above = 0;
  while (bucket > 0 && above + histogram[bucket] < k) above += histogram[bucket--];
  int n = collect(r, bucket);
  make_heap(r.x, r.list, n);
  float limit = -INFINITY;
  for (int i = above; i < k && n > 0; i++) limit = r.x[pop(r.x, r.list, &n)];
  keep(r, limit, r.n);
}

// e = exp((x - top) * scale); returns the sum. Sums of blocks are added in order, so that the result is one for all tiers of a width.
static double exponentiate(const Row& r, float top, float scale) {
  double total = 0;
  for (int at = 0; at < r.n; at += 1024) {
    const int end = at + 1024 < r.n ? at + 1024 : r.n;
    for (int i = at; i < end; i++) r.e[i] = exp_fast((r.x[i] - top) * scale);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = at; i < end; i++) sum += (double)r.e[i];
    total += sum;
  }
  return total;
}

// Keeps the smallest set of largest probabilities whose sum reaches p: what stands before a kept token sums to less than p.
static void keep_top_p(Row& r, float p, float top) {
  for (int i = 0; i < kBuckets; i++) r.mass[i] = 0;
  const double want = (double)p * exponentiate(r, top, 1.0f);
  for (int i = 0; i < r.n; i++) r.mass[order_key(r.x[i]) >> 20] += (double)r.e[i];
  int bucket = kBuckets - 1;
  double before_it = 0;
  while (bucket > 0 && (r.mass[bucket] == 0 || before_it + r.mass[bucket] < want)) before_it += r.mass[bucket--];
  int n = collect(r, bucket);
  if (n == 0) return;
  make_heap(r.x, r.list, n);
  int32_t last = r.list[0];
  bool any = (int)(order_key(top) >> 20) > bucket;  // a larger bucket already holds the first token
  while (n > 0) {
    const int32_t place = pop(r.x, r.list, &n);
    if (any && before_it >= want) break;
    any = true;
    last = place;
    before_it += (double)r.e[place];
  }
  keep(r, r.x[last], last);
}

static void keep_min_p(Row& r, float p, float top) {
  exponentiate(r, top, 1.0f);
  int n = 0;
  for (int i = 0; i < r.n; i++) {
    if (r.e[i] < p) continue;
    r.x[n] = r.x[i];
    r.id[n++] = r.id[i];
  }
  r.n = n;
}

static void sample_row(Row r, const exl3_sample_params& p, const float* logits, const int32_t* history, int n_history, int32_t* id, float* prob) {
  int bad = 0;
#pragma omp simd reduction(| : bad)
  for (int i = 0; i < r.n; i++) {
    r.x[i] = logits[i];
    bad |= !(logits[i] < INFINITY);  // NaN or +inf
  }
  *id = -1;
  if (prob) *prob = 0;
  if (bad) return;
  if (n_history > 0) penalise(r, p, history, n_history);
  const int best = arg_max(r.x, r.n);
  float top = r.x[best];
  if (!(top > -INFINITY)) return;
  if (p.temperature == 0) {
    *id = best;
    if (prob) *prob = (float)(1.0 / exponentiate(r, top, 1.0f));
    return;
  }
  for (int i = 0; i < r.n; i++) r.id[i] = i;
  if (!p.temperature_last) {
    for (int i = 0; i < r.n; i++) r.x[i] /= p.temperature;
    top /= p.temperature;
  }
  if (p.top_k > 0 && p.top_k < r.n) keep_top_k(r, p.top_k, top);
  if (p.top_p < 1) keep_top_p(r, p.top_p, top);
  if (p.min_p > 0) keep_min_p(r, p.min_p, top);
  const double total = exponentiate(r, top, p.temperature_last ? 1.0f / p.temperature : 1.0f);
  const double mark = ((double)philox(p.seed, p.counter) + 0.5) / 4294967296.0 * total;
  double sum = 0;
  int last = -1;
  for (int i = 0; i < r.n; i++) {
    if (r.e[i] == 0) continue;
    sum += (double)r.e[i];
    last = i;
    if (sum > mark) break;
  }
  *id = r.id[last];
  if (prob) *prob = (float)((double)r.e[last] / total);
}

int64_t sample_workspace(const exl3_sample_args* a) { return a->rows * row_bytes(a->vocab); }

int sample(const exl3_sample_args* a, void* stream) {
  if (a->vocab < 1) return fail(EXL3_BAD_ARGUMENT, "sample: a vocabulary of %d", a->vocab);
  if (a->workspace_bytes < sample_workspace(a)) return fail(EXL3_BAD_ARGUMENT, "sample: the workspace is too small");
  const int64_t padded = (a->vocab + 15) / 16 * 16;
  for_rows(stream, a->rows, (int64_t)a->rows * a->vocab * 4, [&](int64_t i) {
    char* space = (char*)a->workspace + i * row_bytes(a->vocab);
    Row r;
    r.mass = (double*)space;
    r.x = (float*)(space + kBuckets * 8);
    r.e = r.x + padded;
    r.id = (int32_t*)(r.e + padded);
    r.list = r.id + padded;
    r.n = a->vocab;
    const int n = a->history && a->history_len ? a->history_len[i] : 0;
    const int32_t* history = a->history ? a->history + i * a->history_stride : nullptr;
    sample_row(r, a->params[i], a->logits + i * a->logits_stride, history, n, &a->ids[i], a->probs ? &a->probs[i] : nullptr);
  });
  return EXL3_OK;
}

EXL3_TIER_END
