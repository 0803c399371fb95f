#!/usr/bin/env bash
# make test: builds the CPU backend in a virtual environment, compiles the GPU backends where a compiler for them is
# found (a notice where not), then lint, types and tests. Needs python3, a C++ compiler and the package registries.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${EXL3_TEST_VENV:-.venv}
step() { printf '\n== %s\n' "$*"; }

step "system packages"
need=()
command -v c++ >/dev/null || command -v g++ >/dev/null || need+=(g++)
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || need+=(python3-venv)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || need+=(chromium)  # the chat page's test
command -v clang-22 >/dev/null || need+=(clang-22 lld-22 llvm-22 clang-tools-22)
if ((${#need[@]})); then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null || echo "notice: could not install ${need[*]}"
  else
    echo "notice: not installed and no rights to install: ${need[*]}"
  fi
fi

step "virtual environment"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# shellcheck disable=SC1091
. "$VENV/bin/activate"
python -m pip install -q --upgrade pip
# a CPU build of torch suffices for the tests; an installed one is kept
python -c 'import torch' 2>/dev/null || python -m pip install -q "torch==${EXL3_TEST_TORCH:-2.13.0}"
python -m pip install -q "scikit-build-core>=0.10" "pybind11>=2.13" cmake ninja
step "build and install (CPU backend)"
python -m pip install -q --no-build-isolation ".[test]"
python -c 'import exl3; print("exl3", exl3.__version__)'

step "compile checks"
bash .ci/compile_gpu.sh

step "lint and types"
ruff check .
mypy

step "tests"
# from a folder of its own, so that the installed package is tested and not src/
python -m pytest tests -q -p no:cacheprovider --durations=15
