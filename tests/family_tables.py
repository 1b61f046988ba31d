"""Writes what README and docs say of the model families out of their entries: `make docs`.

A page holds `<!-- families: NAME -->`, the text of `BLOCKS[NAME]`, and `<!-- end of families -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mega_rl.converters.families import FAMILIES, Family

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
BLOCK = re.compile(r"(<!-- families: (\w+) -->)(.*?)(<!-- end of families -->)", flags=re.DOTALL)


def table() -> str:
    """Return a row for each family."""
    lines = ["| `model_type` | model | differs from Llama by | trains |", "|---|---|---|---|"]
    for family in FAMILIES.values():
        trains = f"no: {family.not_trained}" if family.not_trained else "yes"
        lines.append(f"| `{family.model_type}` | {family.title} | {family.differs} | {trains} |")
    return "\n" + "\n".join(lines) + "\n"


def bugs() -> str:
    """Return a row for each fault of transformers."""
    rows = [
        f"| `{family.model_type}` | {bug.what} | {bug.fixed_in} |"
        for family in FAMILIES.values()
        for bug in family.known_bugs
    ]
    return "\n" + "\n".join(["| family | fault | fixed in transformers |", "|---|---|---|", *rows]) + "\n"


def trained() -> str:
    """Return the families that train, dense ones first."""
    able = [family for family in FAMILIES.values() if not family.not_trained]
    dense, mixtures = [f for f in able if f.moe is None], [f for f in able if f.moe is not None]
    return f"{_titles(dense)}; mixtures: {_titles(mixtures)}"


def not_trained() -> str:
    """Return the families that convert and do not train, each with the reason."""
    return "; ".join(f"{family.title} ({family.not_trained})" for family in FAMILIES.values() if family.not_trained)


def untied_in_sglang() -> str:
    """Return the families whose tied checkpoints SGLang cannot serve."""
    return _titles([family for family in FAMILIES.values() if family.untied_in_sglang])


def _titles(families: list[Family]) -> str:
    return ", ".join(family.title for family in families)


BLOCKS = {block.__name__: block for block in (table, bugs, trained, not_trained, untied_in_sglang)}


def rendered(page: str) -> str:
    """Return the text of a page with every block as the entries have it.

    Raises KeyError for a block that is not in `BLOCKS`.
    """
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[4]}", page)


def main() -> None:
    """Rewrite the pages."""
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if rendered(page) != page:
            path.write_text(rendered(page), encoding="utf-8")


if __name__ == "__main__":
    main()
