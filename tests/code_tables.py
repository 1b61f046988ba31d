"""Write what README and docs say of families, algorithms, launchers and peers' names out of the code: `make docs`.

A page holds `<!-- code: NAME -->`, the text of `BLOCKS[NAME]`, and `<!-- end of code -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mega_rl.cli import launch
from mega_rl.config.choices import ADVANTAGE, CORRECTION, LOSS
from mega_rl.config.keys import FIELDS
from mega_rl.config.loader import NAMES
from mega_rl.converters.families import FAMILIES, Family

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("**/*.md")))
BLOCK = re.compile(r"(<!-- code: (\w+) -->)(.*?)(<!-- end of code -->)", flags=re.DOTALL)


def table() -> str:
    """Return a row for each family."""
    lines = ["| `model_type` | model | differs from Llama by |", "|---|---|---|"]
    for family in FAMILIES.values():
        lines.append(f"| `{family.model_type}` | {family.title} | {family.differs} |")
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
    """Return the families, dense ones first."""
    dense, mixtures = ([f for f in FAMILIES.values() if (f.moe is None) == plain] for plain in (True, False))
    return f"{_titles(dense)}; mixtures: {_titles(mixtures)}"


def untied_in_sglang() -> str:
    """Return the families whose tied checkpoints SGLang cannot serve."""
    return _titles([family for family in FAMILIES.values() if family.untied_in_sglang])


def _titles(families: list[Family]) -> str:
    return ", ".join(family.title for family in families)


def algorithms() -> str:
    """Return every choice of an algorithm by name."""
    parts = [
        f"{len(choice.builtin)} {title} ({', '.join(f'`{name}`' for name in choice.builtin)})"
        for title, choice in (("advantage estimators", ADVANTAGE), ("losses", LOSS), ("corrections", CORRECTION))
    ]
    names = FIELDS["algorithm.loss_aggregation"].metadata["choices"]
    return "; ".join([*parts, f"{len(names)} aggregations ({', '.join(f'`{name}`' for name in names)})"])


def launchers() -> str:
    """Return the ways to start ranks."""
    names = [command.name or command.callback.__name__ for command in launch.app.registered_commands]
    return ", ".join(["torchrun", "`mega-rl train --nproc-per-node`", *(f"`mega-rl launch {name}`" for name in names)])


def peer_names() -> str:
    """Return a list for each peer: its name, then ours."""
    lists = []
    for peer, names in NAMES.items():
        lines = [f"- {name}: {_setting(setting)}" for name, setting in sorted(names.items())]
        lists.append("\n".join([f"\n## {peer}\n", *lines]))
    return "\n".join(lists) + "\n"


def _setting(text: str) -> str:
    """Return a setting with its remark, the setting as code."""
    return re.sub(r"[a-z_]+(\.[a-z_0-9]+)+(=[\w-]+)?", lambda match: f"`{match[0]}`", text)


BLOCKS = {
    block.__name__: block for block in (table, bugs, trained, untied_in_sglang, algorithms, launchers, peer_names)
}


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
