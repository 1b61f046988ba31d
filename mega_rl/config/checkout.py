"""Detect a source tree, where advice may name `make`: an installed package has no Makefile."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2]


def made_by_make() -> bool:
    """Return whether this program runs in the environment that `make` makes in a source tree, from that tree."""
    environment = SOURCES / ".venv"
    return (
        (SOURCES / "Makefile").is_file()
        and environment.is_dir()
        and environment.resolve() == Path(sys.prefix).resolve()
    )
