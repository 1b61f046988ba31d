"""Megatron-Core's GPTModel and the parts of it that are ours."""
