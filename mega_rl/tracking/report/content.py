"""Runs as a report reads them, and the report's content as JSON's types.

All curves share one grid of steps. A grid has one column for each step or, for long runs, for several neighbouring
steps. Each column keeps the mean of its values, and their minimum and maximum, so that a spike stays visible.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from mega_rl import __version__
from mega_rl.config.keys import as_record, flattened
from mega_rl.config.packaged import parse_yaml
from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.tracking.health.records import read_records
from mega_rl.tracking.metrics.records import Series, read_series
from mega_rl.tracking.report.page import (
    MAX_CHARACTERS,
    OVERVIEW,
    THEMES,
    explain,
    read_samples,
    render,
    reward_parts,
    shorten,
    theme_of,
)
from mega_rl.tracking.report.symptoms import RULES, symptoms_of
from mega_rl.untrusted import JsonFields, parse_object, read_file

METRICS, CONFIG, AUDIT = "metrics.jsonl", "config.yaml", "audit.json"
MAX_CONFIG_BYTES, MAX_AUDIT_BYTES = 4 << 20, 64 << 20
# Settings in which repetitions of one run differ.
OF_A_REPETITION = frozenset({"trainer.seed", "trainer.run_dir", "metrics.run_name"})


@dataclass(frozen=True)
class Run:
    """Content of a run's files."""

    folder: Path
    label: str  # shortest name that differs from the other runs of the report
    series: Mapping[str, Series]  # metric -> values
    config: Mapping[str, str]  # "optim.lr": "1e-06"; empty without config.yaml
    audit: str = ""  # page of `mega-rl audit`; empty without one

    @property
    def last_step(self) -> int:
        """Return the last step with metrics, 0 before the first."""
        return max((series.steps[-1] for series in self.series.values()), default=0)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs. Raises UserError for a repeated, foreign or damaged folder."""
    resolved = [folder.resolve() for folder in folders]
    repeated = [str(folder) for folder, path in zip(folders, resolved, strict=True) if resolved.count(path) > 1]
    if repeated:
        raise UserError(f"{repeated[0]}: is given twice; name each run once")
    return [_read_run(folder, label) for folder, label in zip(folders, labels_of(resolved), strict=True)]


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of absolute paths that differ from one another."""
    length = 1
    longest = max(len(folder.parts) for folder in folders)
    while length < longest and len({folder.parts[-length:] for folder in folders}) < len(folders):
        length += 1
    return ["/".join(folder.parts[-length:]) for folder in folders]


def _read_run(folder: Path, label: str) -> Run:
    has_metrics, config = (folder / METRICS).is_file(), folder / CONFIG
    if not has_metrics and not config.is_file():
        reason = f"has no {METRICS}" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {reason}; give the folder of a run (trainer.run_dir)")
    series = read_series(folder / METRICS) if has_metrics else {}  # the first step has not ended yet
    settings = _read_config(config) if config.is_file() else {}
    return Run(folder, label, series, settings, _read_audit(folder / AUDIT))


def _read_config(file: Path) -> dict[str, str]:
    """Return the settings as dotted keys and texts. Raises UserError."""
    try:
        content = parse_yaml(read_file(file, MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: is not the config of a run; remove it, or give another folder")
    return _texts(content)


def _texts(content: JsonFields) -> dict[str, str]:
    return {key: "null" if value is None else str(value) for key, value in flattened(content).items()}


def seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Return groups of runs, as indices, that differ only in the seed."""
    groups: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        own = run.config.get("trainer.run_dir")
        shared = {
            key: value.replace(f"{own}/", "<run>/") if own else value  # paths below the run's own folder
            for key, value in run.config.items()
            if key not in OF_A_REPETITION
        }
        groups.setdefault(frozenset(shared.items()) if run.config else number, []).append(number)
    return list(groups.values())


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which runs differ, sorted."""
    keys = sorted({key for run in runs for key in run.config})
    return [key for key in keys if len({run.config.get(key) for run in runs}) > 1]


def changed_settings(config: Mapping[str, str]) -> dict[str, str | None]:
    """Return the default of every setting that a run's config changes, None if it has none."""
    defaults = _texts(json.loads(json.dumps(as_record(Config()))))
    return {key: defaults.get(key) for key, value in config.items() if defaults.get(key) != value}


MAX_BYTES = 2_000_000  # size of a page
MAX_CURVES = 1_000_000  # characters of all curves together, about
MAX_COLUMNS, MIN_COLUMNS = 1000, 20
MAX_SETTING = 2_000  # characters
MAX_PARTS = 6  # named parts of the reward among the first charts
_CHARACTERS_OF_A_COLUMN = 26  # mean, minimum and maximum of four digits


@dataclass(frozen=True)
class Grid:
    """Columns of equal width that cover the steps of all runs."""

    first: int  # step
    width: int  # steps of a column
    columns: int

    def column(self, step: int) -> int:
        """Return the column of a step."""
        return (step - self.first) // self.width


def make_grid(runs: Sequence[Run], *, max_characters: int = MAX_CURVES) -> Grid:
    """Return the finest grid whose curves of all runs take at most about `max_characters` of JSON."""
    curves = [series for run in runs for series in run.series.values()]
    first = min((series.steps[0] for series in curves), default=0)
    last = max((series.steps[-1] for series in curves), default=0)
    room = max_characters // (_CHARACTERS_OF_A_COLUMN * max(len(curves), 1))
    columns = min(max(room, MIN_COLUMNS), MAX_COLUMNS)
    width = max(1, math.ceil((last - first + 1) / columns))
    return Grid(first, width, (last - first) // width + 1)


def thin(series: Series, grid: Grid) -> JsonFields:
    """Return a curve for the page.

    `at` lists the columns with values, `mean` their means; `low` and `high` exist if a column holds several steps.
    `bad` lists columns with values that are NaN or infinite, which count in nothing else.
    """
    columns: dict[int, list[float]] = {}
    bad: set[int] = set()
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            columns.setdefault(grid.column(step), []).append(value)
        else:
            bad.add(grid.column(step))
    at = sorted(columns)
    curve: JsonFields = {"at": None if at == list(range(grid.columns)) else at}
    curve["mean"] = [shorten(math.fsum(columns[column]) / len(columns[column])) for column in at]
    if grid.width > 1:
        curve["low"] = [shorten(min(columns[column])) for column in at]
        curve["high"] = [shorten(max(columns[column])) for column in at]
    if bad:
        curve["bad"] = sorted(bad)
    return curve


def page_of(runs: Sequence[Run]) -> str:
    """Return the report of runs as HTML, at most `MAX_BYTES` in UTF-8 however long they are."""
    room = MAX_CURVES
    while True:
        text = render(content_of(runs, max_characters=room))
        if len(text.encode()) < MAX_BYTES or room < MAX_CURVES // 64:
            return text
        room //= 2


def content_of(runs: Sequence[Run], *, max_characters: int = MAX_CURVES) -> JsonFields:
    """Return the content of a report of runs; max_characters: of all curves, about."""
    grid = make_grid(runs, max_characters=max_characters)
    names = sorted({name for run in runs for name in run.series})
    settings = sorted({key for run in runs for key in run.config})
    samples = [read_samples(run.folder, max_characters=MAX_CHARACTERS // len(runs)) for run in runs]
    # Named parts of the reward stand behind the reward.
    overview = [OVERVIEW[0], *reward_parts(names)[:MAX_PARTS], *OVERVIEW[1:]]
    return {
        "version": __version__,
        "runs": [_facts(run) for run in runs],
        "groups": seed_groups(runs),
        "grid": asdict(grid),
        "curves": {
            name: [thin(run.series[name], grid) if name in run.series else None for run in runs] for name in names
        },
        "metrics": {name: entry for name in names if (entry := explain(name))},
        "themes": [[title, [name for name in names if theme_of(name) == title]] for title, _ in THEMES],
        "overview": [name for name in overview if name in names],
        "rules": len(RULES),
        "config": {
            key: [run.config[key][:MAX_SETTING] if key in run.config else None for run in runs] for key in settings
        },
        "differing": differing_keys(runs),
        "changed": changed_settings(runs[0].config) if len(runs) == 1 else {},
        "symptoms": [[asdict(symptom) for symptom in symptoms_of(run.series)] for run in runs],
        "audits": [run.audit for run in runs],
        "samples": [{"rows": rows, "left_out": left_out} for rows, left_out in samples],
    }


def _read_audit(file: Path) -> str:
    """Return the page of a run's audit; empty without one. Raises UserError."""
    if not file.is_file():
        return ""
    try:
        page = parse_object(read_file(file, MAX_AUDIT_BYTES))["page"]
        return "\n".join(map(str, page))[:MAX_CHARACTERS]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: is not an audit; run mega-rl audit again, or remove it") from error


def _facts(run: Run) -> JsonFields:
    """Return the facts of a run for the heading of the page."""
    facts: JsonFields = {"label": run.label, "last": run.last_step, "seed": run.config.get("trainer.seed")}
    if run.series:
        facts["date"] = f"{datetime.fromtimestamp((run.folder / METRICS).stat().st_mtime):%Y-%m-%d %H:%M}"
    return {**facts, "hosts": [record.host for record in read_records(run.folder).values()]}
