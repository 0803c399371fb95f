#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <mutex>

#ifndef EXL3_CUDA_ARCH_TEXT
#define EXL3_CUDA_ARCH_TEXT "unknown"
#endif

namespace exl3 {

static thread_local char message[512];

int refuse(exl3_status status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(message, sizeof message, format, list);
  va_end(list);
  return status;
}
const char* last_error() { return message; }

int check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return EXL3_OK;
  return refuse(EXL3_DEVICE_FAULT, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

// What of the code inside runs on a card shows in its limit.
constexpr int kHopperProbe = 992;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__global__ void __launch_bounds__(kHopperProbe) probe() {}
#else
__global__ void probe() {}
#endif

static bool look_at(int index, Device& d) {
  cudaError_t error = cudaSuccess;
  auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, index);
  };
  get(d.sms, cudaDevAttrMultiProcessorCount);
  get(d.major, cudaDevAttrComputeCapabilityMajor);
  get(d.minor, cudaDevAttrComputeCapabilityMinor);
  get(d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (error != cudaSuccess) {
    refuse(EXL3_DEVICE_FAULT, "CUDA device %d can't be read: %s", index, cudaGetErrorString(error));
    return false;
  }
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, probe);
  if (error != cudaSuccess) {
    cudaGetLastError();
    refuse(EXL3_UNSUPPORTED,
           "libexl3_cuda has no code for this card (compute capability %d.%d): it was built for %s. Build for it: EXL3_CUDA_ARCHS=%d%d pip install .",
           d.major, d.minor, EXL3_CUDA_ARCH_TEXT, d.major, d.minor);
    return false;
  }
  d.code = attributes.ptxVersion;
  d.hopper = attributes.maxThreadsPerBlock == kHopperProbe;
  d.wide = d.hopper && !getenv("EXL3_TEST_NO_WGMMA");
  return true;
}

const Device* current_device() {
  constexpr int kMost = 64;
  static Device devices[kMost];
  static std::atomic<bool> known[kMost];
  static std::mutex mutex;
  int index = 0;
  const cudaError_t error = cudaGetDevice(&index);
  if (error != cudaSuccess) {
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver)
      refuse(EXL3_UNSUPPORTED, "no NVIDIA driver, or one too old for CUDA %d.%d that libexl3_cuda was built with: update the driver",
             CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    else
      refuse(EXL3_UNSUPPORTED, "no CUDA device can be used: %s", cudaGetErrorString(error));
    return nullptr;
  }
  if (index >= kMost) {
    refuse(EXL3_UNSUPPORTED, "CUDA device %d: at most %d are known", index, kMost);
    return nullptr;
  }
  if (!known[index].load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!known[index].load(std::memory_order_relaxed)) {
      if (!look_at(index, devices[index])) return nullptr;
      known[index].store(true, std::memory_order_release);
    }
  }
  return &devices[index];
}

int launch(const void* kernel, dim3 grid, int threads, int shared_bytes, int cluster, const void* block, cudaStream_t stream, const char* what) {
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  if (shared_bytes > device->shared_bytes)
    return refuse(EXL3_UNSUPPORTED, "%s: needs %d bytes of shared memory, this card has %d a block", what, shared_bytes, device->shared_bytes);
  if (shared_bytes > 32 * 1024) {  // above 48 KiB together with the kernel's static shared memory it must be asked for
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return check(error, what);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  if (device->code >= 90) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    if (cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs].val.clusterDim.x = cluster;
      attributes[config.numAttrs].val.clusterDim.y = 1;
      attributes[config.numAttrs++].val.clusterDim.z = 1;
    }
  }
  config.attrs = attributes;
  void* arguments[] = {const_cast<void*>(block)};
  return check(cudaLaunchKernelExC(&config, kernel, arguments), what);
}

}  // namespace exl3
