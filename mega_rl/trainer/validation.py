"""Evaluations of the policy on sets of prompts: samples of their own, rewards, pass@k, avg@k and maj@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from zlib import crc32

from torch import Tensor

from mega_rl.algorithms.evaluation import Estimate, maj_at_k, mean_with_interval, pass_at_k
from mega_rl.errors import UserError
from mega_rl.protocols import Ranks, RolloutSource, Scorer
from mega_rl.trainer.step_metrics import part_metrics, rollout_metrics
from mega_rl.trainer.unscored import scored_rows
from mega_rl.types import Draws, Metrics, PromptSet, RewardParts, Rewards, Rollout

AnswersOf = Callable[[Sequence[str]], Sequence[str | None]]


@dataclass(frozen=True)
class EvaluationPlan:
    """Samples of each prompt and what is measured of them."""

    draws: Draws | None = None  # None: one greedy response
    counted: Sequence[int] = ()  # numbers of samples that pass@k and maj@k are of; (): rewards and lengths alone
    right_above: float = 0.5
    right_part: str = ""  # of the reward; "": the reward itself

    @property
    def n(self) -> int:
        """Return the samples of each prompt."""
        return 1 if self.draws is None else self.draws.n


class SetOutcome(NamedTuple):
    """Outcome of an evaluation of one set of prompts."""

    prompts: PromptSet
    rollout: Rollout  # this replica's rows
    rewards: Rewards
    votes: Sequence[str | None]  # [B] answer that each response votes for; () where pass@k and maj@k are not measured
    metrics: Metrics  # by name, as "val/pass_at_4" for any set; the same on all ranks
    estimates: dict[str, Estimate]


def stripped(responses: Sequence[str]) -> list[str | None]:
    """Return all of each response as its answer."""
    return [response.strip() for response in responses]


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a policy on sets of prompts; what it samples depends on step, set, prompt and sample alone."""

    sets: Sequence[PromptSet] = ()
    plan: EvaluationPlan = EvaluationPlan()
    # [B] -> [B], the answer that each response votes for; None: it has none. Collective over all ranks; raises a
    # UserError on all of them for a user's function that fails on one.
    answers_of: AnswersOf = stripped

    def run(
        self,
        step: int,
        *,
        rollout: RolloutSource,
        reward: Scorer,
        ranks: Ranks,
        decode: Callable[[Sequence[int]], str],
    ) -> list[SetOutcome]:
        """Return the outcome on each set, by name of the set; collective over all ranks.

        ranks: the data-parallel replicas.
        """
        outcomes = []
        for one in self.sets:
            draws = self.plan.draws
            if draws is None:
                rows = rollout.generate(one.prompts, step=step, greedy=True)
            else:
                own = replace(draws, stream=crc32(one.name.encode()))
                rows = rollout.generate(one.prompts, step=step, draws=own)
            rewards = reward.score(rows, one.prompts)
            metrics = _usual_metrics(rows, rewards, ranks)
            estimates: dict[str, Estimate] = {}
            votes: Sequence[str | None] = ()
            if self.plan.counted:
                votes = self._votes(rows, decode)
                own_samples = self._samples(rows, rewards, votes)
                samples = [
                    (place, right, vote) for part in ranks.gather_json(own_samples) for place, right, vote in part
                ]
                estimates = estimates_of(samples, counted=self.plan.counted, n=self.plan.n)
            for name, estimate in estimates.items():
                edges = {"": estimate.mean, "_low": estimate.low, "_high": estimate.high}
                metrics |= {f"val/{name}{edge}": value for edge, value in edges.items()}
            outcomes.append(SetOutcome(one, rows, rewards, votes, metrics, estimates))
        return outcomes

    def is_right(self, rewards: Rewards) -> list[bool]:
        """Return [B] whether each sample is right. Raises UserError where the reward lacks the part that says so."""
        return right_samples(rewards, above=self.plan.right_above, part=self.plan.right_part)

    def _votes(self, rows: Rollout, decode: Callable[[Sequence[int]], str]) -> list[str | None]:
        """Return [B] the answer of each response, None of failed samples; collective over all ranks."""
        answered = range(len(rows.lengths)) if rows.failed is None else (~rows.failed).nonzero().flatten().tolist()
        answers = dict(
            zip(answered, self.answers_of([response_text(rows, row, decode) for row in answered]), strict=True)
        )
        return [answers.get(row) for row in range(len(rows.lengths))]

    def _samples(
        self, rows: Rollout, rewards: Rewards, votes: Sequence[str | None]
    ) -> list[list[int | bool | str | None]]:
        """Return [prompt, right, vote] of each sample of this replica that has an answer and a reward, in order."""
        scored = scored_rows(rows, rewards).tolist()
        right = self.is_right(rewards)
        judged = (~judged_values(rewards, self.plan.right_part).isnan()).tolist()  # a data source may lack the part
        prompts = rows.prompt_index.tolist()
        return [[prompts[row], right[row], votes[row]] for row in range(len(prompts)) if scored[row] and judged[row]]


def right_samples(rewards: Rewards, *, above: float, part: str) -> list[bool]:
    """Return [B] whether each sample's reward, or the named part of it, is above a number. Raises UserError."""
    return [value > above for value in judged_values(rewards, part).tolist()]


def judged_values(rewards: Rewards, part: str, *, setting: str = "validation.right_part") -> Tensor:
    """Return [B] the rewards, or the part of them that a setting names. Raises UserError."""
    return _part(rewards.parts, part, rows=len(rewards.totals), setting=setting) if part else rewards.totals


def _part(parts: RewardParts | None, name: str, *, rows: int, setting: str) -> Tensor:
    names = () if parts is None else parts.names
    if parts is None or (name not in names and (names or rows)):
        has = f"has the parts {', '.join(names)}" if names else "is a number, without named parts"
        raise UserError(f"{setting}={name} has no effect: the reward {has}")
    return parts.values[:, names.index(name)] if names else parts.values.sum(dim=1)


def response_text(rows: Rollout, row: int, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text of a response, without the stop token that ended it."""
    start, stop = int(rows.prompt_lengths[row]), int(rows.lengths[row])
    return decode(rows.tokens[row, start : stop - bool(rows.finished[row])].tolist())


def estimates_of(
    samples: Sequence[tuple[int, bool, str | None]], *, counted: Sequence[int], n: int
) -> dict[str, Estimate]:
    """Return pass@k and maj@k of each k, and avg@n, as means over prompts.

    samples: (prompt, right, vote) of each sample with an answer. A prompt with fewer than k of them, because servers
    failed or the reward left samples out, is in no estimate of k; avg@n is over the samples that there are.
    """
    votes: dict[int, tuple[list[bool], list[str | None]]] = {}
    for prompt, right, vote in samples:
        of_prompt = votes.setdefault(prompt, ([], []))
        of_prompt[0].append(right)
        of_prompt[1].append(vote)
    estimates = {}
    groups = [votes[prompt] for prompt in sorted(votes)]
    for k in counted:
        whole = [(right, vote) for right, vote in groups if len(right) >= k]
        if whole:
            passed = [pass_at_k(len(right), sum(right), k) for right, _ in whole]
            estimates[f"pass_at_{k}"] = mean_with_interval(passed, samples=n)
            majority = [maj_at_k(vote, right, k) for right, vote in whole]
            estimates[f"maj_at_{k}"] = mean_with_interval(majority, samples=n)
    if groups:
        shares = [math.fsum(right) / len(right) for right, _ in groups]
        estimates[f"avg_at_{n}"] = mean_with_interval(shares, samples=n)
    return estimates


def _usual_metrics(rows: Rollout, rewards: Rewards, ranks: Ranks) -> Metrics:
    """Return the mean of rewards, of their parts and of lengths, over all ranks' samples."""
    numbers = rollout_metrics(rows, rewards, ranks)
    metrics = {"val/reward_mean": numbers["reward/mean"]} if "reward/mean" in numbers else {}
    if numbers.get("reward/masked_fraction"):
        metrics["val/reward_masked_fraction"] = numbers["reward/masked_fraction"]
    metrics["val/response_tokens_mean"] = numbers["rollout/response_tokens_mean"]
    return metrics | part_metrics(rewards.parts, rows, ranks, prefix="val/reward_")


def named(outcomes: Sequence[SetOutcome]) -> Metrics:
    """Return the metrics of all sets by their full names: "val/pass_at_4", "val/gsm8k/pass_at_4"."""
    return {
        name.replace("val/", f"val/{outcome.prompts.name}/" if outcome.prompts.name else "val/", 1): value
        for outcome in outcomes
        for name, value in outcome.metrics.items()
    }
