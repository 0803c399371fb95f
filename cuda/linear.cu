// Plans and launches of the product: which kernel, how many slices, where things lie in the workspace.
//
// Workspace: 64 KiB of counters (zero before and after), scales, operand image, partial sums.
#include "parts.h"
#include "product.cuh"
#include "wide.h"

namespace exl3 {

#define X(k2) ProductEntries product_entries_##k2();
EXL3_RATES(X)
#undef X

static const ProductEntry* find_kernel(int k2, int mode, int blocks) {
  ProductEntries entries{};
  switch (k2) {
#define X(k2) \
  case k2: entries = product_entries_##k2(); break;
    EXL3_RATES(X)
#undef X
  }
  for (int i = 0; i < entries.count; i++)
    if (entries.first[i].mode == mode && entries.first[i].blocks == blocks) return entries.first + i;
  return nullptr;
}

constexpr int64_t kCounterBytes = 65536;
constexpr int kMostRows = 4096;         // of one pass: bounds the workspace, keeps the rotated input in the L2 cache
constexpr int kFusedRows = 2;           // up to so many rows each block rotates its own slice of the input
constexpr int kFusedStage = 32 * 1024;  // where the rotated slice fits
constexpr int kResidentImage = 72 * 1024;

struct Plan {
  ProductParams p;
  int mode, blocks;  // of eight operand columns
  int units, row_tiles;
  int64_t scales, image, partial, total;  // workspace offsets
};

// Slices of the inner dimension, from 1 to 8. A model of the time, fitted to measurements on an H200: rows of tiles of the busiest
// multiprocessor and what its blocks cost besides, dearer with fewer than `resident` blocks on it (less latency hidden) and where not all
// blocks run at once. columns: of operands.
static int choose_slices(int units, int blocks, int columns, int sms) {
  const int resident = columns <= 8 ? 3 : columns <= 16 ? 2 : 1, besides = columns <= 8 ? 2 : columns <= 16 ? 5 : 14;
  int best = 1;
  double best_cost = 1e30;
  for (int s : {1, 2, 3, 4, 6, 8}) {
    if (s > blocks) break;
    const int64_t all = (int64_t)units * s, each = (all + sms - 1) / sms;
    const int64_t places = (int64_t)resident * (s > 4 ? sms * 10 / 11 : sms);  // large clusters leave some out
    double cost = (double)each * ((blocks + s - 1) / s + besides);
    if (resident == 3 && each < 3) cost *= each == 1 ? 1.35 : 1.1;
    if (resident == 2 && each == 1) cost *= 1.5;
    if (all > places) cost *= 1.2;
    if (cost < best_cost) {
      best_cost = cost;
      best = s;
    }
  }
  return best;
}

static bool same_kernel(const exl3_weight& a, const exl3_weight& b) {
  return a.k2 == b.k2 && (a.codebook == EXL3_MUL1) == (b.codebook == EXL3_MUL1);
}

static int64_t take(int64_t& at, int64_t bytes) {
  const int64_t offset = at;
  at += (bytes + 255) / 256 * 256;
  return offset;
}

// The plan for matrices first .. first+count-1 of the call, all of one rate and kind of codebook.
static Plan make_plan(const exl3_linear_args* a, int first, int count, const Device& device) {
  Plan plan{};
  ProductParams& p = plan.p;
  const exl3_weight& w = *a->weights[first];
  const bool bytes = w.codebook == EXL3_MUL1;
  p.segments = a->activation ? 2 : 1;
  p.count = a->activation ? 1 : count;
  for (int i = 0; i < count; i++) {
    const exl3_weight& v = *a->weights[first + i];
    const int result = a->activation ? 0 : first + i;
    p.matrix[i] = {(const uint8_t*)v.trellis, (const uint16_t*)v.suh, (const uint16_t*)v.svh, v.bias, a->y[result], a->y_stride[result],
                   v.out_features, v.out_padded / 16, v.multiplier, v.codebook == EXL3_3INST ? k3instAddend : 0u};
    p.first_group[i + 1] = p.first_group[i] + v.out_padded / 128;
  }
  plan.units = p.first_group[p.count];
  p.rows = a->rows;
  p.blocks = w.in_padded / 128;
  p.planes = a->planes == 1 ? 1 : 2;
  p.in_features = w.in_features;
  p.x_dtype = a->x_dtype;
  p.y_dtype = a->y_dtype;
  p.activation = a->activation;
  p.accumulate = a->accumulate;
  p.rotations = a->shared_suh || count == 1 ? 1 : count;
  p.x = a->x;
  p.norm_weight = a->norm_weight;
  p.x_stride = a->x_stride;
  p.norm_eps = a->norm_eps;
  const bool few = a->rows <= kRows && !(bytes && a->planes == 0);
  plan.blocks = a->rows <= 16 ? 2 : 4;
  plan.row_tiles = few ? 1 : (a->rows + plan.blocks * 8 - 1) / (plan.blocks * 8);
  const int columns = few ? (bytes ? p.planes : 1) * a->rows : plan.blocks * 8;
  p.slices = choose_slices(plan.units * plan.row_tiles, p.blocks, columns, device.sms);
  auto cut = [&] {
    p.slice_blocks = p.blocks / p.slices;
    p.slice_rest = p.blocks % p.slices;
  };
  cut();
  if (few) {
    plan.mode = bytes ? kBytes : kPairs;
    p.image_columns = bytes ? p.planes * a->rows : a->rows;
    if (p.image_columns > 8) p.image_columns = 16;
    plan.blocks = p.image_columns > 8 ? 2 : 1;
    const int images = p.rotations > 1 && p.segments > 1 ? 2 : 1;
    while (p.slices * 2 <= kMaxSlices && p.slices * 2 <= p.blocks &&
           images * widest_slice(p) * 8 * p.image_columns * image_column_bytes(plan.mode) > kResidentImage) {
      p.slices *= 2;
      cut();
    }
    p.fused = a->rows <= kFusedRows && a->rows * widest_slice(p) * 512 <= kFusedStage;
  } else {
    plan.mode = bytes ? kDecodeBytes : kDecodePairs;
    p.image_columns = plan.blocks * 8;
  }
  const bool clusters = device.code >= 90;
  const int steps = (widest_slice(p) + rows_in_slot(w.k2) - 1) / rows_in_slot(w.k2) * p.segments;
  p.ring_slots = steps < kRingSlots ? steps : kRingSlots;

  int64_t at = kCounterBytes;
  plan.scales = take(at, (int64_t)p.rotations * a->rows * p.slices * sizeof(SliceScale));
  plan.image = take(at, p.fused ? 0 : (int64_t)p.rotations * plan.row_tiles * p.blocks * 8 * p.image_columns * image_column_bytes(plan.mode));
  plan.partial = take(at, clusters || p.slices == 1
                          ? 0
                          : (int64_t)plan.row_tiles * plan.units * p.slices * p.segments * plan.blocks * 8 * 128 * sizeof(float));
  plan.total = at;
  return plan;
}

// Whether these rows go to the product of many rows: enough of them, and enough columns to fill the card.
static bool goes_wide(const exl3_linear_args* a, int units, const Device& device) {
  if (a->rows <= 64 || (a->activation && a->accumulate)) return false;
  const int64_t blocks = (int64_t)units * ((a->rows + 127) / 128);
  return a->rows >= 256 || blocks * (device.wide ? 8 : 2) >= device.sms;
}

static WidePlan wide_plan(const Plan& plan, const Device& device) {
  return make_wide(plan.p, plan.mode == kDecodeBytes, kCounterBytes, device.sms, device.wide);
}

// Calls f(first, count) for each run of matrices one launch can serve; false from f ends it.
template <class F>
static int for_each_run(const exl3_linear_args* a, F f) {
  for (int first = 0; first < a->count;) {
    int count = 1;
    while (first + count < a->count && same_kernel(*a->weights[first], *a->weights[first + count])) count++;
    if (const int status = f(first, count)) return status;
    first += count;
  }
  return EXL3_OK;
}

// The portable kernels serve cards without these instructions, and gate and up of different rates.
static bool needs_plain(const exl3_linear_args* a, const Device& device) {
  return device.code < 80 || (a->activation && !same_kernel(*a->weights[0], *a->weights[1]));
}

int64_t linear_workspace(const exl3_linear_args* a) {
  const Device* device = current_device();
  if (!device || portable::checked_linear(a) != EXL3_OK || a->rows <= 0) return 0;
  if (needs_plain(a, *device)) return portable::plain_linear_workspace(a);
  exl3_linear_args part = *a;
  int64_t most = 0;
  // the last pass may have fewer rows than the others, and then another kernel
  for (int rows : {a->rows < kMostRows ? a->rows : kMostRows, a->rows % kMostRows}) {
    part.rows = rows;
    if (rows <= 0) continue;
    for_each_run(&part, [&](int first, int count) {
      const Plan plan = make_plan(&part, first, count, *device);
      const int64_t bytes = goes_wide(&part, plan.units, *device) ? wide_plan(plan, *device).total : plan.total;
      most = bytes > most ? bytes : most;
      return (int)EXL3_OK;
    });
  }
  return most;
}

static const void* prepare_kernel(int mode) {
  switch (mode) {
    case kBytes: return (const void*)prepare_input<kBytes>;
    case kPairs: return (const void*)prepare_input<kPairs>;
    case kDecodeBytes: return (const void*)prepare_input<kDecodeBytes>;
    default: return (const void*)prepare_input<kDecodePairs>;
  }
}

static int too_small(int64_t have, int64_t need) {
  return refuse(EXL3_BAD_ARGUMENT, "linear: the workspace has %lld bytes, %lld are needed", (long long)have, (long long)need);
}

static int launch_product(const exl3_linear_args* a, int k2, Plan& plan, const Device& device, void* stream) {
  ProductParams& p = plan.p;
  if (a->workspace_bytes < plan.total) return too_small(a->workspace_bytes, plan.total);
  const ProductEntry* entry = find_kernel(k2, plan.mode, plan.blocks);
  if (!entry) return refuse(EXL3_UNSUPPORTED, "linear: this build has no kernel for K = %g", k2 / 2.0);
  uint8_t* space = (uint8_t*)a->workspace;
  p.counters = (int32_t*)space;
  p.scales = (SliceScale*)(space + plan.scales);
  p.image = space + plan.image;
  p.partial = (float*)(space + plan.partial);
  if (device.code < 90 && p.slices > 1 && (int64_t)plan.units * plan.row_tiles * 4 > kCounterBytes)
    return refuse(EXL3_UNSUPPORTED, "linear: %d rows are too many for one call on this card", a->rows);
  if (!p.fused) {
    const int status = launch(prepare_kernel(plan.mode), dim3(p.slices, a->rows, p.rotations), kWarps * 32, widest_slice(p) * 512, 1,
                              (const void*)&p, (cudaStream_t)stream, "linear: rotation");
    if (status) return status;
  }
  const ProductShared shared = product_shared(p, k2, plan.mode, p.image_columns, plan.mode < kDecodeBytes ? a->rows : p.image_columns);
  return launch(entry->kernel, dim3(p.slices, plan.units, plan.row_tiles), kWarps * 32, shared.total, p.slices, p, stream, "linear");
}

int linear(const exl3_linear_args* a, void* stream) {
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  if (const int status = portable::checked_linear(a)) return status;
  if (a->rows <= 0) return EXL3_OK;
  if (needs_plain(a, *device)) return portable::plain_linear(a, stream);
  auto advance = [](const void* p, int64_t elements, int dtype) { return (void*)((char*)p + elements * (dtype == EXL3_F32 ? 4 : 2)); };
  for (int row = 0; row < a->rows; row += kMostRows) {
    exl3_linear_args part = *a;
    part.rows = a->rows - row < kMostRows ? a->rows - row : kMostRows;
    part.x = advance(a->x, row * a->x_stride, a->x_dtype);
    for (int i = 0; i < EXL3_MAX_GROUP; i++)
      if (a->y[i]) part.y[i] = advance(a->y[i], row * a->y_stride[i], a->y_dtype);
    const int status = for_each_run(&part, [&](int first, int count) {
      Plan plan = make_plan(&part, first, count, *device);
      const int k2 = a->weights[first]->k2;
      if (!goes_wide(&part, plan.units, *device)) return launch_product(&part, k2, plan, *device, stream);
      WidePlan wide = wide_plan(plan, *device);
      if (part.workspace_bytes < wide.total) return too_small(part.workspace_bytes, wide.total);
      return launch_wide(wide, k2, plan.mode == kDecodeBytes, part.activation, part.workspace, stream);
    });
    if (status) return status;
  }
  return EXL3_OK;
}

}  // namespace exl3
