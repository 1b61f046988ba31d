"""Batches that travel through one training step.

Shape letters: B sequences of this data-parallel rank, S padded length, T packed tokens, V vocabulary, H hidden,
L mixtures of experts, K experts that a token goes to.

Every per-token tensor is aligned to the token that it describes: `old_logprobs[b, t]` is the log-probability of
`tokens[b, t]` given `tokens[b, :t]`, `values[b, t]` is predicted just before it. `mega_rl.data.packing` shifts.
Rows are right-padded: prompt, response, padding; between two turns of a response stand tokens that are off the loss
mask. Batches live on the host; an engine moves each micro-batch to its device and brings results back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import tensorclass
from torch import Tensor

JsonObject = Mapping[str, Any]  # decoded JSON
Answer = str | bool | list[Any] | dict[str, Any] | None  # a reference answer as its row has it, numbers as strings


@dataclass(frozen=True)
class Given:
    """A given answer: the tokenised row with its prompt, and which tokens train."""

    token_ids: tuple[int, ...]  # (3, 11, 4, 9, 2)
    spans: tuple[tuple[int, int], ...]  # ((3, 5),): first position that trains, and the one past the last; from 1 on


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, tokenised."""

    index: int  # row number in the data set: 17
    token_ids: tuple[int, ...]  # (3, 11, 4)
    text: str  # the reward function sees it: "3+4="
    answer: Answer  # the reference answer: "7"; None where the row has none
    messages: tuple[tuple[str, str], ...] = ()  # (role, content) of each, where a chat template made the tokens
    row: Mapping[str, Any] | None = None  # every column of the row, where the reward asks for them
    source: str = ""  # its part of a mixture, "math", or the data source of its row, where rewards go by it
    given: tuple[Given, ...] = ()  # answers of a run without sampling: one, or the chosen and the rejected
    worth: float = 0.0  # margin of a pair; 1 for a desired answer and -1 for another, where answers have labels


@dataclass(frozen=True)
class PromptSet:
    """Prompts that an evaluation reports on together."""

    name: str  # "gsm8k"; "" for the only or main one
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Draws:
    """Sampling of an evaluation."""

    n: int  # samples of each prompt
    temperature: float  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all tokens
    stream: int = 0  # stream of random numbers; each set of prompts has its own
    first: int = 0  # position of the first prompt in its set, which random numbers go by
    max_new_tokens: int = 0  # a response's; 0 is the longest of training


def response_mask(prompt_lengths: Tensor, lengths: Tensor, *, width: int) -> Tensor:
    """Return [B, width] bool, True from each row's prompt length to its length, [B] int64."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])


def row_numbers(mask: Tensor, branch: Tensor | None = None) -> Tensor:
    """Return [B, S] int64: the trajectory's number from 1 where `mask` is True, else 0."""
    places = torch.arange(1, len(mask) + 1, device=mask.device) if branch is None else (branch == 0).cumsum(0)
    return mask * places[:, None]


def over_trajectory(x: Tensor, branch: Tensor | None) -> Tensor:
    """Return [B], x [B] summed over each row's trajectory; branch: as in `Rollout`."""
    if branch is None:
        return x
    number = (branch == 0).cumsum(0) - 1
    return torch.zeros_like(x).index_add(0, number, x)[number]


# How a trajectory ended: the task is done; its tokens or turns were used up; it failed, and does not train.
End = Literal["done", "length", "turns", "error"]
ENDS: tuple[End, ...] = get_args(End)


def ends_of(done: Tensor) -> Tensor:
    """Return [B] int8, places in `ENDS`: "done" where [B] bool is True, else "length"."""
    return torch.where(done, ENDS.index("done"), ENDS.index("length")).to(torch.int8)


@tensorclass
class Rollout:
    """Sampled responses; batch_size [B], this data-parallel rank's rows, equal on all ranks of a replica.

    Prompt and sample number name a trajectory. Several rows of one are neighbours, numbered by `branch`.
    """

    tokens: Tensor  # [B, S] int64, prompt then response then padding (0)
    loss_mask: Tensor  # [B, S] bool, True on response tokens: the ones that train
    prompt_lengths: Tensor  # [B] int64
    lengths: Tensor  # [B] int64, prompt plus response
    rollout_logprobs: Tensor  # [B, S] float32, at the sampling temperature, before top-k and top-p; 0 off the mask
    end: Tensor  # [B] int8, place in `ENDS` of how the row's trajectory ended
    prompt_index: Tensor  # [B] int64, position of the prompt in the step's global batch (0 .. prompts_per_step-1)
    sample_index: Tensor  # [B] int64, number of the sample of its prompt (0 .. n-1)
    weight_version: Tensor  # [B] int64, version of the weights that sampled it; the oldest where several did
    routing: Tensor | None = None  # [B, S, L, K] int16 from an engine that reports it; as in `Experience`
    token_versions: Tensor | None = None  # [B, S] int64 of the weights of each token, 0 off the mask; on all ranks
    # [B, S] bool with `token_versions`: the prefix's KV cache was kept over an update, so that the log-prob is the
    # sampler's alone and no version's weights give it
    kept: Tensor | None = None
    failed: Tensor | None = None  # [B] bool, rows without an answer, no token on the mask; None: none failed
    branch: Tensor | None = None  # [B] int64, number of the row within its trajectory; None: each has one row
    # [B, S] int16, number of the token's turn in its trajectory from 1, also where another row trains it; 0: read
    turn: Tensor | None = None
    scores: Tensor | None = None  # [B] float32, the environment's of the row's whole trajectory, 0 of a failed one
    turn_scores: Tensor | None = None  # [B, S] float32, the part of `scores` that a turn has, at its last token; else 0

    @property
    def finished(self) -> Tensor:
        """Return [B] bool: trajectories whose task is done, cut off by no limit."""
        return self.end == ENDS.index("done")

    @classmethod
    def from_rows(cls, tokens: Tensor, *, prompt_lengths: Tensor, lengths: Tensor, **fields: Tensor | None) -> Rollout:
        """Return rows of right-padded `tokens` [B, S]; others: whole responses, a prompt each, zeros."""
        rows = dict.fromkeys(("sample_index", "weight_version"), torch.zeros_like(lengths)) | {
            "prompt_index": torch.arange(len(tokens), device=tokens.device),
            "loss_mask": response_mask(prompt_lengths, lengths, width=tokens.size(1)),
            "rollout_logprobs": torch.zeros_like(tokens, dtype=torch.float32),
            "end": torch.zeros_like(lengths, dtype=torch.int8),
            **{"tokens": tokens, "prompt_lengths": prompt_lengths, "lengths": lengths},
        }
        return cls(**(rows | fields), batch_size=[len(tokens)])  # type: ignore[arg-type, call-arg]


class Draw(NamedTuple):
    """Prompts that were drawn together; a ticket numbers the draws since the run began."""

    first: int  # ticket of the first one
    size: int  # number of prompts
    word: int  # seeds their samples, with the run's seed, the place among them and the sample's number


class Arrived(NamedTuple):
    """Groups, each the samples of one prompt, that are complete."""

    tickets: list[int]
    oldest: list[int]  # version of each group's oldest token
    rollout: Rollout  # this replica's rows; `prompt_index` counts the tickets
    own: Sequence[int] | None  # places of this replica's groups; None: its share


@dataclass(frozen=True)
class RewardParts:
    """Named parts of the rewards of rows, of which the weighted sum is the reward."""

    names: tuple[str, ...]  # the K parts' names, in alphabetical order: ("correct", "format")
    weights: tuple[float, ...]  # each part's weight in the reward; 0: it is only shown
    values: Tensor  # [B, K] float32, as scored, before weights; NaN of a part that the row's data source does not have


@dataclass(frozen=True)
class Rewards:
    """Rewards of rows; 0 of failed samples, NaN of rows that `trainer.rows` takes off."""

    totals: Tensor  # [B] float32
    parts: RewardParts | None = None  # None: the rewards have no named parts
    scored: bool = True  # False of a run that has no reward: totals are 0, and no number of them is reported

    def __getitem__(self, rows: Tensor) -> Rewards:
        """Return the rewards of some rows; rows: [n] int64, or [B] bool."""
        return self.with_columns(self.columns()[rows])

    def columns(self) -> Tensor:
        """Return [B, 1 + K] float32: totals, then parts."""
        totals = self.totals[:, None]
        return totals if self.parts is None else torch.cat([totals, self.parts.values], dim=1)

    def with_columns(self, columns: Tensor) -> Rewards:
        """Return the rewards of other rows from their `columns`, of the same parts."""
        parts = None if self.parts is None else replace(self.parts, values=columns[:, 1:])
        return replace(self, totals=columns[:, 0], parts=parts)


# Numbers of each token that an experience has before mini-batches are cut; all are 0 off the loss mask.
PER_TOKEN = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")


@tensorclass(shadow=True)  # `values` also names a dict method of tensorclass
class Experience:
    """A rollout with everything the losses need; batch_size [B], this data-parallel rank's rows, as in `Rollout`."""

    tokens: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool
    prompt_lengths: Tensor  # [B] int64
    lengths: Tensor  # [B] int64
    prompt_index: Tensor  # [B] int64
    sample_index: Tensor  # [B] int64
    rollout_logprobs: Tensor  # [B, S] float32
    old_logprobs: Tensor  # [B, S] float32, trainer's weights before the update; 0 off the mask
    ref_logprobs: Tensor  # [B, S] float32, reference policy; equal to old_logprobs where the run has no reference
    values: Tensor  # [B, S] float32, critic before the update; 0 without a critic
    advantages: Tensor  # [B, S] float32, 0 off the mask
    returns: Tensor  # [B, S] float32, value targets; 0 off the mask
    loss_weights: Tensor  # [B, S] float32, share of each token in its mini-batch's policy loss
    token_weights: Tensor  # [B, S] float32, loss_mask / tokens of the global mini-batch: for means and the critic
    rows: Tensor  # [B, S] int64, number from 1 of the trajectory in this rank's mini-batch on the loss mask, else 0
    # [B, S, L, K] int16, experts of each mixture when the token was the input, so it is not shifted; -1: unknown.
    # Behind them, in rows of K, the positions that each indexer of sparse attention chose.
    routing: Tensor | None = None
    # [B] int64: rows of one number, such as a pair, train on one rank in one micro-batch; None: every row by itself
    unit: Tensor | None = None
    branch: Tensor | None = None  # [B] int64, as in `Rollout`

    @classmethod
    def from_rows(
        cls, tokens: Tensor, *, prompt_lengths: Tensor, lengths: Tensor, **fields: Tensor | None
    ) -> Experience:
        """Return rows of right-padded `tokens` [B, S]; others: whole responses, a prompt each, zeros."""
        mask = fields.get("loss_mask")
        if mask is None:
            mask = response_mask(prompt_lengths, lengths, width=tokens.size(1))
        blank = (*PER_TOKEN, "loss_weights", "token_weights")
        rows = dict.fromkeys(blank, torch.zeros_like(tokens, dtype=torch.float32)) | {
            **{"tokens": tokens, "prompt_lengths": prompt_lengths, "lengths": lengths},
            "loss_mask": mask,
            "rows": row_numbers(mask, fields.get("branch")),
            "prompt_index": torch.arange(len(tokens), device=tokens.device),
            "sample_index": torch.zeros_like(lengths),
        }
        return cls(**(rows | fields), batch_size=[len(tokens)])  # type: ignore[arg-type, call-arg]


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a forward pass for each token; token-aligned, 0 off the loss mask."""

    logprobs: Tensor | None = None  # [B, S] float32
    entropy: Tensor | None = None  # [B, S] float32, nats, of the distribution that predicts the token
    values: Tensor | None = None  # [B, S] float32
    routing: Tensor | None = None  # [B, S, L, K] int16, as in `Experience`; not masked
    divergence: Tensor | None = None  # [B, S] float32, nats, from a teacher's distribution that predicts the token


@dataclass(frozen=True)
class Lesson:
    """A teacher's distributions at a mini-batch's tokens, cut as the student's; on the last stage."""

    hidden: Sequence[Tensor] = ()  # on the host, of each micro-batch: [its tokens on this rank, H], last hidden states
    weight: Tensor | None = None  # [V / tp, H], this rank's rows of the vocabulary projection
    beta: float = 1.0  # kind of divergence that the student minimises; mega_rl.parallel.divergence


IdRanges = tuple[tuple[int, int], ...]  # token ids from the first up to, but without, the second; ascending
Metrics = dict[str, float]  # "area/metric_unit" -> value
TRAINED_TOKENS = "trained_tokens"  # metric of an update: tokens on the loss mask of its mini-batch, over all ranks


@dataclass
class LossOutput:
    """Shares of one micro-batch and data-parallel rank in a mini-batch's loss and metrics."""

    loss: Tensor  # scalar float32
    sums: dict[str, Tensor] = field(default_factory=dict)  # scalars, added over micro-batches and ranks
    maxima: dict[str, Tensor] = field(default_factory=dict)  # scalars, maximum over micro-batches and ranks
    minima: dict[str, Tensor] = field(default_factory=dict)  # scalars, minimum; infinite without tokens
    # [BINS] float64 of `algorithms.statistics`, counts of logarithms of positive numbers; added
    log_histograms: dict[str, Tensor] = field(default_factory=dict)
