"""Weights, gradients and optimizer state of a model on each rank, in bytes."""
