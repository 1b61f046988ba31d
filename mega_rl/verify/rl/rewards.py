"""Read a config's algorithm, and compute rewards of a recorded run from its tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mega_rl.config.choices import ADVANTAGE, ALGORITHM_CHOICES, CORRECTION, LOSS, Choice, chosen
from mega_rl.config.keys import value_of
from mega_rl.config.schema import Config
from mega_rl.errors import UserErrors
from mega_rl.verify.rl.independent import records
from mega_rl.verify.rl.independent.advantages import ADVANTAGES
from mega_rl.verify.rl.independent.losses import CORRECTIONS, LOSSES
from mega_rl.verify.rl.independent.records import LockstepSettings, ScoredSample, StepBatch
from mega_rl.verify.rl.inputs import EOS, SPECIAL, VOCABULARY, reward, reward_of

# Formulas of the independent trainer: kind of choice -> name -> settings that it reads.
FORMULAS: Mapping[str, Mapping[str, frozenset[str]]] = {
    ADVANTAGE.key: {name: reads for name, (_, reads) in ADVANTAGES.items()},
    LOSS.key: {name: reads for name, (_, reads) in LOSSES.items()},
    CORRECTION.key: {name: reads for name, (_, reads) in CORRECTIONS.items()},
}


def lockstep_settings(config: Config) -> LockstepSettings:
    """Return the settings of a run that its mathematics depends on."""
    problems = [problem for choice in ALGORITHM_CHOICES for problem in _unknown(config, choice)]
    if config.algorithm.loss.name == "kl_cov" and config.algorithm.old_logprobs != "rollout":
        problems.append(
            f"algorithm.old_logprobs={config.algorithm.old_logprobs} with algorithm.loss=kl_cov: |log ratio| has no "
            "derivative at the old policy, where rounding decides its sign, so two right trainers differ; legal: "
            "rollout"
        )
    if config.optim.name != "adam":
        problems.append("optim.name=muon: its Newton-Schulz in bf16 rounds beyond the tolerances; legal: adam")
    if problems:
        raise UserErrors(problems)
    algorithm, kl, overlong = config.algorithm, config.algorithm.kl, config.reward.overlong
    unread = {"name", "max_skipped_steps"}
    optim = {name: value for name, value in vars(config.optim).items() if name not in unread}
    return LockstepSettings(
        advantage=_followed(config, ADVANTAGE),
        loss=_followed(config, LOSS),
        correction=_followed(config, CORRECTION),
        part_weights=config.reward.weights,
        prompts_per_step=config.trainer.prompts_per_step,
        updates_per_epoch=-(-config.trainer.prompts_per_step // config.trainer.minibatch_size),
        samples_all_tokens=config.rollout.top_p == 1 and config.rollout.top_k == 0,
        max_generations=config.rollout.dynamic_sampling.max_generations,
        temperature=config.rollout.temperature,
        value_clip=algorithm.value_clip,
        entropy_coef=algorithm.entropy_coef,
        aggregation=algorithm.loss_aggregation,
        max_response_tokens=config.rollout.max_new_tokens,
        stop_tokens=frozenset({EOS, *config.rollout.stop_token_ids}),
        overlong_filter=overlong.filter,
        overlong_buffer=overlong.buffer_tokens,
        overlong_penalty=overlong.penalty,
        last_turn=algorithm.train_turns == "last",
        old_is_rollout=algorithm.old_logprobs == "rollout",
        kl_placement=kl.name,
        kl_estimator=kl.estimator,
        kl_coef=kl.coef,
        kl_target=kl.target if kl.control == "adaptive" else 0.0,
        kl_horizon=kl.horizon,
        reference_interval=kl.reference_interval,
        reference_rate=kl.reference_rate,
        critic_warmup_steps=algorithm.critic_warmup_steps,
        **optim,
        steps=config.trainer.steps,
        ahead=config.trainer.async_steps,
    )


def _followed(config: Config, choice: Choice) -> records.NamedSettings:
    """Return the chosen algorithm with its settings as the independent trainer's own."""
    name = chosen(config, choice)
    settings = choice.builtin[name](**value_of(config, choice.key).settings).settings
    words = {key: value for key, value in settings.items() if isinstance(value, str)}
    return records.NamedSettings(
        name, {key: float(value) for key, value in settings.items() if key not in words}, words
    )


def _unknown(config: Config, choice: Choice) -> Iterator[str]:
    """Yield why a choice cannot be followed: it has no formula, or an unread setting."""
    name, followed = chosen(config, choice), [one for one in choice.builtin if one in FORMULAS[choice.key]]
    if name not in followed:
        yield f"{choice.key}={name}: the independent trainer has no formula of it; legal: {' '.join(followed)}"
        return
    defaults = choice.builtin[name]().settings
    for setting, value in value_of(config, choice.key).settings.items():
        if setting not in FORMULAS[choice.key][name] and value != defaults[setting]:
            legal = f"legal: {defaults[setting]}"
            yield f"{choice.key}.{setting}={value}: the independent trainer's {name} has no such setting; {legal}"


@dataclass(frozen=True)
class RewardRule:
    """Rule by which each response is rewarded."""

    function: Callable[..., float | Mapping[str, float]] | None  # None: the run has no reward
    weights: Mapping[str, float]  # weight of each named part; default 1
    stop_tokens: frozenset[int]  # one at the end of a response is not in its text
    answers: Mapping[str, str]  # answers of the data's rows, by prompt text
    of_turns: bool = False  # an agent's: each turn has a score, too

    def scored(self, samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        """Return the samples with rewards computed from their own tokens."""
        scores = [self._score(sample) for sample in samples]
        own = [
            replace(sample, reward=reward, parts=parts, greedy_reward=math.nan)
            for sample, (reward, parts) in zip(samples, scores, strict=True)
        ]
        return [self._with_turns(sample) for sample in own] if self.of_turns else own

    def _with_turns(self, sample: ScoredSample) -> ScoredSample:
        """Return an agent's sample with the scores of its turns."""
        turns, ends = list[list[int]]([[]]), [end for row in sample.rows for end in row.ends]
        for token, is_end in zip(sample.sampled, ends, strict=True):
            turns[-1].append(token)
            turns += [[]] if is_end else []
        score, of_turns = agent_scores(self._prompt(sample), turns[:-1], self.answers.get(self._prompt(sample), ""))
        later = iter(of_turns)
        numbers = [in_float32(next(later) or 0.0) if is_end else 0.0 for is_end in ends]
        total = sum([score, *(one for one in of_turns if one is not None)])
        return replace(sample, reward=in_float32(total), turn_scores=numbers)

    def _prompt(self, sample: ScoredSample) -> str:
        return text_of(sample.rows[0].tokens[: sample.rows[0].start])

    def _score(self, sample: ScoredSample) -> tuple[float, dict[str, float]]:
        """Return (reward, its named parts)."""
        if self.function is None:
            return math.nan, {}
        response, text = sample.sampled, self._prompt(sample)
        if response[-1] in self.stop_tokens:
            response = response[:-1]
        score = self.function(text, text_of(response), self.answers.get(text, ""))
        if not isinstance(score, Mapping):
            return in_float32(score), {}
        total = math.fsum(self.weights.get(name, 1.0) * part for name, part in score.items())
        return in_float32(total), {name: in_float32(part) for name, part in score.items()}


def reward_rule(config: Config) -> RewardRule:
    """Return the rule of a run."""
    rows = [json.loads(line) for file in config.data.train_files for line in Path(file).read_text("utf-8").splitlines()]
    answers = {row["prompt"]: row["answer"] for row in rows}
    stops, of_turns = lockstep_settings(config).stop_tokens, config.reward.source.name == "environment"
    return RewardRule(reward_of(config), config.reward.weights, stops, answers=answers, of_turns=of_turns)


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


def agent_scores(prompt: str, turns: Sequence[Sequence[int]], answer: str) -> tuple[float, list[float | None]]:
    """Return the scores of an agent's trajectory and of its turns; every third has none."""
    scores = [None if place % 3 == 2 else reward(prompt, text_of(turn), answer) / 4 for place, turn in enumerate(turns)]
    return reward(prompt, "".join(map(text_of, turns)), answer), scores


def text_of(token_ids: Sequence[int]) -> str:
    """Return the characters of token ids, without special tokens, by the table that made the tokenizer."""
    return "".join(VOCABULARY[token] for token in token_ids if VOCABULARY[token] not in SPECIAL)


def in_float32(number: float) -> float:
    """Return a number as float32 has it, which is what the trainer keeps of a reward."""
    return float(torch.tensor(number, dtype=torch.float32))


def _gap(real: ScoredSample, own: ScoredSample) -> float:
    if set(real.parts) != set(own.parts) or len(real.turn_scores) != len(own.turn_scores):
        return math.inf
    gaps = [abs(a - b) for a, b in zip(real.turn_scores, own.turn_scores, strict=True)]
    gaps += [abs(real.reward - own.reward), *(abs(real.parts[name] - part) for name, part in own.parts.items())]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)
