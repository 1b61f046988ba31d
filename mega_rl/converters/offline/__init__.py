"""Conversion, comparison and description of checkpoints without a model."""
