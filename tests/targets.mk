# Campaigns, upstream releases, images and clusters; `make test` and `make test-fast` stand in the Makefile.
.PHONY: test-full test-nccl test-ray test-slurm test-newest compare-sglang test-versions test-swanlab test-triton special-distributed \
	campaign-agents campaign-checkpoint campaign-faults campaign-rl campaign-sandbox campaign-templates planted-faults cards two-hosts \
	slow-link wheel-check real-models doc-commands image-cpu image-lint test-image

# Every case of the tables of which `make test` takes some (tests/helpers/selection.py).
test-full: setup sglang te peers kubernetes triton linters
	@MEGA_RL_TESTS=full $(PYTEST_WORKERS)

# Tests of several ranks over the strict stand-in for NCCL (tests/helpers/strict_nccl.py), twelve minutes on two cores.
test-nccl: setup
	@MEGA_RL_TESTS_NCCL=strict $(PYTEST_WORKERS) $(addprefix tests/unit_tests/,distributed parallel engines ddp) \
		tests/workers

# Runs on a real Ray of this machine, three minutes.
test-ray: setup ray
	@PYTHONPATH=$(VENV)/ray:$(CURDIR) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clusters/ray

# Runs on a real Slurm of this machine, ten minutes; docs/schedulers.md says what to install.
test-slurm: setup
	@MEGA_RL_TESTS=slurm PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clusters/slurm

# Release of Megatron-Core for `make test-newest`: "other" than the one in .venv, 0.16.1 or the newest that is supported;
# "newest", or a version such as 0.18.2.
MEGATRON ?= other
# What reaches Megatron-Core.
MEGATRON_TESTS := $(addprefix tests/unit_tests/,ddp engines distributed parallel \
	checkpoint/test_layouts.py checkpoint/test_store.py converters/test_load.py converters/test_torch_dist.py \
	converters/test_wrapped.py converters/test_model_config.py plan/test_activations.py verify workers/test_models.py)

# Into .megatron/, a folder that only these tests see.
test-newest: setup
	@folder=$$($(BIN)/python -m tests.upstream.fetch $(MEGATRON)) && \
		PYTHONPATH="$$folder:$(CURDIR)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(MEGATRON_TESTS)

# Releases of SGLang in what we use of them; their sources are fetched, nothing is installed.
SGLANG ?= 0.5.22 0.5.23
compare-sglang: setup
	@$(BIN)/python -m tests.upstream.compare_sglang $(SGLANG)

# SwanLab wants an older protobuf than TensorBoard and W&B have here, so it gets a folder of its own.
test-swanlab: setup
	@$(BIN)/python -m pip install -q --upgrade --target $(VENV)/swanlab 'swanlab>=0.10'
	@PYTHONPATH=$(VENV)/swanlab OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit_tests/tracking/metrics/test_trackers.py -k swanlab

# Triton's kernels in its interpreter, which needs no GPU.
test-triton: setup triton
	@PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit_tests/parallel/test_vocab_kernels.py

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

# Every kill of a run that saves, as a table.
campaign-checkpoint: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint_campaign

# A thousand faults in real runs, as root: control groups, mounts, network namespaces. CAMPAIGN has its options.
CAMPAIGN ?= --faults 1000
campaign-faults: setup sglang ray
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fault_campaign $(CAMPAIGN)

# 10,000 trajectories in environments of which every tenth goes wrong, in a process and over HTTP; ten minutes.
campaign-agents: setup
	@MEGA_RL_TESTS=full OMP_NUM_THREADS=1 $(BIN)/python -m pytest -k 'hostile or costs_the_sample_by_kind' \
		tests/unit_tests/agents/test_environment.py tests/unit_tests/agents/test_remote.py

# 1,000 conversations with each chat template of ours and of TRL.
campaign-templates: setup peers
	@MEGA_RL_TESTS=full $(PYTEST_WORKERS) --dist load tests/unit_tests/agents/test_templates.py

# Hostile programs in the sandbox of this machine, as a table, and a run whose answers they are; ten minutes.
# SANDBOX='--only memory' takes some.
SANDBOX ?=
campaign-sandbox: setup bubblewrap
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile_programs $(SANDBOX)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile_programs --train $(SANDBOX)

# One fault after the other in a copy of the package: its tests must fail. PLANTED='--only TEXT' plants some of them.
PLANTED ?=
planted-faults: setup
	@$(BIN)/python -m tests.planted_faults $(PLANTED)

# Only the faults of reinforcement learning.
campaign-rl: setup
	@$(BIN)/python -m tests.planted_faults --areas algorithms advantages losses corrections experience data trainer steps reference parts

# The card of every family with a table, into build/cards, and the table of docs/converters.md; fifteen minutes.
# CARDS='qwen3 llama' makes some and leaves the document.
CARDS ?=
cards: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.cards $(CARDS)

# Weights to two SGLang servers on two hosts, network namespaces of this machine; as root.
two-hosts: setup sglang
	@$(BIN)/python -m tests.two_hosts

# Changes of weights against all of them, over 100 Mbit/s between two namespaces, to a real SGLang server; as root.
slow-link: setup sglang
	@$(BIN)/python -m tests.slow_link

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

# The image of docker/Dockerfile.cpu, on a base that debootstrap makes, into build/images; IMAGE has options of
# tests/release/cpu_image.py. As root, with buildah and debootstrap: four minutes, 12 GB.
IMAGE ?=
image-cpu: setup
	@$(BIN)/python -m tests.release.cpu_image build $(IMAGE)

# The image in use: doctor, the check at the start, the quickstart.
test-image: setup
	@$(BIN)/python -m tests.release.cpu_image use $(IMAGE)

# What hadolint and shellcheck say of docker/, and the rest of its tests; part of `make test`.
image-lint: setup linters
	@$(BIN)/python -m pytest tests/unit_tests/test_images.py
