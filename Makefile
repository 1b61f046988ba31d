# Every command does all its set-up. PYTHON names the interpreter of a new environment (3.11 or 3.12).
PYTHON ?= python3
# What the quickstart trains on: megatron or fsdp.
ENGINE ?= megatron
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
SGLANG_STAMP := $(VENV)/.installed-sglang

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

INSTALL = if command -v uv >/dev/null 2>&1; \
	then uv pip install -q --python $(BIN)/python -c constraints.txt -e '$(1)'; \
	else $(BIN)/python -m pip install -qq -c constraints.txt -e '$(1)'; fi

# Into a folder of its own: only the server's process may see these packages.
INSTALL_SGLANG = if command -v uv >/dev/null 2>&1; \
	then uv pip install -q --python $(BIN)/python --no-deps --target $(VENV)/sglang -r $(1); \
	else $(BIN)/python -m pip install -qq --no-deps --target $(VENV)/sglang -r $(1); fi

.DELETE_ON_ERROR:
.PHONY: setup sglang quickstart test special-distributed check bench bench-converters bench-ddp bench-weight-sync bench-checkpoint bench-engines campaign-checkpoint parity docs

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

sglang: $(SGLANG_STAMP)
	@:

# SGLang on CPUs. Where torch has CUDA, `pip install -e '.[sglang]'` is the way instead.
$(SGLANG_STAMP): requirements-sglang-cpu.txt | $(STAMP)
	@rm -rf $@ $(VENV)/sglang
	@if $(BIN)/python -c 'import sys, torch; sys.exit(sys.platform == "linux" and not torch.version.cuda)'; \
	then echo "SGLang on CPUs is for Linux with a CPU build of torch: not installed"; \
	else echo "installing SGLang for CPUs"; $(call INSTALL_SGLANG,$<); fi
	@touch $@

quickstart: setup
	@$(BIN)/python -m mega_rl.quickstart quickstart --engine $(ENGINE)

test: setup sglang
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Programs on four ranks by themselves; `make test` runs them, too.
special-distributed: setup
	@bash tests/special_distributed/run_all.sh

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

bench-weight-sync: setup sglang
	@$(BIN)/python benchmarks/weight_sync.py --real

bench-checkpoint: setup
	@$(BIN)/python benchmarks/checkpoint.py

bench-engines: setup
	@$(BIN)/python benchmarks/engines.py

campaign-checkpoint: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint_campaign

docs: setup
	@$(BIN)/python -m mega_rl.config.render > docs/config.md
