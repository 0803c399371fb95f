// The attention kernels of one head size, EXL3_HEAD_DIM.
#include "attention_prefill.cuh"

namespace exl3 {

#define EXL3_NAME_(dim) attention_kernels_##dim
#define EXL3_NAME(dim) EXL3_NAME_(dim)

AttentionKernels EXL3_NAME(EXL3_HEAD_DIM)(AttentionKind kind) { return attention_kernels<EXL3_HEAD_DIM>(kind); }

}  // namespace exl3
