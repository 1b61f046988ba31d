"""Data parallelism: gradient buffers, FSDP, optimizers."""

from mega_rl.parallel.accelerator import prepare

prepare()  # before the modules of this package import Megatron-Core
