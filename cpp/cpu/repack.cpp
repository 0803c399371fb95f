// repack: the layout on disk to the packed layout of trellis.h. reconstruct: either layout to a plain matrix.
#include <string.h>

#include "cpu/backend.h"
#include "cpu/threads.h"
#include "cpu/trellis.h"

namespace exl3::cpu {

namespace {

// The tile at (row, column) of the tile grid in the packed form, wherever it lies; `scratch` has room for one tile and slack.
const uint8_t* packed_tile(const exl3_weight& w, int64_t row, int64_t column, uint8_t* scratch) {
  if (w.layout == 1) return (const uint8_t*)w.trellis + (size_t)(column * (w.in_padded / kTile) + row) * tile_stride(w.k2);
  const int words = 4 * w.k2;
  const uint8_t* from = (const uint8_t*)w.trellis + (size_t)(row * (w.out_padded / kTile) + column) * (size_t)tile_bytes(w.k2);
  for (int i = 0; i < words; i++) memcpy(scratch + 4 * i, from + 4 * (words - 1 - i), 4);
  memcpy(scratch + 4 * words, scratch, 2);
  return scratch;
}

int check(const char* op, const exl3_weight& w) {
  if (!valid_k2(w.k2)) return fail(EXL3_BAD_ARGUMENT, "%s: no valid rate (k2 = %d)", op, w.k2);
  if (w.in_padded % kBlock || w.out_padded % kBlock || w.in_padded <= 0 || w.out_padded <= 0)
    return fail(EXL3_BAD_ARGUMENT, "%s: sizes %d x %d are not multiples of %d", op, w.in_padded, w.out_padded, kBlock);
  if (w.codebook < EXL3_3INST || w.codebook > EXL3_MUL1) return fail(EXL3_BAD_ARGUMENT, "%s: unknown codebook %d", op, w.codebook);
  return EXL3_OK;
}

}  // namespace

int64_t repack_bytes(const exl3_weight* w) { return (int64_t)packed_bytes(*w); }

int repack(const exl3_repack_args* a, void* stream) {
  const exl3_weight& w = *a->weight;
  if (const int status = check("repack", w)) return status;
  if (w.layout != 0) return fail(EXL3_BAD_ARGUMENT, "repack: the matrix is packed already");
  const int64_t rows = w.in_padded / kTile, columns = w.out_padded / kTile;
  const size_t stride = tile_stride(w.k2);
  uint8_t* out = (uint8_t*)a->out;
  parallel_for(thread_count(stream), columns, [&](int64_t column) {
    for (int64_t row = 0; row < rows; row++) packed_tile(w, row, column, out + (size_t)(column * rows + row) * stride);
  });
  memset(out + (size_t)(rows * columns) * stride, 0, 64);
  return EXL3_OK;
}

int reconstruct(const exl3_reconstruct_args* a, void* stream) {
  const exl3_weight& w = *a->weight;
  if (const int status = check("reconstruct", w)) return status;
  if (a->out_dtype != EXL3_F32 && a->out_dtype != EXL3_F16) return fail(EXL3_BAD_ARGUMENT, "reconstruct: writes fp32 or fp16");
  const Kernels& k = kernels();
  const int64_t size = a->out_dtype == EXL3_F32 ? 4 : 2;
  const int64_t width = a->original_basis ? w.out_features : w.out_padded, height = a->original_basis ? w.in_features : w.in_padded;
  const int64_t across = w.out_padded / kBlock;
  // one square of 128 x 128 at a time: the rotation of both sides stays inside it
  parallel_for(thread_count(stream), (w.in_padded / kBlock) * across, [&](int64_t square) {
    const int64_t top = square / across * kBlock, left = square % across * kBlock;
    float m[kBlock][kBlock], tile[kTileWeights], scale[kBlock], line[kBlock];
    uint8_t scratch[tile_bytes(16) + 66];
    for (int r = 0; r < 8; r++)
      for (int c = 0; c < 8; c++) {
        k.decode(packed_tile(w, top / kTile + r, left / kTile + c, scratch), w.k2, w.codebook, w.multiplier, tile);
        for (int i = 0; i < kTileWeights; i++) m[kTile * r + tile_row(i)][kTile * c + tile_col(i)] = tile[i];
      }
    if (a->original_basis) {
      k.load(scale, (const uint16_t*)w.suh + top, EXL3_F16, kBlock);
      for (int c = 0; c < kBlock; c++) {
        for (int r = 0; r < kBlock; r++) line[r] = m[r][c];
        k.hadamard(line);
        for (int r = 0; r < kBlock; r++) m[r][c] = line[r] * scale[r];
      }
      k.load(scale, (const uint16_t*)w.svh + left, EXL3_F16, kBlock);
      for (int r = 0; r < kBlock; r++) {
        k.hadamard(m[r]);
        for (int c = 0; c < kBlock; c++) m[r][c] *= scale[c];
      }
    }
    const int64_t count = width - left < kBlock ? width - left : kBlock;
    if (count <= 0) return;
    for (int64_t r = 0; r < kBlock && top + r < height; r++) k.store((char*)a->out + ((top + r) * width + left) * size, m[r], a->out_dtype, count);
  });
  return EXL3_OK;
}

}  // namespace exl3::cpu
