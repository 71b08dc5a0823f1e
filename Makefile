# Two commands do it all: `make quickstart` and `make test`. Both install what they need on the first call.
SHELL := /bin/bash
PYTHON_VERSION := 3.12
EXTRA ?= cpu
VENV := .venv
PY := $(VENV)/bin/python
UV := .tools/bin/uv
UV_VERSION := 0.13.9
# Everything local to this machine: models, store, Prefect's and MLflow's databases.
export POLICYFLOW_HOME ?= $(CURDIR)/outputs
export PREFECT_HOME ?= $(POLICYFLOW_HOME)/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: quickstart test test-slow model bench lint lock server prefect-ui mlflow-ui s3 clean
.DEFAULT_GOAL := quickstart

PROFILE ?= smollm2-cpu
RUN ?= quickstart

quickstart: $(VENV)/.installed-$(EXTRA)  ## train SmolLM2 to add; the same command resumes an interrupted run
	@$(PY) -m flows train $(PROFILE) run=$(RUN) $(SET)

# vLLM, Megatron and Ray each own a process: every integration file gets one, so that none meets another's leftovers.
# Two run at a time, the longest first; a file's output is shown when it ends.
LONGEST := tests/integration/test_recovery.py tests/unit tests/integration/beam/test_vllm.py tests/integration/beam/test_trainer.py
TESTS ?= $(LONGEST) $(filter-out $(LONGEST),$(wildcard tests/integration/test_*.py tests/integration/*/test_*.py))
JOBS ?= 2

test: $(VENV)/.installed-$(EXTRA)  ## all tests, on the real components; TESTS=path runs some, JOBS=1 one after another
	@printf '%s\n' $(TESTS) | OMP_NUM_THREADS=1 xargs -P $(JOBS) -I {} bash -c \
	  'output=$$($(PY) -m pytest {} 2>&1); status=$$?; printf "== %s\n%s\n" {} "$$output"; \
	   test $$status = 5 || exit $$status'  # 5: all tests of the file are slow ones

model: $(VENV)/.installed-$(EXTRA)  ## MODEL=name writes a model of the catalog: smollm2, beam-tiny
	@$(PY) -m infra.models.catalog $(MODEL) $(POLICYFLOW_HOME)/models

test-slow: $(VENV)/.installed-$(EXTRA)  ## whole runs through server and worker, killed and resumed, and a stock vLLM server: a quarter of an hour
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m slow tests/integration

bench: $(VENV)/.installed-$(EXTRA)  ## BENCH=name runs one; results in tests/bench/results
	$(PY) -m tests.bench $(BENCH)

lint: $(VENV)/.installed-$(EXTRA)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/ty check

server: $(VENV)/.installed-$(EXTRA)  ## Prefect's server, work pools, deployments and a worker on this machine
	@$(PY) -m infra.server --home $(PREFECT_HOME)

prefect-ui: $(VENV)/.installed-$(EXTRA)  ## Prefect's UI on the runs made here, http://127.0.0.1:4200
	@mkdir -p $(PREFECT_HOME)
	$(VENV)/bin/prefect server start --host 127.0.0.1

mlflow-ui: $(VENV)/.installed-$(EXTRA)  ## MLflow's UI on the runs made here, http://127.0.0.1:5000
	@mkdir -p $(POLICYFLOW_HOME)
	$(VENV)/bin/mlflow ui --host 127.0.0.1 --backend-store-uri sqlite:///$(POLICYFLOW_HOME)/mlflow.db

s3: $(VENV)/.installed-$(EXTRA)  ## a real S3 server (SeaweedFS) on 127.0.0.1:8333
	$(PY) -m infra.s3_server --dir $(POLICYFLOW_HOME)/s3 --port 8333 --bucket policyflow

# The environment, from the lock with hashes. uv itself, pinned too, comes into .tools, whatever Python is at hand.
$(UV): requirements/uv.txt
	@python3 -m venv .tools && .tools/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $< && touch $@

$(VENV)/.installed-$(EXTRA): requirements/$(EXTRA).txt pyproject.toml | $(UV)
	@echo "installing the environment from requirements/$(EXTRA).txt (about 7 GB; minutes the first time)"
	@test -x $(PY) || $(UV) venv --quiet --python $(PYTHON_VERSION) $(VENV)
	@# Compiled once: with PYTHONDONTWRITEBYTECODE set, every process would compile vLLM, torch and Megatron anew.
	@$(UV) pip sync --quiet --compile-bytecode --python $(VENV) --require-hashes requirements/$(EXTRA).txt
	@$(UV) pip install --quiet --python $(VENV) --no-deps --editable .
	@rm -f $(VENV)/.installed-* && touch $@  # CPU and GPU packages take each other's place

lock: | $(UV)  ## resolve again: requirements/uv.txt, cpu.txt, gpu.txt
	echo uv==$(UV_VERSION) | $(UV) pip compile --quiet --python-version $(PYTHON_VERSION) --generate-hashes --no-header - -o requirements/uv.txt
	$(UV) pip compile --quiet --python $(PYTHON_VERSION) --generate-hashes --no-header pyproject.toml --extra cpu --group dev -o requirements/cpu.txt
	$(UV) pip compile --quiet --python $(PYTHON_VERSION) --generate-hashes --no-header pyproject.toml --extra gpu --group dev -o requirements/gpu.txt

clean:  ## remove what runs have left in outputs/ (not the environment, nor what lies elsewhere)
	rm -rf "$(CURDIR)/outputs"
