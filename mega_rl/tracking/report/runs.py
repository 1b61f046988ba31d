"""Runs as a report reads them: metrics.jsonl and config.yaml of their folders. Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.config.origins import as_record
from mega_rl.config.recipe import parse_yaml
from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.tracking.metrics.records import Series, read_series
from mega_rl.untrusted import JsonFields

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
MAX_CONFIG_BYTES = 4 << 20
DIGITS = 4
# Settings in which repetitions of one run differ.
OF_A_REPETITION = frozenset({"trainer.seed", "trainer.run_dir", "metrics.run_name"})


@dataclass(frozen=True)
class Run:
    """Content of a run's files."""

    folder: Path
    label: str  # shortest name that differs from the other runs of the report
    series: Mapping[str, Series]  # metric -> values
    config: Mapping[str, str]  # "optim.lr": "1e-06"; empty without config.yaml

    @property
    def last_step(self) -> int:
        """Return the last step with metrics, 0 before the first."""
        return max((series.steps[-1] for series in self.series.values()), default=0)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs. Raises UserError for a folder that is not a run, is given twice, or has a damaged file."""
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
    return Run(folder, label, series, _read_config(config) if config.is_file() else {})


def _read_config(file: Path) -> dict[str, str]:
    """Return the settings as dotted keys and texts. Raises UserError."""
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{file}: is larger than {MAX_CONFIG_BYTES >> 20} MiB; this is not the config of a run")
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: is not the config of a run; remove it, or give another folder")
    return dict(_flat(content, ""))


def _flat(content: JsonFields, prefix: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", "null" if value is None else str(value)))
    return pairs


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
    defaults = dict(_flat(json.loads(json.dumps(as_record(Config()))), ""))
    return {key: defaults.get(key) for key, value in config.items() if defaults.get(key) != value}


def shorten(value: float) -> float | int:
    """Return a value of four significant digits, whole numbers below ten million as they are."""
    if abs(value) < 1e7 and value == int(value):
        return int(value)
    return float(f"{value:.{DIGITS}g}")
