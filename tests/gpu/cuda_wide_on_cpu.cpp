// cuda/wide_mma.cuh, its input and its finish (which the product with wgmma shares), how tiles are split, and cuda/reconstruct.cuh, as functions on the CPU; source.inc is made by test_cuda_on_cpu.py.
#define __CUDA_ARCH__ 800
#include "cuda_on_cpu.h"
#include "source.inc"

using namespace exl3;

template <int K2, int MODE>
static int run(WideParams p) {
  std::vector<uint8_t> image((size_t)p.steps * p.row_tiles * kMmaRows * 128 + 1024, 0x7f);  // NaNs where nothing is written
  p.image = (uint8_t*)(((uintptr_t)image.data() + 1023) & ~(uintptr_t)1023);
  std::vector<SliceScale> scales(p.rows);
  p.scales = scales.data();
  for (int r = 0; r < p.rows; r++) {
    cuda_block = {r, 0, 0};
    run_cuda_block(prepare_threads(p.steps * 64), [&] { prepare_wide(p); });
  }
  for (int y = 0; y < 2 * p.pairs; y++)
    for (int x = 0; x < p.row_tiles; x++) {
      cuda_block = {x, y, 0};
      run_cuda_block(kMmaThreads, [&] { mma_wide_kernel<K2, MODE>(p); });
    }
  return EXL3_OK;
}

// One matrix; with an activation y holds the gate.
EXL3_EXPORT int on_cpu(const exl3_linear_args* a) {
  const exl3_weight& w = *a->weights[0];
  WideParams p{};
  p.count = p.rotations = 1;
  p.rows = a->rows;
  p.steps = w.in_padded / 64;
  p.in_features = w.in_features;
  p.x_dtype = a->x_dtype;
  p.y_dtype = a->y_dtype;
  p.accumulate = a->accumulate;
  p.activation = a->activation;
  p.x = a->x;
  p.x_stride = a->x_stride;
  p.norm_weight = a->norm_weight;
  p.norm_eps = a->norm_eps;
  p.matrix[0] = {(const uint8_t*)w.trellis, (const uint16_t*)w.suh, (const uint16_t*)w.svh, w.bias, a->y[0], a->y_stride[0],
                 w.out_features, w.out_padded / 16, w.multiplier, w.codebook == EXL3_3INST ? k3instAddend : 0u};
  p.pairs = (w.out_padded / 128 + 1) / 2;
  for (int i = 1; i <= EXL3_MAX_GROUP; i++) p.first_pair[i] = p.pairs;
  p.tile_rows = kMmaRows;
  p.row_tiles = (p.rows + kMmaRows - 1) / kMmaRows;
  const bool bytes = w.codebook == EXL3_MUL1;
  p.shrink = bytes ? 1e-4f : 1e-2f;  // any that keeps sums within halves
  p.shrink_shift = bytes ? p.shrink * (kMul1Shift / kMul1Scale + kMul1Middle) : 0.f;
  p.grow = HADAMARD128_SCALE * (bytes ? kMul1Scale : 1.f) / p.shrink;
  if (w.k2 == 3 && bytes) return run<3, kDecodeBytes>(p);
  if (w.k2 == 8 && bytes) return run<8, kDecodeBytes>(p);
  if (w.k2 == 14 && !bytes) return run<14, kDecodePairs>(p);
  return EXL3_UNSUPPORTED;
}

template <int K2, int MODE>
static int rebuild(const exl3_reconstruct_args* a) {
  const exl3_weight& w = *a->weight;
  const ReconstructParams p = reconstruct_params(w, (uint16_t*)a->out);
  for (int y = 0; y < w.in_padded / 128; y++)
    for (int x = 0; x < w.out_padded / 128; x++) {
      cuda_block = {x, y, 0};
      run_cuda_block(kReconstructThreads, [&] { reconstruct_kernel<K2, MODE>(p); });
    }
  return EXL3_OK;
}

EXL3_EXPORT int reconstruct_on_cpu(const exl3_reconstruct_args* a) {
  const bool bytes = a->weight->codebook == EXL3_MUL1;
  if (a->weight->k2 == 3 && bytes) return rebuild<3, kDecodeBytes>(a);
  if (a->weight->k2 == 8 && bytes) return rebuild<8, kDecodeBytes>(a);
  if (a->weight->k2 == 14 && !bytes) return rebuild<14, kDecodePairs>(a);
  return EXL3_UNSUPPORTED;
}

// How `most` clusters share out so many tiles of so many steps: 0, or what is wrong with it.
EXL3_EXPORT int check_split(int tiles, int steps, int most) {
  WideParams p{};
  p.tiles = tiles;
  p.steps = steps;
  const int clusters = share_out(p, most);
  if (clusters < 1 || clusters > most) return 1;
  std::vector<int> done((size_t)tiles * steps), owned(tiles);
  struct Wait {
    int tile, slot;
  };
  std::vector<Wait> waits;
  std::vector<std::pair<int, int>> sent(clusters, {-1, 0});  // of a slot: tile, how many pieces
  for (int c = 0; c < clusters; c++) {
    WideWalk walk(p, c, clusters);
    WidePiece piece;
    int pieces = 0;
    bool waits_before = false;
    while (walk.step(p, clusters, piece)) {
      if (piece.tile < 0 || piece.tile >= tiles || piece.first < 0 || piece.first >= piece.last || piece.last > steps) return 2;
      for (int s = piece.first; s < piece.last; s++) done[(size_t)piece.tile * steps + s]++;
      const WideShares shares = shares_of(p, piece, c, clusters);
      if (shares.count < 0) {
        if (shares.slot < 0 || shares.slot >= clusters || sent[shares.slot].second++) return 3;  // someone would write over it
        if (waits_before) return 4;  // who waits before it has sent could wait for ever
        sent[shares.slot].first = piece.tile;
      } else {
        if (owned[piece.tile]++) return 5;
        for (int i = 0; i < shares.count; i++) waits.push_back({piece.tile, shares.slot + i});
        waits_before |= shares.count > 0;
      }
      pieces++;
    }
    if (!pieces) return 6;
  }
  for (int n : done)
    if (n != 1) return 7;
  for (int n : owned)
    if (n != 1) return 8;
  size_t all = 0;
  for (const auto& s : sent) all += s.second;
  for (const Wait& w : waits)
    if (w.slot < 0 || w.slot >= clusters || sent[w.slot].first != w.tile) return 9;
  return all == waits.size() ? 0 : 10;
}
