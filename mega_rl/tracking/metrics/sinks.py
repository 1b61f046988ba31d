"""Sinks of a run's numbers: metrics.jsonl, TensorBoard, trackers, the console, dumped rollouts.

A sink knows the first step that the run will do. It removes the later steps that an earlier run in the same folder
wrote, so a resumed run's files read as if it had never stopped. A run from step 1 (or 0) on is new and removes all.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mega_rl import disk
from mega_rl.config.schema import MetricsConfig
from mega_rl.protocols import MetricsSink
from mega_rl.tracking.metrics.console import ConsoleSink
from mega_rl.tracking.metrics.records import StepMetrics, decode_step, encode_step, to_json_value
from mega_rl.tracking.metrics.trackers import TrackedRun, TrackerSink, without_secrets
from mega_rl.types import Metrics

logger = logging.getLogger(__name__)

# Errors of a full disk, a vanished folder or a tracker's client.
_RUNTIME_FAILURES = (OSError, RuntimeError, ValueError)
_DUMP_NAME = re.compile(r"(?:step|val)_(\d+)\.jsonl")


class NullSink:
    """Sink that drops everything, for ranks that do not write."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Do nothing."""

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        """Do nothing."""

    def close(self, *, failed: bool = False) -> None:
        """Do nothing."""


def _first_stale_step(resume_step: int) -> int:
    """Return the first step whose old records are removed; 0 is before step 1."""
    return 0 if resume_step <= 1 else resume_step


class JsonlSink(NullSink):
    """One flushed line per step in metrics.jsonl; see `records` for its format.

    Later metrics of the same step, such as of the last save, join its line.
    The sink never gives up: it reports and drops a line that it cannot write, cuts the file back to its last whole
    line, and tries again at the next step. If the file was deleted, it begins a new one.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self._path = path
        self._resume_step = resume_step
        self._num_bytes: int | None = None  # bytes of whole lines; None until the first step
        self._last, self._begin = StepMetrics(-1, {}), 0  # the last line, and the bytes before it
        self._failing = False

    def log(self, step: int, metrics: Metrics) -> None:
        try:
            if self._num_bytes is None or not self._path.exists():
                self._num_bytes = _drop_steps_from(self._path, _first_stale_step(self._resume_step))
            again = step == self._last.step
            begin = min(self._begin, self._num_bytes) if again else self._num_bytes
            record = StepMetrics(step, {**self._last.metrics, **metrics} if again else metrics)
            line = encode_step(step, record.metrics).encode() + b"\n"
            with self._path.open("r+b") as file:
                file.seek(begin)
                file.write(line)
                file.truncate()  # drops the rest of a failed write; last, so that a kill takes no line that stood
        except (OSError, disk.SaveError) as error:
            if not self._failing:
                logger.error(
                    "metrics of step %d lost, %s cannot be written: %s (each step tries)", step, self._path, error
                )
            self._failing = True
            return
        self._last, self._begin, self._num_bytes = record, begin, begin + len(line)
        if self._failing:
            logger.warning("%s can be written again, from step %d on", self._path, step)
        self._failing = False


def _drop_steps_from(path: Path, first_stale: int) -> int:
    """Drop the records of steps from `first_stale` on, atomically; return the bytes left."""
    disk.make_folder(path.parent)
    kept = ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            kept += f"{line}\n" if decode_step(line).step < first_stale else ""
        except ValueError:
            logger.warning("a line of metrics.jsonl that is not a record was dropped: %.80r", line)
    disk.replace_text(path, kept)
    return len(kept.encode())


class TensorBoardSink(NullSink):
    """Scalars in TensorBoard event files; the config and sampled rollouts as texts.

    The caller's thread writes the files, because the thread of TensorBoard's own writer dies with a traceback when the
    disk is full.
    """

    def __init__(self, directory: Path, *, resume_step: int, config_text: str = "") -> None:
        """config_text: the config as YAML."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary  # a second of import time that only this sink needs

        self._directory = directory
        self._resume_step = resume_step
        self._config_text = config_text
        self._events, self._summaries, self._make_writer = event_pb2, summary, RecordWriter
        self._file: Path | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        self._write(step, [self._summaries.scalar(name, value) for name, value in metrics.items()])

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        if rows:
            name = "val_rollouts" if validation else "rollouts"
            self._write(step, [self._summaries.text(name, _markdown_table(rows))])

    def _write(self, step: int, summaries: Sequence[object]) -> None:
        """Append summaries to the file, which may be new. Raises OSError."""
        event = self._events.Event
        events = [event(step=step, summary=one) for one in summaries]
        if self._file is None or not self._file.exists():
            # TensorBoard hides the steps of earlier event files from the first event's step on.
            purge_step, start = _first_stale_step(self._resume_step), self._events.SessionLog.START
            first = [event(file_version="brain.Event:2"), event(session_log=self._events.SessionLog(status=start))]
            if self._config_text:
                first.append(event(summary=self._summaries.text("config", f"```yaml\n{self._config_text}```")))
            for one in first:
                one.step = purge_step
            events = [*first, *events]
            seconds, rest = divmod(time.time_ns(), 10**9)
            self._directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{seconds}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
            self._file = self._directory / name
        content = io.BytesIO()
        for one in events:
            one.wall_time = time.time()
            self._make_writer(content).write(one.SerializeToString())
        with self._file.open("ab") as file:
            file.write(content.getvalue())


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as a table in Markdown."""
    cells = [[str(value).replace("|", "\\|").replace("\n", "<br>") for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(rows[0]), ["---"] * len(rows[0]), *cells])


class RolloutDump(NullSink):
    """Rollouts as rollouts/step_000010.jsonl and validations as rollouts/val_000010.jsonl, for people to read."""

    def __init__(self, directory: Path, *, resume_step: int) -> None:
        self._directory = directory
        for path in directory.glob("*.jsonl"):
            name = _DUMP_NAME.fullmatch(path.name)
            if name and int(name[1]) >= _first_stale_step(resume_step):
                path.unlink()

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        """Write the rows as lines of JSON; numbers may be NaN or infinite."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{'val' if validation else 'step'}_{step:06d}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                strict = {key: to_json_value(v) if isinstance(v, float) else v for key, v in row.items()}
                file.write(json.dumps(strict, ensure_ascii=False, allow_nan=False) + "\n")


class MultiSink:
    """Several sinks as one. A sink that fails is reported once and left out."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Metrics) -> None:
        self._each(lambda sink: sink.log(step, metrics))

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        self._each(lambda sink: sink.dump_rollouts(step, rows, validation=validation))

    def close(self, *, failed: bool = False) -> None:
        self._each(lambda sink: sink.close(failed=failed))
        self._sinks = []

    def _each(self, call: Callable[[MetricsSink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except _RUNTIME_FAILURES as error:
                names = type(sink).__name__, type(error).__name__
                logger.error("%s failed and is off for the rest of the run: %s: %s", *names, error)
                self._sinks.remove(sink)


def make_sink(
    config: MetricsConfig,
    run_dir: Path,
    *,
    is_writer: bool,
    resume_step: int,
    total_steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> MetricsSink:
    """Return the sink of this rank, which drops everything unless `is_writer`.

    resume_step: the first step that the run will do, 1 when it is new. total_steps: number of steps of the run.
    settings: the whole config, for sinks that keep it.
    """
    if not is_writer:
        return NullSink()
    public = without_secrets(settings or {})
    sinks: list[MetricsSink] = [JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)]
    if config.tensorboard:
        text = yaml.safe_dump(public, sort_keys=False) if public else ""
        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step=resume_step, config_text=text))
    if config.rollout_interval and config.rollout_samples:
        sinks.append(RolloutDump(run_dir / "rollouts", resume_step=resume_step))
    run = TrackedRun(
        project=config.project,
        name=config.run_name or run_dir.resolve().name,
        run_dir=str(run_dir.resolve()),
        config=public,
    )
    for tracker in dict.fromkeys(config.trackers):
        sinks.append(TrackerSink(tracker, run, resume_step=resume_step, total_steps=total_steps))
    sinks.append(ConsoleSink(samples=config.print_samples))
    return MultiSink(sinks)
