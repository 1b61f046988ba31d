"""Settings: dataclass fields with documentation and range. Tagged sections: the name chooses the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")


class Kind:
    """One kind of a tagged section: `name` is the tag, the dataclass fields are its settings."""

    name: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Return every setting of this kind by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @property
    def plain(self) -> dict[str, Any]:
        """Return name and settings as a recipe writes them: {"name": "ppo", "clip_low": 0.2, ...}."""
        return {"name": self.name, **self.settings}

    def problems(self) -> Iterator[str]:
        """Yield mistakes between settings that are each in range: "name=value: legal: ..."."""
        yield from ()

    def __str__(self) -> str:
        return self.name


K = TypeVar("K", bound=Kind)


@dataclasses.dataclass(frozen=True)
class OwnKind(Kind):
    """A user's class or function, from a file or registered, with the recipe's settings for it."""

    name: str
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.given)


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    kinds: Mapping[str, type[Kind]] | None = None,
) -> Any:
    """Dataclass field with its documentation and range (`min` and `max` inclusive, `above` exclusive)."""
    metadata = {"doc": doc, "unit": unit, "min": min, "max": max, "above": above, "choices": choices, "kinds": kinds}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def tagged(kinds: Mapping[str, type[Kind]], default: str, doc: str) -> Any:
    """Return a dataclass field for a tagged section: one of `kinds`, chosen by `name`."""
    return setting(kinds[default](), doc, kinds=kinds)


def by_name(*kinds: type[K]) -> dict[str, type[K]]:
    """Return the kinds of a tagged section by their names."""
    return {kind.name: kind for kind in kinds}
