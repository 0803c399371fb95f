// The `attend` operation out of the three that it stands for, for backends and sizes without a kernel of its own.
#pragma once
#include "exl3/ops.h"

namespace exl3 {

inline int attend_in_three(const exl3_attend_args* t, void* stream, int (*rotary)(const exl3_rotary_args*, void*),
                           int (*append)(const exl3_cache_append_args*, void*), int (*attention)(const exl3_attention_args*, void*)) {
  const exl3_attention_args& a = t->attention;
  if (t->cos || t->q_norm || t->k_norm) {
    exl3_rotary_args r{};
    r.q = const_cast<void*>(a.q);
    r.k = t->k;
    r.cos = t->cos;
    r.sin = t->sin;
    r.q_norm = t->q_norm;
    r.k_norm = t->k_norm;
    r.q_stride = a.q_stride;
    r.k_stride = t->k_stride;
    r.tokens = a.tokens;
    r.q_heads = a.heads;
    r.k_heads = a.cache.kv_heads;
    r.head_dim = a.cache.head_dim;
    r.rotary_dim = t->rotary_dim;
    r.dtype = a.dtype;
    r.interleaved = t->interleaved;
    r.eps = t->eps;
    if (const int status = rotary(&r, stream)) return status;
  }
  exl3_cache_append_args c{};
  c.cache = a.cache;
  c.k = t->k;
  c.v = t->v;
  c.k_stride = t->k_stride;
  c.v_stride = t->v_stride;
  c.positions = a.positions;
  c.token_row = a.token_row;
  c.block_table = a.block_table;
  c.tokens = a.tokens;
  c.table_stride = a.table_stride;
  c.dtype = a.dtype;
  if (const int status = append(&c, stream)) return status;
  return attention(&a, stream);
}

}  // namespace exl3
