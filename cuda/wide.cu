// Plan and launch of the product of many rows.
#include <math.h>

#include "parts.h"
#include "wide_input.cuh"
#include "wide_mma.cuh"
#include "wide_split.h"

namespace exl3 {

#define X(k2) WideEntry wide_entry_##k2();
EXL3_RATES(X)
#undef X

static WideEntry find_wide(int k2) {
  switch (k2) {
#define X(k2) \
  case k2: return wide_entry_##k2();
    EXL3_RATES(X)
#undef X
  }
  return {};
}

constexpr int kBandRows = 2048;     // rows of x that the L2 cache holds while the columns go by

// 256 rows a tile where they are used: a weight is decoded half as often. kNarrowCost: what a row costs more in tiles of 128.
static int choose_rows(int rows) {
  constexpr float kNarrowCost = 1.1f;
  const int narrow = (rows + 127) / 128 * 128, wide = (rows + 255) / 256 * 256;
  return (float)narrow * kNarrowCost < (float)wide ? 128 : 256;
}

WidePlan make_wide(const ProductParams& from, bool bytes, int64_t reserved, int sms, bool wgmma) {
  WidePlan plan{};
  WideParams& p = plan.p;
  for (int i = 0; i < EXL3_MAX_GROUP; i++) p.matrix[i] = from.matrix[i];
  p.count = from.count;
  for (int i = 0; i < p.count; i++) p.first_pair[i + 1] = p.first_pair[i] + (p.matrix[i].columns / 8 + 1) / 2;
  p.pairs = p.first_pair[p.count];
  p.rows = from.rows;
  p.tile_rows = wgmma ? choose_rows(p.rows) : kMmaRows;
  p.row_tiles = (p.rows + p.tile_rows - 1) / p.tile_rows;
  p.steps = from.blocks * 2;
  p.tiles = p.row_tiles * p.pairs;
  p.band = p.row_tiles < kBandRows / p.tile_rows ? p.row_tiles : kBandRows / p.tile_rows;
  p.in_features = from.in_features;
  p.x_dtype = from.x_dtype;
  p.y_dtype = from.y_dtype;
  p.accumulate = from.accumulate;
  p.rotations = from.rotations;
  p.x = from.x;
  p.norm_weight = from.norm_weight;
  p.x_stride = from.x_stride;
  p.norm_eps = from.norm_eps;

  if (wgmma) plan.clusters = share_out(p, sms / 2);
  // |sum| <= |x| |w| with inputs up to 512, weights of about 147 (bytes) or 1.2
  p.shrink = 1.f / ((bytes ? 512.f : 4.f) * sqrtf(64.f * (float)p.steps));
  p.shrink_shift = bytes ? p.shrink * (kMul1Shift / kMul1Scale + kMul1Middle) : 0.f;
  p.grow = HADAMARD128_SCALE * (bytes ? kMul1Scale : 1.f) / p.shrink;

  int64_t at = reserved;
  auto take = [&](int64_t bytes) {
    const int64_t offset = at;
    at += (bytes + 255) / 256 * 256;
    return offset;
  };
  plan.scales = take((int64_t)p.rotations * p.rows * (int64_t)sizeof(SliceScale));
  plan.image = take((int64_t)p.rotations * p.steps * p.row_tiles * p.tile_rows * 128);
  plan.partial = take(p.split_tiles || p.tail ? (int64_t)plan.clusters * 2 * p.tile_rows * 256 : 0);
  plan.total = at;
  return plan;
}

int launch_wide(WidePlan& plan, int k2, bool bytes, int activation, void* workspace, void* stream) {
  WideParams& p = plan.p;
  uint8_t* space = (uint8_t*)workspace;
  p.arrived = (int32_t*)space;
  p.scales = (SliceScale*)(space + plan.scales);
  p.image = space + plan.image;
  p.partial = space + plan.partial;
  if (const int status = launch(prepare_wide, dim3(p.rows, p.rotations), prepare_threads(p.steps * 64), 0, 1, p, stream, "linear: rotation")) return status;
  const WideEntry entry = find_wide(k2);
  const auto kernel = plan.clusters ? entry.kernel[bytes ? 0 : 1][p.tile_rows == 128 ? 0 : 1] : entry.mma[bytes ? 0 : 1];
  if (!kernel) return refuse(EXL3_UNSUPPORTED, "linear: this build has no kernel for K = %g", k2 / 2.0);
  auto start = [&](const char* what) {
    if (!plan.clusters) return launch(kernel, dim3(p.row_tiles, 2 * p.pairs), kMmaThreads, mma_wide_shared(k2), 1, p, stream, what);
    return launch(kernel, dim3(2 * plan.clusters), kWideThreads, wide_shared(k2, p.tile_rows), 2, p, stream, what);
  };
  if (!activation) return start("linear");
  // the gate goes to y, then up multiplies what it finds there
  if (const int status = start("linear: gate")) return status;
  p.matrix[0] = p.matrix[1];
  p.activation = activation;
  if (p.rotations > 1) {
    p.rotations = 1;
    p.image += (int64_t)p.steps * p.row_tiles * p.tile_rows * 128;
    p.scales += p.rows;
  }
  return start("linear: up");
}

}  // namespace exl3
