// What the translation units of libexl3_cuda offer one another.
#pragma once
#include "device.h"

namespace exl3 {

namespace portable {  // portable.cu
void fill(exl3_backend& table);
int64_t plain_linear_workspace(const exl3_linear_args* a);
int plain_linear(const exl3_linear_args* a, void* stream);
int plain_reconstruct(const exl3_reconstruct_args* a, void* stream);
int few_rms_norm(const exl3_rms_norm_args* a, void* stream);
int few_rotary(const exl3_rotary_args* a, void* stream);
int few_act_mul(const exl3_act_mul_args* a, void* stream);
int few_cache_read(const exl3_cache_read_args* a, void* stream);
int few_cache_append(const exl3_cache_append_args* a, void* stream);
int plain_attention(const exl3_attention_args* a, void* stream);
int checked_linear(const exl3_linear_args* a);
int checked_weight(const char* op, const exl3_weight* w);
int checked_cache(const char* op, const exl3_cache_layer& c);
int checked_attention(const exl3_attention_args* a);
}  // namespace portable

int64_t linear_workspace(const exl3_linear_args* a);  // linear.cu
int linear(const exl3_linear_args* a, void* stream);
int reconstruct(const exl3_reconstruct_args* a, void* stream);  // reconstruct.cu
int rms_norm(const exl3_rms_norm_args* a, void* stream);  // many.cu
int rotary(const exl3_rotary_args* a, void* stream);
int act_mul(const exl3_act_mul_args* a, void* stream);
int cache_append(const exl3_cache_append_args* a, void* stream);
int cache_read(const exl3_cache_read_args* a, void* stream);  // read.cu
int64_t attention_workspace(const exl3_attention_args* a);  // attention.cu
int attention(const exl3_attention_args* a, void* stream);
int attend(const exl3_attend_args* a, void* stream);
int64_t encode_workspace(const exl3_encode_args* a);  // encode.cu
int encode(const exl3_encode_args* a, void* stream);

}  // namespace exl3
