"""The page of a report: one HTML text with its styles, program and data inside.

Data is JSON in an element that no browser runs, and the program puts texts into the page as texts. The page's content
security policy allows this program and these styles, by their hashes, and nothing else. Units and meanings of metrics
come from a table that `make docs` makes of docs/metrics.md.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from mega_rl.untrusted import JsonFields

# Title and the beginnings of names; the first title that fits counts.
THEMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/", "val/")),
    ("Importance", ("importance/", "rollout/logprob", "rollout/stale", "rollout/ahead", "rollout/weight_version")),
    ("Responses", ("rollout/",)),
    ("Policy", ("actor/", "kl/", "advantage/")),
    ("Critic", ("critic/", "values/", "returns/")),
    ("Time", ("time/", "perf/", "sync/", "sglang/")),
    ("Memory", ("memory/",)),
    ("Checkpoints, data and others", ("",)),
)
OVERVIEW = (
    "reward/mean", "val/reward_mean", "kl/ref", "actor/entropy", "actor/grad_norm", "rollout/response_tokens_mean",
    "rollout/logprob_diff_max", "actor/clip_fraction_high", "values/explained_variance", "rollout/truncated_fraction",
    "reward/equal_groups_fraction", "time/step_s",
)  # fmt: skip
DIGITS = 4
_PLACE = re.compile(r"<[a-z]+>")


def explain(name: str) -> dict[str, str] | None:
    """Return unit, meaning and expected range of a metric, None if docs/metrics.md does not list it."""
    exact, patterns = _table()
    if name in exact:
        return exact[name]
    return next((entry for pattern, entry in patterns if pattern.fullmatch(name)), None)


def reward_parts(names: Iterable[str]) -> list[str]:
    """Return the metrics of the reward's parts: unlisted names below "reward/"."""
    exact, _ = _table()
    return [name for name in names if name.startswith("reward/") and name.count("/") == 1 and name not in exact]


def theme_of(name: str) -> str:
    """Return the title under which a metric is drawn."""
    return next(title for title, beginnings in THEMES if name.startswith(beginnings))


@cache
def _table() -> tuple[dict[str, dict[str, str]], list[tuple[re.Pattern[str], dict[str, str]]]]:
    """Return entries by name, and those of names with a place as patterns."""
    exact: dict[str, dict[str, str]] = {}
    patterns: list[tuple[re.Pattern[str], dict[str, str]]] = []
    for line in _file("metrics.tsv").splitlines():
        name, *cells = line.split("\t")
        entry = dict(zip(("unit", "meaning", "expect"), cells, strict=True))
        if _PLACE.search(name):
            patterns.append((re.compile(".+".join(map(re.escape, _PLACE.split(name)))), entry))
        else:
            exact[name] = entry
    return exact, patterns


def render(content: JsonFields) -> str:
    """Return the page that shows the content."""
    style, program = _file("report.css"), '"use strict";\n' + _file("charts.js") + "\n" + _file("report.js")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(program)}'; style-src 'sha256-{_hash(style)}'; "
        f"img-src data:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape("mega_rl: " + ", ".join(run["label"] for run in content["runs"])),
        "STYLE": style,
        "DATA": to_script_data(content),
        "PROGRAM": program,
    }
    pieces = _file("report.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def to_script_data(content: object) -> str:
    """Return JSON for a script element: nothing in it ends the element."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shorten(value: float) -> float | int:
    """Return a value of four significant digits, whole numbers below ten million as they are."""
    if abs(value) < 1e7 and value == int(value):
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def _file(name: str) -> str:
    return files("mega_rl.tracking.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
