# Needs Python 3.11+, make and Java 17+. Everything else is downloaded: packages into .venv, jars into the cache.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.ONESHELL:
MAKEFLAGS += --no-print-directory
export PYTHONUTF8 := 1

PYTHON ?= python3
JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
ARGS ?=
SPARK ?= 4.0.5
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest --no-header
PACKAGES := envelope persistence aggregations jobs
FAST := $(wildcard tests/unit tests/property tests/seeds)
SLOW := $(wildcard tests/simulation tests/spark tests/local tests/integration tests/contract tests/golden tests/docs tests/packaging) \
  $(shell grep -ls 'mark.integration' tests/seeds/test_*.py)
TLA := .headwater/tla-checker-0.24.0
STUBS := envelope/v1/envelope:envelope demo/v1/leg:jobs/demo

.PHONY: help demo test check lint tests-fast tests-slow explore coverage docs bench prove kills spark cluster soak mutants fuzz model manifests lock proto clean java

help:  ## show this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## (.*)/  make \1\t\2/' | expand -t 16

demo: $(READY) java  ## real flights, republished and aggregated, with crashes; ARGS='--flights 20000 --json'
	@$(BIN)/headwater demo $(ARGS)

test: check java  ## every test: check, contracts, simulation, Spark, a real broker, packaging
	@$(MAKE) tests-slow

check: lint tests-fast  ## format, lint, types, import direction, unit and property tests; about ten minutes on two cores

lint: $(READY)  ## format, lint, types and import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

tests-fast: $(READY)
	$(PYTEST) -q -n 2 -m 'not integration' $(FAST)

# Five files in parallel on two cores: many tests wait for triggers, timeouts and the start of servers.
tests-slow: $(READY) java
	$(BIN)/python -m tests.support.spark
	$(PYTEST) -q -n 5 --dist loadfile --no-loadscope-reorder --durations=15 -m 'not kills' $(SLOW)

explore: $(READY)  ## property tests with sixty times as many examples, new ones in each run; ARGS='-k windows'
	$(PYTEST) -q -n 2 --hypothesis-profile=explore tests/property $(ARGS)

docs: $(READY)  ## the documentation as a site, in build/docs/index.html; a warning is an error
	$(BIN)/python -m sphinx -b html -q -W --keep-going docs build/docs

coverage: $(READY)  ## lines and branches that unit and property tests reach; fails below the floor in pyproject.toml
	rm -rf .headwater/coverage
	mkdir -p .headwater/coverage
	$(BIN)/coverage run -m pytest --no-header -q -n 2 -m 'not integration' $(FAST)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

bench: $(READY) java  ## headwater compared with Kafka Streams and others, results checked; ARGS='--only headwater,kafka-streams --keys 10000 --json'
	@$(BIN)/python -m benchmarks $(ARGS)

prove: $(READY)  ## simulated worlds, every schedule of faults, planted bugs; ARGS='--seeds 2000 --schedules 50000 --json'
	@$(BIN)/python -m tests.simulation prove $(ARGS)

kills: $(READY) java  ## processes killed at every step, each filter and path, a whole chain, and what takes longest; about two hours
	$(PYTEST) -q -n 2 --dist loadfile -m kills tests/integration tests/local tests/spark tests/contract

spark: $(READY) java .headwater/spark/$(SPARK)  ## what uses Spark, with the oldest supported version of it or another; SPARK=4.1.4
	PYTHONPATH=$(CURDIR)/.headwater/spark/$(SPARK) $(PYTEST) -q -n 2 --dist loadfile -m 'not kills' tests/spark tests/integration/test_submit.py $(ARGS)

.headwater/spark/%: | $(READY)
	rm -rf $@.new
	$(BIN)/pip install -q --no-deps --target $@.new pyspark==$*
	mv $@.new $@

cluster: $(READY) java  ## a standalone Spark cluster that gets its packages in an archive; executors and drivers killed
	$(PYTEST) -q tests/cluster

soak: $(READY) java  ## real processes and servers, killed and disturbed for hours; resumable; ARGS='--minutes 30 --json'
	@$(BIN)/python -m tests.soak $(ARGS)

mutants: $(READY)  ## one change at a time in the core's code: does a test fail? ARGS='envelope.dedup.history.*', ARGS=report
	$(BIN)/python -m tests.mutants $(ARGS)

fuzz: $(READY)  ## a million damaged envelopes through the codec, then odd records through flows, republishers and copies; ARGS='--seed 7'
	$(BIN)/python -m tests.fuzz.codec $(ARGS)
	$(BIN)/python -m tests.fuzz.records $(ARGS)

model: $(TLA)/bin/tla  ## the rules as small TLA+ models, and broken variants that must fail; needs cargo; ARGS=Growth
	$(PYTHON) -m tests.models --checker $(TLA)/bin/tla $(ARGS)

manifests: $(READY)  ## the manifests in deploy/ against the schemas of Kubernetes and of the Spark operator; needs go
	$(BIN)/pip install -q 'kubernetes-validate>=1.37,<2'
	MODULE=$$(cd /tmp && GOFLAGS=-mod=mod go mod download -json github.com/kubeflow/spark-operator/v2@v2.3.0)
	DIRECTORY=$$($(PYTHON) -c 'import json, sys; print(json.loads(sys.argv[1])["Dir"])' "$$MODULE")
	$(BIN)/python -m tests.deploy "$$DIRECTORY/config/crd/bases/sparkoperator.k8s.io_sparkapplications.yaml"

lock: $(READY)  ## pin every dependency again; ARGS=--upgrade for newer versions
	$(BIN)/pip install -q 'uv>=0.9,<1'
	$(BIN)/uv pip compile pyproject.toml --group dev --group docs --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-annotate --no-header -q -o requirements.lock $(ARGS)

proto: $(READY)  ## generate the stubs, *_pb2.py and .pyi, from the schemas
	out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT
	for stub in $(STUBS); do
	  $(BIN)/python -m grpc_tools.protoc -Iproto --python_out="$$out" --pyi_out="$$out" headwater/$${stub%%:*}.proto
	  mv "$$out"/headwater/$${stub%%:*}_pb2.py* $${stub##*:}/
	done

clean:  ## stop the local stack; remove .venv and everything generated
	@if [ -x $(BIN)/headwater ] && [ -d .headwater ]; then $(BIN)/headwater stack down || true; fi
	@if [ -x $(BIN)/python ] && [ -d .headwater/soak ]; then $(BIN)/python -m tests.soak --remove; fi
	rm -rf .venv .headwater mutants build dist *.egg-info spark-warehouse .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "headwater needs Python 3.11 or newer; '$(PYTHON)' is not on PATH. Install it, or name it: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headwater needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12"; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python's venv module is not complete. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	if [ -t 1 ]; then quiet=; else quiet=-q; fi
	echo "Installing the pinned dependencies into .venv (a few minutes the first time) ..."
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(TLA)/bin/tla:
	@command -v cargo >/dev/null || { echo "The model checker is built with Rust's cargo, which was not found. On Debian: apt-get install cargo; or see rustup.rs"; exit 1; }
	cargo install tla-checker --version $(lastword $(subst -, ,$(TLA))) --locked --root $(TLA)

java:
	@command -v "$(JAVA)" >/dev/null || { echo "headwater needs Java 17 or newer for Spark and Kafka; '$(JAVA)' was not found. On Debian: apt-get install openjdk-17-jre-headless; or set JAVA_HOME"; exit 1; }
	major=$$("$(JAVA)" -version 2>&1 | sed -nE 's/.* version "(1\.)?([0-9]+).*/\2/p' | head -n 1)
	[ "$${major:-0}" -ge 17 ] || { echo "headwater needs Java 17 or newer; '$(JAVA)' is Java $${major:-of an unknown version}. Set JAVA_HOME to a newer one"; exit 1; }
