"""Settings of a run as the independent trainer's own, and settings of well-known algorithms."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files

from mega_rl.config.choices import ADVANTAGE, ALGORITHM_CHOICES, CORRECTION, LOSS, Choice, chosen
from mega_rl.config.keys import flattened, value_of
from mega_rl.config.schema import Config
from mega_rl.errors import UserErrors
from mega_rl.verify.rl.independent import records
from mega_rl.verify.rl.independent.advantages import ADVANTAGES
from mega_rl.verify.rl.independent.losses import CORRECTIONS, LOSSES
from mega_rl.verify.rl.independent.records import LockstepSettings
from mega_rl.verify.rl.inputs import EOS

_TEXT = files("mega_rl.verify.rl").joinpath("algorithms.toml").read_text("utf-8")
# Settings of an algorithm that differ from the defaults, by its name.
ALGORITHMS: dict[str, Mapping[str, object]] = {name: flattened(own) for name, own in tomllib.loads(_TEXT).items()}
# What the independent trainer has formulas for: settings that each reads, by kind of choice and name.
FORMULAS: Mapping[str, Mapping[str, frozenset[str]]] = {
    ADVANTAGE.key: {name: reads for name, (_, reads) in ADVANTAGES.items()},
    LOSS.key: {name: reads for name, (_, reads) in LOSSES.items()},
    CORRECTION.key: {name: reads for name, (_, reads) in CORRECTIONS.items()},
}


def coverage(choice: Choice) -> tuple[list[str], list[str]]:
    """Return the names of built-in choices that are followed, and of those that are refused."""
    followed = FORMULAS[choice.key]
    return [name for name in choice.builtin if name in followed], [
        name for name in choice.builtin if name not in followed and name != "auto"
    ]


def lockstep_settings(config: Config) -> LockstepSettings:
    """Return the settings of a run that its mathematics depends on."""
    problems = [problem for choice in ALGORITHM_CHOICES for problem in _unknown(config, choice)]
    if config.algorithm.loss.name == "kl_cov" and config.algorithm.old_logprobs != "rollout":
        problems.append(
            f"algorithm.old_logprobs={config.algorithm.old_logprobs} with algorithm.loss=kl_cov: |log ratio| has no "
            "derivative at the old policy, where rounding decides its sign, so two right trainers differ; legal: "
            "rollout"
        )
    if problems:
        raise UserErrors(problems)
    algorithm, kl, overlong = config.algorithm, config.algorithm.kl, config.reward.overlong
    optim = {name: value for name, value in vars(config.optim).items() if name != "max_skipped_steps"}
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
    name, followed = chosen(config, choice), coverage(choice)[0]
    if name not in followed:
        yield f"{choice.key}={name}: the independent trainer has no formula of it; legal: {' '.join(followed)}"
        return
    defaults = choice.builtin[name]().settings
    for setting, value in value_of(config, choice.key).settings.items():
        if setting not in FORMULAS[choice.key][name] and value != defaults[setting]:
            legal = f"legal: {defaults[setting]}"
            yield f"{choice.key}.{setting}={value}: the independent trainer's {name} has no such setting; {legal}"
