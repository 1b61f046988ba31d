"""Writers of a rank's part of a save: inline in a thread, or a copy of the state in a background process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from mega_rl.checkpoint.saving.job import SaveJob, SaveOutcome, perform
from mega_rl.checkpoint.saving.staging import Staging, direct, plan
from mega_rl.checkpoint.saving.writer import WriterProcess
from mega_rl.storage.disk import SaveError
from mega_rl.types import Piece

log = logging.getLogger(__name__)

STOP_S = 10.0  # for a stopped thread; one that waits for a dead disk cannot end


class Writing(Protocol):
    """A writer of one job at a time."""

    def start(self, job: SaveJob, pieces: Sequence[Piece]) -> None:
        """Start a job over these pieces; with a background writer they may change once this returns.

        Raises:
            SaveError: the job could not start.
        """
        ...

    def wait(self, timeout_s: float) -> SaveOutcome | None:
        """Wait for the job; return its outcome once, None if it is not done within the time. Raises SaveError."""
        ...

    def stop(self) -> None:
        """Abandon the job, so that it publishes nothing; `start` may follow."""
        ...

    def close(self) -> None:
        """Release the resources kept from job to job; may be called twice."""
        ...


class InlineWriter:
    """Writer of the live state, in a thread, so that the ranks can meet while some still write."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | SaveError | None = None

    def start(self, job: SaveJob, pieces: Sequence[Piece]) -> None:
        """Start a job; the pieces may not change until it is done."""
        ordered, places, _ = plan(pieces)
        job, data, given_up = replace(job, pieces=tuple(places)), direct(ordered), threading.Event()

        def work() -> None:
            try:
                self._outcome = perform(job, data, given_up=given_up.is_set)
            except SaveError as error:
                self._outcome = error
            except BaseException as error:  # noqa: BLE001 - any error must reach the waiting rank
                self._outcome = SaveError(f"{type(error).__name__}: {error}")

        self._outcome, self._given_up = None, given_up
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> SaveOutcome | None:
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if isinstance(self._outcome, SaveError):
            raise self._outcome
        return self._outcome

    def stop(self) -> None:
        """Abandon the job; a thread that hangs in the disk is not awaited beyond `STOP_S`."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def close(self) -> None:
        """Do nothing: an inline writer holds no resources."""


class BackgroundWriter:
    """Writer of a copy of the state, in a process. The first job creates staging memory and process."""

    def __init__(self) -> None:
        self._staging: Staging | None = None
        self._process: WriterProcess | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the writer, None before the first job."""
        return None if self._process is None else self._process.pid

    def start(self, job: SaveJob, pieces: Sequence[Piece]) -> None:
        """Copy the job's data to staging memory and start writing it."""
        if self._staging is None:
            self._staging = Staging()
        ordered, places, nbytes = plan(pieces)
        self._staging.copy(ordered, places, nbytes)
        if self._process is not None and not self._process.alive:
            log.warning("the writer (process %d) has ended between two saves: starting another", self._process.pid)
            self.stop()
        if self._process is None:
            self._process = WriterProcess(self._staging.descriptor)
        self._process.start(replace(job, pieces=tuple(places)), memory_bytes=nbytes)

    def wait(self, timeout_s: float) -> SaveOutcome | None:
        return None if self._process is None else self._process.wait(timeout_s)

    def stop(self) -> None:
        """End the process; the next job gets another."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def close(self) -> None:
        """End the process and free the memory."""
        self.stop()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()
