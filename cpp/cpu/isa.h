// Which instruction set the kernels may use, decided once per process. Sources named *_avx2.cpp and *_avx512.cpp are compiled with
// the flags of their tier (CMakeLists.txt) and run only when isa() allows it; everything they define is in an anonymous namespace but
// their entry points, so that no inline function compiled for a newer CPU leaks into other files.
//   *_avx2.cpp:   -mavx2 -mfma -mf16c
//   *_avx512.cpp: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi
#pragma once
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#define EXL3_X86 1
#else
#define EXL3_X86 0
#endif

namespace exl3::cpu {

enum class Isa { scalar = 0, avx2 = 1, avx512 = 2 };

inline Isa detect_isa() {
  Isa best = Isa::scalar;
#if EXL3_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    best = Isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi"))
      best = Isa::avx512;
  }
#endif
  const char* cap = getenv("EXL3_CPU_MAX_ISA");
  if (cap && !strcmp(cap, "scalar")) return Isa::scalar;
  if (cap && !strcmp(cap, "avx2") && best > Isa::avx2) return Isa::avx2;
  return best;
}

// The best tier of this CPU, capped by EXL3_CPU_MAX_ISA = scalar | avx2 | avx512.
inline Isa isa() {
  static const Isa chosen = detect_isa();
  return chosen;
}

inline const char* isa_name(Isa i) { return i == Isa::avx512 ? "avx512" : i == Isa::avx2 ? "avx2" : "scalar"; }

}  // namespace exl3::cpu
