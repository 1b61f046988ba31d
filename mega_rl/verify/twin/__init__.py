"""Shrunk twins of checkpoints, and logits of Megatron-Core and of transformers on them."""
