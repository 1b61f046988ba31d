"""The page of a report: one HTML text with its styles, program and data inside, which asks no network for anything.

Data is JSON in an element that no browser runs, and the program puts texts into the page as texts. The page's content
security policy allows this program and these styles, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files

from mega_rl import __version__
from mega_rl.health.records import read_records
from mega_rl.report import curves, glossary, rules
from mega_rl.report.runs import METRICS, Run, changed_settings, differing_keys, seed_groups
from mega_rl.report.samples import MAX_CHARACTERS, read_samples
from mega_rl.storage.strict_json import JsonFields

MAX_BYTES = 2_000_000  # of a page
MAX_SETTING = 2_000  # characters
MAX_PARTS = 6  # named parts of the reward among the first charts
_PROGRAM = ("elements.js", "charts.js", "samples.js", "report.js")


def page_of(runs: Sequence[Run], *, refresh_s: int | None = None) -> str:
    """Return the report of runs as HTML, at most `MAX_BYTES` in UTF-8 however long they are.

    refresh_s: seconds after which a page that a viewer serves asks for new data; None of a file.
    """
    room = curves.MAX_CHARACTERS
    while True:
        text = render(content_of(runs, max_characters=room), refresh_s=refresh_s)
        if len(text.encode()) < MAX_BYTES or room < curves.MAX_CHARACTERS // 64:
            return text
        room //= 2


def content_of(runs: Sequence[Run], *, max_characters: int = curves.MAX_CHARACTERS) -> JsonFields:
    """Return what a report of runs says, as JSON's types; max_characters: of all curves, about."""
    grid = curves.make_grid(runs, max_characters=max_characters)
    groups = seed_groups(runs)
    names = sorted({name for run in runs for name in run.series})
    samples = [read_samples(run.folder, max_characters=MAX_CHARACTERS // len(runs)) for run in runs]
    return {
        "version": __version__,
        "runs": [_facts(run) for run in runs],
        "groups": groups,
        "grid": grid.to_json(),
        "curves": {name: [_curve(run, name, grid) for run in runs] for name in names},
        "metrics": {name: entry._asdict() for name in names if (entry := glossary.explain(name))},
        "themes": [
            [title, [name for name in names if glossary.theme_of(name) == title]] for title, _ in glossary.THEMES
        ],
        "overview": _overview(names),
        "rules": len(rules.RULES),
        "config": _settings(runs),
        "differing": differing_keys(runs),
        "changed": changed_settings(runs[0].config) if len(runs) == 1 else {},
        "symptoms": [[symptom.to_json() for symptom in rules.symptoms_of(run.series)] for run in runs],
        "samples": [{"rows": one.rows, "left_out": one.left_out} for one in samples],
    }


def render(content: JsonFields, *, refresh_s: int | None = None) -> str:
    """Return the page that shows the content."""
    style = _file("report.css")
    program = '"use strict";\n' + "\n".join(_file(name) for name in _PROGRAM)
    connect = "'self'" if refresh_s is not None else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(program)}'; style-src 'sha256-{_hash(style)}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    title = "mega_rl: " + ", ".join(run["label"] for run in content["runs"])
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(title),
        "STYLE": style,
        "DATA": to_script_data({**content, "refresh_s": refresh_s}),
        "PROGRAM": program,
    }
    pieces = _file("report.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def to_script_data(content: object) -> str:
    """Return JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _facts(run: Run) -> JsonFields:
    """Return the facts of a run for the heading of the page."""
    facts: JsonFields = {"label": run.label, "last": run.last_step, "seed": run.config.get("trainer.seed")}
    if run.series:
        facts["date"] = f"{datetime.fromtimestamp((run.folder / METRICS).stat().st_mtime):%Y-%m-%d %H:%M}"
    return {**facts, "hosts": [record.host for record in read_records(run.folder).values()]}


def _overview(names: Sequence[str]) -> list[str]:
    """Return the metrics of the first charts: named parts of the reward stand behind the reward."""
    first, *others = glossary.OVERVIEW
    return [name for name in (first, *glossary.reward_parts(names)[:MAX_PARTS], *others) if name in names]


def _curve(run: Run, name: str, grid: curves.Grid) -> JsonFields | None:
    return curves.thin(run.series[name], grid) if name in run.series else None


def _settings(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Return the value of every setting in each run, None where a run lacks it."""
    keys = sorted({key for run in runs for key in run.config})
    cut = [{key: value[:MAX_SETTING] for key, value in run.config.items()} for run in runs]
    return {key: [config.get(key) for config in cut] for key in keys}


def _file(name: str) -> str:
    return files("mega_rl.report").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
