#include "hip.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>

namespace exl3::hip {

static int find_loaded(dl_phdr_info* info, size_t, void* out) {
  const char* slash = info->dlpi_name ? strrchr(info->dlpi_name, '/') : nullptr;
  const char* name = slash ? slash + 1 : info->dlpi_name;
  if (!name || strncmp(name, "libamdhip64.so", 14)) return 0;
  *(const char**)out = info->dlpi_name;
  return 1;
}

static void* open_runtime() {
  if (const char* named = getenv("EXL3_HIP_LIB")) return dlopen(named, RTLD_NOW | RTLD_LOCAL);
  const char* loaded = nullptr;
  dl_iterate_phdr(find_loaded, &loaded);
  if (loaded)
    if (void* handle = dlopen(loaded, RTLD_NOW | RTLD_NOLOAD)) return handle;
  for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"})
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  return nullptr;
}

const Api* api(const char** why) {
  static Api a{};
  static char error[512];
  static bool usable = false;
  static std::once_flag once;
  std::call_once(once, [] {
    void* handle = open_runtime();
    if (!handle) {
      const char *said = dlerror(), *named = getenv("EXL3_HIP_LIB");
      if (named)
        snprintf(error, sizeof error, "EXL3_HIP_LIB is no HIP runtime that can be loaded (%s): correct it, or unset it", said ? said : named);
      else
        snprintf(error, sizeof error, "no HIP runtime (libamdhip64.so) is on this machine: install ROCm, or torch's ROCm build (%s)",
                 said ? said : "not found");
      return;
    }
    auto get = [&](const char* name, auto& function) {
      *(void**)&function = dlsym(handle, name);
      if (!function && !error[0]) snprintf(error, sizeof error, "the HIP runtime lacks %s: it is too old, install ROCm 6.4 or newer", name);
    };
    get("hipGetDeviceCount", a.GetDeviceCount);
    get("hipGetDevice", a.GetDevice);
    get("hipDeviceGetName", a.DeviceGetName);
    get("hipDeviceGetAttribute", a.DeviceGetAttribute);
    get("hipRuntimeGetVersion", a.RuntimeGetVersion);
    get("hipSetDevice", a.SetDevice);
    get("hipModuleLoadData", a.ModuleLoadData);
    get("hipModuleGetFunction", a.ModuleGetFunction);
    get("hipModuleLaunchKernel", a.ModuleLaunchKernel);
    get("hipGetErrorString", a.GetErrorString);
    usable = !error[0];
  });
  if (!usable && why) *why = error;
  return usable ? &a : nullptr;
}

}  // namespace exl3::hip
