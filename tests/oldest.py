"""Prints the oldest release of every dependency that was tested, as pip takes them."""

import re
from pathlib import Path

TABLE = re.compile(r"^\| ([\w-]+) \| `([^`]+)` \| (\S+) \| (\S+) \|", re.MULTILINE)


def tested() -> list[tuple[str, str, str, str]]:
    """Return (package, allowed, oldest, newest) of each row in docs/versions.md."""
    return TABLE.findall((Path(__file__).parents[1] / "docs/versions.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    print("megatron-core==0.16.1", *(f"{name}=={oldest}" for name, _, oldest, _ in tested()))
