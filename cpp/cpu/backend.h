// What the files of libexl3_cpu share: one function per operation, named as in ops.h, and error reporting.
#pragma once
#include "exl3/ops.h"

namespace exl3 {
namespace cpu {

// Notes the text behind last_error() of this thread, returns `status`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
int fail(int status, const char* format, ...);

#define EXL3_CPU_OP(name) int name(const exl3_##name##_args* a, void* stream);
EXL3_OPS(EXL3_CPU_OP)
#undef EXL3_CPU_OP

int64_t repack_bytes(const exl3_weight* weight);
int64_t linear_workspace(const exl3_linear_args* a);
int64_t encode_workspace(const exl3_encode_args* a);

}  // namespace cpu
}  // namespace exl3

// The small operations exist once per instruction tier; X(name).
#define EXL3_SMALL_OPS(X) \
  X(rms_norm) X(rotary_table) X(rotary) X(cache_append) X(attention) X(cache_read) X(act_mul) X(embedding) X(add) X(softcap) X(sample)

#define EXL3_DECLARE_TIER(tier)                                       \
  namespace exl3 { namespace cpu { namespace tier {                   \
  EXL3_SMALL_OPS(EXL3_CPU_TIER_OP)                                    \
  int64_t attention_workspace(const exl3_attention_args* a);          \
  int64_t sample_workspace(const exl3_sample_args* a);                \
  } } }
#define EXL3_CPU_TIER_OP(name) int name(const exl3_##name##_args* a, void* stream);
EXL3_DECLARE_TIER(base)
EXL3_DECLARE_TIER(avx2)
#undef EXL3_CPU_TIER_OP
#undef EXL3_DECLARE_TIER
