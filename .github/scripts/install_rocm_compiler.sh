#!/usr/bin/env bash
# clang 22 with lld, on Debian: all that the AMD kernels need. No ROCm: the HIP runtime is looked up when a card is used.
set -euo pipefail
apt-get update -qq
apt-get install -y -qq --no-install-recommends clang-22 lld-22 llvm-22 clang-tools-22 g++ python3-venv python3-dev git ca-certificates
clang-22 --version | head -1
