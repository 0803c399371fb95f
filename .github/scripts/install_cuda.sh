#!/usr/bin/env bash
# The CUDA compiler of one release, without driver or libraries but cudart, in a manylinux_2_28 container or on Ubuntu.
#   bash .github/scripts/install_cuda.sh 12.8
# Prints nothing but dnf's or apt's errors; afterwards source /etc/profile.d/exl3-cuda.sh
set -euo pipefail
release=${1:?which CUDA release, such as 12.8}
dashed=${release/./-}
machine=$(uname -m)
repo=https://developer.download.nvidia.com/compute/cuda/repos
if command -v dnf >/dev/null; then
  arch=$machine
  [ "$machine" = aarch64 ] && arch=sbsa
  dnf install -y -q dnf-plugins-core
  dnf config-manager --add-repo "$repo/rhel8/$arch/cuda-rhel8.repo"
  # gcc 13 is the newest host compiler that every release of the matrix takes
  dnf install -y -q "cuda-nvcc-$dashed" "cuda-cudart-devel-$dashed" "cuda-cuobjdump-$dashed" gcc-toolset-13-gcc-c++
  host=/opt/rh/gcc-toolset-13/root/usr/bin/g++
else
  arch=x86_64
  [ "$machine" = aarch64 ] && arch=sbsa
  curl -fsSLo /tmp/cuda-keyring.deb "$repo/ubuntu2404/$arch/cuda-keyring_1.1-1_all.deb"
  dpkg -i /tmp/cuda-keyring.deb
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "cuda-nvcc-$dashed" "cuda-cudart-dev-$dashed" "cuda-cuobjdump-$dashed" g++-13
  host=/usr/bin/g++-13
fi
mkdir -p /etc/profile.d
printf 'export PATH=/usr/local/cuda-%s/bin:$PATH\nexport CUDACXX=/usr/local/cuda-%s/bin/nvcc\nexport CUDAHOSTCXX=%s\n' "$release" "$release" "$host" > /etc/profile.d/exl3-cuda.sh
if [ -n "${GITHUB_ENV:-}" ]; then
  printf 'CUDACXX=/usr/local/cuda-%s/bin/nvcc\nCUDAHOSTCXX=%s\n' "$release" "$host" >> "$GITHUB_ENV"
  echo "/usr/local/cuda-$release/bin" >> "$GITHUB_PATH"
fi
"/usr/local/cuda-$release/bin/nvcc" --version | tail -1
