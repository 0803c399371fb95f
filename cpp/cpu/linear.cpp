// linear: rows are rotated and quantized, tile columns are multiplied on all threads, finished outputs are rotated back and stored.
#include <atomic>
#include <math.h>
#include <string.h>

#include "cpu/backend.h"
#include "cpu/threads.h"
#include "cpu/trellis.h"

namespace exl3::cpu {

namespace {

constexpr int64_t kCounters = 65536;  // bytes at the start of the workspace that are zero between calls
const int kSize[] = {4, 2, 2};        // bytes of an exl3_dtype

enum class Grade { integers, bytes, floats };

struct Plan {
  const exl3_linear_args* a;
  Grade grade;
  int bases;                // different input rotations
  int rows;                 // rows of a full batch
  int64_t in_padded, blocks, out_total;
  Operand x[EXL3_MAX_GROUP];
  float* y;                 // [rows][out_total], rotated basis
  int64_t y_offset[EXL3_MAX_GROUP];
  int64_t units;            // groups of 128 outputs that finish together
  int tiles;                // tile columns in a unit
  std::atomic<int32_t>* counters;   // [0]: next column to take; [apart * (1 + unit)]: columns of it that are done
  int64_t apart;            // counters to a counter: a cache line where there is room, so that threads don't pass one line to and fro
};

template <class T> T* take(char*& p, int64_t count) {
  T* start = (T*)p;
  p += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
  return start;
}

// Lays the workspace out from `base`; returns its end.
char* lay_out(const exl3_linear_args* a, Plan& p, char* base) {
  p.a = a;
  p.grade = !kernels().quantize || a->planes == 0 ? Grade::floats : a->planes == 1 && kernels().column_byte ? Grade::bytes : Grade::integers;
  p.bases = a->shared_suh ? 1 : a->count;
  p.rows = a->rows < kMaxRows ? a->rows : kMaxRows;
  p.in_padded = a->weights[0]->in_padded;
  p.blocks = p.in_padded / kBlock;
  p.counters = (std::atomic<int32_t>*)base;
  char* at = base + kCounters;
  p.out_total = 0;
  for (int i = 0; i < a->count; i++) {
    p.y_offset[i] = p.out_total;
    p.out_total += a->weights[i]->out_padded;
  }
  p.tiles = a->activation ? 16 : 8;
  p.units = p.out_total / (kTile * p.tiles);
  p.apart = (p.units + 1) * 64 <= kCounters ? 16 : 1;
  p.y = take<float>(at, p.rows * p.out_total);
  const int64_t cells = p.blocks * p.rows;
  for (int i = 0; i < p.bases; i++) {
    Operand& x = p.x[i];
    x.rows = p.rows, x.blocks = (int)p.blocks;
    x.total = take<float>(at, p.rows);
    if (p.grade == Grade::floats) {
      x.exact = take<float>(at, cells * kBlock);
    } else {
      x.units = take<int16_t>(at, cells * 2 * kBlock);
      x.offset = take<int32_t>(at, cells * 16);
      x.scale = take<float>(at, cells);
    }
  }
  return at;
}

// One plane of bytes has its own kernel for one row; more rows give the same sums through 16-bit integers, which is faster.
bool byte_kernel(const Plan& p, const exl3_weight& w, int rows) { return p.grade == Grade::bytes && rows == 1 && w.codebook == EXL3_MUL1; }

// Normalises, scales, rotates and quantizes one row for one basis.
void prepare(const Plan& p, int basis, int row, const void* x) {
  const exl3_linear_args& a = *p.a;
  const Kernels& k = kernels();
  const Operand& to = p.x[basis];
  const exl3_weight& w = *a.weights[basis];
  const int n = w.in_features;
  float block[kBlock], suh[kBlock];
  float norm = 1;
  if (a.norm_weight) {
    float sums[8] = {0};
    for (int start = 0; start < n; start += kBlock) {
      const int count = n - start < kBlock ? n - start : kBlock;
      k.load(block, (const char*)x + (int64_t)start * kSize[a.x_dtype], a.x_dtype, count);
      memset(block + count, 0, (size_t)(kBlock - count) * 4);
      for (int i = 0; i < kBlock; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += block[i + j] * block[i + j];
    }
    const float sum = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
    norm = 1 / sqrtf(sum / (float)n + a.norm_eps);
  }
  to.total[row] = 0;
  for (int64_t b = 0; b < p.blocks; b++) {
    const int start = (int)b * kBlock;
    const int count = n - start < 0 ? 0 : n - start < kBlock ? n - start : kBlock;
    const int64_t cell = b * to.rows + row;
    memset(block, 0, sizeof block);
    if (count) k.load(block, (const char*)x + (int64_t)start * kSize[a.x_dtype], a.x_dtype, count);
    k.load(suh, (const uint16_t*)w.suh + start, EXL3_F16, kBlock);
    if (a.norm_weight)
      for (int i = 0; i < count; i++) block[i] *= norm * a.norm_weight[start + i];
    for (int i = 0; i < kBlock; i++) block[i] *= suh[i];
    k.hadamard(block);
    if (p.grade == Grade::floats) memcpy(to.exact + cell * kBlock, block, sizeof block);
    else {
      int16_t* units = to.units + cell * 2 * kBlock;
      k.quantize(block, w.codebook != EXL3_MUL1 ? kUnitLimitHalf : p.grade == Grade::bytes ? kByteLimit : kUnitLimit, units, to.offset + cell * 16, to.scale + cell, to.total + row);
      if (byte_kernel(p, w, to.rows))
        for (int i = 0; i < 2 * kBlock; i++) units[i] = (int16_t)((units[i] & 0xFF) * 0x101);
    }
  }
}

// Rotates 128 outputs of one row back, in place, with svh and bias.
void rotate_back(const exl3_weight& w, int start, float* y) {
  const Kernels& k = kernels();
  float svh[kBlock];
  k.hadamard(y);
  k.load(svh, (const uint16_t*)w.svh + start, EXL3_F16, kBlock);
  const int count = w.out_features - start < kBlock ? w.out_features - start : kBlock;
  if (w.bias)
    for (int i = 0; i < count; i++) y[i] = y[i] * svh[i] + w.bias[start + i];
  else
    for (int i = 0; i < kBlock; i++) y[i] *= svh[i];
}

// Where a unit's columns lie: matrix and first output.
void locate(const Plan& p, int64_t unit, int* matrix, int* start) {
  *matrix = 0;
  if (p.a->activation) {
    *start = (int)unit * kBlock;
    return;
  }
  int64_t at = unit * kBlock;
  while (at >= p.a->weights[*matrix]->out_padded) at -= p.a->weights[(*matrix)++]->out_padded;
  *start = (int)at;
}

void finish(const Plan& p, int64_t unit, int first_row, int rows) {
  const exl3_linear_args& a = *p.a;
  int m, start;
  locate(p, unit, &m, &start);
  const exl3_weight& w = *a.weights[m];
  const int count = w.out_features - start < kBlock ? w.out_features - start : kBlock;
  if (count <= 0) return;
  for (int r = 0; r < rows; r++) {
    float* y = p.y + r * p.out_total + p.y_offset[m] + start;
    rotate_back(w, start, y);
    if (a.activation) {
      float* up = p.y + r * p.out_total + p.y_offset[1] + start;
      rotate_back(*a.weights[1], start, up);
      kernels().activate(y, up, a.activation, kBlock);
    }
    char* out = (char*)a.y[m] + ((first_row + r) * a.y_stride[m] + start) * kSize[a.y_dtype];
    if (a.accumulate)
      for (int i = 0; i < count; i++) ((float*)out)[i] += y[i];
    else kernels().store(out, y, a.y_dtype, count);
  }
}

void multiply(const Plan& p, int64_t column) {
  const int64_t unit = column / p.tiles;
  int m, start;
  locate(p, unit, &m, &start);
  const int within = (int)(column % p.tiles);
  if (within >= 8) m = 1;
  const int first = start + kTile * (within % 8);
  const exl3_weight& w = *p.a->weights[m];
  const Operand& x = p.x[p.bases == 1 ? 0 : m];
  const uint8_t* tiles = (const uint8_t*)w.trellis + (size_t)(first / kTile) * (size_t)(p.in_padded / kTile) * tile_stride(w.k2);
  const Column c = {tiles, w.k2, w.codebook, w.multiplier, &x, p.y + p.y_offset[m] + first, p.out_total};
  const Kernels& k = kernels();
  (p.grade == Grade::floats ? k.column_float : byte_kernel(p, w, x.rows) ? k.column_byte : k.column)(c);
}

// Takes columns as long as there are some, and finishes the units whose last column it did.
void multiply_share(const Plan& p, int64_t columns, int share, int first_row, int rows) {
  for (;;) {
    const int64_t first = p.counters[0].fetch_add(share, std::memory_order_relaxed);
    if (first >= columns) return;
    for (int64_t column = first; column < first + share; column++) multiply(p, column);
    const int64_t unit = first / p.tiles;
    std::atomic<int32_t>& done = p.counters[p.apart * (1 + unit)];
    if (done.fetch_add(share, std::memory_order_acq_rel) == p.tiles - share) {
      done.store(0, std::memory_order_relaxed);
      finish(p, unit, first_row, rows);
    }
  }
}

// The operands of one row on a thread's own stack: to rotate it again costs less than to wait for it and fetch it from another core.
struct OwnRow {
  static constexpr int64_t limit = 8192;   // inputs of all bases
  alignas(64) int16_t units[2 * limit];
  int32_t offset[limit / kBlock * 16];
  float scale[limit / kBlock], total[EXL3_MAX_GROUP];
  Plan plan;
  OwnRow(const Plan& p, const void* x) : plan(p) {
    for (int i = 0; i < p.bases; i++) {
      const int64_t block = i * p.blocks;
      Operand& own = plan.x[i];
      own.units = units + block * 2 * kBlock, own.offset = offset + block * 16, own.scale = scale + block, own.total = total + i;
      prepare(plan, i, 0, x);
    }
  }
};

void run_batch(Plan& p, int first_row, int rows, int threads) {
  for (int i = 0; i < p.bases; i++) p.x[i].rows = rows;
  const int64_t row_bytes = p.a->x_stride * kSize[p.a->x_dtype];
  const char* x = (const char*)p.a->x + first_row * row_bytes;
  const int64_t columns = p.units * p.tiles;
  const int64_t work = columns * kTile * p.in_padded * (rows < 4 ? 1 : rows / 4);
  if (work < 32768) threads = 1;
  // columns are taken as threads come free, a few at a time: a busy neighbour on one core delays only what it holds
  const int64_t even = columns / (threads * 8);
  const int share = even < 2 ? 1 : even < 4 ? 2 : 4;   // divides a unit
  if (rows == 1 && p.grade != Grade::floats && p.bases * p.in_padded <= OwnRow::limit) {
    parallel(threads, [&](int, int) {
      const OwnRow own(p, x);
      multiply_share(own.plan, columns, share, first_row, rows);
    });
  } else {
    const int64_t jobs = (int64_t)rows * p.bases;
    parallel_for(jobs * p.in_padded < 32768 ? 1 : threads, jobs, [&](int64_t i) { prepare(p, (int)(i / rows), (int)(i % rows), x + i % rows * row_bytes); });
    parallel(threads, [&](int, int) { multiply_share(p, columns, share, first_row, rows); });
  }
  p.counters[0].store(0, std::memory_order_relaxed);
}

int check(const exl3_linear_args* a) {
  if (a->count < 1 || a->count > EXL3_MAX_GROUP) return fail(EXL3_BAD_ARGUMENT, "linear: %d matrices; one call takes 1 to %d", a->count, EXL3_MAX_GROUP);
  if (a->rows < 0) return fail(EXL3_BAD_ARGUMENT, "linear: %d rows", a->rows);
  if (a->activation && (a->count != 2 || a->weights[0]->out_padded != a->weights[1]->out_padded))
    return fail(EXL3_BAD_ARGUMENT, "linear: an activation needs two matrices (gate, up) of one shape");
  if (a->activation == EXL3_ACT_XIELU) return fail(EXL3_UNSUPPORTED, "linear: xielu is not fused; use act_mul");
  if (a->accumulate && a->y_dtype != EXL3_F32) return fail(EXL3_BAD_ARGUMENT, "linear: accumulate needs an fp32 result");
  int64_t units = 0;
  for (int i = 0; i < a->count; i++) {
    const exl3_weight& w = *a->weights[i];
    if (w.layout != 1) return fail(EXL3_BAD_ARGUMENT, "linear: matrix %d has the layout on disk; call repack first", i);
    if (!valid_k2(w.k2)) return fail(EXL3_BAD_ARGUMENT, "linear: matrix %d has no valid rate (k2 = %d)", i, w.k2);
    if (w.in_padded != a->weights[0]->in_padded || w.in_features != a->weights[0]->in_features)
      return fail(EXL3_BAD_ARGUMENT, "linear: matrices of one call need one input size");
    // the quantized operand differs by codebook class
    if (a->shared_suh && (w.codebook == EXL3_MUL1) != (a->weights[0]->codebook == EXL3_MUL1))
      return fail(EXL3_BAD_ARGUMENT, "linear: mul1 and other codebooks can't share one rotated input");
    units += w.out_padded / kBlock;
  }
  if ((units + 1) * 4 > kCounters) return fail(EXL3_UNSUPPORTED, "linear: more than %d outputs in one call", (int)(kCounters / 4 - 1) * kBlock);
  return EXL3_OK;
}

// Matrices of both codebook classes with equal suh are rotated twice: their operands are quantized to different ranges.
exl3_linear_args resolved(const exl3_linear_args* a) {
  exl3_linear_args copy = *a;
  for (int i = 1; i < a->count; i++)
    if ((a->weights[i]->codebook == EXL3_MUL1) != (a->weights[0]->codebook == EXL3_MUL1)) copy.shared_suh = 0;
  return copy;
}

}  // namespace

int64_t linear_workspace(const exl3_linear_args* args) {
  const exl3_linear_args a = resolved(args);
  if (check(&a) != EXL3_OK) return 0;
  Plan p{};
  char* const base = (char*)64;   // any aligned place: only the distance counts
  return lay_out(&a, p, base) - base + 64;
}

int linear(const exl3_linear_args* args, void* stream) {
  const exl3_linear_args a = resolved(args);
  if (const int status = check(&a)) return status;
  if (!a.rows) return EXL3_OK;
  Plan p{};
  char* base = (char*)(((uintptr_t)a.workspace + 63) / 64 * 64);
  if (!a.workspace || lay_out(&a, p, base) > (char*)a.workspace + a.workspace_bytes)
    return fail(EXL3_BAD_ARGUMENT, "linear: workspace of %lld bytes is too small", (long long)a.workspace_bytes);
  for (int first = 0; first < a.rows; first += p.rows) run_batch(p, first, a.rows - first < p.rows ? a.rows - first : p.rows, thread_count(stream));
  return EXL3_OK;
}

}  // namespace exl3::cpu
