"""Files of a run that a report is made of: metrics.jsonl and config.yaml. Nothing is written."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.config.origins import as_record
from mega_rl.config.recipe import parse_yaml
from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.metrics.records import StepMetrics, read_metrics
from mega_rl.storage.strict_json import JsonFields

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
MAX_CONFIG_BYTES = 4 << 20
# Settings in which repetitions of one run differ.
OF_A_REPETITION = frozenset({"trainer.seed", "trainer.run_dir", "metrics.run_name"})


@dataclass(frozen=True)
class Series:
    """One metric over a run; both arrays have the same length."""

    steps: array[int]
    values: array[float]  # may be NaN or infinite

    def until(self, step: int) -> Series:
        """Return the part of the series up to a step."""
        end = bisect_right(self.steps, step)
        return Series(self.steps[:end], self.values[:end])


@dataclass(frozen=True)
class Run:
    """Content of a run's files."""

    folder: Path
    label: str  # shortest name that tells it from the other runs of the report
    series: Mapping[str, Series]  # by metric
    config: Mapping[str, str]  # "optim.lr": "1e-06"; empty without config.yaml

    @property
    def last_step(self) -> int:
        """Return the last step with metrics, 0 before the first."""
        return max((series.steps[-1] for series in self.series.values()), default=0)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several runs. Raises UserError for a folder that is no run, is given twice, or has a damaged file."""
    resolved = [folder.resolve() for folder in folders]
    repeated = [str(folder) for folder, path in zip(folders, resolved, strict=True) if resolved.count(path) > 1]
    if repeated:
        raise UserError(f"{repeated[0]}: is given twice; name each run once")
    labels = labels_of(resolved)
    return [_read_run(folder, label) for folder, label in zip(folders, labels, strict=True)]


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of absolute paths that differ from one another."""
    length = 1
    longest = max(len(folder.parts) for folder in folders)
    while length < longest and len({folder.parts[-length:] for folder in folders}) < len(folders):
        length += 1
    return ["/".join(folder.parts[-length:]) for folder in folders]


def seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Return numbers of runs that differ in the seed alone, together; runs without a config stand alone."""
    groups: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        key = frozenset(_repeated(run).items()) if run.config else number
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which runs differ, sorted."""
    keys = sorted({key for run in runs for key in run.config})
    return [key for key in keys if len({run.config.get(key) for run in runs}) > 1]


def changed_settings(config: Mapping[str, str]) -> dict[str, str | None]:
    """Return the default of every setting that has another value in a run's config, None where it has none."""
    defaults = dict(_flat(json.loads(json.dumps(as_record(Config()))), ""))
    return {key: defaults.get(key) for key, value in config.items() if defaults.get(key) != value}


def _repeated(run: Run) -> dict[str, str]:
    """Return the settings that repetitions share; paths below the run's own folder without it."""
    own = run.config.get("trainer.run_dir", "")
    shared = {key: value for key, value in run.config.items() if key not in OF_A_REPETITION}
    return {key: value.replace(f"{own}/", "<run>/") for key, value in shared.items()} if own else shared


def _read_run(folder: Path, label: str) -> Run:
    file = folder / METRICS
    if not file.is_file() and (folder / CONFIG).is_file():
        return Run(folder, label, {}, _read_config(folder / CONFIG))  # it has begun, and no step has ended
    if not file.is_file():
        reason = f"has no {METRICS}" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {reason}; give the folder of a run (trainer.run_dir)")
    return Run(folder, label, _read_series(file), _read_config(folder / CONFIG))


def _read_series(file: Path) -> dict[str, Series]:
    series: dict[str, Series] = {}
    try:
        for record in read_metrics(file):
            _append(series, record)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    return series


def _append(series: dict[str, Series], record: StepMetrics) -> None:
    for name, value in record.metrics.items():
        one = series.get(name)
        if one is None:
            one = series[name] = Series(array("q"), array("d"))
        one.steps.append(record.step)
        one.values.append(value)


def _read_config(file: Path) -> dict[str, str]:
    """Return the settings as dotted keys and texts; empty without the file. Raises UserError."""
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{file}: is larger than {MAX_CONFIG_BYTES >> 20} MiB; it is no config of a run")
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: is no config of a run; remove it, or give another folder")
    return dict(_flat(content, ""))


def _flat(content: JsonFields, prefix: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", "null" if value is None else str(value)))
    return pairs
