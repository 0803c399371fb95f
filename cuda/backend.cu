// The one exported symbol: the table of operations.
#include <stdio.h>

#include "parts.h"

#ifndef EXL3_CUDA_ARCH_TEXT
#define EXL3_CUDA_ARCH_TEXT "unknown"
#endif
#define EXL3_TEXT_(x) #x
#define EXL3_TEXT(x) EXL3_TEXT_(x)

namespace exl3 {

static const char* describe(int device) {
  int current = 0;
  static thread_local char text[160];
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();
    if (current_device()) refuse(EXL3_UNSUPPORTED, "no CUDA device is visible");
    return nullptr;
  }
  if (device < 0 || device >= count) {
    refuse(EXL3_BAD_ARGUMENT, "CUDA device %d: %d visible", device, count);
    return nullptr;
  }
  cudaGetDevice(&current);
  cudaSetDevice(device);
  const Device* found = current_device();
  cudaDeviceProp properties;
  const bool named = found && cudaGetDeviceProperties(&properties, device) == cudaSuccess;
  cudaSetDevice(current);
  if (!named) return nullptr;
  snprintf(text, sizeof text, "%s, compute capability %d.%d, %d multiprocessors, code for %d", properties.name, found->major, found->minor,
           found->sms, found->code);
  return text;
}

static exl3_backend make_table() {
  exl3_backend b{};
  b.abi = EXL3_ABI;
  b.bytes = sizeof(exl3_backend);
  b.name = "cuda";
  b.build = "nvcc " EXL3_TEXT(__CUDACC_VER_MAJOR__) "." EXL3_TEXT(__CUDACC_VER_MINOR__) ", architectures " EXL3_CUDA_ARCH_TEXT;
  b.last_error = last_error;
  b.describe = describe;
  b.repack_bytes = [](const exl3_weight*) { return (int64_t)0; };
  portable::fill(b);
  b.linear_workspace = linear_workspace;
  b.linear = linear;
  b.reconstruct = reconstruct;
  b.rms_norm = rms_norm;
  b.rotary = rotary;
  b.act_mul = act_mul;
  b.cache_append = cache_append;
  b.cache_read = cache_read;
  b.attention_workspace = attention_workspace;
  b.attention = attention;
  b.attend = attend;
  b.encode_workspace = encode_workspace;
  b.encode = encode;
  return b;
}

}  // namespace exl3

EXL3_EXPORT const exl3_backend* exl3_get_backend(void) {
  static const exl3_backend table = exl3::make_table();
  return &table;
}
