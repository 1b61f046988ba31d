"""Typed access to a decoded config.json; every problem is collected, none stops the reading."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from mega_rl.untrusted import is_number

# Sizes beyond these are damage, and would make plans of any length.
LARGEST_SIZE, MOST_LAYERS, MOST_EXPERTS = 1 << 31, 4096, 1 << 14

_MISSING = object()


class Fields:
    """Keys of one JSON object, with its Hugging Face class's values for absent keys.

    A problem goes into `problems` and a harmless value takes its place, so that one error can list them all.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        *,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
        problems: list[str] | None = None,
    ) -> None:
        self.raw, self.where, self.prefix = raw, where, prefix
        self.defaults = defaults or {}
        self.problems: list[str] = [] if problems is None else problems

    def inside(self, name: str, raw: Mapping[str, Any]) -> Fields:
        """Return access to an object within this one; its problems join these."""
        return Fields(raw, self.where, prefix=f"{self.prefix}{name}.", problems=self.problems)

    def get(self, name: str) -> Any:
        """Return a key's value, or an absent key's default; null in the file is a value."""
        return self.raw[name] if name in self.raw else self.defaults.get(name)

    def refuse(self, name: str, reason: str, *, value: Any = _MISSING) -> None:
        """Add the problem that a key has a value that cannot be used, and why."""
        shown = self.get(name) if value is _MISSING else value
        self.problems.append(f"{self.where}: {self.prefix}{name}={_shown(shown)}: {reason}")

    def missing(self, name: str, rule: str) -> None:
        """Add the problem that a key is absent or null where a value is needed."""
        self.problems.append(f"{self.where}: {self.prefix}{name} is missing; {rule}")

    def size(self, name: str, *, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """Return an integer in [least, most], `default` if absent or null, max(least, 1) after a problem."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        rule = f"it must be an integer from {least} to {most}" if least != 1 else "it must be a positive integer"
        if value is None:
            self.missing(name, rule)
        elif isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(name, rule)
        elif value > most:
            self.refuse(name, f"it must be at most {most}")
        else:
            return value
        return max(least, 1)

    def number(self, name: str, *, default: float) -> float:
        """Return a positive finite number; absent or null takes `default`. After a problem: 1.0."""
        value = self.get(name)
        if value is None:
            return default
        if is_number(value) and value > 0:
            return float(value)
        self.refuse(name, "must be a positive number")
        return 1.0

    def optional_number(self, name: str) -> float | None:
        """Return a finite number, not negative; None if the key is absent or null."""
        value = self.get(name)
        if value is None or (is_number(value) and value >= 0):
            return None if value is None else float(value)
        self.refuse(name, "must be a number, not negative")
        return None

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """Return true or false; null is false, as in Python, and an absent key takes `default`."""
        value = self.raw.get(name, default)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value if isinstance(value, bool) else False

    def must_be(self, name: str, allowed: Collection[Any], reason: str) -> None:
        """Refuse any value but these; absent, with no default, is fine."""
        value = self.get(name)
        if not any(value is a or (type(value) is type(a) and value == a) for a in (None, *allowed)):
            self.refuse(name, reason)

    def object(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object; empty where the key is absent or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "must be an object")
        return value if isinstance(value, dict) else {}

    def strings(self, name: str, *, length: int, allowed: Collection[str]) -> list[str] | None:
        """Return a list of `length` words out of `allowed`; None if absent, null or wrong."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == length and all(isinstance(v, str) and v in allowed for v in value):
            return value
        self.refuse(name, f"must be a list of {length}, one per layer, of {' or '.join(sorted(allowed))}")
        return None


def _shown(value: Any) -> str:
    """Return a value as JSON, cut to a length that fits a message."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 200 else text[:200] + "..."
