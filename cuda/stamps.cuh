// When the warps of a product of up to 64 rows reach points of it: for benchmarks/gpu_timeline.py, in libraries built with -DEXL3_CUDA_STAMPS=ON.
#pragma once
#include <stdint.h>

namespace exl3 {

// kFetches: the first copies are begun. Above few rows kHasInput is the first part's sums.
enum StampPoint { kBegins, kFetches, kWaits, kGoesOn, kHasInput, kEnds, kBeginsNs, kEndsNs, kStampPoints };
constexpr int kStampWarps = 20, kStampBlocks = 256;

#ifdef EXL3_STAMPS
// Cycles of the multiprocessor, or for the last two points nanoseconds of the card. stamps: [block][warp][point], of the last launch.
__device__ __forceinline__ void stamp(int64_t* stamps, StampPoint point) {
  if (!stamps || threadIdx.x % 32 || blockIdx.x >= kStampBlocks) return;
  int64_t now;
  if (point < kBeginsNs)
    asm volatile("mov.u64 %0, %clock64;" : "=l"(now)::"memory");
  else
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  stamps[(blockIdx.x * kStampWarps + threadIdx.x / 32) * kStampPoints + point] = now;
}
#else
__device__ __forceinline__ void stamp(int64_t*, StampPoint) {}
#endif

}  // namespace exl3
