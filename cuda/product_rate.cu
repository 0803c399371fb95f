// The product kernels of one rate; compiled once for each EXL3_K2 (twice the bits a weight).
#include "product.cuh"

namespace exl3 {

#define EXL3_CONCAT_(a, b) a##b
#define EXL3_CONCAT(a, b) EXL3_CONCAT_(a, b)

static const ProductEntry entries[] = {
    {product_kernel<EXL3_K2, kBytes, 1>, EXL3_K2, kBytes, 1},
    {product_kernel<EXL3_K2, kBytes, 2>, EXL3_K2, kBytes, 2},
    {product_kernel<EXL3_K2, kDecodeBytes, 2>, EXL3_K2, kDecodeBytes, 2},
    {product_kernel<EXL3_K2, kDecodeBytes, 4>, EXL3_K2, kDecodeBytes, 4},
#if EXL3_K2 % 2 == 0  // half rates exist for mul1 only
    {product_kernel<EXL3_K2, kPairs, 1>, EXL3_K2, kPairs, 1},
    {product_kernel<EXL3_K2, kDecodePairs, 2>, EXL3_K2, kDecodePairs, 2},
    {product_kernel<EXL3_K2, kDecodePairs, 4>, EXL3_K2, kDecodePairs, 4},
#endif
};

ProductEntries EXL3_CONCAT(product_entries_, EXL3_K2)() { return {entries, (int)(sizeof entries / sizeof *entries)}; }

}  // namespace exl3
