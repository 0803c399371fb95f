// cuda/product.cuh as a function on the CPU, source.inc is made of it and what it includes by test_cuda_on_cpu.py.
#include "cuda_on_cpu.h"
#include "source.inc"

#include "cuda_linear_on_cpu.h"

using namespace exl3;

constexpr int kSharedBytes = 232448;  // of a block on 9.0

template <int K2, int MODE>
static int run(ProductParams p, int blocks) {
  const int work = p.first_group[p.count] * p.segments * p.blocks * 8;
  share_out(p, work, blocks);
  ProductParams most = p;  // as set_shape of linear.cu: the number of warps is that of the most rows
  most.rows = most_rows(MODE);
  most.columns = kRows;
  most.row_bytes = most.columns * column_bytes(MODE);
  for (most.row_shift = 3; product_shared(most, kRoomy, K2, MODE).total > kSharedBytes;) most.row_shift--;
  p.row_shift = most.row_shift;
  p.fused = p.rows <= 2;
  p.row_bytes = p.columns * column_bytes(MODE);
  complete(p, kRoomy, K2, MODE);
  const size_t image_bytes = (size_t)p.rotations * p.blocks * 8 * p.row_bytes;
  std::vector<uint8_t> image(image_bytes + 64, 0x7f);  // NaNs where nothing is written
  p.image = (uint8_t*)(((uintptr_t)image.data() + 63) & ~(uintptr_t)63);
  std::vector<float> scales((size_t)p.rotations * chunks_of(p) * kRows), squares((size_t)chunks_of(p) * kRows);
  p.scales = scales.data();
  p.squares = squares.data();
  std::vector<float> inbox((size_t)blocks * p.segments * kRows * 128 + 4);
  p.inbox = (float*)(((uintptr_t)inbox.data() + 15) & ~(uintptr_t)15);
  for (int rotation = 0; rotation < p.rotations && !p.fused; rotation++)
    for (int row = 0; row < p.rows; row++)
      for (int chunk = 0; chunk < chunks_of(p); chunk += kPrepareWarps) {
        cuda_block = {chunk / kPrepareWarps, row, rotation};
        run_cuda_block(kPrepareWarps * 32, [&] { prepare_input<MODE>(p); });
      }
  for (int b = 0; b < blocks; b++) {  // in this order no block waits: sums travel upwards
    cuda_block = {b, 0, 0};
    run_cuda_block(product_threads(p), [&] {
      if (p.fused)
        product_kernel<K2, MODE, true>(p);
      else
        product_kernel<K2, MODE, false>(p);
    });
  }
  for (float v : inbox)
    if (__float_as_uint(v)) return -1;  // left behind
  return EXL3_OK;
}

EXL3_EXPORT int on_cpu(const exl3_linear_args* a, int blocks) {
  const exl3_weight& w = *a->weights[0];
  const bool bytes = w.codebook == EXL3_MUL1;
  auto p = params_of<ProductParams>(a);
  p.planes = a->planes;
  p.columns = operand_columns(bytes ? kBytes : kPairs, a->rows);
  if (p.columns > kRows) return EXL3_UNSUPPORTED;
  if (w.k2 == 8 && bytes) return run<8, kBytes>(p, blocks);
  if (w.k2 == 6 && bytes) return run<6, kBytes>(p, blocks);
  if (w.k2 == 3 && bytes) return run<3, kBytes>(p, blocks);
  if (w.k2 == 14 && !bytes) return run<14, kPairs>(p, blocks);
  return EXL3_UNSUPPORTED;
}
