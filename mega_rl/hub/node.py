"""One rank of each node does the work, the others wait for its result and for no longer than it lives.

Ranks of a node have no process group yet: they meet in a file of HF_HOME, named by the launch. The working rank writes
its process and a sign of life into it, and at the end the result or the reason of its failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import constants

from mega_rl.errors import UserError, UserErrors

BEAT_S = 2.0
SILENCE_S = 60.0  # without a sign of life the working rank counts as hung
BEGIN_S = 120.0  # from this rank's own begin until the working rank must have shown itself
POLL_S = 0.1
START_SPREAD_S = 5.0  # between the begins of the ranks of one launch
LAUNCH = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
KEPT_S = 86_400.0


def once_per_node(work: Callable[[], dict[str, Any]], *, what: str) -> dict[str, Any]:
    """Return the result of `work` (JSON), which local rank 0 of a launcher runs for all ranks of its node.

    `what` names the work in errors. Raises what `work` raises, on the other ranks UserErrors with the same problems;
    UserError on a rank that waits for a process that has ended, is silent, or never came.
    """
    local_rank, local_size = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE", "2")
    alone = local_rank is None or os.environ.get("WORLD_SIZE", "1") == "1" or local_size == "1"
    if alone or not _writable(Path(constants.HF_HOME)):  # a cache that cannot change has it all or nothing
        return work()
    meeting = _Meeting(_place(what), what)
    return meeting.lead(work) if local_rank == "0" else meeting.follow()


def _writable(folder: Path) -> bool:
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return os.access(existing, os.W_OK | os.X_OK)


def _place(what: str) -> Path:
    """Return the file of this launch on this node."""
    parts = [socket.gethostname(), what, *(os.environ.get(name, "") for name in LAUNCH)]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
    return Path(constants.HF_HOME) / "mega_rl" / "launches" / f"{digest}.json"


@dataclass(frozen=True)
class _Meeting:
    """The file in which local rank 0 reports to the other ranks of its node."""

    file: Path
    what: str

    def lead(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `work` and leave it, or the reason of its failure, for the others."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(self.file.parent)
        self._write({})
        ended = threading.Event()
        beats = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        beats.start()
        final: dict[str, Any] = {"problems": [f"{self.what}: local rank 0 of this node failed; look at its log"]}
        try:
            result = work()
            final = {"result": result}
        except UserError as error:
            final = {"problems": list(error.problems) if isinstance(error, UserErrors) else [str(error)]}
            raise
        finally:
            ended.set()
            beats.join()
            self._write(final)
        return result

    def follow(self) -> dict[str, Any]:
        """Return what local rank 0 leaves. Raises UserError once it is certain that nothing will come."""
        leader = f"{self.what}: local rank 0 of this node, which downloads for all,"
        begun = time.time()
        while True:
            record = self._read()
            if record is None:
                if time.time() - begun > BEGIN_S:
                    raise UserError(f"{leader} has not begun within {BEGIN_S:.0f} s; look at its log")
            elif "result" in record:
                return dict(record["result"])
            elif "problems" in record:
                raise UserErrors(record["problems"])
            elif not _alive(record):
                raise UserError(f"{leader} ended (process {record['pid']}) without a result; look at its log")
            elif time.time() - record["at"] > SILENCE_S:
                raise UserError(f"{leader} gave no sign of life for {SILENCE_S:.0f} s (process {record['pid']})")
            time.sleep(POLL_S)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            self._write({})

    def _write(self, content: Mapping[str, Any]) -> None:
        process = psutil.Process()
        record = {"pid": process.pid, "started": process.create_time(), "at": time.time(), **content}
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(record))
        fresh.replace(self.file)

    def _read(self) -> dict[str, Any] | None:
        """Return the record if it is of this launch: its writer lives, or wrote it after this process had begun."""
        try:
            record = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return None
        is_new = record["at"] >= psutil.Process().create_time() - START_SPREAD_S
        return record if is_new or _alive(record) else None


def _alive(record: Mapping[str, Any]) -> bool:
    try:
        return abs(psutil.Process(record["pid"]).create_time() - record["started"]) < 1.0
    except psutil.Error:
        return False


def _remove_old(folder: Path) -> None:
    """Remove the reports of launches that are long over."""
    for file in folder.glob("*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > KEPT_S:
                file.unlink()
