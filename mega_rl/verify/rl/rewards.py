"""Compute the rewards of a recorded run from its tokens, without the run's reward role."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mega_rl.config.schema import Config
from mega_rl.verify.rl.independent.records import ScoredSample, StepBatch
from mega_rl.verify.rl.inputs import reward_of
from mega_rl.verify.rl.model import SPECIAL, VOCABULARY
from mega_rl.verify.rl.reading import lockstep_settings


@dataclass(frozen=True)
class RewardRule:
    """Rule by which each response is rewarded; a planted fault replaces a field."""

    function: Callable[..., float | Mapping[str, float]] | None  # None: the run has no reward
    weights: Mapping[str, float]  # weight of each named part; default 1
    stop_tokens: frozenset[int]  # one at the end of a response is not in its text
    # Samples in the order in which their rewards go to the samples: each has its own.
    placed: Callable[[Sequence[ScoredSample]], Sequence[ScoredSample]] = list
    answers: Mapping[str, str] = field(default_factory=dict)  # answers of the data's rows, by prompt text

    def scored(self, samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        """Return the samples with rewards computed from their own tokens."""
        scores = [self._score(sample) for sample in self.placed(samples)]
        return [
            replace(sample, reward=reward, parts=parts, greedy_reward=math.nan)
            for sample, (reward, parts) in zip(samples, scores, strict=True)
        ]

    def _score(self, sample: ScoredSample) -> tuple[float, dict[str, float]]:
        """Return (reward, its named parts)."""
        if self.function is None:
            return math.nan, {}
        prompt, response = sample.tokens[: sample.prompt_length], sample.tokens[sample.prompt_length :]
        if response[-1] in self.stop_tokens:
            response = response[:-1]
        text = text_of(prompt)
        score = self.function(text, text_of(response), self.answers.get(text, ""))
        if not isinstance(score, Mapping):
            return in_float32(score), {}
        total = math.fsum(self.weights.get(name, 1.0) * part for name, part in score.items())
        return in_float32(total), {name: in_float32(part) for name, part in score.items()}


def reward_rule(config: Config) -> RewardRule:
    """Return the rule of a run."""
    rows = [json.loads(line) for file in config.data.train_files for line in Path(file).read_text("utf-8").splitlines()]
    answers = {row["prompt"]: row["answer"] for row in rows}
    return RewardRule(reward_of(config), config.reward.weights, lockstep_settings(config).stop_tokens, answers=answers)


def rescored(batch: StepBatch, rule: RewardRule) -> StepBatch:
    """Return the batch with rewards by the rule, and with those of greedy responses."""
    greedy = rule.scored(batch.greedy)
    baselines = {sample.prompt: sample.reward for sample in greedy}
    samples = [
        replace(sample, greedy_reward=baselines.get(sample.prompt, math.nan)) for sample in rule.scored(batch.samples)
    ]
    generations = [rule.scored(generation) for generation in batch.generations]
    return replace(batch, samples=samples, generations=generations, greedy=greedy)


def reward_error(real: StepBatch, own: StepBatch) -> float:
    """Return the largest |difference| of a reward or its part; infinite for other names of parts."""
    every = [
        [sample for samples in (batch.samples, *batch.generations, batch.greedy) for sample in samples]
        for batch in (real, own)
    ]
    return max(_gap(*pair) for pair in zip(*every, strict=True))


def text_of(token_ids: Sequence[int]) -> str:
    """Return the characters of token ids, without special tokens, by the table that made the tokenizer."""
    return "".join(VOCABULARY[token] for token in token_ids if VOCABULARY[token] not in SPECIAL)


def in_float32(number: float) -> float:
    """Return a number as float32 has it, which is what the trainer keeps of a reward."""
    return float(torch.tensor(number, dtype=torch.float32))


def _gap(real: ScoredSample, own: ScoredSample) -> float:
    if set(real.parts) != set(own.parts):
        return math.inf
    gaps = [abs(real.reward - own.reward), *(abs(real.parts[name] - part) for name, part in own.parts.items())]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)
