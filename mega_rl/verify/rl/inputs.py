"""Inputs of a lockstep: settings with a recipe's mathematics, prompts and a reward."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.config.choices import ADVANTAGE
from mega_rl.config.keys import FIELDS, value_of, with_settings
from mega_rl.config.loader import load
from mega_rl.config.needs import unmet
from mega_rl.config.rules import check
from mega_rl.config.schema import Config, ReferenceLayoutConfig
from mega_rl.data.downloads import checkpoint_folder
from mega_rl.data.hub import model_name
from mega_rl.errors import UserErrors
from mega_rl.verify.layouts import Layout

REWARD = "python:mega_rl.verify.rl.inputs.reward"
NO_REWARD: Mapping[str, object] = {"reward.source": "none"}  # for a recipe that learns only from a teacher
# An agent whose rows have holes and forks plays in place of a recipe's own; it scores its turns.
AGENT: Mapping[str, object] = {
    "rollout.source": f"{Path(__file__).with_name('agent.py')}:Agent",
    "reward.source": "environment",
}
PARTS = ("correct", "format")  # names of the reward's parts if no weight names any
# (factor of the length, number of values) of parts: one of two values is often equal in all samples of a prompt.
PART_VALUES = ((5, 11), (3, 2), (1, 3), (2, 7))
STAND_IN = "the quickstart's architecture"
STEPS = 5
NUM_PROMPTS, LONGEST_PROMPT = 64, 8
CHARACTERS = "0123456789abcdefghijklmnopqrs"  # a token each
SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD = SPECIAL.index("<pad>")
VOCABULARY = (*SPECIAL, *CHARACTERS)
STOP_TOKENS = [3, 4, 5, 6]  # the first characters: one token in six ends a response, so that lengths differ

EOS = 1  # number of the token that ends a response, too
# Settings whose values are the recipe's, with those of the sections below.
KEPT = (
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.dynamic_sampling.max_generations"),
    *("trainer.seed", "trainer.async_steps", "trainer.microbatch.packing", "reward.weights"),
)
KEPT_SECTIONS = ("algorithm", "optim", "reward.overlong")
DRAWN = "rollout.dynamic_sampling.prompts"
# Settings of a small run, unless the command line gives them. Adam's eps is the size of a gradient's element, so that a
# step follows the gradient. The rates move the policy far enough for ratios to leave the clip range.
SIZES: Mapping[str, object] = {
    "trainer.prompts_per_step": 8,
    "trainer.minibatch_size": 4,
    "trainer.microbatch.max_tokens": 64,
    "rollout.n": 4,
    DRAWN: 0,
    "rollout.max_new_tokens": 12,
    "optim.lr": 1e-3,
    "optim.critic_lr": 3e-3,
    "optim.eps": 1e-3,
}
# Settings of a run on CPUs whose files nobody reads.
UNSEEN: Mapping[str, object] = {
    "checkpoint.save_final": False,
    "checkpoint.resume": "never",
    "metrics.tensorboard": False,
    "metrics.progress_bar": False,
    "metrics.rollout_interval": 0,
    "trainer.device": "cpu",
    "trainer.timeout_s": 120.0,
}
# The rollout engine's log-probs are shifted on purpose (`mega_rl.verify.rl.record`), so its guards are wide open.
FIXED: Mapping[str, object] = {
    "model.dtype": "fp32",
    "engine.megatron.transformer_impl": "local",
    "data.max_prompt_tokens": LONGEST_PROMPT,
    "data.overlong_prompts": "drop",
    "rollout.stop_token_ids": STOP_TOKENS,
    "rollout.mismatch.mean_limit": 10.0,
    "rollout.mismatch.share_limit": 1.0,
    "rollout.mismatch.max_limit": 100.0,
    **UNSEEN,
}


@dataclass(frozen=True)
class LockstepRun:
    """A run without its layout, and the architecture of its model."""

    config: Config
    source: Path | None  # folder with the model's config.json; None: that of the quickstart
    description: str  # origin of the model


def read_run(recipe: str | None, overrides: Sequence[str], *, steps: int) -> LockstepRun:
    """Return the small run of `steps` steps for a recipe and settings. Raises UserErrors."""
    read = load(recipe, overrides)
    given = {text.lstrip("~+").partition("=")[0] for text in overrides}
    rewards = NO_REWARD if read.reward.source.name == "none" else {"reward.function": REWARD}
    rewards = AGENT if read.rollout.source.name != "single_turn" else rewards
    legal = {*SIZES, "model.path", *(rewards.keys() - {"reward.function"})}
    if foreign := sorted(key for key in given - legal if not _is_kept(key) and not key.startswith("rollout.source.")):
        raise UserErrors(
            [
                f"{key}: verify rl has its own; leave it out. Legal are settings of {', '.join(KEPT_SECTIONS)}, "
                f"model.path, {', '.join((*KEPT, *SIZES))}, reward.source=none; --layouts and --steps choose the rest"
                for key in foreign
            ]
        )
    kept = {key: value_of(read, key) for key in FIELDS if _is_kept(key)}
    sizes = {key: value_of(read, key) if key in given else value for key, value in SIZES.items()}
    config = with_settings(Config(), {**FIXED, **rewards, **kept, **sizes, "trainer.steps": steps})
    config, path = without_idle(_shortened(config, given), given), read.model.path
    if path and (model_name(path) is not None or Path(path).exists() or "model.path" in given):
        return LockstepRun(config, checkpoint_folder(Path(path), label="model.path", weights=False), path)
    return LockstepRun(config, None, STAND_IN + (f": {path} is not there" if path else ""))


def _is_kept(key: str) -> bool:
    return key in KEPT or any(key.startswith(f"{section}.") for section in (*KEPT_SECTIONS, "reward.weights"))


def _shortened(config: Config, given: set[str]) -> Config:
    """Return the config with warm-ups, intervals, buffers and prompts that fit a short run."""
    most = config.trainer.steps // 3
    limits = {
        **{"optim.warmup_steps": most, "algorithm.critic_warmup_steps": most},
        "algorithm.kl.reference_interval": max(most, 1),
        "reward.overlong.buffer_tokens": config.rollout.max_new_tokens // 3,
    }
    changes: dict[str, object] = {
        key: min(int(value_of(config, key)), limit) for key, limit in limits.items() if key not in given
    }
    if config.rollout.dynamic_sampling.max_generations == 1 and DRAWN not in given:
        changes[DRAWN] = 2 * config.trainer.prompts_per_step  # more than it trains on, to choose from
    return with_settings(config, changes)


def without_idle(config: Config, given: set[str]) -> Config:
    """Return the config with defaults for sizes without effect, except `given` ones."""
    idle = {entry.key for entry in unmet(config)} & set(SIZES) - given
    return with_settings(config, {key: value_of(Config(), key) for key in idle})


def with_layout(config: Config, layout: Layout, *, run_dir: Path) -> Config:
    """Return the config on a layout, in `run_dir`. Raises UserErrors if they do not fit."""
    sizes = layout.settings
    if sizes["etp"] == sizes["tp"] or sizes["ep"] == 1:
        sizes["etp"] = 0
    changed: dict[str, object] = {"engine.backend": layout.engine, "trainer.run_dir": str(run_dir)}
    changed["engine.megatron.reference"] = ReferenceLayoutConfig()  # every model has the layout that is tried
    if layout.engine == "megatron":
        changed |= {f"engine.megatron.{name}": size for name, size in sizes.items()}
    else:
        changed["engine.megatron.transformer_impl"] = "auto"
    config = with_settings(config, changed)
    problems = check(config, world_size=layout.ranks)
    if problems:
        raise UserErrors([f"{layout.name}: {problem}" for problem in problems])
    return config


def rows(seed: int) -> list[dict[str, str]]:
    """Return prompts of different lengths with answers; every eighth is too long and dropped."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices(CHARACTERS, k=rng.randint(2, LONGEST_PROMPT))) for _ in range(NUM_PROMPTS)]
    for place in range(0, NUM_PROMPTS, 7):
        texts.insert(place, "".join(rng.choices(CHARACTERS, k=LONGEST_PROMPT + 1)))
    return [{"prompt": text, "answer": "".join(random.Random(text).choices(CHARACTERS, k=3))} for text in texts]


def reward_of(config: Config) -> Callable[..., float | Mapping[str, float]] | None:
    """Return the reward function of a run; None for a run without reward."""
    if config.reward.source.name == "none":
        return None
    if config.reward.source.name == "environment":
        return reward
    weighted = tuple(config.reward.weights)
    if not weighted and not ADVANTAGE.needs(config, "needs_parts"):
        return reward
    names = weighted or PARTS

    def reward_parts(prompt: str, response: str, answer: str) -> dict[str, float]:
        values = itertools.cycle(PART_VALUES)
        return {
            name: (factor * len(response) + mixed(prompt, response, answer)) % count * 2 / (count - 1) - 1
            for name, (factor, count) in zip(names, values, strict=False)
        }

    return reward_parts


def reward(prompt: str, response: str, answer: str) -> float:
    """Return a number from -1 to 1 that depends on every character; few samples share one."""
    return (7 * len(response) + mixed(prompt, response, answer)) % 11 / 5 - 1


def mixed(prompt: str, response: str, answer: str) -> int:
    """Return a number that depends on every character, and on its place in prompt and answer."""
    given = sum(place * ord(character) for place, character in enumerate(f"{prompt}={answer}", start=1))
    return sum(map(ord, response)) + given
