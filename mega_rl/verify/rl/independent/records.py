"""Inputs of the independent trainer, and the figures of its updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class NamedSettings:
    """An algorithm's name, with its settings by name: numbers (1 yes, 0 no) and words."""

    name: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, setting: str) -> float:
        return self.numbers[setting]

    def but(self, **settings: float) -> NamedSettings:
        """Return the same with other numbers."""
        return replace(self, numbers={**self.numbers, **settings})


@dataclass(frozen=True)
class LockstepSettings:
    """The numbers of a run that its mathematics depends on."""

    advantage: NamedSettings
    loss: NamedSettings
    correction: NamedSettings
    part_weights: Mapping[str, float]  # weight of each named part of the rewards; default 1
    prompts_per_step: int
    updates_per_epoch: int
    samples_all_tokens: bool  # neither top-k nor top-p cuts the distribution that is sampled
    max_generations: int  # generations of dynamic sampling in a step; 0: no dynamic sampling
    temperature: float
    value_clip: float  # 0: none
    entropy_coef: float
    aggregation: str  # token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm, prompt-mean
    max_response_tokens: int
    stop_tokens: frozenset[int]  # a response that ends with another one was cut off
    overlong_filter: bool  # responses that were cut off do not train
    overlong_buffer: int  # tokens before the limit in which a punishment grows; 0: none
    overlong_penalty: float  # punishment at the limit
    last_turn: bool  # only the last turn of each response trains
    old_is_rollout: bool  # the ratio is to what sampled; else to the policy before the updates
    kl_placement: str  # none, reward, loss
    kl_estimator: str  # k1, k2, k3
    kl_coef: float
    kl_target: float  # nats per token, of the adaptive coefficient; 0: the coefficient is fixed
    kl_horizon: int  # sequences
    reference_interval: int  # steps after which the reference takes in the policy; 0: never
    reference_rate: float  # share of the policy in the reference's new weights
    critic_warmup_steps: int
    lr: float
    critic_lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip_grad: float  # 0: none
    schedule: str  # constant, linear, cosine
    warmup_steps: int
    min_lr_ratio: float
    steps: int
    ahead: int  # most versions of the weights between a token and its step


@dataclass(frozen=True)
class SampledRow:
    """A context of a response: tokens that were sampled, and others that were read."""

    tokens: Sequence[int]
    start: int  # tokens of the prompt, or of what stands in its place
    places: Sequence[int]  # positions of the sampled tokens, but for those that another row of the response has
    # The last sampled token before these, which another row has: that row, the token's number there, its position here.
    after: tuple[int, int, int] | None = None

    @property
    def ends(self) -> list[bool]:
        """Return for each sampled token if it is the last of its run."""
        return [place + 1 not in self.places for place in self.places]


@dataclass(frozen=True)
class TokenPath:
    """Tokens of a response from a first one to an end, over rows that continue each other."""

    share: float  # among the ways from the same first token
    tokens: tuple[int, ...]  # numbers in the response
    ends: tuple[bool, ...]  # for each token, if it is the last of its run

    def of(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of the way's tokens."""
        return [numbers[token] for token in self.tokens]

    def longer(self, after: Sequence[tuple[int, bool]]) -> list[TokenPath]:
        """Return the way with each of the successors of its last token; without any, itself."""
        share = self.share / max(len(after), 1)
        return [TokenPath(share, (*self.tokens, token), (*self.ends, ends)) for token, ends in after] or [self]


@dataclass(frozen=True)
class ScoredSample:
    """A prompt with one of its responses, in which "token" means one that was sampled."""

    rows: Sequence[SampledRow]  # one, or of an agent several
    prompt: int  # position of the prompt in the step's batch
    reward: float
    rollout_logprobs: Sequence[float]  # log-probs of the tokens by the sampler, row after row
    turn_scores: Sequence[float] = ()  # parts of the reward, one for each token; empty: none
    versions: Sequence[float] = ()  # version of each token's weights; empty: the step's
    earlier_scores: float = 0.0  # the part of the reward of turns that do not train
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward by name; empty for a plain number
    greedy_reward: float = math.nan  # reward of the prompt's greedy response; NaN without one

    @property
    def sampled(self) -> list[int]:
        """Return the tokens, row after row."""
        return [row.tokens[place] for row in self.rows for place in row.places]

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.sampled)

    @property
    def longest(self) -> int:
        """Return the most tokens after the prompt in a row, those that were read included."""
        return max(len(row.tokens) - row.start for row in self.rows)

    def last_turn(self) -> ScoredSample:
        """Return the sample as if only its last turn had been sampled, and the others read."""
        last, before = self.rows[-1], [number for number, ends in enumerate(self.rows[-1].ends[:-1]) if ends]
        first = before[-1] + 1 if before else 0
        alone = replace(last, places=last.places[first:], after=None)
        rows = [*(replace(row, places=(), after=None) for row in self.rows[:-1]), alone]
        left = len(last.places) - first
        earlier = sum(self.turn_scores[:-left])
        logprobs, scores = self.rollout_logprobs[-left:], self.turn_scores[-left:]
        return replace(self, rows=rows, rollout_logprobs=logprobs, turn_scores=scores, earlier_scores=earlier)

    def ways(self) -> list[TokenPath]:
        """Return each way from a first token to an end; one for each row that continues no other."""
        firsts = [0, *accumulate(len(row.places) for row in self.rows)]
        after: list[list[tuple[int, bool]]] = [[] for _ in range(firsts[-1])]  # successors of each token
        paths = list[TokenPath]()
        for first, row in zip(firsts, self.rows, strict=False):
            for number, ends in enumerate(row.ends[:-1], first):
                after[number].append((number + 1, ends))
            if row.places and row.after is None:
                paths.append(TokenPath(1.0, (first,), ()))
            elif row.places and row.after is not None:
                after[firsts[row.after[0]] + row.after[1]].append((first, row.after[2] + 1 != row.places[0]))
        while any(after[way.tokens[-1]] for way in paths):
            paths = [longer for way in paths for longer in way.longer(after[way.tokens[-1]])]
        return [replace(way, ends=(*way.ends, True)) for way in paths]


@dataclass(frozen=True)
class StepBatch:
    """A step's samples, and the prompts of each of its mini-batches in update order."""

    samples: Sequence[ScoredSample]
    minibatches: Sequence[Sequence[int]]
    # Dynamic sampling: all samples, generation by generation; each generation numbers its prompts from 0.
    generations: Sequence[Sequence[ScoredSample]] = ()
    greedy: Sequence[ScoredSample] = ()  # one response to each prompt, where an estimator asks for it


@dataclass(frozen=True)
class Figures:
    """Figures of one optimizer step of a role."""

    role: str  # actor, critic
    step: int
    update: int  # number of the mini-batch in its step
    # Name -> float64, one number for each response token of the mini-batch, sample after sample.
    tokens: Mapping[str, Tensor]
    loss: float
    loss_scale: float  # sum of |weight * term| over the tokens: the size of what cancels in the loss
    grad_norm: float  # before clipping
    gradients: Mapping[str, Tensor]  # after clipping, by Hugging Face names
    weights: Mapping[str, Tensor]  # after the step
