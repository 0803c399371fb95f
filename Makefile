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
