// A stand-in for libamdhip64.so on an NVIDIA card: the same AMD kernel source, compiled by nvcc, behind the same functions. What the CPU
// fibers can't show is seen here: real concurrency, the order of memory between blocks, whole models. benchmarks/gpu_portable_check.py
// builds and runs it.  -DGPU_WMMA=11 or 12 chooses the layout of the (emulated) matrix product, 0 leaves it out.
//   -DPART=0       the runtime's functions; 1 to 4: the kernels in parts that compile side by side, of which 4 depends on the layout
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

#include "gpu/entries.h"
#include "entries.h"

struct Kernel {
  const char* name;
  int threads;
  const void* function;
};
struct Part {
  const Kernel* kernels;
  int count;
  Part* next;
};
extern Part* parts;

#if PART > 0
#if PART == 1
#define PART_KERNELS(X) EXL3_PORTABLE_SMALL(X) EXL3_RDNA_REST(X) X(rotate_halves, rdna::HalvesArgs, 256, rdna::rotate_halves)
#elif PART == 2
#define PART_KERNELS(X) EXL3_EACH_MUL1(EXL3_GEMV, X)
#elif PART == 3
#define PART_KERNELS(X) EXL3_EACH_PAIR(EXL3_GEMV, X)
#else
#define PART_KERNELS(X) EXL3_RDNA_GEMM(X) EXL3_RDNA_PREFILL(X)
#endif

#define X(name, args, threads, body) \
  GPU_KERNEL(threads) k_##name(const __grid_constant__ args a) { body(a); }
PART_KERNELS(X)
#undef X

static const Kernel kernels[] = {
#define X(name, args, threads, body) {"k_" #name, threads, (const void*)k_##name},
    PART_KERNELS(X)
#undef X
};
static Part mine = {kernels, sizeof kernels / sizeof *kernels, nullptr};
__attribute__((constructor)) static void add_part() {
  mine.next = parts;
  parts = &mine;
}

#else
Part* parts = nullptr;

#define API extern "C" __attribute__((visibility("default")))
API int hipGetDeviceCount(int* n) { return cudaGetDeviceCount(n); }
API int hipGetDevice(int* d) { return cudaGetDevice(d); }
API int hipSetDevice(int d) { return cudaSetDevice(d); }
API int hipDeviceGetName(char* name, int n, int d) {
  cudaDeviceProp p;
  const cudaError_t error = cudaGetDeviceProperties(&p, d);
  if (!error) snprintf(name, n, "%s in place of an AMD card", p.name);
  return error;
}
API int hipDeviceGetAttribute(int* value, int attribute, int d) {
  switch (attribute) {
    case 23: *value = GPU_WMMA ? GPU_WMMA : 10; return 0;
    case 61: *value = GPU_WMMA ? 0 : 3; return 0;
    case 63: return cudaDeviceGetAttribute(value, cudaDevAttrMultiProcessorCount, d);
    case 87: *value = 32; return 0;
    default: return 1;
  }
}
API int hipRuntimeGetVersion(int* version) {
  *version = 70151831;
  return 0;
}
API const char* hipGetErrorString(int e) { return cudaGetErrorString((cudaError_t)e); }
API int hipModuleLoadData(void** module, const void* image) {
  *module = const_cast<void*>(image);
  return 0;
}
API int hipModuleGetFunction(const void** function, void*, const char* name) {
  for (const Part* p = parts; p; p = p->next)
    for (int i = 0; i < p->count; i++)
      if (!strcmp(p->kernels[i].name, name)) {
        *function = &p->kernels[i];
        return 0;
      }
  return 500;
}
API int hipModuleLaunchKernel(const void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                              void* stream, void** arguments, void**) {
  const Kernel& k = *(const Kernel*)function;
  if ((int)bx != k.threads || by != 1 || bz != 1) return 1;
  return cudaLaunchKernel(k.function, dim3(gx, gy, gz), dim3(bx), arguments, shared, (cudaStream_t)stream);
}
#endif
