"""Conditions of settings: keys that mean something only where others hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from mega_rl.config.keys import keys_in
from mega_rl.config.schema import Config
from mega_rl.config.schema.sandbox import runs_code


@dataclass(frozen=True)
class Need:
    """Keys that mean something only where a condition holds."""

    keys: tuple[str, ...]
    condition: str  # as the user would write it: "engine.backend=megatron"
    holds: Callable[[Config], bool]
    fault: str = "has no effect"  # of a key whose condition does not hold


@dataclass(frozen=True)
class Unmet:
    """A setting other than the default whose condition does not hold."""

    key: str  # "engine.megatron.tp"
    value: object
    need: Need

    @property
    def setting(self) -> str:
        """The setting as one writes it: "engine.megatron.tp=2"."""
        value = str(self.value)
        return f"{self.key}={value.lower() if isinstance(self.value, bool) else value}"


def within(
    section: str, names: str, condition: str, holds: Callable[[Any], bool], fault: str = "has no effect"
) -> Need:
    """Return the Need of some keys of a section whose condition is about that section."""
    area = attrgetter(section)
    keys = tuple(f"{section}.{name}" for name in names.split())
    return Need(keys, condition, lambda config: holds(area(config)), fault)


SANDBOX_NEEDS = (
    Need(keys_in("reward.sandbox"), "the reward function code_tests", lambda config: runs_code(config.reward)),
    within("reward.sandbox", "url key_file", "reward.sandbox.kind=remote", lambda sandbox: sandbox.kind == "remote"),
    within(
        "reward.sandbox",
        "processes tmp_mib interpreter",
        "reward.sandbox.kind=local: a service has limits of its own",
        lambda sandbox: sandbox.kind == "local",
    ),
)
