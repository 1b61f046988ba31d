# Benchmarks; `make bench` stands in the Makefile, and README.md here says what each measures.
.PHONY: bench-converters bench-ddp bench-weight-sync bench-checkpoint bench-restart bench-device bench-engines bench-learn \
	bench-curves

bench-converters: bench-environment
	@$(BIN)/python benchmarks/converters.py

bench-ddp: setup
	@$(BIN)/python benchmarks/ddp.py

bench-weight-sync: setup sglang
	@$(BIN)/python benchmarks/weight_sync.py --real

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
	@OMP_NUM_THREADS=1 $(BIN)/mega-rl bench learn --ablations --json docs/learning.json
	@$(BIN)/python benchmarks/learn_page.py

# GRPO's learning curves next to TRL's, five seeds each.
bench-curves: bench-environment
	@$(BIN)/python benchmarks/learning.py
