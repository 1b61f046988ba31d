"""PPO and GRPO post-training of language models on NVIDIA Megatron-Core."""

__version__ = "0.1.0"
