#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <atomic>
#include <mutex>

#ifndef EXL3_ROCM_ARCH_TEXT
#define EXL3_ROCM_ARCH_TEXT "unknown"
#endif
#ifndef EXL3_ROCM_FLOOR  // lowest runtime the code objects load in: 100 * major + minor
#define EXL3_ROCM_FLOOR 604
#endif

// The code objects of all architectures, a compressed bundle.
__asm__(
    ".pushsection .hip_fatbin,\"a\",@progbits\n"
    ".balign 4096\n"
    ".globl exl3_device_code\n.hidden exl3_device_code\n"
    "exl3_device_code:\n.incbin \"" EXL3_FATBIN "\"\n"
    ".globl exl3_device_code_end\n.hidden exl3_device_code_end\n"
    "exl3_device_code_end:\n.byte 0\n"
    ".popsection\n");
extern "C" const char exl3_device_code[], exl3_device_code_end[];

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

constexpr int kMost = 32;
static Device devices[kMost];
static std::atomic<hip::Function> functions[kMost][kSlots];
static std::mutex mutex;

template <class T>
static uint64_t read(const char* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}
// Bytes a bundle of code objects says it has, by the headers of clang-offload-bundler; 0: it is none. `most` are there.
static uint64_t bundle_bytes(const char* bundle, uint64_t most) {
  if (most < 32) return 0;
  if (!memcmp(bundle, "CCOB", 4)) return read<uint16_t>(bundle + 4) < 3 ? read<uint32_t>(bundle + 8) : read<uint64_t>(bundle + 8);
  if (memcmp(bundle, "__CLANG_OFFLOAD_BUNDLE__", 24)) return 0;
  uint64_t end = 32, at = 32;
  for (uint64_t i = read<uint64_t>(bundle + 24); i > 0; i--) {  // entries: offset, bytes, length of the name, name
    if (at + 24 > most) return at + 24;
    const uint64_t entry_end = read<uint64_t>(bundle + at) + read<uint64_t>(bundle + at + 8);
    if (entry_end > end) end = entry_end;
    const uint64_t name = read<uint64_t>(bundle + at + 16);
    at += 24 + (name < most ? name : most);
  }
  return end;
}

static bool look_at(const hip::Api& runtime, int index, Device& d) {
  d.index = index;
  int version = 0, warp = 0;
  runtime.DeviceGetName(d.name, sizeof d.name, index);
  if (hip::Error e = runtime.DeviceGetAttribute(&d.multiprocessors, hip::kMultiprocessors, index)) {
    refuse(EXL3_DEVICE_FAULT, "AMD device %d can't be read: %s", index, runtime.GetErrorString(e));
    return false;
  }
  runtime.DeviceGetAttribute(&d.major, hip::kComputeMajor, index);
  runtime.DeviceGetAttribute(&d.minor, hip::kComputeMinor, index);
  runtime.DeviceGetAttribute(&warp, hip::kWarpSize, index);
  runtime.RuntimeGetVersion(&version);
  if (warp != 32) {
    refuse(EXL3_UNSUPPORTED, "%s (gfx%d) runs waves of %d lanes; exl3's AMD kernels are for RDNA2 and newer (waves of 32): use an RDNA card or the CPU",
           d.name, d.major, warp);
    return false;
  }
  const int release = version / 10000000 * 100 + version / 100000 % 100;  // 60342131 is 6.3.42131
  if (release < EXL3_ROCM_FLOOR) {
    refuse(EXL3_UNSUPPORTED, "the HIP runtime is ROCm %d.%d, this libexl3_rocm (%s) needs %d.%d or newer: update ROCm and torch", release / 100, release % 100,
           EXL3_ROCM_ARCH_TEXT, EXL3_ROCM_FLOOR / 100, EXL3_ROCM_FLOOR % 100);
    return false;
  }
  const uint64_t here = exl3_device_code_end - exl3_device_code, whole = bundle_bytes(exl3_device_code, here);
  if (!whole) {
    refuse(EXL3_UNSUPPORTED, "libexl3_rocm holds no code objects where they should be: build or install it again");
    return false;
  }
  if (whole > here) {
    refuse(EXL3_UNSUPPORTED, "libexl3_rocm's device code is cut short (%llu of %llu bytes): build or install it again", (unsigned long long)here,
           (unsigned long long)whole);
    return false;
  }
  int current = -1;
  runtime.GetDevice(&current);
  if (current != index) runtime.SetDevice(index);
  const hip::Error error = runtime.ModuleLoadData(&d.module, exl3_device_code);
  if (current != index && current >= 0) runtime.SetDevice(current);
  if (error) {
    d.module = nullptr;
    const char* build = "EXL3_BACKENDS=cpu,rocm EXL3_ROCM_ARCHS=<its gfx name> pip install .";
    if (error == hip::kNoBinary)
      refuse(EXL3_UNSUPPORTED, "libexl3_rocm has no code for %s (gfx%d.%d), it was built for %s: build for it: %s", d.name, d.major, d.minor,
             EXL3_ROCM_ARCH_TEXT, build);
    else
      refuse(EXL3_UNSUPPORTED, "ROCm %d.%d can't load libexl3_rocm's code for %s on %s (gfx%d.%d): %s; update ROCm and torch, or build for it: %s",
             release / 100, release % 100, EXL3_ROCM_ARCH_TEXT, d.name, d.major, d.minor, runtime.GetErrorString(error), build);
    return false;
  }
  d.matrix_products = d.major >= 11;
  return true;
}

const Device* device(int index) {
  static std::atomic<bool> known[kMost];
  const char* why = "";
  const hip::Api* runtime = hip::api(&why);
  if (!runtime) {
    refuse(EXL3_UNSUPPORTED, "%s", why);
    return nullptr;
  }
  int count = 0;
  if (index < 0) {
    if (hip::Error e = runtime->GetDevice(&index)) {
      refuse(EXL3_UNSUPPORTED, "no AMD device can be used (%s): is the amdgpu driver loaded, and may this user open /dev/kfd?", runtime->GetErrorString(e));
      return nullptr;
    }
  }
  if (index >= 0 && index < kMost && known[index].load(std::memory_order_acquire)) return &devices[index];
  if (hip::Error e = runtime->GetDeviceCount(&count); e || count == 0) {
    refuse(EXL3_UNSUPPORTED, "no AMD device is visible (%s): is the amdgpu driver loaded, and may this user open /dev/kfd?",
           e ? runtime->GetErrorString(e) : "none found");
    return nullptr;
  }
  if (index < 0 || index >= count || index >= kMost) {
    refuse(EXL3_BAD_ARGUMENT, "AMD device %d: %d visible", index, count);
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (!known[index].load(std::memory_order_relaxed)) {
    if (!look_at(*runtime, index, devices[index])) return nullptr;
    known[index].store(true, std::memory_order_release);
  }
  return &devices[index];
}

int launch(int slot, const char* name, unsigned grid_x, unsigned grid_y, int threads, const void* block, void* stream) {
  const Device* d = device();
  if (!d) return EXL3_UNSUPPORTED;
  const hip::Api& runtime = *hip::api(nullptr);
  hip::Function function = functions[d->index][slot].load(std::memory_order_acquire);
  if (!function) {
    if (hip::Error e = runtime.ModuleGetFunction(&function, d->module, name))
      return refuse(EXL3_UNSUPPORTED, "%s is not in this library's device code (%s): reinstall exl3", name, runtime.GetErrorString(e));
    functions[d->index][slot].store(function, std::memory_order_release);
  }
  void* arguments[] = {const_cast<void*>(block)};
  if (hip::Error e = runtime.ModuleLaunchKernel(function, grid_x, grid_y, 1, threads, 1, 1, 0, (hip::Stream)stream, arguments, nullptr))
    return refuse(EXL3_DEVICE_FAULT, "%s on %s: %s", name, d->name, runtime.GetErrorString(e));
  return EXL3_OK;
}

}  // namespace exl3
