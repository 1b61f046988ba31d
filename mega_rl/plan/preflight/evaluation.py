"""Settings of an evaluation without training, from those of a recipe, checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mega_rl.config.keys import value_of, with_settings
from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.plan.preflight.host import launched_world_size
from mega_rl.plan.preflight.run import check_run

SAMPLES, RESULTS = "samples.jsonl", "results.json"
# Sections and settings that only training reads, which take their defaults, and the settings in them that are kept.
_SECTIONS = ("model", "optim", "algorithm", "checkpoint", "metrics", "trainer")
_OF_TRAINING = (
    *("data.source", "data.val_size", "data.train_files"),
    *("data.mixture", "data.curriculum", "data.stream"),
    *("engine.megatron.moe.routing_replay", "engine.megatron.reference"),
    *("rollout.dynamic_sampling", "rollout.sglang.partial_rollout", "rollout.sglang.return_routing", "reward.overlong"),
)
_KEPT = (
    *(f"model.{name}" for name in ("path", "dtype", "fp32_head", "attn_implementation")),
    *(f"trainer.{name}" for name in ("seed", "device", "deterministic", "timeout_s", "microbatch")),
    "metrics.progress_bar",
)


def checked(config: Config, *, world_size: int | None, out: str, launchers: int = 1) -> Config:
    """Return `evaluation_config` of a config, with which an evaluation can start; arguments as of `check_run`.

    Raises UserErrors with every mistake, one line each; UserError for a folder that holds another's samples.
    """
    size = launched_world_size() if world_size is None else world_size
    earlier = [name for name in (SAMPLES, RESULTS) if (Path(out) / name).exists()]
    if earlier:
        raise UserError(
            f"--out={out}: holds {' and '.join(earlier)} of an earlier evaluation, which this one would replace; name "
            "another folder, or remove them"
        )
    own = evaluation_config(config, world_size=size, out=out)
    if not (own.data.val_files or own.validation.sets):
        raise UserError("there are no prompts to evaluate on; name a file, as --data gsm8k=gsm8k_test.jsonl")
    return check_run(own, world_size=size, launchers=launchers, trains=False)


def evaluation_config(config: Config, *, world_size: int, out: str) -> Config:
    """Return the config that evaluates `model.path` on the held-out prompts of `config` and writes into `out`.

    Model, layout, rollouts, rewards and data stay. Several samples of a prompt are drawn at the temperature of rollouts
    unless validation has its own.
    """
    val, micro, defaults = config.validation, config.trainer.microbatch, Config()
    length = val.max_new_tokens or config.rollout.max_new_tokens
    longest = config.data.max_prompt_tokens + length
    temperature = config.rollout.temperature if val.n > 1 and val.temperature == 0 else val.temperature
    untrained = replace(config, **{section: value_of(defaults, section) for section in _SECTIONS})
    return with_settings(
        untrained,
        {key: value_of(defaults, key) for key in _OF_TRAINING}
        | {key: value_of(config, key) for key in _KEPT}
        | {
            "algorithm.advantage": "reinforce_plus_plus",  # needs no other model
            "rollout.n": 1,
            "rollout.max_new_tokens": length,
            "validation.temperature": temperature,
            "validation.max_new_tokens": 0,
            "checkpoint.resume": "never",
            "trainer.run_dir": out,
            "trainer.steps": 1,
            "trainer.prompts_per_step": world_size,
            "trainer.minibatch_size": world_size,
            "trainer.val_interval": 1,
            "trainer.microbatch.max_tokens": max(micro.max_tokens, 2 * longest if micro.packing else 1),
            "trainer.microbatch.skip_zero_advantages": False,
        },
    )
