"""A setting: a dataclass field with its documentation and range."""

from __future__ import annotations

import dataclasses
from typing import Any

ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Dataclass field with its documentation and range (`min` and `max` inclusive, `above` exclusive)."""
    metadata = {"doc": doc, "unit": unit, "min": min, "max": max, "above": above, "choices": choices}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def defaults(area: type) -> dict[str, object]:
    """Return the default of every setting of a dataclass."""
    return {field.name: field.default for field in dataclasses.fields(area)}
