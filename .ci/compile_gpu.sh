#!/usr/bin/env bash
# Compiles the CUDA and ROCm backends without running them; says so where a compiler is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
JOBS=${MAX_JOBS:-$(nproc)}
if command -v nvcc >/dev/null || [ -n "${CUDACXX:-}" ]; then
  if [ -f cuda/CMakeLists.txt ]; then
    cmake -S . -B build/cuda -G Ninja -DEXL3_BACKENDS=cuda -DEXL3_BINDINGS=OFF -DEXL3_CUDA_ARCHS="80;90a" -DCMAKE_BUILD_TYPE=Release >/dev/null
    cmake --build build/cuda -j "$JOBS"
    # reads registers and stack back out of the library
    command -v cuobjdump >/dev/null || python3 -m pip install -q nvidia-cuda-cuobjdump || echo "notice: no cuobjdump"
    python3 cuda/check_build.py "$(find build/cuda -name libexl3_cuda.so)" --archs "80 90a"
  fi
else
  echo "notice: no nvcc found, CUDA backend not compiled"
fi
if command -v clang-22 >/dev/null; then
  if [ -f rocm/CMakeLists.txt ]; then
    cmake -S . -B build/rocm -G Ninja -DEXL3_BACKENDS=rocm -DEXL3_BINDINGS=OFF -DCMAKE_BUILD_TYPE=Release >/dev/null
    cmake --build build/rocm -j "$JOBS"
  fi
else
  echo "notice: no clang-22 found, ROCm backend not compiled"
fi
