"""Weights of the actor on their way to a user's rollout source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from mega_rl.types import Metrics

Weights = Iterator[tuple[str, Tensor]]  # (Hugging Face name, full tensor in training dtype)


class WeightReceiver(Protocol):
    """A rollout source that samples with weights of its own, as through an inference server."""

    def receive_weights(self, weights: Weights, *, version: int) -> None:
        """Take every weight of the actor; collective, so every rank reads `weights`, and one may write them.

        A tensor stays as it is until the next one is asked for.
        """
        ...


@dataclass
class WeightsToSource:
    """Weight sync of a run without an engine: each publish hands the weights to the source, or only counts."""

    export: Callable[[], Weights]  # collective
    receiver: WeightReceiver | None = None  # None for a source that needs no weights, as of recorded rollouts
    _version: int = field(default=0, init=False)

    @property
    def weight_version(self) -> int:
        """Return the version of the weights that the source has; 0 before the first publish."""
        return self._version

    def resume_at(self, version: int) -> None:
        """Let the next publish send the weights of `version` again."""
        self._version = version - 1

    def publish(self) -> Metrics:
        """Hand over every weight and raise the version."""
        if self.receiver is not None:
            weights = self.export()
            self.receiver.receive_weights(weights, version=self._version + 1)
            for _ in weights:  # what the source left: every rank takes part in gathering it
                pass
        self._version += 1
        return {"rollout/weight_version": float(self._version)}
