// The kernels of many rows of one rate; compiled once for each EXL3_K2 (twice the bits a weight).
#include "wide_mma.cuh"

namespace exl3 {

#define EXL3_CONCAT_(a, b) a##b
#define EXL3_CONCAT(a, b) EXL3_CONCAT_(a, b)

WideEntry EXL3_CONCAT(wide_entry_, EXL3_K2)() {
#if EXL3_K2 % 2 == 0
  return {{{wide_kernel<EXL3_K2, kDecodeBytes, 128>, wide_kernel<EXL3_K2, kDecodeBytes, 256>},
           {wide_kernel<EXL3_K2, kDecodePairs, 128>, wide_kernel<EXL3_K2, kDecodePairs, 256>}},
          {mma_wide_kernel<EXL3_K2, kDecodeBytes>, mma_wide_kernel<EXL3_K2, kDecodePairs>}};
#else
  return {{{wide_kernel<EXL3_K2, kDecodeBytes, 128>, wide_kernel<EXL3_K2, kDecodeBytes, 256>}}, {mma_wide_kernel<EXL3_K2, kDecodeBytes>}};
#endif
}

}  // namespace exl3
