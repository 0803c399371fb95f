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
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#else
#define EXL3_X86 0
#endif

namespace exl3::cpu {

enum class Isa { scalar = 0, avx2 = 1, avx512 = 2 };

#if EXL3_X86
inline void cpuid(int leaf, unsigned* r) {
#if defined(_MSC_VER)
  __cpuidex(reinterpret_cast<int*>(r), leaf, 0);
#else
  __cpuid_count(leaf, 0, r[0], r[1], r[2], r[3]);
#endif
}
inline unsigned kept_registers() {
#if defined(_MSC_VER)
  return static_cast<unsigned>(_xgetbv(0));
#else
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
#endif
}
inline bool has(unsigned bits, int bit) { return (bits >> bit & 1) != 0; }
#endif

inline Isa detect_isa() {
  Isa best = Isa::scalar;
#if EXL3_X86
  // asked of the CPU itself: __builtin_cpu_supports needs a compiler runtime that not every toolchain brings
  unsigned r[4];
  cpuid(0, r);
  if (r[0] >= 7) {
    cpuid(1, r);
    const bool base = has(r[2], 12) && has(r[2], 27) && has(r[2], 29);  // fma, osxsave, f16c
    const unsigned kept = base ? kept_registers() : 0;                  // what the system saves: 6 ymm, 0xe0 zmm and masks
    cpuid(7, r);
    if (base && (kept & 6) == 6 && has(r[1], 5)) {
      best = Isa::avx2;
      const bool fl = has(r[1], 16) && has(r[1], 17) && has(r[1], 30) && has(r[1], 31);  // avx512 f, dq, bw, vl
      if ((kept & 0xe0) == 0xe0 && fl && has(r[2], 1) && has(r[2], 11)) best = Isa::avx512;  // vbmi, vnni
    }
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
