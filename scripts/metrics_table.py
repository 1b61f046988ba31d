"""Write names, units and meanings of docs/metrics.md as the table that reports read, assets/metrics.tsv."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
TABLE = ROOT / "mega_rl" / "tracking" / "report" / "assets" / "metrics.tsv"


def table() -> str:
    """Return a line for each row of the page's tables: name, unit, meaning, expect, separated by tabs."""
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [[name, *(plain(cell) for cell in re.split(r"(?<!\\) \| ", cells)[:3])] for name, cells in rows]
    return "".join("\t".join(line) + "\n" for line in lines)


def plain(cell: str) -> str:
    """Return a cell without the marks of Markdown."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("\\|", "|").strip()


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
