// Plans and launches of the product: which kernel, how many slices, where things lie in the workspace.
//
// Workspace: 64 KiB of counters (zero before and after), scales, operand image, partial sums.
#include "parts.h"
#include "product.cuh"
#include "wide.cuh"

namespace exl3 {

#define EXL3_RATES(X) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(10) X(12) X(14) X(16)
#define X(k2)                               \
  ProductEntries product_entries_##k2(); \
  WideEntry wide_entry_##k2();
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

static WideEntry find_wide(int k2) {
  switch (k2) {
#define X(k2) \
  case k2: return wide_entry_##k2();
    EXL3_RATES(X)
#undef X
  }
  return {};
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

// Whether these rows go to wgmma: enough of them, and enough blocks to fill the card.
static bool goes_wide(const exl3_linear_args* a, int units, const Device& device) {
  if (!device.wide || a->rows <= 64 || (a->activation && a->accumulate)) return false;
  const int64_t blocks = (int64_t)units * ((a->rows + 127) / 128);
  return a->rows >= 256 || blocks * 2 >= device.sms;
}

struct WidePlan {
  WideParams p;
  int units;
  int64_t scales, image, total;
};
static WidePlan make_wide(const exl3_linear_args* a, const Plan& plan, const Device& device) {
  WidePlan wide{};
  WideParams& p = wide.p;
  const ProductParams& from = plan.p;
  for (int i = 0; i < EXL3_MAX_GROUP; i++) p.matrix[i] = from.matrix[i];
  for (int i = 0; i <= EXL3_MAX_GROUP; i++) p.first_group[i] = from.first_group[i];
  p.count = from.count;
  p.rows = a->rows;
  // 256 rows a block make a decoded weight cheaper, 128 give more blocks
  p.tile_rows = (int64_t)plan.units * ((a->rows + 255) / 256) * 5 >= device.sms * 4 ? 256 : 128;
  if (a->rows <= 128) p.tile_rows = 128;
  p.row_tiles = (a->rows + p.tile_rows - 1) / p.tile_rows;
  p.steps = from.blocks * 2;
  p.in_features = from.in_features;
  p.x_dtype = from.x_dtype;
  p.y_dtype = from.y_dtype;
  p.accumulate = from.accumulate;
  p.rotations = from.rotations;
  p.x = from.x;
  p.norm_weight = from.norm_weight;
  p.x_stride = from.x_stride;
  p.norm_eps = from.norm_eps;
  wide.units = plan.units;
  int64_t at = kCounterBytes;
  wide.scales = take(at, (int64_t)p.rotations * a->rows * sizeof(SliceScale));
  wide.image = take(at, (int64_t)p.rotations * p.steps * p.row_tiles * p.tile_rows * 128);
  wide.total = at;
  return wide;
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
      const int64_t bytes = goes_wide(&part, plan.units, *device) ? make_wide(&part, plan, *device).total : plan.total;
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

static int launch_wide(const exl3_linear_args* a, int k2, const Plan& plan, const Device& device, void* stream) {
  WidePlan wide = make_wide(a, plan, device);
  WideParams& p = wide.p;
  if (a->workspace_bytes < wide.total) return too_small(a->workspace_bytes, wide.total);
  p.scales = (SliceScale*)((uint8_t*)a->workspace + wide.scales);
  p.image = (uint8_t*)a->workspace + wide.image;
  if (const int status = launch(prepare_wide, dim3(a->rows, p.rotations), 256, 0, 1, p, stream, "linear: rotation")) return status;
  const auto kernel = find_wide(k2).kernel[plan.mode == kDecodeBytes ? 0 : 1][p.tile_rows / 256];
  auto start = [&](const char* what) {
    return launch(kernel, dim3(wide.units * p.row_tiles), kWideThreads, wide_shared(k2, p.tile_rows), 1, p, stream, what);
  };
  if (!a->activation) return start("linear");
  // the gate goes to y, then up multiplies what it finds there
  if (const int status = start("linear: gate")) return status;
  p.matrix[0] = p.matrix[1];
  p.activation = a->activation;
  if (p.rotations > 1) {
    p.rotations = 1;
    p.image += (int64_t)p.steps * p.row_tiles * p.tile_rows * 128;
    p.scales += p.rows;
  }
  return start("linear: up");
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
      return goes_wide(&part, plan.units, *device) ? launch_wide(&part, k2, plan, *device, stream) : launch_product(&part, k2, plan, *device, stream);
    });
    if (status) return status;
  }
  return EXL3_OK;
}

}  // namespace exl3
