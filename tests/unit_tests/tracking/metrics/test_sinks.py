"""Sinks: their files, resumed runs, and failures that stay in the sink."""

from __future__ import annotations

import json
import math
import resource
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mega_rl.tracking.metrics.records import read_metrics
from mega_rl.tracking.metrics.sinks import JsonlSink, MultiSink, NullSink, RolloutDump, TensorBoardSink
from mega_rl.types import Metrics


def steps_of(path: Path) -> list[int]:
    return [record.step for record in read_metrics(path)]


def written(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


# -- metrics.jsonl ----------------------------------------------------------------------------------------------------


def test_resumed_run_replaces_repeated_steps(tmp_path: Path) -> None:
    """Every step is on the disk at once; a run that begins again starts empty."""
    path = tmp_path / "run" / "metrics.jsonl"
    first = JsonlSink(path, resume_step=1)
    for step in range(6):
        first.log(step, {"reward/mean": 1.0, "actor/loss": math.nan})
        assert steps_of(path) == list(range(step + 1))
    with path.open("a") as file:
        file.write('{"step": 6, "met')  # the crash
    resumed = JsonlSink(path, resume_step=4)
    for step in (4, 5, 6):
        resumed.log(step, {"reward/mean": 2.0})
    assert [(r.step, r.metrics["reward/mean"]) for r in read_metrics(path)] == [
        (0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip
    for resume_step in (0, 1):
        JsonlSink(path, resume_step=resume_step).log(0, {"val/reward_mean": 0.0})
        assert steps_of(path) == [0]


def test_later_metrics_of_a_step_join_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=1)
    for step, metrics in ((1, {"a": 1.0}), (2, {"a": 2.0, "b": 3.0}), (2, {"b": 4.0, "c": 5.0})):
        sink.log(step, metrics)
    assert [one.metrics for one in read_metrics(path)] == [{"a": 1.0}, {"a": 2.0, "b": 4.0, "c": 5.0}]
    shutil.rmtree(path.parent)
    sink.log(2, {"d": 6.0})
    assert [one.metrics for one in read_metrics(path)] == [{"a": 2.0, "b": 4.0, "c": 5.0, "d": 6.0}]


def test_full_disk_loses_only_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=1)
    sink.log(1, {"reward/mean": 1.0})
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, largest[1]))  # half a line has room
    try:
        sink.log(2, {"reward/mean": 2.0})
        sink.log(3, {f"reward/mean_{i}": 3.0 for i in range(20)})
        assert steps_of(path) == [1], "a torn end does not hide what came before it"
        assert not path.read_text().endswith("}\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, largest)
    sink.log(4, {"reward/mean": 4.0})
    assert steps_of(path) == [1, 4]
    assert path.read_text().endswith("}\n"), "nothing is left of the lost lines"
    begin, end = caplog.messages
    assert "metrics of step 2 lost" in begin
    assert "File too large" in begin
    assert "from step 4 on" in end


def test_deleted_file_begins_again(tmp_path: Path) -> None:
    """A run whose folder was deleted continues, and loses no later step."""
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=1)
    sink.log(1, {"reward/mean": 1.0})
    shutil.rmtree(path.parent)
    for step in (2, 3):
        sink.log(step, {"reward/mean": 2.0})
    assert steps_of(path) == [2, 3]


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_hides_repeated_steps(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path, resume_step=1)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": float(step)})
    first.close()
    resumed = TensorBoardSink(tmp_path, resume_step=3)
    resumed.log(3, {"reward/mean": 30.0})
    resumed.close()
    events = events_of(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_holds_config_and_rollouts_as_texts(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_step=1, config_text="optim:\n  lr: 0.5\n")
    sink.dump_rollouts(2, [{"prompt": "3|4=", "reward": 1.0}])
    sink.dump_rollouts(2, [{"prompt": "5=", "reward": 0.0}], validation=True)
    sink.log(2, {"reward/mean": 1.0})
    sink.close()
    events = events_of(tmp_path)
    names = ("config", "rollouts", "val_rollouts")
    texts = [events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in names]
    assert texts == [
        b"```yaml\noptim:\n  lr: 0.5\n```",
        b"| prompt | reward |\n| --- | --- |\n| 3\\|4= | 1.0 |",
        b"| prompt | reward |\n| --- | --- |\n| 5= | 0.0 |",
    ]


@pytest.mark.parametrize("full", [False, True], ids=["deleted", "full disk"])
def test_lost_events_cost_tensorboard_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    folder = tmp_path / "tb"
    sink = MultiSink([TensorBoardSink(folder, resume_step=1), JsonlSink(tmp_path / "m.jsonl", resume_step=1)])
    sink.log(1, {"reward/mean": 1.0})
    if full:
        (events,) = folder.iterdir()
        events.unlink()
        events.symlink_to("/dev/full")
    else:
        shutil.rmtree(folder)
    for step in (2, 3):
        sink.log(step, {"reward/mean": 1.0})
    sink.close()
    assert caplog.messages == full * [
        "TensorBoardSink failed and is off for the rest of the run: OSError: [Errno 28] No space left on device"
    ]
    assert not died
    assert steps_of(tmp_path / "m.jsonl") == [1, 2, 3]
    if not full:
        assert [event.step for event in events_of(folder).Scalars("reward/mean")] == [2, 3]


# -- rollouts ---------------------------------------------------------------------------------------------------------


def test_rollouts_are_one_line_each(tmp_path: Path) -> None:
    row = {"prompt": "3+4=", "response": "7\nü", "answer": "7", "reward": 1.0, "weight_version": 3}
    dump = RolloutDump(tmp_path / "rollouts", resume_step=1)
    dump.dump_rollouts(10, [row, row | {"reward": math.nan}])
    dump.dump_rollouts(10, [row], validation=True)
    lines = (tmp_path / "rollouts" / "step_000010.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [row, row | {"reward": "NaN"}]
    assert json.loads((tmp_path / "rollouts" / "val_000010.jsonl").read_text(encoding="utf-8")) == row


def test_resumed_run_drops_only_repeated_dumps(tmp_path: Path) -> None:
    repeated = ["step_000020.jsonl", "step_000030.jsonl", "val_000020.jsonl"]
    kept = ["notes.txt", "step_000010.jsonl", "step_best.jsonl", "val_000019.jsonl"]
    for name in (*repeated, *kept):
        (tmp_path / name).write_text("{}\n")
    RolloutDump(tmp_path, resume_step=20)
    assert written(tmp_path) == kept


# -- many sinks, and the one the config asks for ----------------------------------------------------------------------


class Recorder(NullSink):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, int]] = []

    def _call(self, name: str, step: int) -> None:
        self.calls.append((name, step))
        if self.error:
            raise self.error

    def log(self, step: int, metrics: Metrics) -> None:
        self._call("log", step)

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        self._call("val dump" if validation else "dump", step)

    def close(self, *, failed: bool = False) -> None:
        self._call("close", -1)


@pytest.mark.parametrize("method", ["log", "dump_rollouts", "close"])
def test_failed_sink_is_reported_once(method: str, caplog: pytest.LogCaptureFixture) -> None:
    broken, healthy = Recorder(OSError("disk gone")), Recorder()
    multi = MultiSink([broken, healthy])
    arguments = {"log": (1, {}), "dump_rollouts": (1, []), "close": ()}[method]
    getattr(multi, method)(*arguments)
    multi.log(2, {})
    multi.close()
    assert len(broken.calls) == 1
    assert healthy.calls[0][0] == {"log": "log", "dump_rollouts": "dump", "close": "close"}[method]
    assert [r.getMessage() for r in caplog.records] == [
        "Recorder failed and is off for the rest of the run: OSError: disk gone"
    ]


def test_bug_in_a_sink_is_not_hidden() -> None:
    with pytest.raises(KeyError):
        MultiSink([Recorder(KeyError("typo"))]).log(1, {})
