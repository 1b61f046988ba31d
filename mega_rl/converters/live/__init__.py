"""Weights into and out of live Megatron-Core models."""
