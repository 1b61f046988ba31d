"""Experiment trackers as sinks: Weights & Biases, MLflow and SwanLab, each on a thread.

Accounts are the client's own affair: keys, entity, server and offline mode come from its environment variables and its
login files.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

import yaml

from mega_rl import disk
from mega_rl.config.keys import flattened
from mega_rl.types import Metrics

logger = logging.getLogger(__name__)

ANSWER_S = 120.0  # deadline of each call, the start of the run included
FINISH_S = 60.0  # deadline of all that is left when a run ends
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it."""

    project: str
    name: str
    run_dir: str  # absolute; files go here unless the client's environment names another folder
    config: dict[str, Any]  # {"optim": {"lr": 1e-6}, "engine": "megatron"}
    run_id: str = ""  # the tracker's run to continue; empty for a new one


class WandbClient:
    """Weights & Biases: rollouts as a table, the status in the summary.

    As of every client, errors of its methods are of any type.
    """

    offline = "WANDB_MODE=offline"  # how to record without a network

    def start(self, run: TrackedRun) -> tuple[str, str]:
        """Begin or continue a run; return its id and its address or folder."""
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id or None,
            resume="allow" if run.run_id else None,
            config=run.config,
            dir=os.environ.get("WANDB_DIR", run.run_dir),
            settings=wandb.Settings(console="off", silent=True),
        )
        return self._run.id, self._run.url or str(Path(self._run.dir).parent)

    def log(self, step: int, metrics: Metrics) -> None:
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

    offline = "no MLFLOW_TRACKING_URI"
    STATUS: ClassVar = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
    PARAMETERS: ClassVar = 100  # at most in one request to a server

    def start(self, run: TrackedRun) -> tuple[str, str]:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            address = (Path(run.run_dir) / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Callable[..., Any] = Metric
        self._client = client = mlflow.MlflowClient(address)
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
        client.log_text(self._id, yaml.safe_dump(run.config, sort_keys=False), "config.yaml")  # also of a resumed run
        return self._id, address

    def log(self, step: int, metrics: Metrics) -> None:
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

    offline = "SWANLAB_MODE=offline"
    STATUS: ClassVar = {"finished": "success", "failed": "crashed", "stopped": "aborted"}

    def start(self, run: TrackedRun) -> tuple[str, str]:
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
            return begun.id, begun.url
        except ValueError:  # an offline run has no address
            return begun.id, str(begun.dir)

    def log(self, step: int, metrics: Metrics) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rows: Sequence[Row], name: str) -> None:
        texts = [self._swanlab.Text(json.dumps(row, ensure_ascii=False, indent=1)) for row in rows]
        self._swanlab.log({name: texts}, step=step)

    def finish(self, status: str) -> None:
        self._swanlab.finish(state=self.STATUS[status], error="the run failed" if status == "failed" else None)


CLIENTS: dict[str, type[WandbClient | MlflowClient | SwanlabClient]] = {
    "mlflow": MlflowClient,
    "swanlab": SwanlabClient,
    "wandb": WandbClient,
}


class TrackerSink:
    """Sink of one tracker; raises RuntimeError once its client has failed or hangs.

    The client works on a thread, in the order of the calls. Only `close` waits for it, at most `FINISH_S`.
    """

    def __init__(self, tracker: str, run: TrackedRun, *, resume_step: int, total_steps: int | None) -> None:
        """tracker: a key of `CLIENTS`. run: with an empty `run_id`; the run's folder keeps the id.

        resume_step: the first step that the run will do; 1 begins a new run of the tracker. total_steps: the step after
        which the run counts as finished.
        """
        self._tracker, self._client = tracker, CLIENTS[tracker]()
        self._state = Path(run.run_dir) / "trackers" / f"{tracker}.json"
        self._last_step, self._total_steps = resume_step - 1, total_steps
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None  # beginning of the call that the client works on
        self._failure = ""
        self._thread = threading.Thread(target=self._work, name=f"{tracker} tracker", daemon=True)
        self._thread.start()
        run_id = "" if resume_step <= 1 else self._earlier_run()
        self._calls.put(partial(self._start, replace(run, run_id=run_id)))

    def log(self, step: int, metrics: Metrics) -> None:
        self._last_step = step
        self._send(partial(self._client.log, step, {name: float(value) for name, value in metrics.items()}))

    def dump_rollouts(self, step: int, rows: Sequence[Row], *, validation: bool = False) -> None:
        if rows:
            name = "val_rollouts" if validation else "rollouts"
            self._send(partial(self._client.log_rollouts, step, [dict(row) for row in rows], name))

    def close(self, *, failed: bool = False) -> None:
        """End the tracker's run as failed, stopped early or finished."""
        complete = self._total_steps is None or self._last_step >= self._total_steps
        status = "failed" if failed else "finished" if complete else "stopped"
        self._send(partial(self._client.finish, status))
        self._calls.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive() or self._failure:
            raise self._error(self._failure or f"has not ended {FINISH_S:g} s after the run")

    def _send(self, call: Callable[[], None]) -> None:
        busy_since = self._busy_since
        if self._failure:
            raise self._error(self._failure)
        if busy_since is not None and time.monotonic() - busy_since > ANSWER_S:
            raise self._error(f"has not answered for {ANSWER_S:g} s")
        self._calls.put(call)

    def _error(self, reason: str) -> RuntimeError:
        return RuntimeError(f"{self._tracker} {reason}; to record without a network: {self._client.offline}")

    def _work(self) -> None:
        """Make the calls one after the other until one fails; runs on the thread."""
        while (call := self._calls.get()) is not None:
            self._busy_since = time.monotonic()
            try:
                call()
            except Exception as error:  # noqa: BLE001 - a client may raise anything; training continues without it
                self._failure = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
                return
            self._busy_since = None

    def _start(self, run: TrackedRun) -> None:
        """Start the client and keep the id of the tracker's run for a resume."""
        run_id, place = self._client.start(run)
        logger.info("%s: %s", self._tracker, place)
        try:
            disk.make_folder(self._state.parent)
            disk.replace_text(self._state, json.dumps({"run_id": run_id, "place": place}) + "\n")
        except disk.SaveError as error:
            logger.warning("%s: a resumed run will begin a new one there: %s", self._tracker, error)

    def _earlier_run(self) -> str:
        """Return the id of the tracker's run to continue; empty if none is known."""
        try:
            return str(json.loads(self._state.read_text(encoding="utf-8"))["run_id"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config for others to see: addresses lose their query, which may hold keys.

    Nothing else of a config is secret: passwords in addresses are refused, and keys come from files that it names.
    """

    def shown(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shown(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [shown(entry) for entry in value]
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            return urlunsplit(urlsplit(value)._replace(query="", fragment=""))
        return value

    return {key: shown(value) for key, value in config.items()}
