"""Checks of the source of rewards: a function that exists, a service with a valid key, a model with one label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mega_rl.config.schema import Config, RemoteSandboxConfig, RewardHttpConfig
from mega_rl.config.schema.sandbox import runs_code
from mega_rl.config.user_files import missing_function
from mega_rl.converters.architecture import HFConfig
from mega_rl.errors import UserError
from mega_rl.plan.preflight.checkpoints import tensor_shape
from mega_rl.rewards.builtin import BUILTINS
from mega_rl.rewards.code import check_sandbox
from mega_rl.rewards.score import TAKEN
from mega_rl.rewards.service import find_service


def check_rewards(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield the problems of the source that reward.source names."""
    reward = config.reward
    if reward.source.name == "function":
        if reward.functions:
            for name, function in reward.functions.items():
                yield from _named_function(name, function)
        else:
            yield from _function(reward.function)
        yield from _sandbox(config)
    elif reward.source.name == "http":
        yield from _service(config)
    elif "reward.source.path" in checkpoints:
        yield from _head(Path(reward.model_path), checkpoints["reward.source.path"])
        yield from _room(config)


def _sandbox(config: Config) -> Iterator[str]:
    """Yield why programs cannot run in the sandbox of the settings; one is tried."""
    if not runs_code(config.reward):
        return
    sandbox = config.reward.sandbox
    if isinstance(sandbox, RemoteSandboxConfig) and not sandbox.url.startswith(("http://", "https://")):
        return  # a rule between settings refuses it
    try:
        check_sandbox(sandbox)
    except UserError as error:
        yield str(error)


def _service(config: Config) -> Iterator[str]:
    http = config.reward.source
    assert isinstance(http, RewardHttpConfig)
    try:
        if http.url.startswith(("http://", "https://")):  # a rule between settings refuses others
            find_service(http.url, http.key_file)
    except UserError as error:
        yield str(error)
    if http.timeout_s >= config.trainer.timeout_s:
        yield (
            f"reward.source.timeout_s={http.timeout_s:g} must be below "
            f"trainer.timeout_s={config.trainer.timeout_s:g}, the time that other ranks wait for the scores"
        )


def _head(directory: Path, hf: HFConfig) -> Iterator[str]:
    """Yield the problems of a reward model's labels, in its config and its weights."""
    fix = "a reward model is a sequence-classification checkpoint with one label"
    names = hf.raw.get("id2label")
    labels = len(names) if isinstance(names, dict) else hf.raw.get("num_labels", 1)
    if labels != 1:
        yield f"reward.source.path: {directory / 'config.json'}: has {labels} labels; {fix}"
    expected, shape = [1, hf.hidden_size], tensor_shape(directory, hf.value_head)
    if shape is None:
        yield f"reward.source.path: {directory}: has no {hf.value_head}; {fix}"
    elif shape != expected:
        yield f"reward.source.path: {directory}: {hf.value_head} has shape {shape}, not {expected}; {fix}"


def _room(config: Config) -> Iterator[str]:
    """Yield a problem if the longest row, with the one token at which its score is read, exceeds a micro-batch."""
    trainer, cp = config.trainer, config.engine.megatron.cp
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    multiple = 2 * cp if cp > 1 else 1
    without, needed = (-(-length // multiple) * multiple for length in (longest, longest + 1))
    if trainer.microbatch.packing and without <= trainer.microbatch.max_tokens < needed:
        yield (
            f"trainer.microbatch.max_tokens={trainer.microbatch.max_tokens} cannot hold one sequence of "
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest} and one more token for the reward model; make it "
            f"at least {needed}"
        )


def _function(function: str, key: str = "reward.function") -> Iterator[str]:
    """Yield the problem of the reward function of a setting; a user's file is parsed, not run."""
    if problem := missing_function(function, builtin=sorted(BUILTINS)):
        yield f"{key}={function!r}: {problem}"


def _named_function(name: str, function: str) -> Iterator[str]:
    """Yield the problems of one of reward.functions."""
    if name in TAKEN or not name.isascii():
        yield f"reward.functions.{name}: is not ASCII, or the name of another metric below reward/; rename it"
    yield from _function(function, f"reward.functions.{name}")
