"""Sinks of a run's numbers: metrics.jsonl, TensorBoard, trackers, the console, dumped rollouts.

A sink gets the first step that the run will do. What an earlier run in the same folder wrote from there on is
removed, so a resumed run's files read as if it had never stopped; a run from step 1 (or 0) on is new and removes all.
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

from mega_rl.config.schema import MetricsConfig
from mega_rl.metrics.console import ConsoleSink
from mega_rl.metrics.records import decode_step, encode_step, to_json_value
from mega_rl.metrics.tracker_clients import TrackedRun
from mega_rl.metrics.trackers import TrackerSink, without_secrets
from mega_rl.protocols import MetricsSink
from mega_rl.types import Metrics

logger = logging.getLogger(__name__)

# What a full disk, a vanished folder or a client of a tracker raise.
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
    """Records from this step on are removed by a run that starts with `resume_step`; step 0 is what precedes step 1."""
    return 0 if resume_step <= 1 else resume_step


class JsonlSink(NullSink):
    """One flushed line per step in metrics.jsonl; see `records` for its form.

    It is the run's record, so it is never given up: a line that cannot be written is reported and dropped, the file is
    cut back to its last whole line, and the next step tries again. A file that is gone begins anew.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self._path = path
        self._resume_step = resume_step
        self._num_bytes: int | None = None  # of whole lines; None until the first step
        self._failing = False

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the record of a step."""
        line = encode_step(step, metrics).encode() + b"\n"
        try:
            if self._num_bytes is not None and not self._path.exists():
                logger.error("%s is gone with the metrics before step %d: a new one begins", self._path, step)
                self._num_bytes = None
            if self._num_bytes is None:
                self._num_bytes = _drop_steps_from(self._path, _first_stale_step(self._resume_step))
            _write_at(self._path, self._num_bytes, line)
        except OSError as error:
            if not self._failing:
                logger.error(
                    "metrics of step %d lost, %s cannot be written: %s (each step tries)", step, self._path, error
                )
            self._failing = True
            return
        self._num_bytes += len(line)
        if self._failing:
            logger.warning("%s can be written again, from step %d on", self._path, step)
        self._failing = False


def _write_at(path: Path, offset: int, line: bytes) -> None:
    """Put `line` at `offset` and cut off what a failed write may have left there."""
    with path.open("r+b") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(line)


def _drop_steps_from(path: Path, first_stale: int) -> int:
    """Rewrite the file, in one atomic move, with the records of steps below `first_stale`; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = "".join(f"{line}\n" for line in lines if _is_record_before(line, first_stale)).encode()
    rewritten = path.with_name(path.name + ".tmp")
    rewritten.write_bytes(kept)
    os.replace(rewritten, path)
    return len(kept)


def _is_record_before(line: str, step: int) -> bool:
    try:
        return decode_step(line).step < step
    except ValueError:
        logger.warning("a line of metrics.jsonl that is not a record was dropped: %.80r", line)
        return False


class TensorBoardSink(NullSink):
    """Scalars in TensorBoard event files; the config and sampled rollouts as texts.

    They are written in the caller's thread: where the disk is full, the thread of TensorBoard's writer dies with a
    traceback.
    """

    def __init__(self, directory: Path, *, resume_step: int, config_text: str = "") -> None:
        """config_text: the config as YAML. Raises ImportError without the tensorboard package."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary  # a second of import time that only this sink needs

        self._directory = directory
        self._resume_step = resume_step
        self._config_text = config_text
        self._events, self._summaries, self._make_writer = event_pb2, summary, RecordWriter
        self._file: Path | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        """Add every metric as a scalar."""
        self._write(step, [self._summaries.scalar(name, value) for name, value in metrics.items()])

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        """Add the rows as a table in Markdown."""
        if rows:
            name = "val_rollouts" if validation else "rollouts"
            self._write(step, [self._summaries.text(name, _markdown_table(rows))])

    def _write(self, step: int, summaries: Sequence[object]) -> None:
        """Append summaries to the file, which is made here, also when it is gone. Raises OSError."""
        event = self._events.Event
        events = [event(step=step, summary=one) for one in summaries]
        if self._file is not None and not self._file.exists():
            logger.error("%s is gone with the events before step %d: new ones begin", self._directory, step)
            self._file = None
        if self._file is None:
            # TensorBoard hides what earlier event files of the folder hold from the first event's step on.
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
    columns = list(rows[0])

    def cell(value: object) -> str:
        return str(value).replace("|", "\\|").replace("\n", "<br>")

    lines = [columns, ["---"] * len(columns), *([cell(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class RolloutDump(NullSink):
    """Rollouts as rollouts/step_000010.jsonl, those of validations as rollouts/val_000010.jsonl, for people to read."""

    def __init__(self, directory: Path, *, resume_step: int) -> None:
        self._directory = directory
        for path in directory.glob("*.jsonl"):
            name = _DUMP_NAME.fullmatch(path.name)
            if name and int(name[1]) >= _first_stale_step(resume_step):
                path.unlink()

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        """Write the rows of this step, one line each; values are JSON's types, and numbers may be NaN or infinite."""
        self._directory.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(_json_row(row), ensure_ascii=False, allow_nan=False) for row in rows]
        path = self._directory / f"{'val' if validation else 'step'}_{step:06d}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: to_json_value(value) if isinstance(value, float) else value for key, value in row.items()}


class MultiSink:
    """Several sinks as one. A sink that fails is reported once and left out from then on; training goes on."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log to every sink that still works."""
        self._each(lambda sink: sink.log(step, metrics))

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        """Dump to every sink that still works."""
        self._each(lambda sink: sink.dump_rollouts(step, rows, validation=validation))

    def close(self, *, failed: bool = False) -> None:
        """Close every sink that still works."""
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
    """Return the sink of this rank: everything the config asks for where `is_writer`, nothing elsewhere.

    resume_step: the first step that the run will do, 1 when it is new. total_steps: of the run. settings: the whole
    config, for those that keep it.
    """
    if not is_writer:
        return NullSink()
    public = without_secrets(settings or {})
    sinks: list[MetricsSink] = [JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)]
    if config.tensorboard:
        try:
            text = yaml.safe_dump(public, sort_keys=False) if public else ""
            sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step=resume_step, config_text=text))
        except ImportError:
            logger.warning("metrics.tensorboard=true, but the tensorboard package is not installed: metrics.jsonl only")
    if config.rollout_interval and config.rollout_samples:
        sinks.append(RolloutDump(run_dir / "rollouts", resume_step=resume_step))
    run = TrackedRun(
        project=config.project,
        name=config.run_name or run_dir.resolve().name,
        run_dir=str(run_dir.resolve()),
        run_id="",
        trainer_pid=os.getpid(),
        config=public,
    )
    for tracker in dict.fromkeys(config.trackers):
        sinks.append(TrackerSink(tracker, run, resume_step=resume_step, total_steps=total_steps))
    sinks.append(ConsoleSink(samples=config.print_samples))
    return MultiSink(sinks)
