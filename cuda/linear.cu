// Plans and launches of the product: which kernel, how many slices, where things lie in the workspace.
//
// Workspace: counters and the inbox of the even product (zero before and after, always in the same place), then what one call needs.
#include "even.cuh"
#include "parts.h"
#include "product.cuh"
#include "wide.h"

namespace exl3 {

#define X(k2)                               \
  ProductEntries product_entries_##k2(); \
  even::EvenEntries even_entries_##k2();
EXL3_RATES(X)
#undef X

static ProductEntries product_entries(int k2) {
  switch (k2) {
#define X(k2) \
  case k2: return product_entries_##k2();
    EXL3_RATES(X)
#undef X
  }
  return {};
}
static even::EvenEntries even_entries(int k2) {
  switch (k2) {
#define X(k2) \
  case k2: return even_entries_##k2();
    EXL3_RATES(X)
#undef X
  }
  return {};
}
template <class Entries, class Matches>
static auto find(const Entries& entries, Matches matches) -> decltype(entries.first) {
  for (int i = 0; i < entries.count; i++)
    if (matches(entries.first[i])) return entries.first + i;
  return nullptr;
}

constexpr int64_t kCounterBytes = 65536;
constexpr int kMostRows = 4096;         // of one pass: bounds the workspace, keeps the rotated input in the L2 cache
// Chunks of 256 inputs, times rows, that a block rotates itself; with more of them a kernel before it does. One row may be dearer.
constexpr int kFusedTasks = 24, kFusedByteTasks = 40, kFusedChunks = 64;  // measured

// Zero between calls, so where it ends depends on the card alone.
static int64_t zero_bytes(const Device& device) { return kCounterBytes + (int64_t)device.sms * 2 * even::kMostColumns * 512; }

struct Plan {
  ProductParams p;
  bool few;  // rows, multiplied by the hash itself
  int mode;
  int units, grid;
  int64_t scales, squares, image, total;  // workspace offsets
};

static bool same_kernel(const exl3_weight& a, const exl3_weight& b) {
  return a.k2 == b.k2 && (a.codebook == EXL3_MUL1) == (b.codebook == EXL3_MUL1);
}

static int64_t take(int64_t& at, int64_t bytes) {
  const int64_t offset = at;
  at += (bytes + 255) / 256 * 256;
  return offset;
}

// Warps, and who rotates the input, as shared memory allows; false where there is not enough, however few rows. The number of warps must not depend
// on that of rows: a row has the same bits whatever stands beside it.
static bool set_shape(Plan& plan, int k2, const Device& device) {
  ProductParams& p = plan.p;
  auto fits = [&](int rows, int fused) {
    ProductParams q = p;
    q.rows = rows;
    q.columns = operand_columns(plan.mode, rows);
    q.row_bytes = q.columns * column_bytes(plan.mode);
    q.fused = fused;
    if (product_shared(q, roomy(device.code), k2, plan.mode).total > device.shared_bytes) return false;
    p = q;
    return true;
  };
  const int rows = p.rows;
  for (p.row_shift = 3; !fits(most_rows(plan.mode), 0);)
    if (--p.row_shift == 0) return false;
  const int inputs = fused_inputs(p, kGrain, p.share + kGrain).chunks * rows * p.rotations;
  const int most = rows == 1 ? kFusedChunks : plan.mode == kBytes ? kFusedByteTasks : kFusedTasks;
  if (inputs > most || !fits(rows, 1)) fits(rows, 0);
  complete(p, roomy(device.code), k2, plan.mode);
  return true;
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
  plan.mode = bytes ? kBytes : kPairs;
  plan.few = a->rows <= most_rows(plan.mode) && (!bytes || a->planes != 0);
  if (!plan.few) {
    plan.mode = bytes ? kDecodeBytes : kDecodePairs;
    return plan;
  }
  const int work = plan.units * p.segments * p.blocks * 8, most = work / kGrain;
  plan.grid = most < device.sms ? most : device.sms;
  // Fewer blocks take no longer where the same largest share divides units: then each has a part of one unit.
  const int largest = (most + plan.grid - 1) / plan.grid, unit = p.segments * p.blocks * 8 / kGrain;
  if (unit % largest == 0) plan.grid = most / largest;
  share_out(p, work, plan.grid);
  if (!set_shape(plan, w.k2, device)) {
    plan.few = false;
    plan.mode = bytes ? kDecodeBytes : kDecodePairs;
    return plan;
  }
  const int chunks = chunks_of(p);
  int64_t at = zero_bytes(device);
  plan.scales = take(at, p.fused ? 0 : (int64_t)p.rotations * chunks * kRows * 4);
  plan.squares = take(at, p.fused ? 0 : (int64_t)chunks * kRows * 4);
  plan.image = take(at, p.fused ? 0 : (int64_t)p.rotations * p.blocks * 8 * p.row_bytes);
  plan.total = at;
  return plan;
}

struct EvenPlan {
  even::EvenParams p;
  int mode, blocks;  // of eight operand columns
  int grid, passes, shared;
  int64_t inputs, image, total;  // workspace offsets
};
static EvenPlan make_even(const exl3_linear_args* a, int k2, const Plan& from, const Device& device) {
  EvenPlan plan{};
  even::EvenParams& p = plan.p;
  const ProductParams& f = from.p;
  for (int i = 0; i < EXL3_MAX_GROUP; i++) p.matrix[i] = f.matrix[i];
  for (int i = 0; i <= EXL3_MAX_GROUP; i++) p.first_group[i] = f.first_group[i];
  p.count = f.count;
  p.segments = f.segments;
  p.rows = p.all_rows = a->rows;
  p.row_parts = device.sms / (a->rows * f.rotations);
  p.row_parts = p.row_parts < 1 ? 1 : p.row_parts < even::kMostParts ? p.row_parts : even::kMostParts;
  p.blocks = f.blocks;
  p.in_features = f.in_features;
  p.x_dtype = f.x_dtype;
  p.y_dtype = f.y_dtype;
  p.activation = f.activation;
  p.accumulate = f.accumulate;
  p.rotations = f.rotations;
  p.x = f.x;
  p.norm_weight = f.norm_weight;
  p.x_stride = f.x_stride;
  p.norm_eps = f.norm_eps;
  plan.mode = from.mode;
  p.step_tiles = even::ring_shape(device.hopper, 1).step_tiles;
  p.steps = (p.blocks * 8 + p.step_tiles - 1) / p.step_tiles;
  const int work = from.units * p.segments * p.steps;
  plan.grid = work < device.sms ? work : device.sms;
  p.share = work / plan.grid;
  p.rest = work % plan.grid;
  plan.blocks = a->rows <= 8 ? 1 : a->rows <= 16 ? 2 : a->rows <= 32 ? 4 : 8;
  for (;; plan.blocks /= 2) {
    const even::RingShape ring = even::ring_shape(device.hopper, plan.blocks);
    p.columns = plan.blocks * 8;
    p.rows = a->rows < p.columns ? a->rows : p.columns;
    auto fits = [&](int stages) {
      p.stages = stages;
      plan.shared = even::even_shared(p, ring, k2).total;
      return plan.shared <= device.shared_bytes;
    };
    if (fits(ring.stages) || (device.hopper && fits(2)) || plan.blocks == 1) break;
  }
  plan.passes = (a->rows + p.columns - 1) / p.columns;
  p.image_stride = plan.passes * image_bytes(p);
  int64_t at = zero_bytes(device);
  plan.inputs = take(at, (int64_t)p.rotations * a->rows * sizeof(even::RowInput));
  plan.image = take(at, p.rotations * p.image_stride);
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
  return make_wide(plan.p, plan.mode == kDecodeBytes, zero_bytes(device), device.sms, device.wide);
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
  if (needs_plain(a, *device)) return zero_bytes(*device) + portable::plain_linear_workspace(a);
  exl3_linear_args part = *a;
  int64_t most = 0;
  // the last pass may have fewer rows than the others, and then another kernel
  for (int rows : {a->rows < kMostRows ? a->rows : kMostRows, a->rows % kMostRows}) {
    part.rows = rows;
    if (rows <= 0) continue;
    for_each_run(&part, [&](int first, int count) {
      const Plan plan = make_plan(&part, first, count, *device);
      const int64_t bytes = goes_wide(&part, plan.units, *device) ? wide_plan(plan, *device).total
                            : plan.few                            ? plan.total
                                                                  : make_even(&part, a->weights[first]->k2, plan, *device).total;
      most = bytes > most ? bytes : most;
      return (int)EXL3_OK;
    });
  }
  return most;
}

static int too_small(int64_t have, int64_t need) {
  return refuse(EXL3_BAD_ARGUMENT, "linear: the workspace has %lld bytes, %lld are needed", (long long)have, (long long)need);
}

// Where the product's warps note when they are where: stamps.cuh.
#ifdef EXL3_STAMPS
constexpr size_t kStampBytes = sizeof(int64_t) * kStampBlocks * kStampWarps * kStampPoints;
static int64_t* stamp_buffer() {
  static int64_t* const buffer = [] {
    void* p = nullptr;
    return cudaMalloc(&p, kStampBytes) == cudaSuccess && cudaMemset(p, 0, kStampBytes) == cudaSuccess ? (int64_t*)p : nullptr;
  }();
  return buffer;
}
extern "C" __attribute__((visibility("default"))) int exl3_stamps(void* to) {
  const cudaError_t status = cudaMemcpy(to, stamp_buffer(), kStampBytes, cudaMemcpyDeviceToHost);
  return (int)(status ? status : cudaMemset(stamp_buffer(), 0, kStampBytes));  // the next shape may have fewer blocks
}
#else
static int64_t* stamp_buffer() { return nullptr; }
#endif

static int launch_product(const exl3_linear_args* a, int k2, Plan& plan, const Device& device, void* stream) {
  ProductParams& p = plan.p;
  if (a->workspace_bytes < plan.total) return too_small(a->workspace_bytes, plan.total);
  const ProductEntry* entry = find(product_entries(k2), [&](const ProductEntry& e) { return e.mode == plan.mode && e.fused == p.fused; });
  if (!entry) return refuse(EXL3_UNSUPPORTED, "linear: this build has no kernel for K = %g", k2 / 2.0);
  uint8_t* space = (uint8_t*)a->workspace;
  p.inbox = (float*)(space + kCounterBytes);
  p.scales = (float*)(space + plan.scales);
  p.squares = (float*)(space + plan.squares);
  p.image = space + plan.image;
  p.stamps = stamp_buffer();
  if (!p.fused) {
    const auto kernel = plan.mode == kBytes ? prepare_input<kBytes> : prepare_input<kPairs>;
    const dim3 grid((chunks_of(p) + kPrepareWarps - 1) / kPrepareWarps, a->rows, p.rotations);
    if (const int status = launch(kernel, grid, kPrepareWarps * 32, 0, 1, p, stream, "linear: rotation")) return status;
  }
  return launch(entry->kernel, dim3(plan.grid), product_threads(p), p.shared.total, 1, p, stream, "linear");
}

static int launch_even(const exl3_linear_args* a, int k2, const Plan& from, const Device& device, void* stream) {
  EvenPlan plan = make_even(a, k2, from, device);
  even::EvenParams& p = plan.p;
  if (a->workspace_bytes < plan.total) return too_small(a->workspace_bytes, plan.total);
  const even::EvenEntry* entry =
      find(even_entries(k2), [&](const even::EvenEntry& e) { return e.mode == plan.mode && e.blocks == plan.blocks; });
  if (!entry) return refuse(EXL3_UNSUPPORTED, "linear: this build has no kernel for K = %g", k2 / 2.0);
  uint8_t* space = (uint8_t*)a->workspace;
  p.inbox = (float*)(space + kCounterBytes);
  p.inputs = (even::RowInput*)(space + plan.inputs);
  p.stamps = stamp_buffer();
  p.image = space + plan.image;
  const dim3 prepare_grid(p.row_parts, a->rows, p.rotations);
  if (const int status = launch(even::prepare_even, prepare_grid, even::kPrepareWarps * 32, 0, 1, p, stream, "linear: rotation")) return status;
  for (int pass = 0; pass < plan.passes; pass++) {
    p.row0 = pass * p.columns;
    p.rows = plan.passes > 1 && a->rows - p.row0 > p.columns ? p.columns : a->rows - p.row0;
    if (const int status = launch(entry->kernel, dim3(plan.grid), even::kThreads, plan.shared, 1, p, stream, "linear")) return status;
    p.image += image_bytes(p);
  }
  return EXL3_OK;
}

int linear(const exl3_linear_args* a, void* stream) {
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  if (const int status = portable::checked_linear(a)) return status;
  if (a->rows <= 0) return EXL3_OK;
  if (needs_plain(a, *device)) {  // away from what has to stay zero
    const int64_t skipped = zero_bytes(*device), need = skipped + portable::plain_linear_workspace(a);
    if (a->workspace_bytes < need) return too_small(a->workspace_bytes, need);
    exl3_linear_args plain = *a;
    plain.workspace = (uint8_t*)a->workspace + skipped;
    plain.workspace_bytes -= skipped;
    return portable::plain_linear(&plain, stream);
  }
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
      if (!goes_wide(&part, plan.units, *device))
        return plan.few ? launch_product(&part, k2, plan, *device, stream) : launch_even(&part, k2, plan, *device, stream);
      WidePlan wide = wide_plan(plan, *device);
      if (part.workspace_bytes < wide.total) return too_small(part.workspace_bytes, wide.total);
      return launch_wide(wide, k2, plan.mode == kDecodeBytes, part.activation, part.workspace, stream);
    });
    if (status) return status;
  }
  return EXL3_OK;
}

}  // namespace exl3
