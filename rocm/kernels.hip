// All device code of libexl3_rocm, compiled once for each architecture.
#include "gpu/entries.h"

#include "entries.h"

#define X(name, args, threads, body) \
  GPU_KERNEL(threads) k_##name(const args a) { body(a); }
EXL3_PORTABLE_SMALL(X)
EXL3_RDNA_KERNELS(X)
#undef X
