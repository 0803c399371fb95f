// rotate: post * H128(pre * x), block by block. dense: the plain product.
#include <string.h>

#include "cpu/backend.h"
#include "cpu/threads.h"
#include "cpu/trellis.h"

namespace exl3::cpu {

int rotate(const exl3_rotate_args* a, void* stream) {
  if (a->n_padded % kBlock || a->n < 0 || a->n > a->n_padded) return fail(EXL3_BAD_ARGUMENT, "rotate: %d columns do not fit %d, a multiple of %d", a->n, a->n_padded, kBlock);
  const Kernels& k = kernels();
  const int64_t size[] = {4, 2, 2};
  const int64_t work = (int64_t)a->rows * a->n_padded;
  parallel_for(work < 32768 ? 1 : thread_count(stream), a->rows, [&](int64_t r) {
    const char* x = (const char*)a->x + r * a->x_stride * size[a->x_dtype];
    char* y = (char*)a->y + r * a->y_stride * size[a->y_dtype];
    float block[kBlock];
    for (int start = 0; start < a->n_padded; start += kBlock) {
      const int count = a->n - start < 0 ? 0 : a->n - start < kBlock ? a->n - start : kBlock;
      memset(block, 0, sizeof block);
      if (count) k.load(block, x + start * size[a->x_dtype], a->x_dtype, count);
      if (a->pre)
        for (int i = 0; i < count; i++) block[i] *= a->pre[start + i];
      k.hadamard(block);
      if (a->post)
        for (int i = 0; i < kBlock; i++) block[i] *= a->post[start + i];
      k.store(y + start * size[a->y_dtype], block, a->y_dtype, kBlock);
    }
  });
  return EXL3_OK;
}

int dense(const exl3_dense_args* a, void* stream) {
  if (a->accumulate && a->y_dtype != EXL3_F32) return fail(EXL3_BAD_ARGUMENT, "dense: accumulate needs an fp32 result");
  const int64_t work = (int64_t)a->rows * a->in_features * a->out_features;
  const int threads = work < 65536 ? 1 : thread_count(stream);
  const int64_t pieces = (a->out_features + 63) / 64;
  parallel_for(threads, pieces, [&](int64_t i) { kernels().dense(*a, 64 * i, a->out_features < 64 * (i + 1) ? a->out_features : 64 * (i + 1)); });
  return EXL3_OK;
}

}  // namespace exl3::cpu
