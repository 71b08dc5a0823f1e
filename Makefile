# Two commands do it all: `make quickstart` and `make test`. Both install what they need on the first call.
# `make` alone prints what there is: the texts behind `##`.
SHELL := /bin/bash
PYTHON_VERSION := 3.12
EXTRA ?= cpu
VENV := .venv
PY := $(VENV)/bin/python
UV := .tools/bin/uv
UV_VERSION := 0.13.9
DOCS_VENV := .docs-venv
GPU_VENV := .gpu-venv
# Of the GPU lock: source only, compiled by requirements/built.sh.
BUILT := transformer-engine-torch
SOURCES := requirements/built.txt requirements/built.sh
# What is source only besides (antlr4-python3-runtime, seconds) is built with locked tools too.
SYNC := pip sync --require-hashes --build-constraints requirements/build.txt
# Everything local to this machine: models, store, Prefect's and MLflow's databases.
export POLICYFLOW_HOME ?= $(CURDIR)/outputs
export PREFECT_HOME ?= $(POLICYFLOW_HOME)/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: help install quickstart test test-slow gpu-check gpu-env-check model bench docs lint lock server prefect-ui mlflow-ui s3 clean
.DEFAULT_GOAL := help

PROFILE ?= smollm2-cpu
RUN ?= quickstart

help:  ## this list
	@sed -nE 's/^([a-z0-9-]+):.*  ## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS=$$'\t' read -r target text; do printf 'make %-11s  %s\n' "$$target" "$$text"; done

install: $(VENV)/.installed-$(EXTRA)  ## the environment and nothing else; EXTRA=gpu, here and in every other call, for GPUs

quickstart: $(VENV)/.installed-$(EXTRA)  ## train SmolLM2 to add; the same command resumes an interrupted run
	@$(PY) -m flows train $(PROFILE) run=$(RUN) $(SET)

# vLLM, Megatron and Ray each own a process: every integration file gets one, so that none meets another's leftovers.
# Two run at a time, the longest first; a file's output is shown when it ends.
LONGEST := tests/integration/test_recovery.py tests/unit tests/integration/beam/test_vllm.py tests/integration/beam/test_trainer.py
# Where there is no GPU tests/gpu says so, once; where there is one its files are as the others.
GPU_TESTS := $(if $(filter gpu,$(EXTRA)),$(wildcard tests/gpu/test_*.py),tests/gpu)
TESTS ?= $(LONGEST) $(filter-out $(LONGEST),$(wildcard tests/integration/test_*.py tests/integration/*/test_*.py)) $(GPU_TESTS)
JOBS ?= 2

test: $(VENV)/.installed-$(EXTRA)  ## all tests, on the real components; TESTS=path runs some, JOBS=1 one after another
	@printf '%s\n' $(TESTS) | OMP_NUM_THREADS=1 xargs -P $(JOBS) -I {} bash -c \
	  'output=$$($(PY) -m pytest {} 2>&1); status=$$?; printf "== %s\n%s\n" {} "$$output"; \
	   test $$status = 5 || exit $$status'  # 5: all tests of the file are slow ones

model: $(VENV)/.installed-$(EXTRA)  ## MODEL=name writes a model of the catalog: smollm2, beam-tiny
	@$(PY) -m infra.models.catalog $(MODEL) "$$POLICYFLOW_HOME/models"

test-slow: $(VENV)/.installed-$(EXTRA)  ## whole runs through server and worker, killed and resumed, a stock vLLM server, new examples of the property tests: an hour
	@OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=search $(PY) -m pytest -m hypothesis tests/unit
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m slow tests/integration

gpu-check: $(VENV)/.installed-$(EXTRA)  ## tests/gpu and two steps in each precision, in 10 minutes; writes outputs/gpu-check.json
	@$(PY) -m tests.gpu.check $(ARGS)

gpu-env-check: $(GPU_VENV)/.installed  ## the GPU lock in an environment of its own, without a GPU: every module imported, tests/gpu_env; 10 GB, an hour the first time
	@for file in tests/gpu_env/test_*.py; do OMP_NUM_THREADS=1 $(GPU_VENV)/bin/python -m pytest $$file || exit 1; done

bench: $(VENV)/.installed-$(EXTRA)  ## BENCH=name runs one; results in tests/bench/results
	$(PY) -m tests.bench $(BENCH)

docs: $(VENV)/.installed-$(EXTRA) $(DOCS_VENV)/.installed  ## the documentation as a site in build/site; its generated pages anew; a broken link fails
	@$(PY) -m docs.pages
	@$(DOCS_VENV)/bin/zensical build --clean --strict

lint: $(VENV)/.installed-$(EXTRA)  ## what CI and pre-commit (.pre-commit-config.yaml) ask of every file
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/ty check

server: $(VENV)/.installed-$(EXTRA)  ## Prefect's server, work pools, deployments and a worker on this machine
	@$(PY) -m infra.orchestration.server

prefect-ui: $(VENV)/.installed-$(EXTRA)  ## Prefect's UI on the runs made here, http://127.0.0.1:4200
	@mkdir -p "$$PREFECT_HOME"
	env $$($(PY) -m infra.storage.urls prefect "$$PREFECT_HOME") $(VENV)/bin/prefect server start --host 127.0.0.1

mlflow-ui: $(VENV)/.installed-$(EXTRA)  ## MLflow's UI on the runs made here, http://127.0.0.1:5000
	@mkdir -p "$$POLICYFLOW_HOME"
	$(VENV)/bin/mlflow ui --host 127.0.0.1 --backend-store-uri "$$($(PY) -m infra.storage.urls mlflow "$$POLICYFLOW_HOME")"

s3: $(VENV)/.installed-$(EXTRA)  ## a real S3 server (SeaweedFS) on 127.0.0.1:8333
	$(PY) -m infra.storage.s3_server --dir "$$POLICYFLOW_HOME/s3" --port 8333 --bucket policyflow

# The environment, from the lock with hashes. uv itself, pinned too, comes into .tools, whatever Python is at hand.
$(UV): requirements/uv.txt
	@echo "installing the environment, 1 of 5: uv $(UV_VERSION), the installer (seconds)"
	@python3 -m venv .tools && .tools/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $< && touch $@

$(VENV)/.installed-$(EXTRA): requirements/$(EXTRA).txt requirements/build.txt $(if $(filter gpu,$(EXTRA)),$(SOURCES)) pyproject.toml | $(UV)
	@echo "installing the environment, 2 of 5: Python $(PYTHON_VERSION) (seconds; it is downloaded where this machine has none)"
	@test -x $(PY) || $(UV) venv --quiet --python $(PYTHON_VERSION) $(VENV)
	@echo "installing the environment, 3 of 5: $$(grep -c == $<) packages of $< (about 7 GB: 3 to 5 minutes the first time)"
	@$(UV) $(SYNC) --python $(VENV) $<
	@# Compiled once: with PYTHONDONTWRITEBYTECODE set, every process would compile vLLM, torch and Megatron anew.
	@echo "installing the environment, 4 of 5: Python files are compiled (1 to 2 minutes)"
	@$(UV) $(SYNC) --compile-bytecode --python $(VENV) $<
	@$(if $(filter gpu,$(EXTRA)),$(BUILDING); requirements/built.sh $(UV) $(VENV))
	@echo "installing the environment, 5 of 5: policyflow itself"
	@$(UV) pip install --quiet --python $(VENV) --no-deps --editable .
	@rm -f $(VENV)/.installed-* && touch $@  # CPU and GPU packages take each other's place

BUILDING = echo "Transformer Engine is compiled against the locked torch: 20 minutes of one core, $$(nproc) here; once, uv keeps the wheel"

# The GPU's environment beside the CPU's, on any machine: what of it can be tried without a device.
$(GPU_VENV)/.installed: requirements/gpu.txt requirements/build.txt $(SOURCES) requirements/oracles.txt pyproject.toml | $(UV)
	@echo "installing the GPU environment into $(GPU_VENV) (about 10 GB)"
	@test -x $(GPU_VENV)/bin/python || $(UV) venv --quiet --python $(PYTHON_VERSION) $(GPU_VENV)
	@$(UV) $(SYNC) --quiet --compile-bytecode --python $(GPU_VENV) requirements/gpu.txt
	@$(BUILDING); requirements/built.sh $(UV) $(GPU_VENV)
	@$(UV) pip install --quiet --python $(GPU_VENV) --no-deps --editable .
	@# Other people's code that ours is compared with: beside the environment, not in it.
	@$(UV) pip install --quiet --python $(GPU_VENV) --target $(GPU_VENV)/oracles --no-deps --require-hashes -r requirements/oracles.txt
	@touch $@

# What builds the documentation has an environment of its own: the main lock knows nothing of it.
$(DOCS_VENV)/.installed: requirements/docs.txt | $(UV)
	@test -x $(DOCS_VENV)/bin/python || $(UV) venv --quiet --python $(PYTHON_VERSION) $(DOCS_VENV)
	@$(UV) pip sync --quiet --python $(DOCS_VENV)/bin/python --require-hashes requirements/docs.txt && touch $@

lock: | $(UV)  ## resolve again: requirements/uv.txt, cpu.txt, gpu.txt, built.txt, build.txt, oracles.txt, docs.txt
	echo uv==$(UV_VERSION) | $(UV) pip compile --quiet --python-version $(PYTHON_VERSION) --generate-hashes --no-header - -o requirements/uv.txt
	$(UV) pip compile --quiet --python $(PYTHON_VERSION) --generate-hashes --no-header pyproject.toml --extra cpu --group dev -o requirements/cpu.txt
	$(UV) pip compile --quiet --python $(PYTHON_VERSION) --generate-hashes --no-header pyproject.toml --extra gpu --group dev \
	  --no-emit-package $(BUILT) -o requirements/gpu.txt
	sed -n 's/^transformer-engine==\([^ ]*\).*/$(BUILT)==\1/p' requirements/gpu.txt \
	  | $(UV) pip compile --quiet --python $(PYTHON_VERSION) --generate-hashes --no-header --no-deps - -o requirements/built.txt
	printf 'setuptools\nwheel\n' | $(UV) pip compile --quiet --python $(PYTHON_VERSION) --generate-hashes --no-header - -o requirements/build.txt
	printf 'skyrl==0.4.0\njaxtyping\nwadler-lindig\n' | $(UV) pip compile --quiet --python $(PYTHON_VERSION) --generate-hashes --no-header --no-deps - -o requirements/oracles.txt
	$(UV) pip compile --quiet --python-version $(PYTHON_VERSION) --generate-hashes --no-header --group docs -o requirements/docs.txt

clean:  ## remove what runs have left in outputs/ (not the environment, nor what lies elsewhere)
	rm -rf "$(CURDIR)/outputs"
