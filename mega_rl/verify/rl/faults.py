"""Runs of every algorithm, and faults of the independent trainer: a lockstep must name the phase of each."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import pstdev
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from mega_rl.config.keys import flattened
from mega_rl.config.loader import load
from mega_rl.config.schema import Config
from mega_rl.errors import RunError
from mega_rl.tracking import progress
from mega_rl.verify.layouts import REFERENCE, TOLERANCES
from mega_rl.verify.rl.compare import UpdateErrors, off
from mega_rl.verify.rl.independent import formulas
from mega_rl.verify.rl.independent.advantages import ADVANTAGES, Responses, generalized
from mega_rl.verify.rl.independent.formulas import Row, divergence, gae, value_term, whitened
from mega_rl.verify.rl.independent.records import NamedSettings, ScoredSample, TokenPath
from mega_rl.verify.rl.independent.trainer import EvaluatedSample, IndependentTrainer
from mega_rl.verify.rl.inputs import (
    AGENT,
    FIXED,
    REWARD,
    SIZES,
    STAND_IN,
    STEPS,
    LockstepRun,
    with_layout,
    without_idle,
)
from mega_rl.verify.rl.rewards import RewardRule
from mega_rl.verify.rl.run import Trial, follow_config, problem_of, record_runs, write_inputs

_TEXT = files("mega_rl.verify.rl").joinpath("algorithms.toml").read_text("utf-8")
# Settings of an algorithm that differ from the defaults, by its name.
ALGORITHMS: dict[str, Mapping[str, object]] = {name: flattened(own) for name, own in tomllib.loads(_TEXT).items()}
# Settings of the runs with planted faults; every one of them has an effect.
SHARED: dict[str, object] = {
    "rollout.temperature": 0.7,
    "optim.lr": 3e-3,
    "optim.clip_grad": 0.5,
    "optim.weight_decay": 0.1,
    "optim.schedule": "linear",
    "optim.warmup_steps": 1,
    "optim.min_lr_ratio": 0.3,
    "trainer.steps": 3,
}


def algorithm_run(settings: Mapping[str, object], *, source: Path | None = None) -> LockstepRun:
    """Return a small run with these settings. source: folder of the architecture's config.json."""
    fixed: Mapping[str, object] = {**FIXED, "reward.function": REWARD}
    if "rollout.source" in settings:
        fixed, settings = FIXED, {**settings, **AGENT}
    elif settings.get("reward.source") == "none":
        fixed = FIXED
    config = load(None, {**fixed, **SIZES, "trainer.steps": STEPS, **settings})
    return LockstepRun(without_idle(config, set(settings)), source, str(source or STAND_IN))


class Fault(NamedTuple):
    """A fault: other settings, other formulas or another rule of rewards than the run's."""

    name: str
    algorithm: str  # run of `ALGORITHMS` in which the fault is planted
    phase: str  # phase that must be named
    plant: Callable[[Trial], Trial] | AbstractContextManager[Any]  # a change of settings or rule, or a patch


def _run(**changes: object) -> Callable[[Trial], Trial]:
    return lambda trial: (replace(trial[0], **changes), trial[1])  # type: ignore[arg-type]


def _but(choice: str, **numbers: float) -> Callable[[Trial], Trial]:
    return lambda trial: _run(**{choice: getattr(trial[0], choice).but(**numbers)})(trial)


def _by(**others: Any) -> Any:
    return patch.multiple(formulas, **others)


def _rule(**changes: Any) -> Callable[[Trial], Trial]:
    return lambda trial: (trial[0], replace(trial[1], **changes))


def _sample_whitened(rows: list[Row]) -> list[Row]:
    """Return advantages whitened with n - 1 below."""
    n = sum(map(len, rows))
    return [[value * math.sqrt((n - 1) / n) for value in row] for row in whitened(rows)]


def _bootstrapped(rewards: Row, values: Row, gammas: Row, lambdas: Row) -> tuple[Row, Row]:
    """Return GAE that continues after the last token, as if every response was cut off."""
    return gae([*rewards[:-1], rewards[-1] + gammas[-1] * values[-1]], values, gammas, lambdas)


update_actor, scored, ways = IndependentTrainer._update_actor, RewardRule.scored, ScoredSample.ways


def _apart(sample: ScoredSample) -> list[TokenPath]:
    """Return the ways of a sample as if each of its rows stood alone."""
    return ways(replace(sample, rows=[replace(row, after=None) for row in sample.rows]))


def _of_next(self: RewardRule, samples: Sequence[ScoredSample]) -> list[ScoredSample]:
    own = scored(self, samples)
    return [replace(one, reward=it.reward, parts=it.parts) for one, it in zip(own, [*own[1:], *own[:1]], strict=True)]


def _anchored(self: Any, rows: list[EvaluatedSample], place: tuple[int, int]) -> Any:
    """Take ratios to the log-probs before each update, not before the step's."""
    with torch.no_grad():
        now = [self.policy.logprobs(row.sample, self._settings.temperature) for row in rows]
    return update_actor(self, [replace(row, old=old) for row, old in zip(rows, now, strict=True)], place)


def _early(responses: Responses, choice: NamedSettings) -> list[Row]:
    return [[*row[1:], 0.0] for row in generalized(responses, choice)]


def _per_token(trial: Trial) -> Trial:
    """Return a run whose discounts count tokens."""
    return _run(advantage=replace(trial[0].advantage, words={"discount_per": "token"}))(trial)


def _whole(responses: Responses, choice: NamedSettings) -> list[Row]:
    return generalized(replace(responses, turn_rewards=responses.token_rewards), choice)


def _clipped_alone(ratio: Tensor, advantages: Tensor, choice: NamedSettings) -> Tensor:
    """Return the loss of the clipped ratio, without the minimum of both."""
    return -torch.clamp(ratio, 1 - choice["clip_low"], 1 + choice["clip_high"]) * advantages


def _far_apart(rewards: Sequence[Row]) -> bool:
    """Return whether rewards differ by more than a threshold."""
    return any(abs(a - b) > 0.5 for a, b in zip(rewards[0], rewards[1], strict=True))


def _divergence(changed: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, float]]) -> Any:
    """Return the fault of another student, teacher or temperature in the divergence."""
    return _by(divergence=lambda *given: divergence(*changed(*given[:3]), given[3]))


_WHOLE = patch.dict(ADVANTAGES, gae=(_whole, ADVANTAGES["gae"][1]))
_ANCHORED = patch.object(IndependentTrainer, "_update_actor", _anchored)
_EARLY = patch.dict(ADVANTAGES, gae=(_early, ADVANTAGES["gae"][1]))
_TOKENS = NamedSettings("ppo", {"clip_low": 0.02, "clip_high": 0.03})
_UNDIVIDED, _DIVIDED = (NamedSettings("grpo", words={"std": std}) for std in ("none", "group"))
FAULTS = (
    Fault("rewards of the next sample", "grpo", "rewards", patch.object(RewardRule, "scored", _of_next)),
    Fault("stop token in the text", "grpo", "rewards", _rule(stop_tokens=frozenset())),
    Fault("prompts without their answers", "grpo", "rewards", _rule(answers={})),
    Fault("sum of parts without weights", "gdpo", "rewards", _rule(weights={})),
    Fault("population instead of sample deviation", "grpo", "advantages", _by(sample_deviation=pstdev)),
    Fault("no division by the deviation", "grpo", "advantages", _run(advantage=_UNDIVIDED)),
    Fault("temperature 1", "grpo", "log-probs", _run(temperature=1.0)),
    Fault("token-mean instead of seq-mean-token-mean", "grpo", "loss", _run(aggregation="token-mean")),
    Fault("no clip", "grpo", "loss", _by(clipped_term=lambda ratio, advantages, _: -ratio * advantages)),
    Fault("clip without the minimum", "grpo", "loss", _by(clipped_term=_clipped_alone)),
    Fault("old log-probs of every update", "grpo", "log-probs", _ANCHORED),
    Fault("no gradient clipping", "grpo", "gradient", _run(clip_grad=0.0)),
    Fault("constant learning rate", "grpo", "weights", _run(schedule="constant")),
    Fault("no bias correction in Adam", "grpo", "weights", _by(bias_corrections=lambda step, run: (1.0, 1.0))),
    Fault("weight decay of norms", "grpo", "weights", _by(decay=lambda tensor, run: run.weight_decay)),
    Fault("KL in the loss with the wrong sign", "grpo_kl", "loss", _run(kl_coef=-0.1)),
    Fault("k2 instead of k3", "grpo_kl", "loss", _run(kl_estimator="k2")),
    Fault("entropy bonus with the wrong sign", "grpo_kl", "loss", _run(entropy_coef=-0.01)),
    Fault("importance weights without a cap", "tis", "loss", _but("correction", cap=1e9)),
    Fault("no importance weights", "tis", "loss", _run(correction=NamedSettings("none"))),
    Fault("advantages one token early", "ppo", "advantages", _EARLY),
    Fault("KL in the reward with the wrong sign", "ppo", "advantages", _run(kl_coef=-0.05)),
    Fault("lambda 1", "ppo", "advantages", _but("advantage", gae_lambda=1.0)),
    Fault("whitening with the sample deviation", "ppo", "advantages", _by(whitened=_sample_whitened)),
    Fault("a value after the last token", "ppo", "advantages", _by(gae=_bootstrapped)),
    Fault("no value clip", "ppo", "loss", _run(value_clip=0.0)),
    Fault("squared error without the half", "ppo", "loss", _by(value_term=lambda *row: 2 * value_term(*row))),
    Fault("reference as at the start", "reinforce_plus_plus_baseline", "log-probs", _run(reference_interval=0)),
    Fault("copy instead of a moving average", "reinforce_plus_plus_baseline", "log-probs", _run(reference_rate=1.0)),
    Fault("mean reward without lengths", "opo", "advantages", _run(advantage=_UNDIVIDED)),
    Fault("geometric mean without narrow bounds", "opo", "loss", _but("loss", clip_low=9.0, clip_high=9.0)),
    Fault("no rejection", "opo", "loss", _run(correction=NamedSettings("none"))),
    Fault("sets of one response", "pass_at_k", "advantages", _but("advantage", k=1)),
    Fault("covariant tokens not held back", "pass_at_k", "loss", _but("loss", threshold=1e9)),
    Fault("ratio of each token", "gspo_critic", "loss", _run(loss=_TOKENS)),
    Fault("no punishment of long responses", "dapo_sampling", "advantages", _run(overlong_buffer=0)),
    Fault("responses that were cut off train", "dapo_sampling", "log-probs", _run(overlong_filter=False)),
    Fault("groups of equal rewards kept", "dapo_sampling", "sampling", _by(differ=lambda rewards: True)),
    Fault("groups of close rewards dropped", "dapo_sampling", "sampling", _by(differ=_far_apart)),
    Fault("one generation only", "dapo_sampling", "sampling", _run(max_generations=1)),
    Fault("sums of parts compared", "gdpo_sampling", "sampling", _by(differ=lambda parts: len({*map(sum, parts)}) > 1)),
    Fault("population instead of sample deviation of parts", "gdpo", "advantages", _by(sample_deviation=pstdev)),
    Fault("weights of parts ignored", "gdpo", "advantages", _run(part_weights={})),
    Fault("parts summed before they are normalised", "gdpo", "advantages", _run(advantage=_DIVIDED)),
    Fault("punishment of long responses without its weight", "gdpo_sampling", "advantages", _run(overlong_penalty=1.0)),
    Fault("teacher and student swapped", "teacher_reverse_kl", "loss", _divergence(lambda p, q, t: (q, p, t))),
    Fault("divergence without temperature", "teacher_reverse_kl", "loss", _divergence(lambda p, q, t: (p, q, 1.0))),
    Fault("teacher without temperature", "teacher_forward_kl", "loss", _divergence(lambda p, q, t: (p, q * t, t))),
    Fault("discounts within turns", "agent_turns", "advantages", _per_token),
    Fault("rows continue no other", "agent_turns", "advantages", patch.object(ScoredSample, "ways", _apart)),
    Fault("scores of turns at the end", "agent_turns", "advantages", _WHOLE),
    Fault("all turns train", "agent_last_turn", "log-probs", _run(last_turn=False)),
    Fault("beta of the other model", "teacher_jensen_shannon", "loss", _but("loss", beta=0.7)),
    Fault("reverse KL instead of the mixture's", "teacher_jensen_shannon", "loss", _but("loss", beta=1.0)),
)


def first_off(fault: Fault, config: Config, trace: Path) -> tuple[UpdateErrors, str] | None:
    """Return the first (update, phase) that a fault puts off; None if all agree."""
    if not isinstance(fault.plant, AbstractContextManager):
        return off(follow_config(config, trace, fault.plant))
    with fault.plant:
        return off(follow_config(config, trace))


def self_check(folder: Path, *, timeout_s: float) -> Iterator[tuple[Fault, UpdateErrors | None, str]]:
    """Yield (fault, update, phase) that the lockstep names; None and "" if it names none.

    Raises RunError if a run is off without a fault.
    """
    runs: dict[str, tuple[Config, Path]] = {}
    for name in dict.fromkeys(fault.algorithm for fault in FAULTS):
        inputs, trace = folder / f"inputs_{name}", folder / "traces" / name
        inputs.mkdir()
        config, _ = write_inputs(algorithm_run({**SHARED, **ALGORITHMS[name]}), inputs, multiple=1)
        runs[name] = with_layout(config, REFERENCE, run_dir=trace / "run"), trace
    record_runs({trace: config for config, trace in runs.values()}, label="real runs", ranks=1, timeout_s=timeout_s)
    for name, (config, trace) in runs.items():
        if problem := problem_of(tuple(follow_config(config, trace)), TOLERANCES):
            raise RunError(f"{name} is off without a planted fault: {problem}")
    with progress.rounds("fault", len(FAULTS)) as rounds:
        for fault in FAULTS:
            update, phase = first_off(fault, *runs[fault.algorithm]) or (None, "")
            yield fault, update, phase
            rounds.advance()
