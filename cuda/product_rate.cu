// The products of up to 64 rows of one rate; compiled once for each EXL3_K2 (twice the bits a weight).
#include "even.cuh"
#include "product.cuh"

namespace exl3 {

#define EXL3_CONCAT_(a, b) a##b
#define EXL3_CONCAT(a, b) EXL3_CONCAT_(a, b)

static const ProductEntry entries[] = {
    {product_kernel<EXL3_K2, kBytes, false>, kBytes, 0},
    {product_kernel<EXL3_K2, kBytes, true>, kBytes, 1},
#if EXL3_K2 % 2 == 0  // half rates exist for mul1 only
    {product_kernel<EXL3_K2, kPairs, false>, kPairs, 0},
    {product_kernel<EXL3_K2, kPairs, true>, kPairs, 1},
#endif
};

#define EXL3_EVEN(mode, blocks) {even::even_kernel<EXL3_K2, mode, blocks>, mode, blocks}
static const even::EvenEntry even_entries[] = {
    EXL3_EVEN(kDecodeBytes, 1), EXL3_EVEN(kDecodeBytes, 2), EXL3_EVEN(kDecodeBytes, 4), EXL3_EVEN(kDecodeBytes, 8),
#if EXL3_K2 % 2 == 0
    EXL3_EVEN(kDecodePairs, 1), EXL3_EVEN(kDecodePairs, 2), EXL3_EVEN(kDecodePairs, 4), EXL3_EVEN(kDecodePairs, 8),
#endif
};

ProductEntries EXL3_CONCAT(product_entries_, EXL3_K2)() { return {entries, (int)(sizeof entries / sizeof *entries)}; }
even::EvenEntries EXL3_CONCAT(even_entries_, EXL3_K2)() { return {even_entries, (int)(sizeof even_entries / sizeof *even_entries)}; }

}  // namespace exl3
