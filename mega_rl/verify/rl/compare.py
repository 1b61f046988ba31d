"""Comparison of a recorded run with the independent trainer, phase by phase, update by update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator.base import distance
from mega_rl.verify.layouts import LOGPROBS, REWARDS, SAMPLES, SAMPLING, TOLERANCES, UPDATES, finite
from mega_rl.verify.rl.independent.formulas import Group, groups_of, wrong_groups, wrong_prompts
from mega_rl.verify.rl.independent.networks import PolicyNetwork, of_response
from mega_rl.verify.rl.independent.records import Figures, LockstepSettings, ScoredSample
from mega_rl.verify.rl.independent.trainer import IndependentTrainer
from mega_rl.verify.rl.rewards import RewardRule, rescored, reward_error
from mega_rl.verify.rl.trace import read_batch, read_figures, read_updates, shift

# Figures of tokens by phase.
TOKEN_PHASES = {LOGPROBS: ("old_logprobs", "ref_logprobs", "values"), "advantages": ("advantages", "returns")}
# A tensor whose gradient is this much smaller than that of the average element is compared with that size instead of
# its own: rounding is 1e-7 of the average, of which less than 1e-5 is left so.
FLOOR = 1e-2


@dataclass(frozen=True)
class UpdateErrors:
    """Distance of one optimizer step of the real trainer from the independent trainer's."""

    role: str  # actor, critic
    step: int  # counts from 0
    update: int  # number of the mini-batch in its step, from 0
    errors: Mapping[str, float]  # error by phase of the run, in the order of `TOLERANCES`
    worst: str  # name of the tensor whose gradient is furthest off

    @property
    def title(self) -> str:
        """Return the update in words."""
        return f"step {self.step + 1}, {self.role} update {self.update + 1}"


def follow(
    folder: Path,
    model: Path,
    settings: LockstepSettings,
    rule: RewardRule,
    *,
    reference: Path | None = None,
) -> Iterator[UpdateErrors]:
    """Train `model` on recorded tokens, with rewards by `rule`; yields the errors of each update.

    reference: the reference's weights; None: those of `model`.
    """
    trainer = IndependentTrainer(model, settings, reference=reference)
    start, sampler = trainer.weights(), SamplerTest(settings.temperature)
    made = set[tuple[str, int, int]]()  # role, step and number of each update
    policies = dict[int, PolicyNetwork]()  # policies by version, which counts steps from 1
    waiting, chooses = list[Group](), settings.max_generations or settings.ahead
    for step in range(settings.steps):
        recorded = read_batch(folder, step)
        batch = rescored(recorded, rule)
        of_step = {} if rule.function is None else {REWARDS: reward_error(recorded, batch)}
        of_step[UPDATES] = float(wrong_prompts(batch, settings))
        policies[step + 1] = deepcopy(trainer.policy) if settings.ahead else trainer.policy
        policies.pop(step - settings.ahead, None)
        if settings.samples_all_tokens:
            logits, gaps = partial(version_logits, policies), [0.0]
            for samples in batch.generations if chooses else [batch.samples]:  # it may not choose at random
                sampler.add(samples, logits)
                gaps += sampler_errors(samples, logits, settings.temperature) if settings.ahead else []
            of_step[LOGPROBS] = max(gaps)
            # Short responses are complete first: only all steps together have samples at random.
            if not settings.ahead or step == settings.steps - 1:
                of_step[SAMPLES] = max(map(abs, sampler.deviations()))
        if chooses:
            of_step[SAMPLING] = float(wrong_groups(waiting, batch, step + 1, settings))
        for own in trainer.step(step, batch):
            made.add((own.role, own.step, own.update))
            yield _errors(read_figures(folder, own.role, own.step, own.update), own, start[own.role], of_step)
    for real, _ in read_updates(folder):
        if (real.role, real.step, real.update) not in made:
            yield UpdateErrors(real.role, real.step, real.update, {UPDATES: math.inf}, "")


@torch.no_grad()
def version_logits(policies: Mapping[int, PolicyNetwork], sample: ScoredSample) -> Tensor:
    """Compute each token's logits by its version's policy, [n, V] float64; NaN without it."""
    logits = policies[max(policies)].logits(sample)
    versions = torch.tensor(sample.versions or [max(policies)] * sample.length)
    for version in map(int, set(sample.versions)):
        own = policies[version].logits(sample) if version in policies else torch.full_like(logits, torch.nan)
        logits[versions == version] = own[versions == version]
    return logits


def sampler_errors(
    samples: Sequence[ScoredSample], logits: Callable[[ScoredSample], Tensor], temperature: float
) -> list[float]:
    """Compute each sample's largest error of recorded log-probs, without the recorder's shift."""
    errors = []
    for group in groups_of(samples):
        for number, sample in enumerate(group):
            own, _ = of_response(logits(sample), sample, temperature)
            shifts = [shift(torch.tensor([row.tokens]), torch.tensor([number]))[0, row.places] for row in sample.rows]
            real = torch.tensor(sample.rollout_logprobs, dtype=torch.float64) - torch.cat(shifts)
            errors.append(finite(float((real - own).abs().max())))
    return errors


class SamplerTest:
    """Four sums over tokens; for a right sampler they are normal with deviation 1.

    1: log p + entropy, which another temperature, a cut of the distribution or a penalty moves. 2: u - 1/2, where u is
    the randomised place of a token in the cumulated distribution, uniform and independent of all others. 3: products of
    neighbouring u in a response. 4: products of u at one position of neighbouring samples and prompts. A random number
    that is used twice moves 3 and 4.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._sums, self._variances = [0.0] * 4, [0.0] * 4
        self._noise = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def add(self, samples: Sequence[ScoredSample], logits: Callable[[ScoredSample], Tensor]) -> None:
        """Count all samples of neighbouring prompts; logits: returns those of each response token, [n, V] float64."""
        places: dict[tuple[int, int], Tensor] = {}
        for prompt, group in enumerate(groups_of(samples)):
            for number, sample in enumerate(group):
                logprobs = torch.log_softmax(logits(sample) / self._temperature, dim=-1)
                places[prompt, number] = self._place(logprobs, torch.tensor(sample.sampled))
        for (prompt, number), place in places.items():
            self._count(2, place[:-1] * place[1:], (len(place) - 1) / 144)
            for other in ((prompt, number + 1), (prompt + 1, number)):
                if other in places:
                    length = min(len(place), len(places[other]))
                    self._count(3, place[:length] * places[other][:length], length / 144)

    def deviations(self) -> list[float]:
        """Return each sum in units of its deviation; 0 without a token that is random."""
        sums = zip(self._sums, self._variances, strict=True)
        return [total / math.sqrt(variance) if variance > 1e-12 else 0.0 for total, variance in sums]

    def _place(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Count the first two sums of a response; returns [n], u - 1/2 of each token."""
        probabilities, rows = logprobs.exp(), torch.arange(len(tokens))
        entropy = -(probabilities * logprobs).sum(-1)
        self._count(
            0, logprobs[rows, tokens] + entropy, float(((probabilities * logprobs**2).sum(-1) - entropy**2).sum())
        )
        noise = torch.rand(len(tokens), generator=self._noise, dtype=torch.float64)
        place = (probabilities.cumsum(-1) - probabilities * noise[:, None])[rows, tokens] - 0.5
        self._count(1, place, len(place) / 12)
        return place

    def _count(self, number: int, values: Tensor, variance: float) -> None:
        self._sums[number] += float(values.sum())
        self._variances[number] += variance


def off(
    errors: Iterable[UpdateErrors], tolerances: Mapping[str, float] = TOLERANCES
) -> tuple[UpdateErrors, str] | None:
    """Return the first update out of tolerance with its first such phase; None without one."""
    for update in errors:
        for phase, error in update.errors.items():
            if not error <= tolerances[phase]:
                return update, phase
    return None


def _errors(
    real: Figures | None, own: Figures, start: Mapping[str, Tensor], of_step: Mapping[str, float]
) -> UpdateErrors:
    """Return the distance of the real figures from the independent trainer's."""
    if real is None:
        return UpdateErrors(own.role, own.step, own.update, {UPDATES: math.inf}, "")
    if set(real.gradients) != set(own.gradients):
        names = sorted(set(real.gradients) ^ set(own.gradients))
        raise UserError(f"{names[0]} has no counterpart in transformers' model; give another family as model.path")
    gradient, worst = _gradient_error(real.gradients, own.gradients)
    known = {UPDATES: 0.0, **of_step, **_token_errors(real, own)}  # wrong log-probs are no fault of the sampler
    if LOGPROBS in known:
        known[LOGPROBS] = max(known[LOGPROBS], of_step.get(LOGPROBS, 0.0))
    errors = {
        **{phase: known[phase] for phase in TOLERANCES if phase in known},
        "loss": finite(abs(real.loss - own.loss) / max(own.loss_scale, 1e-30)),
        "gradient norm": finite(abs(real.grad_norm - own.grad_norm) / max(own.grad_norm, 1e-30)),
        "gradient": gradient,
        "weights": _distance(real.weights, own.weights) / max(_distance(own.weights, start), 1e-30),
    }
    return UpdateErrors(own.role, own.step, own.update, errors, worst)


def _token_errors(real: Figures, own: Figures) -> dict[str, float]:
    """Return the largest |difference| of any token by phase; infinite for different tokens."""
    errors: dict[str, float] = {}
    for phase, names in TOKEN_PHASES.items():
        for name in real.tokens.keys() & set(names):
            there, here = real.tokens[name], own.tokens[name]
            gap = finite(float((there - here).abs().max())) if there.shape == here.shape else math.inf
            errors[phase] = max(errors.get(phase, 0.0), gap)
    return errors


def _gradient_error(real: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a gradient in the Frobenius norm, and its tensor."""
    numel = sum(tensor.numel() for tensor in own.values())
    typical = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in own.values()) / numel)
    errors = {name: distance(real[name], expected, floor=FLOOR * typical) for name, expected in own.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the distance of two models."""
    return finite(math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)))
