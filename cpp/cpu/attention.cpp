// Causal attention over the paged cache. Two paths, chosen per token by how many tokens of its row stand together in the batch:
// single tokens (decode, short drafts) stream the cache once per key/value head; runs of four and more (prefill) go through small
// matrix products over 64 positions at a time. Both keep an online softmax over blocks at fixed positions, so that a token's result
// depends neither on the other rows of the batch nor on the number of threads.
#include "cpu/kv.h"

EXL3_TIER_BEGIN

static const int kDepth = 8;          // cache rows decoded at a time by the streaming path
static const int kBlock = 64;         // positions in a block of the prefill path
static const int kTile = 12288;       // floats of queries in one prefill tile
static const int kQueries = 96;       // queries in one prefill tile
static const int kRun = 4;            // tokens of a row that stand together from which the prefill path pays

struct Token {
  int row, position, first;  // sees first .. position
};

static inline Token token_at(const exl3_attention_args& a, int64_t t) {
  const int row = a.token_row[t], position = a.positions[t];
  const int first = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
  return {position < 0 || position / EXL3_PAGE >= a.table_stride ? -1 : row, position, first};
}

static inline bool follows(const exl3_attention_args& a, int64_t t) {  // t continues the run of t-1
  return a.token_row[t] >= 0 && a.token_row[t] == a.token_row[t - 1] && a.positions[t] == a.positions[t - 1] + 1;
}

static bool in_run(const exl3_attention_args& a, int64_t t) {
  int n = 1;
  for (int64_t i = t; i > 0 && n < kRun && follows(a, i); i--) n++;
  for (int64_t i = t + 1; i < a.tokens && n < kRun && follows(a, i); i++) n++;
  return n >= kRun;
}

static inline float cap_score(float s, float cap) { return cap > 0 ? cap * tanh_fast(s / cap) : s; }

// Scores of 8 decoded cache rows with one query.
static inline void dot8(const float* q, const float* rows, int n, float* out) {
#if defined(__AVX2__)
  __m256 s[8];
  for (int j = 0; j < 8; j++) s[j] = _mm256_setzero_ps();
  for (int i = 0; i < n; i += 8) {
    const __m256 v = _mm256_loadu_ps(q + i);
    for (int j = 0; j < 8; j++) s[j] = _mm256_fmadd_ps(v, _mm256_loadu_ps(rows + j * n + i), s[j]);
  }
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(s[4], s[5]), _mm256_hadd_ps(s[6], s[7]));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#else
  for (int j = 0; j < 8; j++) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int i = 0; i < n; i++) s += q[i] * rows[j * n + i];
    out[j] = s;
  }
#endif
}

// acc += sum of p[j] * rows[j] over `count` decoded rows.
static inline void add8(float* acc, const float* rows, const float* p, int count, int n) {
#if defined(__AVX2__)
  for (int i = 0; i < n; i += 8) {
    __m256 s = _mm256_loadu_ps(acc + i);
    for (int j = 0; j < count; j++) s = _mm256_fmadd_ps(_mm256_set1_ps(p[j]), _mm256_loadu_ps(rows + j * n + i), s);
    _mm256_storeu_ps(acc + i, s);
  }
#else
  for (int j = 0; j < count; j++)
    for (int i = 0; i < n; i++) acc[i] += p[j] * rows[j * n + i];
#endif
}

// Turns scores into weights exp(s - max) in place; returns max and sum.
static inline void soften(float* s, int n, float* top, float* sum) {
  float m = -INFINITY;
#pragma omp simd reduction(max : m)
  for (int i = 0; i < n; i++) m = s[i] > m ? s[i] : m;
  float total = 0;
  const float base = m == -INFINITY ? 0.0f : m;
#pragma omp simd reduction(+ : total)
  for (int i = 0; i < n; i++) {
    s[i] = exp_fast(s[i] - base);
    total += s[i];
  }
  *top = m;
  *sum = total;
}

// A share of the softmax: largest score, sum of exp(score - top), sum of exp(score - top) * value.
struct Part {
  float* top;
  float* sum;
  float* acc;  // [heads of the group, head_dim]
};

// The part that one page gives a group of heads; q: [group, head_dim] scaled (and rotated for quantized keys).
static void page_part(const exl3_attention_args& a, const float* q, int group, int head, int64_t page, int lo, int hi, const Part& out) {
  const exl3_cache_layer& c = a.cache;
  const int n = c.head_dim, count = hi - lo;
  const Side keys = keys_of(c), values = values_of(c);
  float rows[kDepth * 512], score[8 * EXL3_PAGE];
  for (int g0 = 0; g0 < group; g0 += 8) {  // eight heads' scores at a time keep the buffer small
    const int heads = group - g0 < 8 ? group - g0 : 8;
    for (int i = 0; i < count; i += kDepth) {
      const int some = count - i < kDepth ? count - i : kDepth;
      for (int j = 0; j < some; j++) {
        prefetch_head(keys, c, page, lo + i + j + 2 * kDepth, head);
        prefetch_head(values, c, page, lo + i + j, head);
        read_head(keys, c, page, lo + i + j, head, rows + j * n);
      }
      for (int j = some; j < kDepth; j++) memset(rows + j * n, 0, sizeof(float) * n);
      for (int g = 0; g < heads; g++) dot8(q + (g0 + g) * n, rows, n, score + g * EXL3_PAGE + i);
    }
    for (int g = 0; g < heads; g++) {
      float* s = score + g * EXL3_PAGE;
      if (a.softcap > 0)
        for (int i = 0; i < count; i++) s[i] = cap_score(s[i], a.softcap);
      soften(s, count, &out.top[g0 + g], &out.sum[g0 + g]);
      memset(out.acc + (g0 + g) * n, 0, sizeof(float) * n);
    }
    for (int i = 0; i < count; i += kDepth) {
      const int some = count - i < kDepth ? count - i : kDepth;
      for (int j = 0; j < some; j++) read_head(values, c, page, lo + i + j, head, rows + j * n);
      for (int g = 0; g < heads; g++) add8(out.acc + (g0 + g) * n, rows, score + g * EXL3_PAGE + i, some, n);
    }
  }
}

// into += part, for one head.
static inline void merge(float* top, float* sum, float* acc, float part_top, float part_sum, const float* part, int n) {
  const float m = *top > part_top ? *top : part_top;
  if (m == -INFINITY) return;
  const float keep = exp_fast(*top - m), take = exp_fast(part_top - m);
  *sum = *sum * keep + part_sum * take;
  for (int i = 0; i < n; i++) acc[i] = acc[i] * keep + part[i] * take;
  *top = m;
}

template <class T>
static void load_query(const exl3_attention_args& a, const T* q, float* out) {
  for (int i = 0; i < a.cache.head_dim; i++) out[i] = load(q[i]) * a.scale;
  if (a.cache.k_bits != 16) rotate32(out, a.cache.head_dim);  // the codes stay in their rotated basis
}

template <class T>
static void write_head(const exl3_attention_args& a, int head, float top, float sum, float* acc, T* y) {
  const int n = a.cache.head_dim;
  if (a.sinks) {
    const float sink = a.sinks[head], m = top > sink ? top : sink, keep = exp_fast(top - m);
    sum = sum * keep + exp_fast(sink - m);
    for (int i = 0; i < n; i++) acc[i] *= keep;
  }
  const float inverse = 1.0f / sum;
  for (int i = 0; i < n; i++) acc[i] *= inverse;
  if (a.cache.v_bits != 16) rotate32(acc, n);
  for (int i = 0; i < n; i++) store(&y[i], acc[i]);
}

static inline bool page_range(const exl3_attention_args& a, const Token& t, int p, int64_t* page, int* lo, int* hi) {
  const int start = p * EXL3_PAGE;
  *lo = t.first > start ? t.first - start : 0;
  *hi = t.position - start + 1 < EXL3_PAGE ? t.position - start + 1 : EXL3_PAGE;
  *page = a.block_table[(int64_t)t.row * a.table_stride + p];
  return *lo < *hi && *page >= 0 && *page < a.cache.pages;
}

// One token, one key/value head, up to kGroup of its query heads; `parts` holds finished page parts or is null.
static const int kGroup = 16;

template <class T>
static void stream_heads(const exl3_attention_args& a, int64_t t, const Token& token, int kv, int first_head, int group, const float* parts) {
  const int n = a.cache.head_dim;
  float q[kGroup * 512], acc[kGroup * 512], page_acc[kGroup * 512], top[kGroup], sum[kGroup], page_top[kGroup], page_sum[kGroup];
  for (int g = 0; g < group; g++) {
    if (!parts) load_query(a, (const T*)a.q + t * a.q_stride + (int64_t)(first_head + g) * n, q + g * n);
    memset(acc + g * n, 0, sizeof(float) * n);
    top[g] = -INFINITY;
    sum[g] = 0;
  }
  for (int p = token.first / EXL3_PAGE; p <= token.position / EXL3_PAGE; p++) {
    int64_t page;
    int lo, hi;
    if (!page_range(a, token, p, &page, &lo, &hi)) continue;
    if (parts) {
      const float* part = parts + ((int64_t)p * a.heads + first_head) * (n + 2);
      for (int g = 0; g < group; g++, part += n + 2) merge(&top[g], &sum[g], acc + g * n, part[0], part[1], part + 2, n);
    } else {
      page_part(a, q, group, kv, page, lo, hi, {page_top, page_sum, page_acc});
      for (int g = 0; g < group; g++) merge(&top[g], &sum[g], acc + g * n, page_top[g], page_sum[g], page_acc + g * n, n);
    }
  }
  for (int g = 0; g < group; g++)
    write_head(a, first_head + g, top[g], sum[g], acc + g * n, (T*)a.y + t * a.y_stride + (int64_t)(first_head + g) * n);
}

// The parts of one page for the workspace: [token][page][head][top, sum, acc].
template <class T>
static void store_parts(const exl3_attention_args& a, int64_t t, const Token& token, int kv, int p, float* parts) {
  const int n = a.cache.head_dim, per = a.heads / a.cache.kv_heads;
  int64_t page;
  int lo, hi;
  if (p < token.first / EXL3_PAGE || p > token.position / EXL3_PAGE || !page_range(a, token, p, &page, &lo, &hi)) return;
  float q[kGroup * 512], acc[kGroup * 512], top[kGroup], sum[kGroup];
  for (int h = kv * per; h < (kv + 1) * per; h += kGroup) {
    const int group = (kv + 1) * per - h < kGroup ? (kv + 1) * per - h : kGroup;
    for (int g = 0; g < group; g++) load_query(a, (const T*)a.q + t * a.q_stride + (int64_t)(h + g) * n, q + g * n);
    page_part(a, q, group, kv, page, lo, hi, {top, sum, acc});
    float* part = parts + ((int64_t)p * a.heads + h) * (n + 2);
    for (int g = 0; g < group; g++, part += n + 2) {
      part[0] = top[g];
      part[1] = sum[g];
      memcpy(part + 2, acc + g * n, sizeof(float) * n);
    }
  }
}

// C[m, n] = (add ? C : 0) + A[m, k] B[k, n]; n a multiple of 8.
static void product(int m, int n, int k, const float* A, int lda, const float* B, int ldb, float* C, int ldc, bool add) {
#if defined(__AVX2__)
  for (int i = 0; i < m; i += 6) {
    const int rows = m - i < 6 ? m - i : 6;
    const float* x[6];
    for (int r = 0; r < 6; r++) x[r] = A + (int64_t)(i + (r < rows ? r : 0)) * lda;
    int j = 0;
    for (; j + 16 <= n; j += 16) {
      __m256 s[6][2];
      for (int r = 0; r < 6; r++)
        for (int h = 0; h < 2; h++) s[r][h] = add && r < rows ? _mm256_loadu_ps(C + (int64_t)(i + r) * ldc + j + 8 * h) : _mm256_setzero_ps();
      const float* b = B + j;
      for (int l = 0; l < k; l++, b += ldb) {
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
        for (int r = 0; r < 6; r++) {
          const __m256 v = _mm256_broadcast_ss(x[r] + l);
          s[r][0] = _mm256_fmadd_ps(v, b0, s[r][0]);
          s[r][1] = _mm256_fmadd_ps(v, b1, s[r][1]);
        }
      }
      for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(C + (int64_t)(i + r) * ldc + j + 8 * h, s[r][h]);
    }
    for (; j < n; j += 8)
      for (int r = 0; r < rows; r++) {
        __m256 s = add ? _mm256_loadu_ps(C + (int64_t)(i + r) * ldc + j) : _mm256_setzero_ps();
        for (int l = 0; l < k; l++) s = _mm256_fmadd_ps(_mm256_broadcast_ss(x[r] + l), _mm256_loadu_ps(B + (int64_t)l * ldb + j), s);
        _mm256_storeu_ps(C + (int64_t)(i + r) * ldc + j, s);
      }
  }
#else
  for (int i = 0; i < m; i++) {
    float* c = C + (int64_t)i * ldc;
    if (!add)
      for (int j = 0; j < n; j++) c[j] = 0;
    for (int l = 0; l < k; l++) {
      const float v = A[(int64_t)i * lda + l];
      const float* b = B + (int64_t)l * ldb;
      for (int j = 0; j < n; j++) c[j] += v * b[j];
    }
  }
#endif
}

// 8 rows of n values -> columns j .. j+7 of a [n, ld] matrix.
static inline void transpose8(const float* rows, int n, float* out, int ld) {
#if defined(__AVX2__)
  for (int i = 0; i < n; i += 8) {
    __m256 r[8], t[8];
    for (int j = 0; j < 8; j++) r[j] = _mm256_loadu_ps(rows + j * n + i);
    for (int j = 0; j < 8; j += 2) {
      t[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
      t[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
    }
    for (int j = 0; j < 8; j += 4) {
      r[j] = _mm256_shuffle_ps(t[j], t[j + 2], 0x44);
      r[j + 1] = _mm256_shuffle_ps(t[j], t[j + 2], 0xEE);
      r[j + 2] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0x44);
      r[j + 3] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0xEE);
    }
    for (int j = 0; j < 4; j++) {
      _mm256_storeu_ps(out + (int64_t)(i + j) * ld, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
      _mm256_storeu_ps(out + (int64_t)(i + j + 4) * ld, _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
    }
  }
#else
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < n; i++) out[(int64_t)i * ld + j] = rows[j * n + i];
#endif
}

// Tokens t0 .. t1-1 of one row at consecutive positions, `group` heads from first_head on, all of key/value head kv.
template <class T>
static void prefill_tile(const exl3_attention_args& a, int64_t t0, int64_t t1, int kv, int first_head, int group) {
  const exl3_cache_layer& c = a.cache;
  const int n = c.head_dim, queries = (int)(t1 - t0) * group, block = n > 256 ? kBlock / 2 : kBlock;
  const Side keys = keys_of(c), values = values_of(c);
  float q[kTile], acc[kTile], kv_rows[kBlock * 256], rows[8 * 512], score[kQueries * kBlock], top[kQueries], sum[kQueries];
  for (int i = 0; i < queries; i++) {
    load_query(a, (const T*)a.q + (t0 + i / group) * a.q_stride + (int64_t)(first_head + i % group) * n, q + i * n);
    top[i] = -INFINITY;
    sum[i] = 0;
  }
  memset(acc, 0, sizeof(float) * queries * n);
  const Token first = token_at(a, t0), last = token_at(a, t1 - 1);
  for (int start = first.first / block * block; start <= last.position; start += block) {
    const int64_t page = a.block_table[(int64_t)first.row * a.table_stride + start / EXL3_PAGE];
    if (page < 0 || page >= c.pages) continue;
    const int place = start % EXL3_PAGE, count = last.position - start + 1 < block ? last.position - start + 1 : block;
    const int width = (count + 7) / 8 * 8;
    for (int j = 0; j < width; j += 8) {
      for (int r = 0; r < 8; r++) {
        if (j + r < count) read_head(keys, c, page, place + j + r, kv, rows + r * n);
        else memset(rows + r * n, 0, sizeof(float) * n);
      }
      transpose8(rows, n, kv_rows + j, block);
    }
    product(queries, width, n, q, n, kv_rows, block, score, block, false);
    for (int i = 0; i < queries; i++) {
      float* s = score + i * block;
      const Token token = token_at(a, t0 + i / group);
      const int lo = token.first > start ? token.first - start : 0, hi = token.position - start + 1 < count ? token.position - start + 1 : count;
      if (a.softcap > 0)
        for (int j = 0; j < count; j++) s[j] = cap_score(s[j], a.softcap);
      for (int j = 0; j < lo && j < width; j++) s[j] = -INFINITY;
      for (int j = hi > 0 ? hi : 0; j < width; j++) s[j] = -INFINITY;
      float part_top, part_sum;
      soften(s, width, &part_top, &part_sum);
      if (part_top == -INFINITY) continue;  // sees nothing here: weights are 0
      const float m = top[i] > part_top ? top[i] : part_top, keep = exp_fast(top[i] - m), take = exp_fast(part_top - m);
      sum[i] = sum[i] * keep + part_sum * take;
      top[i] = m;
      if (keep != 1.0f)
        for (int j = 0; j < n; j++) acc[i * n + j] *= keep;
      if (take != 1.0f)
        for (int j = 0; j < count; j++) s[j] *= take;
    }
    for (int j = 0; j < count; j++) read_head(values, c, page, place + j, kv, kv_rows + j * n);
    product(queries, n, count, score, block, kv_rows, n, acc, n, true);
  }
  for (int i = 0; i < queries; i++) {
    const int head = first_head + i % group;
    write_head(a, head, top[i], sum[i], acc + i * n, (T*)a.y + (t0 + i / group) * a.y_stride + (int64_t)head * n);
  }
}

// The tokens of one block of the batch that belong to runs, in tiles of one row.
template <class T>
static void prefill_block(const exl3_attention_args& a, int64_t begin, int64_t end, int kv, int first_head, int group) {
  for (int64_t t = begin; t < end;) {
    if (token_at(a, t).row < 0 || !in_run(a, t)) { t++; continue; }
    int64_t stop = t + 1;
    while (stop < end && follows(a, stop)) stop++;
    prefill_tile<T>(a, t, stop, kv, first_head, group);
    t = stop;
  }
}

static int64_t parts_per_token(const exl3_attention_args& a) { return (int64_t)a.table_stride * a.heads * (a.cache.head_dim + 2); }

int64_t attention_workspace(const exl3_attention_args* a) {
  // parts let few heads use all threads on a long row; with many tokens there is work enough without
  if ((int64_t)a->tokens * a->cache.kv_heads >= 32) return 0;
  const int64_t bytes = a->tokens * parts_per_token(*a) * (int64_t)sizeof(float);
  return bytes > (64ll << 20) ? 0 : bytes;
}

template <class T>
static void attend(const exl3_attention_args& a, void* stream) {
  const exl3_cache_layer& c = a.cache;
  const int n = c.head_dim, per = a.heads / c.kv_heads;
  int64_t work = 0, singles = 0;
  for (int64_t t = 0; t < a.tokens; t++) {
    const Token token = token_at(a, t);
    if (token.row < 0) {
      for (int h = 0; h < a.heads; h++)
        for (int i = 0; i < n; i++) store((T*)a.y + t * a.y_stride + (int64_t)h * n + i, 0.0f);
      continue;
    }
    work += (int64_t)(token.position - token.first + 1) * a.heads * n;
    singles += !in_run(a, t);
  }
  const int threads = work < 65536 ? 1 : thread_count(stream);
  if (singles) {
    const int64_t items = a.tokens * c.kv_heads;
    const bool split = threads > 1 && items < 4 * threads && a.workspace && a.workspace_bytes >= a.tokens * parts_per_token(a) * (int64_t)sizeof(float);
    float* space = split ? (float*)a.workspace : nullptr;
    if (split)
      parallel_for(threads, items * a.table_stride, [&](int64_t i) {
        // pages vary slowest, so that a thread's share covers short rows evenly
        const int64_t p = i / items, t = i % items / c.kv_heads;
        const Token token = token_at(a, t);
        if (token.row >= 0 && !in_run(a, t)) store_parts<T>(a, t, token, (int)(i % c.kv_heads), (int)p, space + t * parts_per_token(a));
      });
    parallel_for(threads, items, [&](int64_t i) {
      const int64_t t = i / c.kv_heads;
      const int kv = (int)(i % c.kv_heads);
      const Token token = token_at(a, t);
      if (token.row < 0 || in_run(a, t)) return;
      for (int h = kv * per; h < (kv + 1) * per; h += kGroup)
        stream_heads<T>(a, t, token, kv, h, (kv + 1) * per - h < kGroup ? (kv + 1) * per - h : kGroup, split ? space + t * parts_per_token(a) : nullptr);
    });
  }
  if (singles < a.tokens) {
    int group = per < kTile / n ? per : kTile / n;
    if (group > kQueries) group = kQueries;
    int size = kTile / (n * group);
    if (size > kQueries / group) size = kQueries / group;
    const int64_t chunks = (per + group - 1) / group, blocks = (a.tokens + size - 1) / size;
    // later blocks see more positions: hand them out round robin
    parallel(threads, [&](int part, int parts) {
      for (int64_t i = part; i < blocks * c.kv_heads * chunks; i += parts) {
        const int64_t b = i / (c.kv_heads * chunks);
        const int kv = (int)(i / chunks % c.kv_heads), h = kv * per + (int)(i % chunks) * group;
        const int64_t end = (b + 1) * size < a.tokens ? (b + 1) * size : a.tokens;
        prefill_block<T>(a, b * size, end, kv, h, (kv + 1) * per - h < group ? (kv + 1) * per - h : group);
      }
    });
  }
}

int attention(const exl3_attention_args* a, void* stream) {
  if (const char* wrong = check_layer(a->cache)) return fail(EXL3_BAD_ARGUMENT, "attention: %s", wrong);
  if (a->cache.kv_heads < 1 || a->heads % a->cache.kv_heads)
    return fail(EXL3_BAD_ARGUMENT, "attention: %d heads over %d key/value heads", a->heads, a->cache.kv_heads);
  return with_dtype(a->dtype, [&](auto* tag) { attend<std::remove_pointer_t<decltype(tag)>>(*a, stream); });
}

EXL3_TIER_END
