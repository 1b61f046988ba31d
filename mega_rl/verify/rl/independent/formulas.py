"""Formulas of several algorithms and of the optimizer; lists have a number per response token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from mega_rl.verify.rl.independent.records import LockstepSettings, NamedSettings, ScoredSample, StepBatch

Row = list[float]


def sample_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation with n - 1 below, as published GRPO implementations have it."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def token_rewards(sample: ScoredSample, reward: float, logprobs: Row, ref_logprobs: Row, coef: float) -> Row:
    """Return -coef * log(p / ref) per token, at the end of each way plus the reward (arXiv:1909.08593, eq. 2)."""
    rewards = [-coef * (logprob - ref) for logprob, ref in zip(logprobs, ref_logprobs, strict=True)]
    for way in sample.ways():
        rewards[way.tokens[-1]] += reward
    return rewards


def gae(rewards: Row, values: Row, gammas: Row, lambdas: Row) -> tuple[Row, Row]:
    """Return (advantages, returns) by the recursion of arXiv:1506.02438, eq. 16, with 0 beyond the last token.

    gammas, lambdas: of each token, from it to the next.
    """
    advantages, next_advantage, next_value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gammas[t] * next_value - values[t]
        next_advantage = delta + gammas[t] * lambdas[t] * next_advantage
        advantages[t], next_value = next_advantage, values[t]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def returns_to_go(rewards: Row, gamma: float) -> Row:
    """Return the discounted sum of each token's reward and those after it."""
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def whitened(rows: list[Row]) -> list[Row]:
    """Return (A - mean) / sqrt(biased variance + 1e-8) over all tokens of the batch."""
    every = [value for row in rows for value in row]
    mean = sum(every) / len(every)
    variance = sum((value - mean) ** 2 for value in every) / len(every)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def aggregation_weights(sizes: Sequence[tuple[int, int]], settings: LockstepSettings) -> Row:
    """Return the weight of a token of each row (prompt, tokens) in its mini-batch's loss."""
    lengths = [length for _, length in sizes]
    tokens, rows = sum(lengths), len(lengths)
    if settings.aggregation == "token-mean":  # DAPO, arXiv:2503.14476, eq. 8
        return [1 / tokens for _ in lengths]
    if settings.aggregation == "seq-mean-token-mean":  # GRPO, arXiv:2402.03300, eq. 3
        return [1 / (rows * length) for length in lengths]
    if settings.aggregation == "seq-mean-token-sum":
        return [1 / rows for _ in lengths]
    if settings.aggregation == "prompt-mean":  # ScaleRL, arXiv:2510.13786
        num_prompts = len({prompt for prompt, _ in sizes})
        return [1 / (num_prompts * sum(n for other, n in sizes if other == prompt)) for prompt, _ in sizes]
    return [1 / (rows * settings.max_response_tokens) for _ in lengths]  # Dr. GRPO, arXiv:2503.20783


def clipped_term(ratio: Tensor, advantages: Tensor, choice: NamedSettings) -> Tensor:
    """Return each token's clipped loss (arXiv:1707.06347, eq. 7), bounded where A < 0 (arXiv:1912.09729)."""
    clipped = torch.clamp(ratio, 1 - choice["clip_low"], 1 + choice["clip_high"])
    return bounded_term(torch.minimum(ratio * advantages, clipped * advantages), advantages, choice)


def bounded_term(objective: Tensor, advantages: Tensor, choice: NamedSettings) -> Tensor:
    """Return each token's loss, at most dual_clip * |A| where A < 0 (arXiv:1912.09729, eq. 5)."""
    bound = choice.numbers.get("dual_clip", 0.0)
    if bound > 0:
        objective = torch.where(advantages < 0, torch.maximum(objective, bound * advantages), objective)
    return -objective


def overlong_punishment(length: int, settings: LockstepSettings) -> float:
    """Return a response length's punishment, from 0 to -1 (DAPO, arXiv:2503.14476, eq. 13)."""
    limit, buffer = settings.max_response_tokens, settings.overlong_buffer
    return 0.0 if buffer == 0 or length <= limit - buffer else ((limit - buffer) - length) / buffer


def differ(rewards: Sequence[Row]) -> bool:
    """Return whether responses to one prompt, each a row of numbers, are not all rewarded alike."""
    return any(row != rewards[0] for row in rewards)


UNSAID = -1e30  # logit of a token that is never said


def divergence(student: Tensor, teacher: Tensor, temperature: float, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of two models at each token (GKD, arXiv:2306.13649, eq. 1), [n].

    student, teacher: logits [n, V]. Section 2 has its limits: KL(teacher || student) of beta 0, and the reverse of 1.
    """
    said = student[0] > UNSAID / 2
    p, q = (torch.softmax(logits[:, said] / temperature, dim=-1) for logits in (teacher, student))
    if beta == 0.0:
        return _kl(p, q)
    if beta == 1.0:
        return _kl(q, p)
    mixture = beta * p + (1 - beta) * q
    return beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) over the last dimension."""
    return (p * (p / q).log()).sum(-1)


def kl_estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the estimate of KL(p || ref) (Schulman 2020, http://joschu.net/blog/kl-approx.html), k3 at most 10."""
    log_ratio = ref_logprobs - logprobs
    if name == "k1":
        return -log_ratio
    if name == "k2":
        return log_ratio**2 / 2
    return (torch.exp(log_ratio) - 1 - log_ratio).clamp(max=10.0)


def kl_term(name: str, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """Return w * KL estimate with gradient of w * k2; w = min(ratio, 10) (arXiv:2506.09477)."""
    weight = ratio.detach().clamp(max=10.0)
    differentiable = weight * (logprobs - ref_logprobs) ** 2 / 2
    value = weight * kl_estimate(name, logprobs, ref_logprobs)
    return differentiable + (value - differentiable).detach()


def value_term(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return half the larger squared error of the value and of the clipped value."""
    squares = (values - returns) ** 2
    if clip > 0:
        near = old + torch.clamp(values - old, -clip, clip)
        squares = torch.maximum(squares, (near - returns) ** 2)
    return squares / 2


def learning_rate(step: int, peak: float, total: int, settings: LockstepSettings) -> float:
    """Return the rate of step `step` of `total`: linear warm-up, then the schedule."""
    warmup = settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "constant":
        return peak
    first = max(warmup - 1, 0)  # the step that has the peak
    done = min((step - first) / max(total - 1 - first, 1), 1.0)
    shape = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that clips gradients to `limit`, like torch's clip_grad_norm_; 0: no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def bias_corrections(step: int, settings: LockstepSettings) -> tuple[float, float]:
    """Return the divisors of Adam's moments after `step` steps, counted from 1 (arXiv:1412.6980)."""
    return 1 - settings.beta1**step, 1 - settings.beta2**step


def decay(tensor: Tensor, settings: LockstepSettings) -> float:
    """Return the decoupled weight decay of a tensor (arXiv:1711.05101): none of norms and biases."""
    return settings.weight_decay if tensor.dim() > 1 else 0.0


def adapted_coefficient(coef: float, kl: float, sequences: int, settings: LockstepSettings) -> float:
    """Return the KL coefficient after a step with this mean KL (arXiv:1909.08593, section 2.2)."""
    if settings.kl_target == 0:
        return coef
    error = min(max(kl / settings.kl_target - 1, -0.2), 0.2)
    return coef * (1 + error * min(sequences / settings.kl_horizon, 1))


Group = list[ScoredSample]


def groups_of(samples: Sequence[ScoredSample]) -> list[Group]:
    """Return the samples of each prompt, in the order of the prompts."""
    prompts = sorted({sample.prompt for sample in samples})
    return [[sample for sample in samples if sample.prompt == prompt] for prompt in prompts]


def wrong_groups(waiting: list[Group], batch: StepBatch, version: int, settings: LockstepSettings) -> int:
    """Return how many groups of a step, and how many generations, are wrong; waiting: complete groups, which change.

    With dynamic sampling only groups whose rewards differ train, until generations run out: the first others fill a
    step, as docs/algorithms.md has it. Ahead, groups with the oldest tokens come first, and none that is too old.
    """

    def trains(group: Group) -> bool:
        return not settings.max_generations or differ([_compared(sample, settings) for sample in group])

    def place(group: Group) -> tuple[float, int]:
        return min((one for sample in group for one in sample.versions), default=version), group[0].prompt

    drawn, count = [groups_of(generation) for generation in batch.generations], settings.prompts_per_step
    known = sorted((one for one in chain(waiting, *drawn) if place(one)[0] >= version - settings.ahead), key=place)
    good, real = [one for one in known if trains(one)], groups_of(batch.samples)
    equal = sorted((one for one in known if not trains(one)), key=lambda group: group[0].prompt)
    kept = sorted((good + equal)[:count], key=lambda group: group[0].prompt)
    waiting[:] = [one for one in good[count:] if place(one)[0] > version - settings.ahead]
    wrong = sum(_content(mine) != _content(its) for mine, its in zip(kept, real, strict=False))
    totals = accumulate(sum(map(trains, generation)) for generation in drawn)
    needed = min(1 + sum(total < count for total in totals), settings.max_generations)
    return wrong + abs(len(kept) - len(real)) + (0 if settings.ahead else abs(needed - len(drawn)))


def wrong_prompts(batch: StepBatch, settings: LockstepSettings) -> int:
    """Return how many prompts the mini-batches of each epoch do not have exactly once."""
    prompts, count = Counter({sample.prompt for sample in batch.samples}), settings.updates_per_epoch
    epochs = [batch.minibatches[first : first + count] for first in range(0, len(batch.minibatches), count)]
    trained = [Counter(prompt for minibatch in epoch for prompt in minibatch) for epoch in epochs]
    return sum(((prompts - epoch) + (epoch - prompts)).total() for epoch in trained)


def _compared(sample: ScoredSample, settings: LockstepSettings) -> list[float]:
    """Return the numbers by which responses differ: GDPO's weighted parts, else the reward."""
    if settings.advantage.name != "gdpo":
        return [sample.reward]
    return [part for name, part in sample.parts.items() if settings.part_weights.get(name, 1.0)]


def _content(group: Group) -> list[tuple[object, ...]]:
    """Return the content of a group's samples, without the number of its prompt."""
    return [
        (*(t for row in one.rows for t in row.tokens), one.reward, *one.rollout_logprobs, *one.parts.values())
        for one in group
    ]
