"""Metrics of a step's optimizer steps, put together."""

from __future__ import annotations

from collections.abc import Sequence

from mega_rl.types import TRAINED_TOKENS, Metrics

# Metrics of an update itself. All others are means over the tokens of its mini-batch.
PER_UPDATE = {"grad_norm", "grad_clipped_fraction", "grad_reduce_bf16_error", "lr", "num_microbatches"}
PER_UPDATE |= {"zero_advantage_fraction"}


def mean_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Return the mean over a step's updates of one role, each weighted by its tokens that train.

    Metrics of `PER_UPDATE` weigh every update alike. Names that end in `_max` and `_min` have the extreme, in `_steps`
    and `_tokens` the sum. A metric that no update has is not there.
    """
    merged: dict[str, list[tuple[float, float]]] = {}
    for update in updates:
        tokens = next((value for name, value in update.items() if name.endswith(TRAINED_TOKENS)), 1.0)
        for name, value in update.items():
            merged.setdefault(name, []).append((value, 1.0 if name.partition("/")[2] in PER_UPDATE else tokens))
    return {name: _merged(name, *zip(*pairs, strict=True)) for name, pairs in merged.items()}


def _merged(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    for ending, merge in (("_max", max), ("_min", min), ("_steps", sum), ("_tokens", sum)):
        if name.endswith(ending):
            return float(merge(values))
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
