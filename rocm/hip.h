// The few functions of the HIP runtime this library calls, looked up at run time: nothing of ROCm is needed to build, one binary serves
// every ROCm, and loading it where none is does no harm. Only functions whose C interface is the same in all of them belong here (so not
// hipGetDeviceProperties).
#pragma once
#include <stddef.h>

namespace exl3::hip {

typedef int Error;  // hipError_t; 0 is success
typedef struct ihipStream_t* Stream;
typedef struct ihipModule_t* Module;
typedef struct ihipModuleSymbol_t* Function;

enum Attribute { kComputeMajor = 23, kComputeMinor = 61, kMultiprocessors = 63, kWarpSize = 87 };  // hipDeviceAttribute_t
enum { kNoBinary = 209 };                                                                          // hipError_t: no code for this card

struct Api {
  Error (*GetDeviceCount)(int*);
  Error (*GetDevice)(int*);
  Error (*DeviceGetName)(char*, int, int);
  Error (*DeviceGetAttribute)(int*, int, int);
  Error (*RuntimeGetVersion)(int*);
  Error (*SetDevice)(int);
  Error (*ModuleLoadData)(Module*, const void*);
  Error (*ModuleGetFunction)(Function*, Module, const char*);
  Error (*ModuleLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**);
  const char* (*GetErrorString)(Error);
};

// The runtime: the one in this process already (torch's), else the first found. EXL3_HIP_LIB names another file. Null, and a sentence in
// *why, where there is none.
const Api* api(const char** why);

}  // namespace exl3::hip
