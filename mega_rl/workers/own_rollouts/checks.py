"""Checks of the rows that a user's rollout source returns, before anything trains on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks, RolloutEngine, RolloutSource
from mega_rl.types import Draws, Metrics, Prompt, Rollout

_ABOVE_ZERO = 1e-3  # log-probs of near-certain tokens may exceed 0 by the rounding of bf16 logits


@dataclass(frozen=True)
class RowRules:
    """Limits of a run that each row must keep to."""

    max_prompt_tokens: int
    max_new_tokens: int
    vocab_size: int  # of the actor
    n: int


@dataclass(frozen=True)
class CheckedRollouts:
    """A user's rollout source whose rows are checked on every rank."""

    source: RolloutSource
    name: str  # the setting that chose it: "rollout.source='agent.py:Agent'"
    rules: RowRules
    engine: RolloutEngine | None  # that the source samples with
    data_parallel: Ranks
    replica: Ranks
    everyone: Ranks

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return the source's rows. Raises RunError on all ranks for rows that break a rule; collective."""
        rules = self.rules
        if draws is None:
            rollout = self.source.generate(prompts, step=step, greedy=greedy)
            n = 1 if greedy else rules.n
        else:
            rollout = self.source.generate(prompts, step=step, draws=draws)
            n, rules = draws.n, replace(rules, max_new_tokens=draws.max_new_tokens or rules.max_new_tokens)
        fault = next(_faults(rollout, own=share(len(prompts), self.data_parallel), n=n, rules=rules), None)
        self._raise(fault)
        digest = torch.tensor(_digest(rollout))
        least, most = -self.replica.max(-digest), self.replica.max(digest)
        self._raise(None if bool(least == most) else "the ranks of a replica return different rows; gather them")
        return rollout

    def metrics(self) -> Metrics:
        """Return the metrics of source and engine. Raises RunError on all ranks for what is no number; collective."""
        metrics = self.source.metrics()
        wrong = [
            f"{name!r}: {value!r}"
            for name, value in metrics.items()
            if not isinstance(name, str) or not isinstance(value, (int, float)) or not math.isfinite(value)
        ]
        self._raise(f"metrics() holds {wrong[0]}; legal: finite numbers by name" if wrong else None)
        of_engine = {} if self.engine is None else self.engine.metrics()
        return of_engine | {name: float(value) for name, value in metrics.items()}

    def _raise(self, fault: str | None) -> None:
        """Raise on all ranks if any has a fault; collective."""
        failure = None if fault is None else RunError(f"{self.name}: {fault}")
        raise_together(failure, self.everyone, error=RunError)


def _faults(rollout: object, *, own: range, n: int, rules: RowRules) -> Iterator[str]:
    """Yield the faults of a replica's rows, which are n samples of each prompt of `own`."""
    if not isinstance(rollout, Rollout):
        yield f"generate() returned {type(rollout).__name__}, not a Rollout"
        return
    rows, width = len(own) * n, rollout.tokens.shape[-1]
    columns = {
        "tokens": ((rows, width), torch.int64),
        "loss_mask": ((rows, width), torch.bool),
        "rollout_logprobs": ((rows, width), torch.float32),
        "finished": ((rows,), torch.bool),
        **dict.fromkeys(
            ("prompt_lengths", "lengths", "prompt_index", "sample_index", "weight_version"), ((rows,), torch.int64)
        ),
    }
    if rollout.failed is not None:
        columns["failed"] = ((rows,), torch.bool)
    for name, (shape, dtype) in columns.items():
        column = getattr(rollout, name)
        if tuple(column.shape) != shape or column.dtype != dtype:
            yield (
                f"{name} has shape {list(column.shape)} and type {column.dtype}; legal: {list(shape)} and {dtype}, "
                f"{n} samples of each of the replica's {len(own)} prompts"
            )
            return
    yield from _row_faults(rollout, rules)


def _row_faults(rollout: Rollout, rules: RowRules) -> Iterator[str]:
    """Yield the faults of rows whose columns have the right form."""
    keys = torch.stack([rollout.prompt_index, rollout.sample_index], dim=1)
    first, end = rollout.prompt_lengths[:, None], rollout.lengths[:, None]
    places = torch.arange(rollout.tokens.size(1))
    failed = torch.zeros_like(rollout.finished) if rollout.failed is None else rollout.failed
    mask, logprobs = rollout.loss_mask, rollout.rollout_logprobs
    empty = ~mask.any(dim=1)
    tokens = torch.where(places < end, rollout.tokens, 0)
    rules_of_rows = {
        f"has no prompt, or one of more than data.max_prompt_tokens={rules.max_prompt_tokens} tokens": (first < 1)
        | (first > rules.max_prompt_tokens),
        f"has a response of more than rollout.max_new_tokens={rules.max_new_tokens} tokens, or ends before its prompt "
        "or after the tokens": (end < first) | (end - first > rules.max_new_tokens) | (end > rollout.tokens.size(1)),
        "has loss_mask set outside its response": mask & ((places < first) | (places >= end)),
        "has no token on loss_mask, so that nothing trains; set `failed` where there is no answer": (empty & ~failed),
        "has failed, and tokens on loss_mask": failed & ~empty,
        f"has token ids outside the actor's vocabulary of {rules.vocab_size}": (tokens < 0)
        | (tokens >= rules.vocab_size),
        "has log-probs that are not finite or above 0": ~(logprobs <= _ABOVE_ZERO) | logprobs.isinf(),
        "has log-probs other than 0 off loss_mask": (logprobs != 0) & ~mask,
    }
    for fault, broken in rules_of_rows.items():
        if broken.any():
            row = int(broken.flatten(1).any(dim=1).nonzero()[0] if broken.dim() > 1 else broken.nonzero()[0])
            yield f"row {row}, prompt {int(keys[row, 0])} and sample {int(keys[row, 1])}, {fault}"


def _digest(rollout: Rollout) -> int:
    """Return 62 bits over the columns that train."""
    digest = xxhash.xxh3_64()
    for column in (rollout.tokens, rollout.loss_mask, rollout.rollout_logprobs, rollout.lengths):
        digest.update(_bytes(column))
    return digest.intdigest() >> 2


def _bytes(column: Tensor) -> memoryview:
    return column.contiguous().flatten().view(torch.uint8).numpy().data
