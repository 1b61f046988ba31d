"""The Makefile with the files that it includes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text() -> str:
    """Return the rules of every file, one after the other."""
    main = (ROOT / "Makefile").read_text(encoding="utf-8")
    (included,) = re.findall(r"^include (.*)", main, flags=re.MULTILINE)
    return "\n".join([main, *((ROOT / name).read_text(encoding="utf-8") for name in included.split())])


def targets() -> set[str]:
    """Return the names that `make` takes, those of folders of packages included."""
    (folders,) = re.findall(r"^APART := (.*)", text(), flags=re.MULTILINE)
    return {*re.findall(r"^([a-z-]+):", text(), flags=re.MULTILINE), *folders.split()}
