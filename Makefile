# Every command does all its set-up. PYTHON names the interpreter of a new environment (3.11 or 3.12).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

INSTALL = if command -v uv >/dev/null 2>&1; \
	then uv pip install -q --python $(BIN)/python -c constraints.txt -e '$(1)'; \
	else $(BIN)/python -m pip install -qq -c constraints.txt -e '$(1)'; fi

.DELETE_ON_ERROR:
.PHONY: setup quickstart test check bench bench-converters bench-ddp parity docs

setup: $(STAMP)
	@:

# The stamp comes last and goes first: an environment without one is half-made and is built anew.
$(STAMP): pyproject.toml constraints.txt
	@if [ -f $@ ]; then echo "updating $(VENV)"; rm -f $@; \
	else echo "making $(VENV)"; \
		if command -v uv >/dev/null 2>&1; then uv venv -q --clear --python $(PYTHON) $(VENV); \
		else $(PYTHON) -m venv --clear $(VENV); fi; fi
	@$(call INSTALL,.[dev])
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(call INSTALL,.[bench])
	@touch $@

quickstart: setup
	@$(BIN)/python -m mega_rl.quickstart

test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(BENCH_STAMP)
	@$(BIN)/python benchmarks/e2e.py

parity: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity_table

bench-converters: $(BENCH_STAMP)
	@$(BIN)/python benchmarks/converters.py

bench-ddp: setup
	@$(BIN)/python benchmarks/ddp.py

docs: setup
	@$(BIN)/python -m mega_rl.config.render > docs/config.md
