"""Weights & Biases, MLflow and SwanLab behind one interface, each by its own client. Imports no torch.

Everything about accounts is the clients' own: keys, entity, server and offline mode come from their environment
variables and their login files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import yaml

from mega_rl.config.keys import flattened

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it."""

    project: str
    name: str
    run_dir: str  # absolute; files go here unless the client's environment names another folder
    run_id: str  # of the tracker's run to go on with; empty for a new one
    trainer_pid: int  # whose use of the machine is recorded where the client does that
    config: dict[str, Any]  # {"optim": {"lr": 1e-6}, "engine": "megatron"}


@dataclass(frozen=True)
class Started:
    """A tracker's run that takes metrics."""

    run_id: str
    place: str  # address or folder for the user to look at


class TrackerClient(Protocol):
    """One run of one tracker. Errors are the client's own, of any type."""

    def start(self, run: TrackedRun) -> Started:
        """Begin a run, or go on with `run.run_id`."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; values may be NaN or infinite."""
        ...

    def log_rollouts(self, step: int, rows: Sequence[Row], name: str) -> None:
        """Record sampled rollouts, all with the same keys. name: "rollouts", or "val_rollouts" of a validation."""
        ...

    def finish(self, status: str) -> None:
        """End the run as "finished", "failed" or "stopped", and wait until everything is written or sent."""
        ...


class WandbClient:
    """Weights & Biases: rollouts as a table, the status as the exit code and in the summary."""

    def start(self, run: TrackedRun) -> Started:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id or None,
            resume="allow" if run.run_id else None,
            config=run.config,
            dir=os.environ.get("WANDB_DIR", run.run_dir),
            settings=wandb.Settings(console="off", x_stats_pid=run.trainer_pid),
        )
        return Started(run_id=self._run.id, place=self._run.url or str(Path(self._run.dir).parent))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rows: Sequence[Row], name: str) -> None:
        columns: list[str | int] = [*rows[0]]
        table = self._wandb.Table(columns=columns, data=[list(row.values()) for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self, status: str) -> None:
        self._run.summary["outcome"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MlflowClient:
    """MLflow: settings as parameters, rollouts as an artifact of JSON lines for each step."""

    STATUS: ClassVar = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
    PARAMETERS: ClassVar = 100  # that a server takes at once

    def start(self, run: TrackedRun) -> Started:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ["MLFLOW_TRACKING_URI"] = (Path(run.run_dir) / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Callable[..., Any] = Metric
        self._client = client = mlflow.MlflowClient()
        if run.run_id:
            client.update_run(run.run_id, status="RUNNING")
            self._id: str = run.run_id
        else:
            experiment = client.get_experiment_by_name(run.project)
            number = client.create_experiment(run.project) if experiment is None else experiment.experiment_id
            self._id = client.create_run(number, run_name=run.name).info.run_id
            settings = [Param(key, str(value)) for key, value in flattened(run.config).items()]
            for start in range(0, len(settings), self.PARAMETERS):
                client.log_batch(self._id, params=settings[start : start + self.PARAMETERS])
        client.log_text(self._id, yaml.safe_dump(run.config, sort_keys=False), "config.yaml")  # that of a resumed run
        return Started(run_id=self._id, place=mlflow.get_tracking_uri())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [self._metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entries)

    def log_rollouts(self, step: int, rows: Sequence[Row], name: str) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._client.log_text(self._id, text, f"{name}/step_{step:06d}.jsonl")

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._id, status=self.STATUS[status])


class SwanlabClient:
    """SwanLab: rollouts as texts."""

    STATUS: ClassVar = {"finished": "success", "failed": "crashed", "stopped": "aborted"}

    def start(self, run: TrackedRun) -> Started:
        import swanlab

        self._swanlab = swanlab
        begun = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.run_id or None,
            resume="allow" if run.run_id else "never",
            config=run.config,
            log_dir=os.environ.get("SWANLAB_LOG_DIR", str(Path(run.run_dir) / "swanlog")),
        )
        try:
            place = begun.url
        except ValueError:  # it has none when it is offline
            place = str(begun.dir)
        return Started(run_id=begun.id, place=place)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rows: Sequence[Row], name: str) -> None:
        texts = [self._swanlab.Text(json.dumps(row, ensure_ascii=False, indent=1)) for row in rows]
        self._swanlab.log({name: texts}, step=step)

    def finish(self, status: str) -> None:
        self._swanlab.finish(state=self.STATUS[status], error="the run failed" if status == "failed" else None)


CLIENTS: dict[str, Callable[[], TrackerClient]] = {
    "mlflow": MlflowClient,
    "swanlab": SwanlabClient,
    "wandb": WandbClient,
}
