"""Inputs of the independent trainer, and the figures of its updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class ScoredSample:
    """A prompt with one of its responses."""

    tokens: Sequence[int]  # prompt, then response
    prompt_length: int
    prompt: int  # position of the prompt in the step's batch
    reward: float
    rollout_logprobs: Sequence[float]  # log-probs of the response's tokens by the sampler
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward by name; empty for a plain number
    greedy_reward: float = math.nan  # reward of the prompt's greedy response; NaN without one

    @property
    def length(self) -> int:
        """Return the number of response tokens."""
        return len(self.tokens) - self.prompt_length


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
