// The product of many rows: argument block, sizes, and who computes what; shared by host and device code. See wide.cuh for how it works.
#pragma once
#include "product.h"

namespace exl3 {

// Two warpgroups multiply; of the third, one warp fetches and three finish.
constexpr int kWideThreads = 384, kWideFinishers = 3;
// Without wgmma.
constexpr int kMmaRows = 128, kMmaThreads = 256, kMmaStages = 3;

// Scale and sums of the quantized input of one (rotation, row, slice). value = scale * q.
struct SliceScale {
  float scale;
  int32_t sum_high, sum_low;  // of the int8 planes
  float sum;                  // of the fp16 values
};

struct WideParams {
  ProductMatrix matrix[EXL3_MAX_GROUP];
  int32_t first_pair[EXL3_MAX_GROUP + 1];  // pairs of groups of 128 columns; the odd last one of a matrix is a pair with itself
  int32_t count, pairs, rows;
  int32_t row_tiles, tile_rows;  // of x; tile_rows: 128 or 256
  int32_t steps;                 // in_padded / 64
  int32_t tiles;                 // row_tiles * pairs: each is the work of one cluster of two blocks
  int32_t split_tiles;           // so many of them, the first, are cut along the inner dimension into one equal share a cluster
  int32_t tail;                  // or: of each tile so many steps, the last, are left to the clusters beyond those that have a tile each
  int32_t band;                  // row tiles that follow one another before the columns go on
  int32_t in_features, x_dtype, y_dtype, accumulate;
  int32_t activation;  // y = act(y) * result: y holds the gate
  int32_t rotations;
  const void* x;
  const float* norm_weight;
  int64_t x_stride;
  float norm_eps;
  float shrink, shrink_shift;  // sums * shrink + sum of inputs * shrink_shift fit fp16
  float grow;                  // and this, times the row's scale, makes results of them
  uint8_t* image;              // [rotation][64 inputs][rows / 8][8 rows][128 bytes, 16-byte pieces swapped by row]
  SliceScale* scales;          // [rotation][row]
  uint8_t* partial;            // [slot][rank in the cluster][row][128 halves]: slot: of the tile with tails, else of the cluster; see OtherShares
  int32_t* arrived;            // [slot][rank], zero before and after
};

// Input and four rows of tiles, rounded up as the swizzle repeats every 1024 bytes.
inline constexpr __host__ __device__ int wide_stage(int k2, int rows) { return rows * 128 + (4 * 128 * k2 + 1023) / 1024 * 1024; }
// Sums as halves, the rows' two numbers, barriers.
inline constexpr __host__ __device__ int wide_fixed(int rows) { return rows * 256 + rows * 8 + 256; }
inline constexpr __host__ __device__ int wide_stages(int k2, int rows) {
  const int fit = (227 * 1024 - wide_fixed(rows)) / wide_stage(k2, rows);
  return fit < 8 ? fit : 8;
}
inline constexpr __host__ __device__ int wide_shared(int k2, int rows) { return wide_stages(k2, rows) * wide_stage(k2, rows) + wide_fixed(rows); }

// A piece of work: steps first .. last-1 of a tile. Whoever has step 0 finishes the tile.
struct WidePiece {
  int tile, first, last;
};

inline __host__ __device__ int wide_share(const WideParams& p, int cluster, int clusters) {
  return p.split_tiles * p.steps * cluster / clusters;  // of split tiles there are fewer than two a cluster
}

// The pieces of one cluster, in order: its share of the split tiles, or the ends of some tiles; then whole tiles, or one but for its end.
struct WideWalk {
  int at, end, next;
  __host__ __device__ WideWalk(const WideParams& p, int cluster, int clusters)
      : at(wide_share(p, cluster, clusters)), end(wide_share(p, cluster + 1, clusters)), next(p.split_tiles + cluster) {
    const int helper = cluster - p.tiles, helpers = clusters - p.tiles;
    if (p.tail && helper >= 0) at = p.tiles * helper / helpers, end = p.tiles * (helper + 1) / helpers;
  }
  __host__ __device__ bool step(const WideParams& p, int clusters, WidePiece& piece) {
    if (at < end) {
      piece.tile = p.tail ? at : at / p.steps;
      piece.first = p.tail ? p.steps - p.tail : at - piece.tile * p.steps;
      piece.last = p.tail || piece.first + end - at > p.steps ? p.steps : piece.first + end - at;
      at += p.tail ? 1 : piece.last - piece.first;
      return true;
    }
    if (next >= p.tiles) return false;
    piece = {next, 0, p.steps - p.tail};
    next += clusters;
    return true;
  }
};
// Where a piece's sums go (count -1), or where the others of the tile come from that it begins: slots of `partial`, one after the other.
struct WideShares {
  int slot, count;
};
inline __host__ __device__ WideShares shares_of(const WideParams& p, const WidePiece& piece, int cluster, int clusters) {
  WideShares shares{p.tail ? piece.tile : piece.first > 0 ? cluster : cluster + 1, 0};
  if (piece.first > 0)
    shares.count = -1;
  else if (p.tail)
    shares.count = 1;
  else if (piece.last < p.steps)
    while (wide_share(p, shares.slot + shares.count, clusters) < (piece.tile + 1) * p.steps) shares.count++;
  return shares;
}

// Where a tile lies.
struct WidePlace {
  int matrix, group, row_tile;  // group: of 128 columns of the matrix, of the first block of the pair
};
inline __host__ __device__ WidePlace wide_place(const WideParams& p, int tile) {
  const int whole = p.pairs * p.band, band = tile / whole, rest = tile - band * whole;
  const int left = p.row_tiles - band * p.band, tall = left < p.band ? left : p.band, pair = rest / tall;
  WidePlace place{0, 0, band * p.band + rest - pair * tall};
  while (place.matrix + 1 < p.count && pair >= p.first_pair[place.matrix + 1]) place.matrix++;
  place.group = 2 * (pair - p.first_pair[place.matrix]);
  return place;
}

struct WidePlan {
  WideParams p;
  int clusters;  // of two blocks; 0: the kernel without wgmma
  int64_t scales, image, partial, total;  // workspace offsets
};
// wide.cu. `bytes`: mul1. The workspace's first `reserved` bytes are counters.
WidePlan make_wide(const ProductParams& from, bool bytes, int64_t reserved, int sms, bool wgmma);
int launch_wide(WidePlan& plan, int k2, bool bytes, int activation, void* workspace, void* stream);

struct WideEntry {
  void (*kernel[2][2])(WideParams);  // [kDecodeBytes, kDecodePairs][128, 256 rows]
  void (*mma[2])(WideParams);        // without wgmma
};

}  // namespace exl3
