#!/usr/bin/env bash
# Compile check of the GPU backends with PyPI's cmake and ninja, for images that bring old ones.
set -euo pipefail
cd "$(dirname "$0")/../.."
python3 -m venv .whl/compile
.whl/compile/bin/python -m pip install -q --require-hashes -r .github/requirements/build.txt
PATH="$PWD/.whl/compile/bin:$PATH" bash .ci/compile_gpu.sh
