// cuda/even*.cuh as a function on the CPU; source.inc is made of it and what it includes by test_cuda_on_cpu.py.
#include "cuda_on_cpu.h"
#include "source.inc"

#include "cuda_linear_on_cpu.h"

using namespace exl3;
using namespace exl3::even;

template <int K2, int MODE, int NB>
static int run(EvenParams p, int blocks) {
  p.columns = NB * 8;
  p.step_tiles = kStepTiles;
  p.stages = ring_shape(kLongSteps, NB).stages;
  p.steps = (p.blocks * 8 + p.step_tiles - 1) / p.step_tiles;
  p.image_stride = image_bytes(p);
  std::vector<uint8_t> image(p.rotations * p.image_stride + 64, 0x7f);  // NaNs where nothing is written
  p.image = (uint8_t*)(((uintptr_t)image.data() + 63) & ~(uintptr_t)63);
  p.row_parts = 1 + p.rows % kMostParts;
  std::vector<RowInput> inputs((size_t)p.rotations * p.rows);
  p.inputs = inputs.data();
  for (int rotation = 0; rotation < p.rotations; rotation++)
    for (int row = 0; row < p.rows; row++)
      for (int part = 0; part < p.row_parts; part++) {
        cuda_block = {part, row, rotation};
        run_cuda_block(even::kPrepareWarps * 32, [&] { prepare_even(p); });
      }
  const int work = p.first_group[p.count] * p.segments * p.steps;
  blocks = min(blocks, work);
  p.share = work / blocks;
  p.rest = work % blocks;
  std::vector<float> inbox((size_t)blocks * p.segments * p.columns * 128);
  p.inbox = inbox.data();
  for (int b = 0; b < blocks; b++) {  // in this order no block waits: sums travel upwards
    cuda_block = {b, 0, 0};
    run_cuda_block(even::kThreads, [&] { even_kernel<K2, MODE, NB>(p); });
  }
  for (float v : inbox)
    if (__float_as_uint(v)) return -1;  // left behind
  return EXL3_OK;
}

EXL3_EXPORT int on_cpu(const exl3_linear_args* a, int blocks) {
  const exl3_weight& w = *a->weights[0];
  auto p = params_of<EvenParams>(a);
  p.all_rows = a->rows;
  const bool bytes = w.codebook == EXL3_MUL1;
  if (w.k2 == 8 && bytes)
    return a->rows <= 8 ? run<8, kDecodeBytes, 1>(p, blocks) : a->rows <= 16 ? run<8, kDecodeBytes, 2>(p, blocks) : run<8, kDecodeBytes, 4>(p, blocks);
  if (w.k2 == 3 && bytes) return run<3, kDecodeBytes, 8>(p, blocks);
  if (w.k2 == 14 && !bytes) return run<14, kDecodePairs, 2>(p, blocks);
  return EXL3_UNSUPPORTED;
}
