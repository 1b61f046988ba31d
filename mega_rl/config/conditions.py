"""Conditions of settings: keys that mean something only where others hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mega_rl.config.keys import keys_in, value_of
from mega_rl.config.schema import Config
from mega_rl.config.schema.sandbox import runs_code

# "KEY=A or B", "KEY above 0", "KEY other than 0", "KEY" that is set, "no KEY"; a remark may follow a colon.
_CONDITION = re.compile(r"(no )?([a-z0-9_.]+)(?:=(\w+(?: or \w+)*)| (above|other than) (\d+))?(?:: .*)?")


@dataclass(frozen=True)
class Need:
    """Keys that mean something only where a condition holds."""

    keys: tuple[str, ...]
    condition: str  # as the user would write it: "engine.backend=megatron"
    check: Callable[[Config], bool] | None = None  # of a condition that is not of the forms of `_CONDITION`
    fault: str = "has no effect"  # of a key whose condition does not hold

    def holds(self, config: Config) -> bool:
        """Return whether the condition holds."""
        if self.check is not None:
            return self.check(config)
        match = _CONDITION.fullmatch(self.condition)
        assert match is not None, f"{self.condition!r} needs a check"
        absent, key, choices, relation, bound = match.groups()
        value = value_of(config, key)
        if choices:
            return str(value).lower() in choices.split(" or ")
        if relation:
            return bool(value > int(bound) if relation == "above" else value != int(bound))
        return bool(value) != bool(absent)


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


def within(section: str, names: str, condition: str) -> Need:
    """Return the Need of some keys of a section."""
    return Need(tuple(f"{section}.{name}" for name in names.split()), condition)


SANDBOX_NEEDS = (
    Need(keys_in("reward.sandbox"), "the reward function code_tests", lambda config: runs_code(config.reward)),
    within("reward.sandbox", "url key_file", "reward.sandbox.kind=remote"),
    within(
        "reward.sandbox", "processes tmp_mib interpreter", "reward.sandbox.kind=local: a service has limits of its own"
    ),
)
