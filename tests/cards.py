"""Cards of every family with a table, into build/cards, and the table of docs/converters.md: `make cards`.

`python -m tests.cards FAMILY ...` makes those of some families and leaves the document. The models are tiny; the whole
size of a model is of no account to its numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mega_rl.cli.app import main as mega_rl
from mega_rl.converters.families import FAMILIES
from mega_rl.verify import launcher
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.verify.cases import forked_ranks

ROOT = Path(__file__).parents[1]
CARDS, DOCUMENT = ROOT / "build/cards", ROOT / "docs/converters.md"
BEGIN, END = "<!-- cards: make cards -->\n", "<!-- end of cards -->"
COLUMNS = ("logits", "gradients", "layouts", "packing", "sampling")


def table(cards: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A row for each family, without blanks; one figure for each proof."""
    yield f"|family|engines|{'|'.join(COLUMNS)}|"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for family, card in cards.items():
        proofs = {one["name"]: one for one in reversed(card["proofs"])}  # the first of a name
        measured = {layout["name"] for layout in card.get("layouts", ()) if layout["errors"]}
        engines = "+".join(name for name, layout in (("megatron", "1"), ("fsdp", "fsdp1")) if layout in measured)
        figures = [proofs[name]["figure"] if name in proofs else "-" for name in COLUMNS]
        yield f"|{family}|{engines or 'refused'}|{'|'.join(figures)}|".replace(" ", "-")


def main() -> None:
    """Make the cards and write the table between its markers."""
    launcher.run_ranks = forked_ranks()
    cards = {}
    for family in sys.argv[1:] or FAMILIES:
        bare = CARDS / family
        bare.mkdir(parents=True, exist_ok=True)
        (bare / "config.json").write_text(json.dumps(TINY[family]))
        code = mega_rl(["card", str(bare), "--out", str(bare)])
        cards[family] = json.loads((bare / "card.json").read_text())
        print(family, code, flush=True)
    installed = ", ".join(f"{name} {version}" for name, version in next(iter(cards.values()))["versions"].items())
    text = "\n".join([*table(cards), "", f"{installed}."])
    print(text)
    if len(sys.argv) == 1:
        page = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(
            f"{page[: page.index(BEGIN)]}{BEGIN}\n{text}\n\n{page[page.index(END) :]}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
