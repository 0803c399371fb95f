// A stand-in for libamdhip64.so: device memory is host memory, and a launched kernel is the same kernel source, run by the CPU emulator.
// So the whole library is tested end to end, argument blocks and launch plans included, with neither a card nor ROCm.
//   -DGPU_WMMA=0, 11, 12   which layout the matrix product of a wave has (RDNA2, 3, 4)
//   -DMOCK_LAYOUT_ONLY     leaves out the products of few rows and the portable kernels, which don't depend on it
//   -DMOCK_FEW             a handful: for tests that plant a fault in the source
//   EXL3_HIP_LIB=this file; MOCK_WAVE, MOCK_VERSION, MOCK_DEVICES, MOCK_LOAD_ERROR: an odd machine
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/entries.h"
#include "entries.h"

#define X(name, args, threads, body) \
  GPU_KERNEL(threads) k_##name(const args a) { body(a); }
#ifdef MOCK_FEW
#define MOCK_KERNELS(X)                                                                  \
  X(rotate_halves, rdna::HalvesArgs, 256, rdna::rotate_halves)                           \
  X(attention_128, rdna::AttentionArgs, rdna::kAttentionThreads, (rdna::attention<4, 4>)) \
  X(prefill_64, rdna::PrefillArgs, 128, (rdna::prefill<2, 4>))                            \
  X(gemv_mul1_8_2, rdna::ProductArgs, rdna::kProductThreads, (rdna::gemv<8, true, 2>))    \
  X(gemm_mul1_8, rdna::ProductArgs, rdna::kProductThreads, (rdna::gemm<8, true>))
#elif defined(MOCK_LAYOUT_ONLY)
#define MOCK_KERNELS(X) EXL3_RDNA_GEMM(X) EXL3_RDNA_PREFILL(X) EXL3_RDNA_REST(X) X(rotate_halves, rdna::HalvesArgs, 256, rdna::rotate_halves)
#else
#define MOCK_KERNELS(X) EXL3_PORTABLE_SMALL(X) EXL3_RDNA_KERNELS(X)
#endif
MOCK_KERNELS(X)
#undef X

struct Kernel {
  const char* name;
  int threads;
  void (*run)(const void*);
};
static const Kernel kernels[] = {
#define X(name, args, threads, body) {"k_" #name, threads, [](const void* block) { k_##name(*(const args*)block); }},
    MOCK_KERNELS(X)
#undef X
};

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

#define API extern "C" __attribute__((visibility("default")))
API int hipGetDeviceCount(int* n) {
  *n = setting("MOCK_DEVICES", 1);
  return *n ? 0 : 100;
}
API int hipGetDevice(int* d) {
  *d = 0;
  return setting("MOCK_DEVICES", 1) ? 0 : 100;
}
API int hipSetDevice(int) { return 0; }
API int hipDeviceGetName(char* name, int n, int) {
  snprintf(name, n, "mock card");
  return 0;
}
API int hipDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 23: *value = GPU_WMMA ? GPU_WMMA : 10; return 0;
    case 61: *value = GPU_WMMA ? 0 : 3; return 0;
    case 63: *value = setting("MOCK_UNITS", 4); return 0;
    case 87: *value = setting("MOCK_WAVE", 32); return 0;
    default: return 1;
  }
}
API int hipRuntimeGetVersion(int* version) {
  *version = setting("MOCK_VERSION", 70151831);
  return 0;
}
API const char* hipGetErrorString(int e) { return e == 100 ? "no device" : e == 209 ? "no binary for this device" : e == 500 ? "not found" : "invalid"; }
API int hipModuleLoadData(void** module, const void* image) {
  if (const int error = setting("MOCK_LOAD_ERROR", 0)) return error;
  if (memcmp(image, "CCOB", 4) && memcmp(image, "__CLANG_OFFLOAD_BUNDLE__", 24)) return 200;
  *module = const_cast<void*>(image);
  return 0;
}
API int hipModuleGetFunction(const void** function, void*, const char* name) {
  for (const Kernel& k : kernels)
    if (!strcmp(k.name, name)) {
      *function = &k;
      return 0;
    }
  return 500;
}
API int hipModuleLaunchKernel(const void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void*,
                              void** arguments, void**) {
  const Kernel& k = *(const Kernel*)function;
  if ((int)bx != k.threads || by != 1 || bz != 1 || gz != 1) return 1;
  exl3::emulator::launch(gx, gy, k.threads, [&] { k.run(arguments[0]); });
  return 0;
}
