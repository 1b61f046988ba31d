"""Checks before work starts: config, rules, and the files that the run will read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mega_rl import environment
from mega_rl.config.choices import OWN_CHOICES, is_sampled, kind_of_run
from mega_rl.config.keys import flat, value_of, with_settings
from mega_rl.config.loader import Overrides, load
from mega_rl.config.rules import check
from mega_rl.config.rules.rollout import files_of, generates
from mega_rl.config.schema import Config, DataConfig, RewardHttpConfig
from mega_rl.config.schema.rollout import runs_code
from mega_rl.config.user_files import missing_function
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import facts_of
from mega_rl.converters.safetensors.header import checkpoint_entries
from mega_rl.data.downloads import HubNames, fetch, hub_names
from mega_rl.data.hub import dataset_name
from mega_rl.errors import UserError, UserErrors, no_such
from mega_rl.plan.preflight.checkpoints import (
    check_adapters,
    check_reference,
    check_tokenizers,
    check_weight_files,
    read_checkpoints,
)
from mega_rl.plan.preflight.host import (
    Checkpoints,
    check_disk,
    check_folders,
    check_memory,
    check_packages,
    check_servers,
    launched_world_size,
    refuse_tasks_of_srun,
)
from mega_rl.rewards.builtin import BUILTINS
from mega_rl.rewards.code import check_sandbox
from mega_rl.rewards.score import TAKEN
from mega_rl.rewards.service import find_service

DATA_SUFFIXES = (".jsonl", ".parquet")
SAMPLES, RESULTS = "samples.jsonl", "results.json"
# Sections and settings that only training reads, which take their defaults, and the settings in them that are kept.
_SECTIONS = ("model", "optim", "algorithm", "checkpoint", "metrics", "trainer")
_OF_TRAINING = (
    *("data.source", "data.val_size", "data.train_files"),
    *("data.mixture", "data.curriculum", "data.stream"),
    *("engine.megatron.moe.routing_replay", "engine.megatron.reference"),
    *("rollout.dynamic_sampling", "rollout.sglang.return_routing", "reward.overlong"),
)
_KEPT = (
    *(f"model.{name}" for name in ("path", "dtype", "fp32_head", "attn_implementation")),
    *(f"trainer.{name}" for name in ("seed", "device", "deterministic", "timeout_s", "microbatch")),
    "metrics.progress_bar",
)


def preflight(
    recipes: Sequence[Path | None], overrides: Overrides = (), *, world_size: int | None = None, launchers: int = 1
) -> list[Config]:
    """Return the configs of runs that can start together; arguments as of `load` and `check_run`."""
    configs = [load(recipe, overrides) for recipe in recipes]
    check_together(configs)
    return [check_run(config, world_size=world_size, launchers=launchers) for config in configs]


# Beginnings of the settings that runs on one base have in common.
_OF_BASE = (
    *("engine.", "model.", "optim.name", "trainer.microbatch."),
    *("trainer.device", "trainer.deterministic", "trainer.timeout_s"),
)


def check_together(configs: Sequence[Config]) -> None:
    """Raise UserErrors unless runs, none of them checked yet, can train in turn on one base."""
    if len(configs) == 1:
        return
    problems, folders, first = list[str](), set[Path](), configs[0]
    for config in configs:
        rank, resident, backend = config.model.adapter.rank, config.engine.resident_roles, config.rollout.backend
        kind, run = kind_of_run(config), config.trainer.run_dir
        refused = {
            " is the folder of two runs; name one for each": Path(run).resolve() in folders,
            f": model.adapter.rank={rank} leaves nothing to one run only; set it above 0": not rank,
            f": engine.resident_roles={resident} moves a base of several runs; legal: auto, all": resident == "one",
            f": rollout.backend={backend} samples for one run; legal: hf, none": backend == "sglang",
            f": algorithm.kind={kind} trains a head; train it by itself": kind.scores,
        }
        problems += [f"trainer.run_dir={run}{problem}" for problem, applies in refused.items() if applies]
        problems += [
            f"{key}={value} in {run}, {other} in {first.trainer.run_dir}: runs on one base have the same; set one value"
            for (key, value), other in zip(flat(config).items(), flat(first).values(), strict=True)
            if key.startswith(_OF_BASE) and value != other
        ]
        folders.add(Path(run).resolve())
    if problems:
        raise UserErrors(problems)


def check_run(
    config: Config,
    *,
    world_size: int | None = None,
    has_reward: bool = False,
    launchers: int = 1,
    trains: bool = True,
) -> Config:
    """Return the config to run with, after all checks and downloads of Hub names.

    world_size: the launcher's WORLD_SIZE by default, else 1. has_reward: a function of the calling program scores
    responses. launchers: of the run, on as many nodes. trains: it reads training prompts; an evaluation does not.

    Raises UserErrors with every mistake, one line each.
    """
    refuse_tasks_of_srun(launchers=launchers)
    world_size = launched_world_size() if world_size is None else world_size
    if names := hub_names(config):
        config = _downloaded(config, names, world_size)
    checkpoints, unread = read_checkpoints(config)
    problems = [*environment.version_problems(), *_of_models(config, checkpoints, world_size), *unread]
    problems += [*check_data(config, trains=trains), *check_weight_files(config, checkpoints)]
    problems += [problem for choice in OWN_CHOICES for problem in choice.own_problems(config)]
    problems += [] if problems else generates(config)
    problems += [] if has_reward else [*check_rewards(config, checkpoints)]
    if not problems and not has_reward:
        problems += probe_rewards(config)
    if problems:
        raise UserErrors(problems)
    return config


def _of_models(config: Config, checkpoints: Checkpoints, world_size: int) -> list[str]:
    """Return every problem that shows without weights and data."""
    models = {key: facts_of(checkpoint) for key, checkpoint in checkpoints.items()}
    problems = [*check(config, world_size=world_size, models=models), *check_reference(config, checkpoints)]
    problems += [] if problems else check_adapters(config, checkpoints, world_size)
    if not problems:  # memory can be planned only for legal settings
        problems += check_memory(config, checkpoints, world_size)
    problems += [*check_tokenizers(config, checkpoints), *check_packages(config), *check_servers(config, checkpoints)]
    return [*problems, *check_folders(config), *check_disk(config, checkpoints)]


def _downloaded(config: Config, names: HubNames, world_size: int) -> Config:
    """Return the config with downloads for Hub names, the same on a node's ranks."""

    def admit(described: Config) -> None:
        checkpoints, unread = read_checkpoints(described)
        if problems := [*_of_models(described, checkpoints, world_size), *unread]:
            raise UserErrors(problems)

    problems = [*environment.version_problems(), *check(config, world_size=world_size)]
    if problems := [*problems, *check_packages(config), *check_folders(config)]:
        raise UserErrors(problems)
    return fetch(config, names, admit=admit)


def check_data(config: Config, *, trains: bool = True) -> Iterator[str]:
    """Yield the problems of the files of prompts."""
    data, validation, asks = config.data, config.validation, is_sampled(config)
    if trains and not data.train_files and data.reads_train_files:
        yield "data.train_files is empty: name at least one JSONL or Parquet file"
    for name, source in data.mixture.named().items():
        own = replace(data, prompt_key=source.prompt_key or data.prompt_key)
        yield from _data_files(f"data.mixture.sources.{name}", source.files, own, needs_prompt=asks)
    yield from _data_files("data.train_files", data.train_files, data, needs_prompt=asks)
    yield from _data_files("data.val_files", data.val_files, data, needs_prompt=asks)
    for name, files in validation.sets.items():
        yield from _data_files(f"validation.sets.{name}", files_of(files), data, needs_prompt=asks)


def _data_files(key: str, files: Iterable[str], data: DataConfig, *, needs_prompt: bool) -> Iterator[str]:
    for path in map(Path, files):
        if data.stream.rows and dataset_name(str(path)) is not None:  # a data set of the Hub, which is streamed
            continue
        if path.suffix not in DATA_SUFFIXES:
            legal = ", ".join(DATA_SUFFIXES)
            yield f"{key}: {path}: unknown kind of file; legal: {legal}, or org/name of the Hub"
        elif not path.is_file() or path.stat().st_size == 0:
            yield f"{key}: {path}: " + ("is empty" if path.is_file() else no_such("file", path))
        else:
            from pyarrow import ArrowException

            try:
                columns = _columns(path)
            except (ArrowException, OSError):
                yield f"{key}: {path}: not a readable Parquet file; write it again"
                continue
            if columns and needs_prompt and data.prompt_key not in columns:
                there = ", ".join(sorted(columns))
                yield f"{key}: {path}: has no column {data.prompt_key!r} (data.prompt_key); it has {there}"


def _columns(path: Path) -> set[str]:
    """Return the columns of a file; none for a malformed line, which the reader reports."""
    from pyarrow.parquet import read_schema

    if path.suffix == ".parquet":
        return set(read_schema(path).names)
    try:
        with path.open("rb") as file:
            row = json.loads(file.readline())
    except ValueError:
        return set()
    return set(row) if isinstance(row, dict) else set()


def check_rewards(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield the problems of the source that reward.source names."""
    reward = config.reward
    if reward.source.name == "function":
        named = {f"reward.functions.{name}": function for name, function in reward.functions.items()}
        for name in reward.functions:
            if name in TAKEN or not name.isascii():
                yield f"reward.functions.{name}: is not ASCII, or the name of another metric below reward/; rename it"
        for key, function in (named or {"reward.function": reward.function}).items():
            if problem := missing_function(function, builtin=sorted(BUILTINS)):  # parses a user's file, does not run it
                yield f"{key}={function!r}: {problem}"
    elif isinstance(reward.source, RewardHttpConfig):
        if reward.source.timeout_s >= config.trainer.timeout_s:
            yield (
                f"reward.source.timeout_s={reward.source.timeout_s:g} must be below "
                f"trainer.timeout_s={config.trainer.timeout_s:g}, the time that other ranks wait for the scores"
            )
    elif "reward.source.path" in checkpoints:
        hf = checkpoints["reward.source.path"]
        try:
            shape: list[int] | None = list(checkpoint_entries(Path(reward.model_path))[hf.value_head].shape)
        except (UserError, KeyError):
            shape = None
        if shape != [1, hf.hidden_size]:
            yield (
                f"reward.source.path: {reward.model_path}: {hf.value_head} must have the shape {[1, hf.hidden_size]}, "
                f"not {shape}; a reward model is a sequence-classification checkpoint with one label"
            )
        yield from _room(config)


def probe_rewards(config: Config) -> Iterator[str]:
    """Yield why the sandbox cannot run programs, or the service cannot score; settings are legal."""
    source = config.reward.source
    try:
        if source.name == "function" and runs_code(config.reward):
            check_sandbox(config.reward.sandbox)
        elif isinstance(source, RewardHttpConfig):
            find_service(source.url, source.key_file)
    except UserError as error:
        yield str(error)


def _room(config: Config) -> Iterator[str]:
    """Yield a problem if the longest row, with the token of its score, exceeds a micro-batch."""
    micro, cp = config.trainer.microbatch, config.engine.megatron.cp
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    multiple = 2 * cp if cp > 1 else 1
    without, needed = (-(-length // multiple) * multiple for length in (longest, longest + 1))
    if micro.packing and without <= micro.max_tokens < needed:
        yield (
            f"trainer.microbatch.max_tokens={micro.max_tokens} cannot hold one sequence of "
            f"data.max_prompt_tokens+rollout.max_new_tokens={longest} and one more token for the reward model; make it "
            f"at least {needed}"
        )


def checked(config: Config, *, world_size: int | None, out: str, launchers: int = 1) -> Config:
    """Return `evaluation_config` of a config that can start; arguments and errors as of `check_run`."""
    size = launched_world_size() if world_size is None else world_size
    earlier = [name for name in (SAMPLES, RESULTS) if (Path(out) / name).exists()]
    if earlier:
        raise UserError(
            f"--out={out}: holds {' and '.join(earlier)} of an earlier evaluation, which this one would replace; name "
            "another folder, or remove them"
        )
    own = evaluation_config(config, world_size=size, out=out)
    if not (own.data.val_files or own.validation.sets):
        raise UserError("there are no prompts to evaluate on; name a file, as validation.sets.gsm8k=gsm8k_test.jsonl")
    return check_run(own, world_size=size, launchers=launchers, trains=False)


def evaluation_config(config: Config, *, world_size: int, out: str) -> Config:
    """Return the config that evaluates `model.path` on the held-out prompts of `config` and writes into `out`."""
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
        },
    )
