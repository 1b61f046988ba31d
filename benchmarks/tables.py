"""Write what the pages say of benchmarks out of the benchmarks' own files: `python benchmarks/tables.py`.

    python benchmarks/e2e.py --json run.json && python benchmarks/tables.py --take e2e run.json

`--take` keeps a run's file in benchmarks/results/, without its single samples. A page holds `<!-- benchmark: NAME -->`,
the text of that run, and `<!-- end of benchmark -->`; a name with "in words" gets a sentence, the others a table.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
BLOCK = re.compile(r"(<!-- benchmark: ([^>]+?) -->)(.*?)(<!-- end of benchmark -->)", flags=re.DOTALL)
MOST_ROWS = 20  # a longer table shows only figures with a target
# Numbers of a result file that a table shows: name of the row, format.
SHOWN = {
    "step_s": ("step of {}", "{:.2f} s"),
    "peak_bytes": ("peak memory of {}", "{:.2f} GB"),
    "numbers": ("{}", "{:.3g}"),
    "lines": ("{}", "{}"),
}


def written(text: str) -> str:
    """Return a page with its blocks made anew.

    Raises:
        KeyError: a block names a run that benchmarks/results/ does not hold.
    """
    return BLOCK.sub(lambda match: match[1] + block(match[2]) + match[4], text)


def block(name: str) -> str:
    """Return the text of a block: "e2e" is a table, "e2e in words" a part of a sentence."""
    name, _, form = name.partition(" ")
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise KeyError(f"{path.name}: no such result; there are {sorted(p.stem for p in RESULTS.glob('*.json'))}")
    result = json.loads(path.read_text())
    return words(result) if form else f"\n{table(result)}\n"


def words(result: dict[str, Any]) -> str:
    """Return the first figure with what it was measured on: "0.52 (0.50 to 0.53; 2026-11-25, commit ...)"."""
    figure, about = result["figures"][0], result["about"]
    at = f"{about['date']}, commit {about['commit']}, {about['cores']} cores of {about['processor']}"
    return f"{figure['median']:.2f} ({figure['low']:.2f} to {figure['high']:.2f}; {at})"


def table(result: dict[str, Any]) -> str:
    """Return the run as Markdown: one line on where it was made, then a row for each figure."""
    about = result["about"]
    packages = ", ".join(f"{name} {release}" for name, release in about["packages"].items())
    lines = [
        f"{about['date']}, commit {about['commit']}, {about['cores']} cores of {about['processor']}, load "
        f"{about['load']} before the run, {packages}. Medians with 95 % intervals; what misses its target is in bold.",
        "",
        "| figure | target | measured |",
        "|---|---|---|",
    ]
    figures = result["figures"]
    for one in [each for each in figures if each["target"] is not None] if len(figures) > MOST_ROWS else figures:
        target = "" if one["target"] is None else f"{one['target']:.3g}"
        measured = f"{one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
        missed = one["target"] is not None and one["high"] > one["target"]
        lines.append(f"| {one['name']} | {target} | {f'**{measured}**' if missed else measured} |")
    for key, (title, form) in SHOWN.items():
        for name, value in result.get(key, {}).items():
            shown = form.format(value / 1e9 if key == "peak_bytes" else value)
            lines.append(f"| {title.format(name)} | | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Take a run's file in, if one is given, and write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--take", nargs=2, metavar=("NAME", "FILE"), help="keep this run as NAME")
    taken = parser.parse_args().take
    if taken:
        result = json.loads(Path(taken[1]).read_text())
        if result["tiny"]:
            parser.error(f"{taken[1]} is of a tiny run, which says nothing of speed")
        RESULTS.mkdir(exist_ok=True)
        kept = {key: value for key, value in result.items() if key != "samples"}
        (RESULTS / f"{taken[0]}.json").write_text(json.dumps(kept, indent=1) + "\n")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
