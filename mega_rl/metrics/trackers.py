"""Experiment trackers as metrics sinks: each client works in its own process, with a deadline for every answer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mega_rl.environment import python_module
from mega_rl.metrics.tracker_clients import TrackedRun
from mega_rl.types import Metrics

logger = logging.getLogger(__name__)

OFFLINE = {"wandb": "WANDB_MODE=offline", "swanlab": "SWANLAB_MODE=offline", "mlflow": "no MLFLOW_TRACKING_URI"}


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of a client in seconds."""

    answer_s: float = 120.0  # for each message, the start of the run included
    finish_s: float = 60.0  # for everything that is left when a run ends that the client has started


class TrackerSink:
    """Sends metrics, config and rollouts to one tracker; a client that fails or hangs is off, with one warning.

    Nothing here waits for the client, except `close`, as long as `Deadlines` says.
    """

    def __init__(
        self,
        tracker: str,
        run: TrackedRun,
        *,
        resume_step: int,
        total_steps: int | None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """tracker: a key of `tracker_clients.CLIENTS`. run: with an empty `run_id`; the run's folder keeps it.

        resume_step: the first step that the run will do; 1 begins a new run of the tracker. total_steps: after which
        the run counts as finished.
        """
        self._tracker = tracker
        self._deadlines = deadlines or Deadlines()
        self._folder = Path(run.run_dir) / "trackers"
        self._last_step, self._total_steps = resume_step - 1, total_steps
        self._unanswered: deque[float] = deque()  # times of sending
        self._started = False
        self._failure = ""
        self._off = False
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = self._start_process()
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"{tracker} tracker", daemon=True).start()
        run_id = "" if resume_step <= 1 else self._earlier_run()
        self._send({"do": "start", "run": {**asdict(run), "run_id": run_id}})

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of a step."""
        self._last_step = step
        self._send({"do": "log", "step": step, "metrics": {name: float(value) for name, value in metrics.items()}})

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], *, validation: bool = False) -> None:
        """Send sampled rollouts."""
        if rows:
            name = "val_rollouts" if validation else "rollouts"
            self._send({"do": "rollouts", "step": step, "name": name, "rows": [dict(row) for row in rows]})

    def close(self, *, failed: bool = False) -> None:
        """End the tracker's run as failed, stopped early or finished, and its process."""
        complete = self._total_steps is None or self._last_step >= self._total_steps
        self._send({"do": "finish", "status": "failed" if failed else "finished" if complete else "stopped"})
        self._outbox.put(None)
        if self._off:
            return
        limit = self._deadlines.finish_s if self._started else self._deadlines.answer_s
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._turn_off(f"has not ended {limit:g} s after the run")
        else:
            if code:
                self._turn_off(self._failure or f"its process ended with exit code {code}")

    def _start_process(self) -> subprocess.Popen[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with (self._folder / f"{self._tracker}.log").open("ab") as log:
            return subprocess.Popen(
                python_module("mega_rl.metrics.tracker_process", self._tracker),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C at the terminal is the trainer's
            )

    def _earlier_run(self) -> str:
        """Return the id of the tracker's run that this run goes on with; empty where none is known."""
        try:
            return str(json.loads(self._state.read_text(encoding="utf-8"))["run_id"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    @property
    def _state(self) -> Path:
        return self._folder / f"{self._tracker}.json"

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._off:
            return
        with self._lock:
            oldest = self._unanswered[0] if self._unanswered else None
            self._unanswered.append(time.monotonic())
        if self._failure:
            self._turn_off(self._failure)
        elif oldest is not None and time.monotonic() - oldest > self._deadlines.answer_s:
            self._turn_off(f"has not answered for {self._deadlines.answer_s:g} s")
        else:
            self._outbox.put(json.dumps(message) + "\n")

    def _turn_off(self, reason: str) -> None:
        self._off = True
        self._outbox.put(None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        logger.warning(
            "%s is off for the rest of the run: %s; training goes on. Its log is %s. To record without a network: %s",
            *(self._tracker, reason, self._folder / f"{self._tracker}.log", OFFLINE[self._tracker]),
        )

    def _write(self) -> None:
        """Hand messages to the process; on a thread, because a pipe whose reader hangs is full one day."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._outbox.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
        except OSError:
            pass  # the process is gone, which `_read` finds out

    def _read(self) -> None:
        """Take the answers of the process; on a thread."""
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                answer = json.loads(line)
                if "error" in answer:
                    self._failure = answer["error"]
                    return
                with self._lock:
                    self._unanswered.popleft()
                if "run_id" in answer:
                    self._started = True
                    self._remember(answer)
        # It has closed its end of the pipe, which does not say that it ends.
        try:
            end = f"its process ended with exit code {self._process.wait(self._deadlines.answer_s)}"
        except subprocess.TimeoutExpired:
            end = "its process answers no more"
        with self._lock:
            if self._unanswered:
                self._failure = self._failure or end

    def _remember(self, answer: Mapping[str, Any]) -> None:
        """Keep the id of the tracker's run for a resume."""
        logger.info("%s: %s", self._tracker, answer["place"])
        try:
            part = self._state.with_suffix(".tmp")
            part.write_text(json.dumps({"run_id": answer["run_id"], "place": answer["place"]}) + "\n", encoding="utf-8")
            os.replace(part, self._state)
        except OSError as error:
            logger.warning("%s: a resumed run will begin a new one there: %s", self._tracker, error)


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config for others to see: addresses lose what follows their path, where keys may stand.

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
