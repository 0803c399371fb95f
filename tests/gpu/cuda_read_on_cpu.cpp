// cuda/read.cu as a function on the CPU; source.inc is made of it by test_cuda_on_cpu.py.
#include "cuda_on_cpu.h"

namespace exl3 {

struct Device {};
static int refuse(exl3_status status, const char*, ...) { return status; }
template <class Block>
static int launch(void (*kernel)(Block), dim3 grid, int threads, int, int, const Block& block, void*, const char*) {
  cuda_grid = {(int)grid.x, (int)grid.y, (int)grid.z};
  for (int y = 0; y < cuda_grid.y; y++)
    for (int x = 0; x < cuda_grid.x; x++) {
      cuda_block = {x, y, 0};
      run_cuda_block(threads, [&] { kernel(block); });
    }
  return EXL3_OK;
}
namespace portable {
static int few_cache_read(const exl3_cache_read_args*, void*) { return EXL3_UNSUPPORTED; }
static int checked_cache(const char*, const exl3_cache_layer&) { return EXL3_OK; }
}  // namespace portable
}  // namespace exl3

#include "source.inc"

EXL3_EXPORT int on_cpu(const exl3_cache_read_args* a, void*) { return exl3::cache_read(a, nullptr); }
