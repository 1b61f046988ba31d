"""Engines: Megatron-Core, and Hugging Face's models under FSDP2."""

from mega_rl.parallel.accelerator import prepare

prepare()  # before the modules of this package import Megatron-Core
