# Everything runs in virtual environments of its own; a fresh machine needs python3 and a C++ compiler.
PYTHON ?= python3
MODEL ?=

.PHONY: demo test lint wheel clean
demo:  ## quantize a real model, judge it, talk to it
	$(PYTHON) benchmarks/demo.py $(if $(MODEL),--model $(MODEL))

test:  ## build, lint, types, tests; compile checks for CUDA and AMD where a compiler is found
	PYTHON=$(PYTHON) bash .ci/test.sh

clean:
	rm -rf build dist .venv demo-work

BACKEND ?= cpu
WHEEL_DIR ?= dist
wheel:  ## a release wheel on this machine: BACKEND=cpu|cuda|rocm WHEEL_DIR=dist, and KERNEL, CUDA_ARCHS, LABEL, TORCH
	$(PYTHON) .github/scripts/wheel.py $(BACKEND) --out $(WHEEL_DIR) $(if $(KERNEL),--kernel $(KERNEL)) \
	  $(if $(CUDA_ARCHS),--archs "$(CUDA_ARCHS)") $(if $(LABEL),--label $(LABEL)) $(if $(TORCH),--torch $(TORCH))
