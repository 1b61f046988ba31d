"""Evaluations of the policy on sets of prompts: samples, rewards, pass@k, avg@k and maj@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from torch import Tensor

from mega_rl.algorithms.evaluation import Estimate, maj_at_k, mean_with_interval, pass_at_k
from mega_rl.config.schema.data import ValidationConfig
from mega_rl.errors import UserError
from mega_rl.protocols import Ranks, RolloutSource, Scorer
from mega_rl.trainer.rows import ReadResponse, check_rows, scored_rows
from mega_rl.trainer.step_metrics import AnswerTable
from mega_rl.types import Draws, Metrics, Prompt, PromptSet, Rewards, Rollout


class ScoredSamples(NamedTuple):
    """Scored samples of neighbouring prompts of a set, as this replica has them."""

    name: str  # name of the set
    first: int  # position of their first prompt in the set
    prompts: Sequence[Prompt]  # `rollout.prompt_index` points into them
    rollout: Rollout
    rewards: Rewards
    votes: Sequence[str | None]  # [B] answer that each response votes for; () where pass@k and maj@k are not measured
    right: Sequence[bool | None]  # [B], None of a sample without a reward, or without the part that says so; or ()


class SetOutcome(NamedTuple):
    """Outcome of an evaluation of one set of prompts."""

    prompts: PromptSet
    samples: ScoredSamples  # the first prompts'
    metrics: Metrics  # have the same name for any set, "val/pass_at_4"; equal on all ranks
    estimates: dict[str, Estimate]


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on sets of prompts; samples depend only on step, set, prompt and sample number."""

    sets: Sequence[PromptSet]
    settings: ValidationConfig
    rollout: RolloutSource
    reward: Scorer
    ranks: Ranks  # the data-parallel replicas
    read: ReadResponse
    answer: Callable[[str], str | None] = str.strip  # what a response votes for
    hold: Callable[[str], None] = lambda stage: None  # brings the state of "validate" or "reward" to the devices

    def run(self, step: int, *, each: Callable[[ScoredSamples], None] = lambda samples: None) -> list[SetOutcome]:
        """Return the outcome on each set; collective over all ranks."""
        # With twice the replicas no replica is ever without a prompt.
        most, outcomes = max(self.settings.chunk // self.settings.n, 2 * self.ranks.size), []
        for one in self.sets:
            table = AnswerTable(self.ranks)
            shown: ScoredSamples | None = None
            for part in parts_of(len(one.prompts), most=most):
                samples = self._sample(one, part, step)
                table.add(samples.rollout, samples.rewards, first=samples.first)
                if self.settings.counted:
                    table.add_votes(samples.votes, samples.right, samples.rollout, first=samples.first)
                each(samples)
                shown = shown or samples
            assert shown is not None, "a set of prompts has some"
            estimates: dict[str, Estimate] = {}
            if self.settings.counted:
                estimates = estimates_of(table.votes(), counted=self.settings.counted, n=self.settings.n)
            metrics = table.metrics()
            for name, estimate in estimates.items():
                edges = {"": estimate.mean, "_low": estimate.low, "_high": estimate.high}
                metrics |= {f"val/{name}{edge}": value for edge, value in edges.items()}
            outcomes.append(SetOutcome(one, shown, metrics, estimates))
        return outcomes

    def _sample(self, one: PromptSet, part: range, step: int) -> ScoredSamples:
        prompts, val, draws = one.prompts[part.start : part.stop], self.settings, None
        self.hold("validate")
        if not val.greedy:
            draws = Draws(
                val.n, val.temperature, val.top_p, val.top_k,
                stream=crc32(one.name.encode()), first=part.start, max_new_tokens=val.max_new_tokens,
            )  # fmt: skip
        rows = self.rollout.generate(prompts, step=step, greedy=val.greedy, draws=draws)
        check_rows(rows, prompts, self.ranks, samples=self.settings.n)
        self.hold("reward")
        rewards = self.reward.score(rows, prompts)
        votes: Sequence[str | None] = ()
        right: Sequence[bool | None] = ()
        if self.settings.counted:
            known = [True] * len(rows.lengths) if rows.failed is None else (~rows.failed).tolist()
            votes = [self.answer(self.read(rows, row)[0]) if known[row] else None for row in range(len(known))]
            right = right_samples(rows, rewards, above=self.settings.right_above, part=self.settings.right_part)
        return ScoredSamples(one.name, part.start, prompts, rows, rewards, votes, right)


def parts_of(count: int, *, most: int) -> list[range]:
    """Return neighbouring parts of `count` prompts, as even as possible, none of more than `most`."""
    number = -(-count // most)
    return [range(count * part // number, count * (part + 1) // number) for part in range(number)]


def right_samples(rows: Rollout, rewards: Rewards, *, above: float, part: str) -> list[bool | None]:
    """Return [B]: whether each sample's reward or part is above a number; None without one."""
    judged, scored = judged_values(rewards, part), scored_rows(rows, rewards)
    known = (scored & ~judged.isnan().to(scored.device)).tolist()  # a data source may lack the part
    return [value > above if known else None for value, known in zip(judged.tolist(), known, strict=True)]


def judged_values(rewards: Rewards, part: str, *, setting: str = "validation.right_part") -> Tensor:
    """Return [B] the rewards, or the part of them that a setting names. Raises UserError."""
    parts, rows = rewards.parts, len(rewards.totals)
    if not part:
        return rewards.totals
    names = () if parts is None else parts.names
    if parts is None or (part not in names and (names or rows)):
        has = f"has the parts {', '.join(names)}" if names else "is a number, without named parts"
        raise UserError(f"{setting}={part} has no effect: the reward {has}")
    return parts.values[:, names.index(part)] if names else parts.values.sum(dim=1)


def estimates_of(
    samples: Sequence[tuple[int, bool, str | None]], *, counted: Sequence[int], n: int
) -> dict[str, Estimate]:
    """Return pass@k and maj@k of each k, and avg@n, as means over prompts.

    samples: (prompt, right, vote) of each sample with an answer. A prompt with fewer than k of them, because servers
    failed or the reward left samples out, is in no estimate of k; avg@n is over the samples that there are.
    """
    groups: dict[int, list[tuple[bool, str | None]]] = {}
    for prompt, right, vote in sorted(samples, key=lambda sample: sample[0]):
        groups.setdefault(prompt, []).append((right, vote))
    of_prompts = [([right for right, _ in own], [vote for _, vote in own]) for own in groups.values()]
    estimates = {}
    for k in counted:
        if whole := [(right, vote) for right, vote in of_prompts if len(right) >= k]:
            passed = [pass_at_k(len(right), sum(right), k) for right, _ in whole]
            estimates[f"pass_at_{k}"] = mean_with_interval(passed, samples=n)
            majority = [maj_at_k(vote, right, k) for right, vote in whole]
            estimates[f"maj_at_{k}"] = mean_with_interval(majority, samples=n)
    if of_prompts:
        shares = [math.fsum(right) / len(right) for right, _ in of_prompts]
        estimates[f"avg_at_{n}"] = mean_with_interval(shares, samples=n)
    return estimates


def named(outcomes: Sequence[SetOutcome]) -> Metrics:
    """Return the metrics of all sets by their full names: "val/pass_at_4", "val/gsm8k/pass_at_4"."""
    return {
        name.replace("val/", f"val/{outcome.prompts.name}/" if outcome.prompts.name else "val/", 1): value
        for outcome in outcomes
        for name, value in outcome.metrics.items()
    }
