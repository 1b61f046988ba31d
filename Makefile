# `make help` shows the targets of every day. The others stand next to what they run: tests/environments.mk,
# tests/targets.mk and benchmarks/targets.mk. Every target does all its set-up.
# PYTHON names the interpreter of a new environment (3.11 or newer). Left out: the newest that runs of those below, since
# Megatron-Core 0.19 is for 3.12 and newer (constraints.txt). A shim of pyenv may be there and not run.
PYTHONS := python3.13 python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.13.*/bin/python3 \
	"$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python3 python3
RUNS := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in $(PYTHONS); do "$$python" -c '$(RUNS)' 2>/dev/null && echo "$$python" && break; done)
# What the quickstart trains on: megatron or fsdp.
ENGINE ?= megatron
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# The tests start hundreds of processes: each would compile the whole package where byte code may not be kept.
unexport PYTHONDONTWRITEBYTECODE

INSTALL = if command -v uv >/dev/null 2>&1; \
	then uv pip install -q --python $(BIN)/python -c constraints.txt -e '$(1)'; \
	else $(BIN)/python -m pip install -qq -c constraints.txt -e '$(1)'; fi

# Workers take whole files, so that fixtures of modules are made once. Most of a test of several ranks is waiting for
# messages, which is why there are more workers than cores.
WORKERS ?= 3
PYTEST_WORKERS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DELETE_ON_ERROR:
.PHONY: help setup quickstart check fmt test test-fast bench docs

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo "More: tests/targets.mk (campaigns, upstream releases, images), benchmarks/targets.mk, tests/environments.mk"

setup: $(STAMP) ## the environment .venv, with the packages of constraints.txt
	@:

# The stamp comes last and goes first: an environment without one is half-made and is built anew.
$(STAMP): pyproject.toml constraints.txt
	@if [ -f $@ ]; then echo "updating $(VENV)"; rm -f $@; \
	else echo "making $(VENV)"; \
		if command -v uv >/dev/null 2>&1; then uv venv -q --clear --python $(PYTHON) $(VENV); \
		else $(PYTHON) -m venv --clear $(VENV); fi; fi
	@$(call INSTALL,.[dev])
	@touch $@

quickstart: setup ## train a small model in a minute; ENGINE=fsdp for the other engine
	@$(BIN)/mega-rl quickstart --engine $(ENGINE)

check: setup ## ruff, mypy, import contracts, the pages of the documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory site

fmt: setup ## repair what ruff can repair by itself
	@$(BIN)/ruff check --quiet --fix .; $(BIN)/ruff format --quiet .

test-fast: setup ## tests that start no ranks, servers or programs, two minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --fast

test: setup sglang te peers kubernetes triton linters ## all tests, ten minutes on two cores
	@$(PYTEST_WORKERS)

bench: bench-environment ## a training step against TRL's
	@$(BIN)/python benchmarks/e2e.py

docs: setup ## write the pages and tables that come from the code
	@$(BIN)/python -m mega_rl.config.render > docs/config.md
	@$(BIN)/python -m tests.code_tables
	@$(BIN)/python -m tests.scale_pages
	@$(BIN)/python scripts/metrics_table.py
	@$(BIN)/python scripts/package_map.py

include tests/environments.mk tests/targets.mk benchmarks/targets.mk
