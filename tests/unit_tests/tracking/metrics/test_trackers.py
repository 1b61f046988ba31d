"""Trackers: offline runs hold what metrics.jsonl holds, a resumed run goes on, and a broken client stops nothing."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mega_rl.config.keys import as_record
from mega_rl.config.loader import load
from mega_rl.config.schema import Config, MetricsConfig
from mega_rl.tracking.metrics import trackers
from mega_rl.tracking.metrics.records import read_metrics
from mega_rl.tracking.metrics.sinks import MultiSink, make_sink
from mega_rl.tracking.metrics.trackers import TrackedRun, TrackerSink, without_secrets
from tests.helpers.selection import FULL

REAL_CLIENT = pytest.mark.skipif(not FULL, reason="make test-full: a dozen seconds for each client")

ROWS = [{"prompt": "3+4=", "response": "7\nü", "reward": 1.0}, {"prompt": "1+1=", "response": "", "reward": 0.0}]


def metrics_of(step: int) -> dict[str, float]:
    """Metrics of a step, with what JSON has no numbers for."""
    return {"reward/mean": 0.5 + step, "actor/loss": math.nan if step == 2 else -1e-9, "kl/ref_max": math.inf}


def record_run(run_dir: Path, trackers: list[str], steps: Sequence[int], *, failed: bool = False) -> None:
    """Log steps as a run does that begins, or resumes, with the first of them."""
    sink = make_sink(
        MetricsConfig(tensorboard=False, print_samples=0, trackers=trackers, project="sums"),
        run_dir,
        is_writer=True,
        resume_step=max(steps[0], 1),
        total_steps=4,
        settings=as_record(Config()),
    )
    for step in steps:
        if step == 2:
            sink.dump_rollouts(step, ROWS)
            sink.dump_rollouts(step, ROWS[:1], validation=True)
        sink.log(step, metrics_of(step))
    sink.close(failed=failed)


def assert_same_metrics(tracked: Mapping[int, Mapping[str, float]], run_dir: Path) -> None:
    """Compare keys and values of every step with metrics.jsonl; NaN equals NaN."""
    expected = {record.step: record.metrics for record in read_metrics(run_dir / "metrics.jsonl")}
    assert sorted(tracked) == sorted(expected)
    for step, metrics in expected.items():
        assert {name: repr(value) for name, value in tracked[step].items()} == {
            name: repr(value) for name, value in metrics.items()
        }


# -- real clients without a network -----------------------------------------------------------------------------------


def read_wandb(file: Path) -> list[Any]:
    """Read the records of an offline run with wandb's own reader."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    records = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    return records


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that was stopped, resumed for two more, and failed."""
    folder = tmp_path_factory.mktemp("trackers") / "adder"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_MODE", "offline")
        environment.delenv("MLFLOW_TRACKING_URI", raising=False)
        record_run(folder, ["wandb", "mlflow"], [0, 1, 2])
        record_run(folder, ["wandb", "mlflow"], [3, 4], failed=True)
    return folder


@pytest.mark.slow
@REAL_CLIENT
def test_wandb_offline_holds_all_of_a_resumed_run(run_dir: Path) -> None:
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    first, resumed = (read_wandb(file) for file in files)
    tracked: dict[int, dict[str, float]] = {}
    for record in (*first, *resumed):
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            dumps = [items.pop(name, None) for name in ("rollouts", "val_rollouts")]
            assert [dump is not None for dump in dumps] == [items["_step"] == 2] * 2
            tracked[items["_step"]] = {name: float(value) for name, value in items.items() if name[0] != "_"}
    assert_same_metrics(tracked, run_dir)

    begun, again = (next(r.run for r in records if r.HasField("run")) for records in (first, resumed))
    assert begun.run_id == again.run_id
    assert (begun.project, begun.display_name) == ("sums", "adder")
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    config.pop("_wandb", None)
    assert config == as_record(Config())
    for name, rows in (("rollouts", ROWS), ("val_rollouts", ROWS[:1])):
        (table,) = files[0].parent.glob(f"files/media/table/{name}*.json")
        assert json.loads(table.read_text()) == {"columns": list(ROWS[0]), "data": [list(row.values()) for row in rows]}
    outcomes = []
    for records in (first, resumed):
        updates = [u for r in records if r.HasField("summary") for u in r.summary.update if u.key == "outcome"]
        exits = [r.exit.exit_code for r in records if r.HasField("exit")]
        outcomes.append((json.loads(updates[-1].value_json), exits))
    assert outcomes == [("stopped", [0]), ("failed", [1])]


@pytest.mark.slow
@REAL_CLIENT
def test_mlflow_files_hold_all_of_a_resumed_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((run_dir / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    tracked: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            tracked.setdefault(metric.step, {})[name] = metric.value
    assert_same_metrics(tracked, run_dir)
    assert (run.info.run_name, run.info.status) == ("adder", "FAILED")
    assert run.data.params["optim.lr"] == "1e-06"
    assert set(run.data.params) >= {"engine.backend", "metrics.trackers", "trainer.seed"}
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    assert load(artifacts / "config.yaml") == Config()
    rows = (artifacts / "rollouts" / "step_000002.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row) for row in rows] == ROWS
    (row,) = (artifacts / "val_rollouts" / "step_000002.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(row) == ROWS[0]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("swanlab") is None,
    reason="swanlab is not installed: it wants an older protobuf than constraints.txt has; make test-swanlab",
)
def test_swanlab_offline_holds_all_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    run_dir = tmp_path / "adder"
    record_run(run_dir, ["swanlab"], [0, 1, 2])
    record_run(run_dir, ["swanlab"], [3, 4])
    assert not caplog.records
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    tracked: dict[int, dict[str, float]] = {}
    ids, states = set(), []
    for file in sorted(run_dir.glob("swanlog/*/*.swanlab"), key=lambda path: path.stat().st_mtime):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = record_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                tracked.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
            elif record.HasField("start"):
                ids.add((record.start.id, record.start.project, record.start.name))
            elif record.HasField("finish"):
                states.append(record.finish.state)
        config = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())
        assert {key: entry["value"] for key, entry in config.items()} == as_record(Config())
    assert_same_metrics(tracked, run_dir)
    ((_, project, name),) = ids
    assert (project, name) == ("sums", "adder")
    assert len(states) == len(set(states)) == 2, "the first was stopped, the second finished"
    texts = [file.read_text(encoding="utf-8") for file in run_dir.glob("swanlog/*/media/text/002-*.txt")]
    rows = [json.loads(text) for text in texts]
    assert [row for row in ROWS if row not in rows] == [row for row in rows if row not in ROWS] == []


# -- clients that fail or hang ----------------------------------------------------------------------------------------


class Wandb(SimpleNamespace):
    """A stand-in for the package: one run, which keeps its calls; `started` and `finished` are called by it."""

    Settings, id, url, dir = dict, "r1", "http://tracker/r1", "."

    def __init__(self, started: Callable[[], object] = dict, finished: Callable[[], object] = dict) -> None:
        super().__init__(started=started, finished=finished, calls=[], summary={})

    def init(self, **settings: Any) -> Wandb:
        self.started()
        self.calls.append((settings["id"], settings["resume"]))
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.finished()
        self.calls.append((self.summary["outcome"], exit_code))


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MultiSink]]:
    """Return a function that makes the sink of a run with a stand-in for wandb; hanging calls end with the test."""
    monkeypatch.setattr(trackers, "ANSWER_S", 0.2)
    monkeypatch.setattr(trackers, "FINISH_S", 0.5)
    made: list[Wandb] = []

    def make(package: Wandb, *, resume_step: int = 1, total_steps: int = 9) -> MultiSink:
        made.append(package)
        monkeypatch.setitem(sys.modules, "wandb", package)
        run = TrackedRun("p", "n", str(tmp_path / "run"), run_id="", config={})
        return MultiSink([TrackerSink("wandb", run, resume_step=resume_step, total_steps=total_steps)])

    hang.clear()
    yield make
    hang.set()


hang = threading.Event()


def refuse() -> None:
    raise PermissionError("no key,\n  no run")


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (Wandb(started=hang.wait), "wandb has not answered for 0.2 s"),
        (Wandb(started=refuse), "wandb failed: PermissionError: no key, no run"),
        (Wandb(finished=hang.wait), "wandb has not ended 0.5 s after the run"),
        (Wandb(finished=refuse), "wandb failed: PermissionError: no key, no run"),
    ],
)
def test_broken_client_costs_one_line(
    use: Callable[..., MultiSink], package: Wandb, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Training neither waits nor fails, whether the client hangs or raises, at its start or at its end."""
    caplog.set_level(logging.WARNING, logger="mega_rl")
    sink = use(package)
    if package.started is not dict:
        for step in range(1, 1000):
            sink.log(step, {"reward/mean": 0.0})
            if caplog.records:
                break
            time.sleep(0.005)
    else:
        sink.log(1, {"reward/mean": 0.0})
    sink.close()
    (message,) = caplog.messages
    assert message == (
        f"TrackerSink failed and is off for the rest of the run: RuntimeError: {reason}; to record without a network: "
        "WANDB_MODE=offline"
    )


@pytest.mark.parametrize(
    ("resume_step", "failed", "outcome"),
    [(1, False, ("stopped", 0)), (9, False, ("finished", 0)), (9, True, ("failed", 1))],
)
def test_outcome_of_a_run_is_recorded(
    use: Callable[..., MultiSink], tmp_path: Path, caplog: pytest.LogCaptureFixture, resume_step: int, failed: bool,
    outcome: tuple[str, int],
) -> None:  # fmt: skip
    """A resumed run continues the tracker's run; its id is in the run's folder."""
    caplog.set_level(logging.INFO, logger="mega_rl")
    state = tmp_path / "run" / "trackers" / "wandb.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"run_id": "r0"}')
    package = Wandb()
    sink = use(package, resume_step=resume_step)
    sink.log(resume_step, {"reward/mean": math.inf})
    sink.close(failed=failed)
    begun = (None, None) if resume_step == 1 else ("r0", "allow")
    assert package.calls == [begun, (resume_step, {"reward/mean": math.inf}), outcome]
    assert json.loads(state.read_text())["run_id"] == "r1"
    assert caplog.messages == ["wandb: http://tracker/r1"]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_addresses_lose_their_keys() -> None:
    config = {"reward": {"url": "https://host/score?key=s3cret#x"}, "sglang": {"urls": ["http://h:1/?k=1"]}, "n": 3}
    assert without_secrets(config) == {
        "reward": {"url": "https://host/score"}, "sglang": {"urls": ["http://h:1/"]}, "n": 3,
    }  # fmt: skip
