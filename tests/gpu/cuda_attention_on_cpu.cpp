// cuda/attention.cu and its kernels as a function on the CPU; source.inc is made of it by test_cuda_on_cpu.py.
#include <stdarg.h>

#include "../../cpp/gpu/plan.h"
#include "cuda_on_cpu.h"

typedef void* cudaStream_t;

namespace exl3 {

struct Device {
  int sms, shared_bytes, code;
};
static int shared_bytes_of_a_block = 232448;
static const Device* current_device() {
  static Device device{132, 232448, 80};
  device.shared_bytes = shared_bytes_of_a_block;
  return &device;
}
static int refuse(exl3_status status, const char*, ...) { return status; }
static int launch(const void* kernel, dim3 grid, int threads, int shared_bytes, int cluster, const void* block, cudaStream_t, const char*);

namespace portable {
int launch(Kernel, unsigned, unsigned, const void*, int, void*) { return EXL3_UNSUPPORTED; }
int refuse(exl3_status status, const char*, ...) { return status; }
static int checked_attention(const exl3_attention_args* a) { return check_attention(a); }
static int plain_attention(const exl3_attention_args*, void*) { return EXL3_UNSUPPORTED; }
}  // namespace portable
static int rotary(const exl3_rotary_args*, void*) { return EXL3_UNSUPPORTED; }
static int cache_append(const exl3_cache_append_args*, void*) { return EXL3_UNSUPPORTED; }
}  // namespace exl3

#include "source.inc"

namespace exl3 {
#define X(dim) \
  AttentionKernels attention_kernels_##dim(AttentionKind kind) { return attention_kernels<dim>(kind); }
EXL3_HEAD_DIMS(X)
#undef X

static int launch(const void* kernel, dim3 grid, int threads, int, int, const void* block, cudaStream_t, const char*) {
  cuda_grid = {(int)grid.x, (int)grid.y, (int)grid.z};
  for (int z = 0; z < cuda_grid.z; z++)
    for (int y = 0; y < cuda_grid.y; y++)
      for (int x = 0; x < cuda_grid.x; x++) {
        cuda_block = {x, y, z};
        run_cuda_block(threads, [&] { ((void (*)(AttentionParams))kernel)(*(const AttentionParams*)block); });
      }
  return EXL3_OK;
}
}  // namespace exl3

EXL3_EXPORT int on_cpu(const exl3_attention_args* a, void*) { return exl3::attention(a, nullptr); }
EXL3_EXPORT int on_cpu_attend(const exl3_attend_args* a, void*) { return exl3::attend(a, nullptr); }
EXL3_EXPORT void on_cpu_shared(int bytes) { exl3::shared_bytes_of_a_block = bytes; }
EXL3_EXPORT int64_t on_cpu_workspace(const exl3_attention_args* a) { return exl3::attention_workspace(a); }
