"""Measures every family on every layout and rewrites the table of docs/converters.md: `make parity`."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mega_rl.verify.twin.compare import hf_logits
from tests.helpers.distributed import run_ranks
from tests.unit_tests.distributed.family_cases import CASES, LAYOUTS, measure, tokens_of, world_sizes, write_case

DOCUMENT = Path(__file__).parents[1] / "docs" / "converters.md"
BEGIN, END = "<!-- parity table -->\n", "<!-- end of parity table -->"


def measured() -> dict[str, list[dict[str, Any]]]:
    """By "case layout", what every rank found."""
    answers: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="parity_") as folder:
        paths = {name: write_case(name, Path(folder)) for name in CASES}
        logits = {n: hf_logits(p, tokens_of(CASES[n])).logits for n, p in paths.items() if CASES[n].has_logits}
        right = {name: tensor for name, tensor in logits.items() if CASES[name].reference}
        wrong = {name: tensor for name, tensor in logits.items() if not CASES[name].reference}
        for world_size, layouts in world_sizes().items():
            ranks = run_ranks(world_size, measure, folder, right, wrong, layouts, timeout_s=900, device="cpu")
            for key in ranks[0]:
                answers[key] = [rank[key] for rank in ranks]
    return answers


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
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table(measured())}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
