// The portable kernels as a backend of their own, run by the CPU emulator: for tests.
#include <stdarg.h>

#include "plan.h"

namespace exl3::portable {

#define X(name, args, threads, body) \
  GPU_KERNEL(threads) k_##name(const args a) { body(a); }
EXL3_PORTABLE_KERNELS(X)
#undef X

typedef void (*Run)(const void*);
static const Run run[] = {
#define X(name, args, threads, body) [](const void* p) { k_##name(*(const args*)p); },
    EXL3_PORTABLE_KERNELS(X)
#undef X
};

static char message[256];
int refuse(exl3_status status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(message, sizeof message, format, list);
  va_end(list);
  return status;
}
int launch(Kernel kernel, unsigned grid_x, unsigned grid_y, const void* block, int, void*) {
  emulator::launch(grid_x, grid_y, entries[kernel].threads, [&] { run[kernel](block); });
  return EXL3_OK;
}

}  // namespace exl3::portable

using namespace exl3::portable;
static const exl3_backend table = [] {
  exl3_backend b{};
  b.abi = EXL3_ABI;
  b.bytes = sizeof(exl3_backend);
  b.name = "emulated";
  b.build = "portable kernels on CPU fibers";
  b.last_error = [] { return (const char*)message; };
  b.describe = [](int) { return "CPU fibers"; };
  b.repack_bytes = [](const exl3_weight*) { return (int64_t)0; };
  b.linear_workspace = linear_workspace;
  b.attention_workspace = [](const exl3_attention_args*) { return (int64_t)0; };
  b.sample_workspace = sample_workspace;
  b.encode_workspace = [](const exl3_encode_args*) { return (int64_t)0; };
  b.linear = linear;
  b.dense = dense;
  b.reconstruct = reconstruct;
  b.rotate = rotate;
  b.rms_norm = rms_norm;
  b.rotary_table = rotary_table;
  b.rotary = rotary;
  b.cache_append = cache_append;
  b.attention = attention_plain;
  b.cache_read = cache_read;
  b.act_mul = act_mul;
  b.embedding = embedding;
  b.add = add;
  b.softcap = softcap;
  b.sample = sample;
  b.attend = attend_plain;
  return b;
}();
EXL3_EXPORT const exl3_backend* exl3_get_backend(void) { return &table; }
