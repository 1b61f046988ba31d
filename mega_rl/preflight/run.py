"""All checks of a run, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_rl import versions
from mega_rl.config.loader import load
from mega_rl.config.plugins.choices import CHOICES
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import facts_of
from mega_rl.data.hub.resolve import HubNames, fetch, hub_names
from mega_rl.errors import UserErrors
from mega_rl.preflight.checkpoints import (
    check_pipeline,
    check_reference,
    check_teacher,
    read_checkpoints,
    weight_files,
)
from mega_rl.preflight.data import check_data, check_validation
from mega_rl.preflight.host import check_disk, check_folders, check_packages, check_servers
from mega_rl.preflight.launcher import launched_world_size, refuse_tasks_of_srun
from mega_rl.preflight.memory import check_memory
from mega_rl.preflight.rewards import check_rewards
from mega_rl.preflight.tokenizers import check_tokenizers


def preflight(
    recipe: str | Path | None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    world_size: int | None = None,
    launchers: int = 1,
) -> Config:
    """Return the Config of a run that can start; arguments as of `mega_rl.config.loader.load` and `check_run`.

    Raises UserErrors with every mistake found, one line each.
    """
    return check_run(load(recipe, overrides), world_size=world_size, launchers=launchers)


def check_run(
    config: Config,
    *,
    world_size: int | None = None,
    reward_given: bool = False,
    launchers: int = 1,
    trains: bool = True,
) -> Config:
    """Check a config against the rules between settings, the files that the run reads, and this machine.

    Return the config to run with: what it names on the Hub has been downloaded.

    world_size: the launcher's WORLD_SIZE by default, else 1. reward_given: a function of the calling program scores
    responses, so the one that the config names is not looked up. launchers: of the run, on as many nodes.
    trains: it reads training prompts; an evaluation does not.

    Raises UserErrors with every mistake found, one line each.
    """
    refuse_tasks_of_srun(launchers=launchers)
    world_size = launched_world_size() if world_size is None else world_size
    if names := hub_names(config):
        config = _downloaded(config, names, world_size)
    checkpoints, problems = read_checkpoints(config)
    problems = [*versions.problems(), *_of_models(config, checkpoints, world_size), *problems]
    problems += weight_files(config, checkpoints)
    problems += [*check_data(config.data, trains=trains), *check_validation(config.validation, config.data)]
    problems += [problem for choice in CHOICES for problem in choice.file_problems(config)]
    problems += [] if reward_given else [*check_rewards(config, checkpoints)]
    if problems:
        raise UserErrors(problems)
    return config


def _of_models(config: Config, checkpoints: Mapping[str, HFConfig], world_size: int) -> list[str]:
    """Return everything that is wrong but for weights and data."""
    models = {key: facts_of(checkpoint) for key, checkpoint in checkpoints.items()}
    problems = [*check(config, world_size=world_size, models=models), *check_pipeline(config, checkpoints)]
    problems += check_reference(config, checkpoints)
    problems += check_teacher(config, checkpoints)
    if not problems:  # memory is that of legal settings
        problems += check_memory(config, checkpoints, world_size)
    problems += [*check_tokenizers(config, checkpoints), *check_packages(config), *check_servers(config, checkpoints)]
    return [*problems, *check_folders(config), *check_disk(config, checkpoints)]


def _downloaded(config: Config, names: HubNames, world_size: int) -> Config:
    """Return the config with downloaded folders and files for Hub names.

    A run that could not start is refused first by its settings, then by the models' descriptions, before weights and
    data are downloaded.
    """

    def admit(described: Config) -> None:
        checkpoints, problems = read_checkpoints(described)
        if problems := [*_of_models(described, checkpoints, world_size), *problems]:
            raise UserErrors(problems)

    problems = [*versions.problems(), *check(config, world_size=world_size)]
    if problems := [*problems, *check_packages(config), *check_folders(config)]:
        raise UserErrors(problems)
    return fetch(config, names, admit=admit)
