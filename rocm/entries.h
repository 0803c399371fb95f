// The list of RDNA's own entry points beside the portable ones: X(name, argument block, threads a block, body).
#pragma once
#include "attention.h"
#include "encode.h"
#include "prefill.h"
#include "product.h"

// Rates are twice the bits a weight. Half rates exist for mul1 alone; 3inst and mcg share their kernels.

#define EXL3_GEMV(X, k2, kind, mul1)                                                            \
  X(gemv_##kind##_##k2##_1, rdna::ProductArgs, rdna::kProductThreads, (rdna::gemv<k2, mul1, 1>)) \
  X(gemv_##kind##_##k2##_2, rdna::ProductArgs, rdna::kProductThreads, (rdna::gemv<k2, mul1, 2>)) \
  X(gemv_##kind##_##k2##_4, rdna::ProductArgs, rdna::kProductThreads, (rdna::gemv<k2, mul1, 4>)) \
  X(gemv_##kind##_##k2##_8, rdna::ProductArgs, rdna::kProductThreads, (rdna::gemv<k2, mul1, 8>))
#define EXL3_GEMM(X, k2, kind, mul1) X(gemm_##kind##_##k2, rdna::ProductArgs, rdna::kProductThreads, (rdna::gemm<k2, mul1>))

#define EXL3_EACH_MUL1(M, X) \
  M(X, 2, mul1, true) M(X, 3, mul1, true) M(X, 4, mul1, true) M(X, 5, mul1, true) M(X, 6, mul1, true) M(X, 7, mul1, true) \
  M(X, 8, mul1, true) M(X, 10, mul1, true) M(X, 12, mul1, true) M(X, 14, mul1, true) M(X, 16, mul1, true)
#define EXL3_EACH_PAIR(M, X) \
  M(X, 2, pair, false) M(X, 4, pair, false) M(X, 6, pair, false) M(X, 8, pair, false) M(X, 10, pair, false) M(X, 12, pair, false) \
  M(X, 14, pair, false) M(X, 16, pair, false)

#define EXL3_RDNA_GEMV(X) EXL3_EACH_MUL1(EXL3_GEMV, X) EXL3_EACH_PAIR(EXL3_GEMV, X)
#define EXL3_RDNA_GEMM(X) EXL3_EACH_MUL1(EXL3_GEMM, X) EXL3_EACH_PAIR(EXL3_GEMM, X)
#define EXL3_RDNA_REST(X)                                                                 \
  X(attention_128, rdna::AttentionArgs, rdna::kAttentionThreads, (rdna::attention<4, 4>)) \
  X(attention_256, rdna::AttentionArgs, rdna::kAttentionThreads, (rdna::attention<8, 2>)) \
  X(attention_512, rdna::AttentionArgs, rdna::kAttentionThreads, (rdna::attention<16, 1>)) \
  X(encode, rdna::EncodeArgs, rdna::kEncodeThreads, rdna::encode)
// what depends on the layout of the matrix product, the products of many rows apart
#define EXL3_RDNA_PREFILL(X)                                  \
  X(prefill_64, rdna::PrefillArgs, 128, (rdna::prefill<2, 4>))  \
  X(prefill_128, rdna::PrefillArgs, 128, (rdna::prefill<4, 4>)) \
  X(prefill_256, rdna::PrefillArgs, 64, (rdna::prefill<8, 2>))
#define EXL3_RDNA_KERNELS(X) \
  X(rotate_halves, rdna::HalvesArgs, 256, rdna::rotate_halves) \
  EXL3_RDNA_REST(X) EXL3_RDNA_PREFILL(X) EXL3_RDNA_GEMV(X) EXL3_RDNA_GEMM(X)
