// cuda/device.cu over a mock of the CUDA runtime: argv[1] names the machine, the answer goes to stdout.
#define EXL3_CUDA_ARCH_TEXT "80 90a"
#include "../../cuda/device.cu"

#include <stdio.h>
#include <string.h>

int main(int, char** argv) {
  const char* machine = argv[1];
  if (!strcmp(machine, "old driver")) mock.device = cudaErrorInsufficientDriver;
  if (!strcmp(machine, "no card")) mock.device = cudaErrorNoDevice;
  if (!strcmp(machine, "no code")) mock = {cudaSuccess, cudaErrorNoKernelImageForDevice, cudaSuccess, 6, 1, 0};
  if (!strcmp(machine, "good, code for 8.0")) mock.code = 80, mock.most_threads = 1024;
  if (!strcmp(machine, "fault")) mock.launch = (cudaError_t)700;
  const exl3::Device* device = exl3::current_device();
  if (!device) return puts(exl3::last_error()), 1;
  if (!strcmp(machine, "small")) return exl3::launch((const void*)0, dim3(1), 32, 1 << 20, 1, "", 0, "linear"), puts(exl3::last_error()), 1;
  if (exl3::launch((const void*)0, dim3(1), 32, 0, 1, "", 0, "linear")) return puts(exl3::last_error()), 1;
  return printf("code for %d, wide %d\n", device->code, device->wide), 0;
}
