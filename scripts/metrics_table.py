"""Write names, units and meanings of docs/metrics.md as the table that reports read, assets/metrics.tsv."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
TABLE = ROOT / "mega_rl" / "tracking" / "report" / "assets" / "metrics.tsv"


def table() -> str:
    """Return a line for each entry of the page: name, unit, meaning, expect ("-" if none), separated by tabs."""
    entry = re.compile(r"^- `([^`]+)` \((.*?)\): (.*?)\.(?: Expect: (.*)\.)?$", re.MULTILINE)
    lines = [[plain(part) or "-" for part in match] for match in entry.findall(PAGE.read_text(encoding="utf-8"))]
    return "".join("\t".join(line) + "\n" for line in lines)


def plain(cell: str) -> str:
    """Return a part of an entry without the marks of Markdown."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip()


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
