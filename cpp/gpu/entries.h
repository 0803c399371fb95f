// The list of portable entry points: X(name, argument block, threads a block, body). CUDA, HIP and the emulator all read it.
// Plain ones are right everywhere and slow; a backend with products and attention of its own may leave them out of its device code.
#pragma once
#include "cache.h"
#include "norm.h"
#include "pointwise.h"
#include "product.h"
#include "rotary.h"
#include "sample.h"

#define EXL3_PORTABLE_PLAIN(X)                                  \
  X(attention_plain, exl3_attention_args, 256, attention_plain) \
  X(rotate_input, RotateInputArgs, 256, rotate_input)           \
  X(product, ProductArgs, 256, product)

#define EXL3_PORTABLE_SMALL(X)                                \
  X(rms_norm, exl3_rms_norm_args, 256, rms_norm)              \
  X(rotate, exl3_rotate_args, 256, rotate)                    \
  X(rotary_table, exl3_rotary_table_args, 256, rotary_table)  \
  X(rotary, exl3_rotary_args, 128, rotary)                    \
  X(cache_append, exl3_cache_append_args, 256, cache_append)  \
  X(cache_read, exl3_cache_read_args, 256, cache_read)        \
  X(act_mul, exl3_act_mul_args, 256, act_mul)                 \
  X(add, exl3_add_args, 256, add)                             \
  X(softcap, exl3_softcap_args, 256, softcap)                 \
  X(embedding, exl3_embedding_args, 256, embedding)           \
  X(embedding_ring, exl3_embedding_args, 256, embedding_ring) \
  X(sample, exl3_sample_args, 1024, sample)                   \
  X(reconstruct, ReconstructArgs, 256, reconstruct)           \
  X(reconstruct_original, ReconstructArgs, 256, reconstruct_original) \
  X(dense, exl3_dense_args, 256, dense)

#define EXL3_PORTABLE_KERNELS(X) EXL3_PORTABLE_PLAIN(X) EXL3_PORTABLE_SMALL(X)
