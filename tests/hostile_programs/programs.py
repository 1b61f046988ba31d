"""A hostile program: its family, its text, and the aims outside of the sandbox that the text names."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# "plain" has no tests; "row" has its own, "vacuous" such as no program may be judged by; others forge a verdict
Kind = Literal["plain", "asserts", "call", "stdin", "row", "vacuous"]
ESCAPED = "ESCAPED"  # printed where something has succeeded that must not


@dataclass(frozen=True)
class Hostile:
    """A hostile program; `{secret_file}` and its like in the text are filled in with aims."""

    family: str
    name: str
    text: str
    kind: Kind = "plain"
    tests: object = None  # of "row" and "vacuous"
    row: Mapping[str, object] = field(default_factory=dict)
    passes: bool = False  # it is right, and must be paid

    @property
    def title(self) -> str:
        """Return "family: name"."""
        return f"{self.family}: {self.name}"


def family(name: str, programs: dict[str, str], *, before: str = "", kind: Kind = "plain") -> list[Hostile]:
    """Return the programs of a family, each with the same beginning."""
    start = textwrap.dedent(before)
    return [
        Hostile(name, title, start + textwrap.dedent(text).strip() + "\n", kind) for title, text in programs.items()
    ]


def attempts(name: str, expressions: dict[str, str], *, before: str = "import os") -> list[Hostile]:
    """Return programs that evaluate one expression and say so unless it raises, or is false."""
    body = "try:\n    result = {expression}\nexcept BaseException as error:\n    print(type(error).__name__, error)\n"
    body += f"else:\n    print('{ESCAPED}' if result else 'nothing')\n"
    texts = {title: body.replace("{expression}", expression) for title, expression in expressions.items()}
    return family(name, texts, before=textwrap.dedent(before).strip() + "\n")
