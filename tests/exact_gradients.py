"""Expected policy gradients of every estimator, loss, KL placement and correction against exact ones.

A policy of two tokens over four words has 16 responses, so the gradient of J - beta KL is a sum. The run's own code,
from rewards to the loss, gets 10^5 sampled groups of responses; the mean of their gradients must meet the exact one
within its standard error, or, where a choice is biased by design, the expectation over all 16^3 groups, whose distance
from the exact gradient is its bias. `python -m tests.exact_gradients` prints the table of docs/exact_gradients.md.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.algorithms.inputs import AdvantageInputs
from mega_rl.algorithms.kl import KL_ESTIMATORS, KLController
from mega_rl.algorithms.policy_losses import LOSSES
from mega_rl.algorithms.statistics import Sequences, SumOverRanks
from mega_rl.types import Experience, RewardParts, TokenOutputs, row_numbers
from mega_rl.workers.models import PolicyLoss

WORDS, LENGTH, GROUP, BETA = 4, 2, 3, 0.3
PARAMETERS = WORDS + WORDS * WORDS  # logits of the first token, and of the second after each first
UNBOUNDED = 1e9
# Estimators and their settings, and the multiple of the reward's gradient that each is meant to have; None: another
# direction. The KL's gradient is never scaled. Of distillation the objective is -KL, without a reward.
ESTIMATED: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "gae": ("gae", {"whiten": False}, 1.0),
    "gae, lambda 0.5": ("gae", {"whiten": False, "gae_lambda": 0.5}, None),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}, 1.0),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}, (GROUP - 1) / GROUP),
    "remax": ("remax", {}, 1.0),
    "rloo": ("rloo", {}, 1.0),
    "grpo, no deviation": ("grpo", {"std": "none"}, (GROUP - 1) / GROUP),
    "grpo, batch": ("grpo", {"std": "batch"}, (GROUP - 1) / GROUP),
    "grpo": ("grpo", {}, None),
    "gdpo": ("gdpo", {}, None),
    "opo": ("opo", {}, (GROUP - 1) / GROUP),
    "pass_at_k": ("pass_at_k", {"k": 2}, None),
    "distillation": ("distillation", {}, None),
    "distillation, gamma 1": ("distillation", {"gamma": 1.0}, 1.0),
}
CORRECTED: dict[str, tuple[str, dict[str, Any], bool]] = {  # name, settings, whether without bias
    "tis of sequences": ("tis", {"level": "sequence", "cap": UNBOUNDED}, True),
    "tis": ("tis", {"cap": UNBOUNDED}, False),
    "icepop": ("icepop", {}, False),
    "geometric_rejection": ("geometric_rejection", {"low": 0.8, "high": 1.25}, False),
    "sequence_rejection": ("sequence_rejection", {}, False),
    "opsm": ("opsm", {}, False),
}


@dataclass(frozen=True)
class Case:
    """A choice of each kind; `correction` "none": the policy samples for itself."""

    estimator: str
    loss: str
    placement: str = "none"
    correction: str = "none"

    @property
    def is_exact(self) -> bool:
        """Return whether the expected gradient is meant to be a multiple of the exact one."""
        unbiased = self.correction == "none" or CORRECTED[self.correction][2]
        # In the loss, the divergence counts at prefixes that were sampled: it does not steer what comes before.
        return ESTIMATED[self.estimator][2] is not None and unbiased and self.placement != "loss"


@dataclass(frozen=True)
class Result:
    """The measured gradients of a case; `bias` is relative to the exact gradient at the scale that is meant."""

    case: Case
    error: float  # of the sampled mean against its target, in standard errors of the parameter that is furthest off
    bias: float  # |expected - exact| / |exact|, with the exact gradient at the scale that is meant
    size: float  # |expected| / |exact|
    cosine: float  # of expected and exact gradient


def cases() -> Iterator[Case]:
    """Yield every combination that a run accepts; a loss that a teacher gives is no estimate."""
    sampled = [loss for loss in LOSSES if not LOSSES[loss].needs_teacher]
    for estimator, loss in itertools.product(ESTIMATED, sampled):
        area = ESTIMATORS[ESTIMATED[estimator][0]]
        if LOSSES[loss].needs_response_advantages and (area.needs_critic or area.needs_reference):
            continue
        for placement in ("none", "loss", *(["reward"] if area.takes_kl else [])):
            if placement != "reward" or not LOSSES[loss].needs_response_advantages:
                yield Case(estimator, loss, placement)
                # Ratios of loss and correction are two things: the losses of one ratio each are enough.
                yield from (Case(estimator, loss, placement, name) for name in (CORRECTED if loss == "ppo" else ()))


class World:
    """The policy with its reference and its sampler, rewards and values; float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.logits = 0.5 * normal(PARAMETERS)
        self.reference, self.other = self.logits + 0.6 * normal(PARAMETERS), self.logits + 0.5 * normal(PARAMETERS)
        self.rewards = torch.rand(WORDS, WORDS, generator=generator, dtype=torch.float64)
        after = (self.logits[WORDS:].view(WORDS, WORDS).softmax(1) * self.rewards).sum(1)
        right = torch.cat([(self.logits[:WORDS].softmax(0) * after).sum()[None], after])
        self.values = right + 0.1 * normal(1 + WORDS)  # before the first token, and after each: a critic that learns
        first = int(self.logits[:WORDS].argmax())
        self.greedy = first, int(self.logits[WORDS:].view(WORDS, WORDS)[first].argmax())
        self.responses = torch.cartesian_prod(torch.arange(WORDS), torch.arange(WORDS))
        self.first = torch.rand(WORDS, generator=generator, dtype=torch.float64)  # part of the reward, by first token

    def logprobs(self, logits: Tensor, responses: Tensor) -> Tensor:
        """Return the log-probs [B, 2] of responses [B, 2]."""
        first = logits[:WORDS].log_softmax(0)[responses[:, 0]]
        table = logits[WORDS:].view(WORDS, WORDS).log_softmax(1)
        return torch.stack([first, table[responses[:, 0], responses[:, 1]]], dim=1)

    def score(self, responses: Tensor) -> Tensor:
        """Return d log-prob / d logits [B, 2, PARAMETERS] of each token."""
        out = torch.zeros(len(responses), LENGTH, PARAMETERS, dtype=torch.float64)
        rows = torch.arange(len(responses))
        out[:, 0, :WORDS] = -self.logits[:WORDS].softmax(0)
        out[rows, 0, responses[:, 0]] += 1
        after = out[:, 1, WORDS:].view(-1, WORDS, WORDS)
        after[rows, responses[:, 0]] = -self.logits[WORDS:].view(WORDS, WORDS).softmax(1)[responses[:, 0]]
        after[rows, responses[:, 0], responses[:, 1]] += 1
        return out

    def exact(self, *, scale: float, beta: float) -> Tensor:
        """Return the gradient of beta KL(policy || reference) - scale J, by autograd over the 16 responses."""
        logits = self.logits.clone().requires_grad_()
        own = self.logprobs(logits, self.responses).sum(1)
        reference = self.logprobs(self.reference, self.responses).sum(1)
        objective = own.exp() * (scale * self.rewards.flatten() - beta * (own - reference))
        (gradient,) = torch.autograd.grad(-objective.sum(), logits)
        return gradient


@dataclass
class BatchMoments:
    """Sums over a batch that an estimator asks for, recorded, and given to another batch as if they were its own."""

    sums: list[Tensor] = field(default_factory=list)  # the first begins with the count, the last ends with squares
    _given: int = 0
    _count: float = 0.0

    def record(self, tensor: Tensor) -> Tensor:
        """Return a sum of the sampled batch."""
        self.sums.append(tensor)
        return tensor

    def replay(self, tensor: Tensor) -> Tensor:
        """Return the next recorded sum, as of a batch of this one's size."""
        self._count = float(tensor[0]) if self._given == 0 else self._count
        self._given += 1
        return self.sums[self._given - 1] * self._count / self.sums[0][0]

    @property
    def deviation(self) -> float:
        """Return the deviation that advantages are divided by; 1 of an estimator that asks for no sums."""
        return float((self.sums[-1][-1] / self.sums[0][0]).sqrt()) if self.sums else 1.0


def gradients(world: World, case: Case, groups: Tensor, weights: Tensor, moments: SumOverRanks) -> Tensor:
    """Return the run's gradients [G, PARAMETERS] of groups [G, 3, 2], each times its weight [G].

    A token of a response weighs half, as the mean over its tokens has it, and a response a third of its group. moments:
    in the place of the sum over ranks.
    """
    responses = groups.reshape(-1, LENGTH)
    name, settings, _ = ESTIMATED[case.estimator]
    count = len(responses)
    old, ref = (world.logprobs(logits, responses) for logits in (world.logits, world.reference))
    sampler = old if case.correction == "none" else world.logprobs(world.other, responses)
    prompt, ones = torch.zeros(count, 1, dtype=torch.float64), torch.ones(count, dtype=torch.int64)

    def aligned(x: Tensor) -> Tensor:
        return torch.cat([prompt, x], dim=1)

    values = torch.stack([world.values[0].expand(count), world.values[1:][responses[:, 0]]], dim=1)
    experience = Experience.from_rows(
        torch.ones(count, 1 + LENGTH, dtype=torch.int64),
        prompt_lengths=ones,
        lengths=ones + LENGTH,
        prompt_index=torch.arange(count) // GROUP,
        old_logprobs=aligned(old),
        ref_logprobs=aligned(ref),
        values=aligned(values),
    )
    controller = KLController(BETA)
    penalty = None
    if case.placement == "reward":
        penalty = controller.penalty(experience.old_logprobs, experience.ref_logprobs)
    rewards = world.rewards[responses[:, 0], responses[:, 1]]
    greedy = world.rewards[world.greedy].float().expand(count)
    first = world.first[responses[:, 0]]
    parts = RewardParts(("first", "rest"), (1.0, 1.0), torch.stack([first, rewards - first], dim=1).float())
    inputs = AdvantageInputs(experience, rewards.float(), penalty, moments, greedy, parts)
    advantages, _ = ESTIMATORS[name](**settings)(inputs)
    correction = None
    if case.correction != "none":
        kind, bounds, _ = CORRECTED[case.correction]
        correction = CORRECTIONS[kind](**bounds)
    loss = PolicyLoss(
        LOSSES[case.loss](),
        kl=controller if case.placement == "loss" else None,
        kl_estimator=KL_ESTIMATORS["k3"],
        correction=correction,
    )
    mask = experience.loss_mask
    fields = {
        "advantages": advantages.double(),
        "old_logprobs": aligned(old),
        "ref_logprobs": aligned(ref),
        "rollout_logprobs": aligned(sampler),
        "token_weights": mask.double() / mask.sum(),
        "loss_weights": mask * (weights.repeat_interleave(GROUP)[:, None] / (GROUP * LENGTH)),
    }
    logprobs = aligned(old).requires_grad_()
    out = loss(TokenOutputs(logprobs=logprobs), fields, Sequences(row_numbers(mask), count))
    (by_token,) = torch.autograd.grad(out.loss, logprobs)
    rows = torch.einsum("bt,btp->bp", by_token[:, 1:], world.score(responses))
    return rows.view(-1, GROUP, PARAMETERS).sum(1)


@cache
def groups_of_three(off_policy: bool) -> tuple[Tensor, Tensor]:
    """Return all groups [16^3, 3, 2] and the probability of each."""
    world = World()
    probability = world.logprobs(world.other if off_policy else world.logits, world.responses).sum(1).exp()
    index = torch.cartesian_prod(*[torch.arange(len(world.responses))] * GROUP)
    return world.responses[index], probability[index].prod(1)


def measure(case: Case, *, samples: int, seed: int = 0) -> Result:
    """Return the case's error against its target over `samples` sampled groups, and its bias over all groups."""
    world, off_policy = World(), case.correction != "none"
    every, probability = groups_of_three(off_policy)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.multinomial(probability, samples, replacement=True, generator=generator)
    moments = BatchMoments()
    sampled = gradients(world, case, every[chosen], torch.ones(samples, dtype=torch.float64), moments.record)
    expected = gradients(world, case, every, probability, moments.replay).sum(0)
    # Whitening divides by one number of the batch: rewards, and a KL among them, but no KL of the loss.
    sampled, expected = sampled * moments.deviation, expected * moments.deviation
    beta = {"none": 0.0, "reward": BETA, "loss": BETA * moments.deviation}[case.placement]
    scale = ESTIMATED[case.estimator][2] or 1.0
    if ESTIMATORS[ESTIMATED[case.estimator][0]].needs_reference:
        scale, beta = 0.0, 1.0 + beta
    # The loss is a mean over the two tokens of a response, the objective a sum.
    exact = world.exact(scale=scale, beta=beta) / LENGTH
    error = sampled.std(0) / samples**0.5
    deviations = (sampled.mean(0) - (exact if case.is_exact else expected)).abs() / error
    return Result(
        case,
        error=float(deviations[error > 1e-12].max()),
        bias=float((expected - exact).norm() / exact.norm()),
        size=float(expected.norm() / exact.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(expected, exact, dim=0)),
    )


def is_shown(case: Case) -> bool:
    """Return whether the page has a row of the case: corrections are shown for one estimator."""
    return case.correction == "none" or (case.estimator == "rloo" and case.placement == "none")


def table(results: list[Result]) -> list[str]:
    """Return the lines of a table: the largest error over losses of each estimator, placement and correction."""
    lines = [
        "| estimator | KL | correction | error, standard errors | size | cosine |",
        "|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((r.case.estimator, r.case.placement, r.case.correction) for r in results)
    for kind in kinds:
        own = [r for r in results if (r.case.estimator, r.case.placement, r.case.correction) == kind]
        error, cosine = max(r.error for r in own), min(r.cosine for r in own)
        size = max((r.size for r in own), key=lambda size: abs(size - 1))
        lines.append(f"| {kind[0]} | {kind[1]} | {kind[2]} | {error:.1f} | {size:.3f} | {cosine:.4f} |")
    return lines


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print("\n".join(table([measure(case, samples=size) for case in cases() if is_shown(case)])))
