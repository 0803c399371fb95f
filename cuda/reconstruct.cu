// Launch of the reconstruction of a matrix; what its kernel does not make goes to the portable ones.
#include "parts.h"
#include "reconstruct.cuh"

namespace exl3 {

#define X(k2) ReconstructKernel reconstruct_kernel_##k2(bool bytes);
EXL3_RATES(X)
#undef X

static ReconstructKernel find_kernel(int k2, bool bytes) {
  switch (k2) {
#define X(k2) \
  case k2: return reconstruct_kernel_##k2(bytes);
    EXL3_RATES(X)
#undef X
  }
  return nullptr;
}

int reconstruct(const exl3_reconstruct_args* a, void* stream) {
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  const exl3_weight* w = a->weight;
  if (!a->original_basis || a->out_dtype != EXL3_F16 || device->code < 80 || !w || w->out_features % 2 || (uintptr_t)a->out % 8)
    return portable::plain_reconstruct(a, stream);
  if (const int status = portable::checked_weight("reconstruct", w)) return status;
  const ReconstructKernel kernel = find_kernel(w->k2, w->codebook == EXL3_MUL1);
  if (!kernel) return refuse(EXL3_UNSUPPORTED, "reconstruct: this build has no kernel for K = %g", w->k2 / 2.0);
  return launch(kernel, dim3(w->out_padded / 128, w->in_padded / 128), kReconstructThreads, 0, 1, reconstruct_params(*w, (uint16_t*)a->out), stream,
                "reconstruct");
}

}  // namespace exl3
