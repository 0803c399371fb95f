// What the host code knows of a card, found once, and how it launches kernels and says what went wrong.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "exl3/ops.h"

namespace exl3 {

struct Device {
  int sms, major, minor, shared_bytes;  // shared_bytes: most dynamic shared memory of a block
  bool hopper;                          // a card of 9.0, and what runs there is code for sm_90a
  bool wide;                            // and many rows go to wgmma: not with EXL3_TEST_NO_WGMMA
  int code;                             // virtual architecture of the code that runs here: 75, 80, 90 ...; 0: none inside
};

// The current device; null, with an error text, where it can't be used.
const Device* current_device();

// Sets this thread's error text and returns `status`.
int refuse(exl3_status status, const char* format, ...);
const char* last_error();
int check(cudaError_t error, const char* what);

// Launches a kernel that may start while the one before it drains (programmatic dependent launch, from sm_90 on), with `cluster` blocks in
// x forming a cluster where that is above 1.
int launch(const void* kernel, dim3 grid, int threads, int shared_bytes, int cluster, const void* block, cudaStream_t stream, const char* what);

template <class Block>
int launch(void (*kernel)(Block), dim3 grid, int threads, int shared_bytes, int cluster, const Block& block, void* stream, const char* what) {
  return launch((const void*)kernel, grid, threads, shared_bytes, cluster, (const void*)&block, (cudaStream_t)stream, what);
}

}  // namespace exl3
