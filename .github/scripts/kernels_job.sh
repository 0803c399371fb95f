#!/usr/bin/env bash
# A job's kernel library, from nothing: compiler, build, size. KERNEL BACKEND TOOLKIT OUT
set -euo pipefail
cd "$(dirname "$0")/../.."
kernel=$1 backend=$2 toolkit=$3 out=$4
python=python3
command -v python3.12 >/dev/null && python=python3.12  # manylinux images
if [ "${OS:-}" = Windows_NT ]; then
  python=python
  if [ "$backend" = cuda ]; then
    powershell -ExecutionPolicy Bypass -File .github/scripts/install_cuda.ps1 "$toolkit"
    export CUDACXX="C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA/v$toolkit/bin/nvcc.exe"
  fi
elif [ "$backend" = cuda ]; then
  bash .github/scripts/install_cuda.sh "$toolkit"
  # shellcheck disable=SC1091
  . /etc/profile.d/exl3-cuda.sh
fi
zig=()
if [ "$backend" = rocm ]; then
  bash .github/scripts/install_rocm_compiler.sh
  zig=(--zig)  # Debian's glibc is above the floor
fi
git config --global --add safe.directory "$PWD" 2>/dev/null || true
"$python" .github/scripts/build_kernels.py "$kernel" --out "$out" "${zig[@]}"
