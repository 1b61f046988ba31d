"""Measures every family on every layout and rewrites the table of docs/converters.md: `make parity`."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.unit_tests.distributed.family_cases import CASES, LAYOUTS, write_and_measure

DOCUMENT = Path(__file__).parents[1] / "docs" / "converters.md"
BEGIN, END = "<!-- parity table -->\n", "<!-- end of parity table -->"


def table(answers: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each family: the largest logit difference of its cases, on one rank and on other layouts."""
    errors: dict[tuple[str, str], float] = {}
    cases: dict[str, set[str]] = defaultdict(set)
    changed: dict[str, int] = defaultdict(int)
    for key, ranks in answers.items():
        name, _, layout = key.rpartition(" ")
        family = CASES[name].family
        cases[family].add(name)
        changed[family] += sum(bool(answer["names"] or answer["different"]) for answer in ranks)
        actual = [answer["error"] for answer in ranks if "error" in answer]
        if actual:
            errors[family, layout] = max(*actual, errors.get((family, layout), 0.0), 0.0)
    alone, *others = LAYOUTS
    lines = ["| family | cases | one rank | other layouts |", "|---|---|---|---|"]
    for family in cases:
        worst = max(errors[family, layout] for layout in others if (family, layout) in errors)
        lines.append(f"| `{family}` | {len(cases[family])} | {errors[family, alone]:.0e} | {worst:.0e} |")
    lines += [""]
    used = ", ".join(f"{package} {version(package)}" for package in ("torch", "megatron-core", "transformers"))
    different = {family: count for family, count in changed.items() if count}
    bits = f"Exports after loading that differ in bits, bf16 too: {different or 'none'}."
    return "\n".join(lines) + f"\nGloo on a CPU; {used}. {bits} Layouts: {', '.join(LAYOUTS)}.\n"


def main() -> None:
    """Measures, and writes the table between its markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert tail, f"{DOCUMENT} has no markers"
    with tempfile.TemporaryDirectory(prefix="parity_") as folder:
        _, answers = write_and_measure(Path(folder), timeout_s=900)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table(answers)}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
