// The reconstruction of one rate; compiled once for each EXL3_K2 (twice the bits a weight).
#include "reconstruct.cuh"

namespace exl3 {

#define EXL3_CONCAT_(a, b) a##b
#define EXL3_CONCAT(a, b) EXL3_CONCAT_(a, b)

ReconstructKernel EXL3_CONCAT(reconstruct_kernel_, EXL3_K2)(bool bytes) {
#if EXL3_K2 % 2 == 0
  if (!bytes) return reconstruct_kernel<EXL3_K2, kDecodePairs>;
#endif
  return bytes ? reconstruct_kernel<EXL3_K2, kDecodeBytes> : nullptr;
}

}  // namespace exl3
