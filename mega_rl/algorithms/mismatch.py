"""Mismatch between the trainer's log-probs and those of the engine that sampled the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Lower ends of the histogram's bins in nats, from the second bin on: the first begins at 0, the last has no end. FP32
# engines of one kind stay below 1e-5, most tokens of bf16 ones below 0.1.
BIN_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_NO_TOKENS = (0,) * (len(BIN_EDGES) + 1)
_NUMBERS = 9  # of a summary, besides its histogram
SUMMARY_SIZE = _NUMBERS + len(_NO_TOKENS)


@dataclass(frozen=True)
class LogprobMismatch:
    """|trainer - rollout| log-prob over some tokens, and the token where it is largest."""

    sum: float  # nats, over all tokens
    count: int  # tokens
    max: float  # nats; a difference that is not a number counts as infinite
    prompt_index: int = -1  # of the worst token; -1 when there are no tokens
    sample_index: int = -1
    position: int = -1  # column of the worst token in its row: prompt, then response
    token_id: int = -1
    rollout_logprob: float = 0.0
    trainer_logprob: float = 0.0
    histogram: tuple[int, ...] = _NO_TOKENS  # tokens in [0, 1e-6), [1e-6, 1e-5), ... [1, inf] nats; see BIN_EDGES

    @property
    def mean(self) -> float:
        """Mean difference in nats; 0 without tokens."""
        return self.sum / self.count if self.count else 0.0

    @property
    def share_of_large(self) -> float:
        """Share of tokens with a difference of `BIN_EDGES[-1]` = 1 nat or more; 0 without tokens."""
        return self.histogram[-1] / self.count if self.count else 0.0

    def metrics(self, name: str = "rollout/logprob_diff") -> dict[str, float]:
        """Return `<name>_max`, `<name>_mean`, and the histogram as the share of tokens in each bin.

        The bins are `<name>_share_below_1e-06`, `<name>_share_from_1e-06`, ... `<name>_share_from_1e+00`, each up to
        the next one's lower end.
        """
        bins = [f"below_{BIN_EDGES[0]:.0e}", *(f"from_{edge:.0e}" for edge in BIN_EDGES)]
        tokens = max(self.count, 1)
        shares = {f"{name}_share_{label}": n / tokens for label, n in zip(bins, self.histogram, strict=True)}
        return {f"{name}_max": self.max, f"{name}_mean": self.mean} | shares

    def describe_worst(self) -> str:
        """Describe the worst token, for the message that stops a run."""
        return (
            f"token id {self.token_id} at position {self.position} of prompt_index={self.prompt_index}, "
            f"sample_index={self.sample_index}: rollout log-prob {self.rollout_logprob:.6g}, trainer log-prob "
            f"{self.trainer_logprob:.6g}, difference {self.max:.6g} nats"
        )

    def pack(self, *, rank: int, size: int) -> Tensor:
        """[size, SUMMARY_SIZE] float64, this rank's summary in row `rank`, zeros elsewhere.

        The elementwise sum over the ranks is what `combine` takes: one collective for everything.
        """
        packed = torch.zeros(size, SUMMARY_SIZE, dtype=torch.float64)
        values = (self.sum, self.count, self.max, self.prompt_index, self.sample_index, self.position, self.token_id)
        logprobs = self.rollout_logprob, self.trainer_logprob
        packed[rank] = torch.tensor([*values, *logprobs, *self.histogram], dtype=torch.float64)
        return packed


def logprob_mismatch(
    rollout_logprobs: Tensor,
    trainer_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    tokens: Tensor,
    prompt_index: Tensor,
    sample_index: Tensor,
) -> LogprobMismatch:
    """Mismatch over the masked tokens of one rank.

    rollout_logprobs, trainer_logprobs: [B, S] floating; loss_mask: [B, S] bool; tokens: [B, S] int64; prompt_index,
    sample_index: [B] int64. The first of several equal differences, row by row, is the worst token.
    """
    rows, columns = loss_mask.nonzero(as_tuple=True)
    if not len(rows):
        return LogprobMismatch(sum=0.0, count=0, max=0.0)
    difference = (trainer_logprobs[rows, columns].double() - rollout_logprobs[rows, columns].double()).abs()
    difference = torch.where(difference.isnan(), torch.inf, difference)
    worst = int(difference.argmax())
    row, column = int(rows[worst]), int(columns[worst])
    return LogprobMismatch(
        sum=float(difference.sum()),
        count=len(rows),
        max=float(difference[worst]),
        prompt_index=int(prompt_index[row]),
        sample_index=int(sample_index[row]),
        position=column,
        token_id=int(tokens[row, column]),
        rollout_logprob=float(rollout_logprobs[row, column]),
        trainer_logprob=float(trainer_logprobs[row, column]),
        histogram=_histogram(difference),
    )


def _histogram(difference: Tensor) -> tuple[int, ...]:
    """Tokens in each bin; difference: [N] float64, may be infinite."""
    edges = torch.tensor(BIN_EDGES, dtype=torch.float64, device=difference.device)
    bins = torch.bucketize(difference, edges, right=True)
    return tuple(torch.bincount(bins, minlength=len(_NO_TOKENS)).tolist())


def combine(packed: Tensor) -> LogprobMismatch:
    """Mismatch over all ranks.

    packed: [ranks, SUMMARY_SIZE] float64, the sum over ranks of what each one's `LogprobMismatch.pack` returned. Equal
    worst differences are settled by (prompt, sample, position), so it does not matter which rank held which row.
    """
    rows = [_unpack(values) for values in packed.tolist()]
    filled = [row for row in rows if row.count]
    if not filled:
        return LogprobMismatch(sum=0.0, count=0, max=0.0)
    worst = min(filled, key=lambda row: (-row.max, row.prompt_index, row.sample_index, row.position))
    return LogprobMismatch(
        sum=sum(row.sum for row in filled),
        count=sum(row.count for row in filled),
        max=worst.max,
        prompt_index=worst.prompt_index,
        sample_index=worst.sample_index,
        position=worst.position,
        token_id=worst.token_id,
        rollout_logprob=worst.rollout_logprob,
        trainer_logprob=worst.trainer_logprob,
        histogram=tuple(sum(bin_counts) for bin_counts in zip(*(row.histogram for row in filled), strict=True)),
    )


def _unpack(values: list[float]) -> LogprobMismatch:
    numbers, histogram = values[:_NUMBERS], values[_NUMBERS:]
    total, count, largest, prompt_index, sample_index, position, token_id, rollout_logprob, trainer_logprob = numbers
    return LogprobMismatch(
        sum=total,
        count=int(count),
        max=largest,
        prompt_index=int(prompt_index),
        sample_index=int(sample_index),
        position=int(position),
        token_id=int(token_id),
        rollout_logprob=rollout_logprob,
        trainer_logprob=trainer_logprob,
        histogram=tuple(int(tokens) for tokens in histogram),
    )
