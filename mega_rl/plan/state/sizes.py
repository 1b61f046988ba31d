"""Bytes of a model's state on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateBytes:
    """Bytes that stay from step to step, and those of the optimizer's step."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0  # FP32 main parameters and moments on the device
    host: int = 0  # optimizer state in host memory
    step: int = 0  # more, from the preparation of gradients to the next mini-batch

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
            self.step + other.step,
        )

    @property
    def device(self) -> int:
        """Return the bytes on the device between steps."""
        return self.weights + self.gradients + self.optimizer
