"""Megatron-Core's GPTModel and the parts of it that are ours."""

from mega_rl.accelerator import prepare

prepare()  # before the modules of this package import Megatron-Core
