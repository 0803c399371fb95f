// As much of the CUDA runtime as cuda/device.cu needs, with a card and a driver of one's choice: what users meet and no test machine has.
#pragma once
#define __global__
#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess = 0, cudaErrorInsufficientDriver = 35, cudaErrorNoDevice = 100, cudaErrorNoKernelImageForDevice = 209 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor, cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
typedef void* cudaStream_t;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaFuncAttributes { int ptxVersion, maxThreadsPerBlock; };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct { unsigned x, y, z; } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  int dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};

static struct {
  cudaError_t device = cudaSuccess, image = cudaSuccess, launch = cudaSuccess;
  int major = 9, minor = 0, code = 90, most_threads = 992;  // of exl3::probe, by what code runs
} mock;

static inline cudaError_t cudaGetDevice(int* index) { return *index = 0, mock.device; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "an error"; }
static inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheMock"; }
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  const int values[] = {132, mock.major, mock.minor, 232448};
  return *value = values[what], cudaSuccess;
}
template <class F>
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, F) { return a->ptxVersion = mock.code, a->maxThreadsPerBlock = mock.most_threads, mock.image; }
static inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
static inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return mock.launch; }
