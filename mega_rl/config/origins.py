"""Settings that name something on the Hub: a run reads the downloaded copy, its records keep name and commit."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from mega_rl.config.keys import as_nested, with_settings
from mega_rl.config.schema import Config


def recorded(config: Config) -> Config:
    """Return the config as records keep it: pinned names in place of the folders that they were downloaded to."""
    return dataclasses.replace(with_settings(config, config.origins), origins={})


def as_record(config: Config) -> dict[str, Any]:
    """Return every setting as nested plain values, names of the Hub pinned: {"optim": {"lr": 1e-06, ...}, ...}."""
    return as_nested(recorded(config))


def short_commit(name: str) -> str:
    """Return a pinned name with as much of its commit as tells commits apart; other texts as they are."""
    return re.sub(r"@([0-9a-f]{12})[0-9a-f]{28}$", r"@\1", name)


def pinned_overrides(config: Config) -> list[str]:
    """Return `key=value` arguments that make another process read the same commits."""
    # JSON is YAML on one line.
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in config.origins.items()]
