"""All checks of a run, one after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.errors import UserError, UserErrors
from mega_rl.preflight.checkpoints import check_pipeline, facts_of, read_checkpoints
from mega_rl.preflight.data import check_data
from mega_rl.preflight.host import check_folders, check_packages, check_servers
from mega_rl.preflight.rewards import check_rewards
from mega_rl.preflight.tokenizers import check_tokenizers


def preflight(recipe: Path | None, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """The Config of a run that can start; `world_size` defaults to the launcher's WORLD_SIZE, else 1.

    Raises UserErrors with every mistake found, one line each.
    """
    config = load(recipe, overrides)
    checkpoints, problems = read_checkpoints(config)
    found = check(
        config,
        world_size=launched_world_size() if world_size is None else world_size,
        models={key: facts_of(checkpoint) for key, checkpoint in checkpoints.items()},
    )
    found += [*problems, *check_tokenizers(config, checkpoints), *check_pipeline(config, checkpoints)]
    found += [*check_packages(config), *check_servers(config, checkpoints), *check_data(config.data)]
    found += [*check_rewards(config, checkpoints), *check_folders(config)]
    if found:
        raise UserErrors(found)
    return config


def launched_world_size() -> int:
    """Ranks that the launcher started, by its WORLD_SIZE; 1 without a launcher. Raises UserError."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f"environment variable WORLD_SIZE={text!r}: needs a whole number of at least 1; unset it")
    return int(text)
