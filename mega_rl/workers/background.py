"""Generation on a background thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import raise_together
from mega_rl.protocols import Ranks
from mega_rl.threads import Running
from mega_rl.types import Prompt, Rollout

log = logging.getLogger(__name__)

Samples = TypeVar("Samples")  # this rank's samples


class BackgroundRolloutError(RunError):
    """Generation in the background failed or did not end in time; the error on its thread is the cause."""


class Requests(Protocol):
    """Requests of a generation in progress, controlled from another thread. Any state allows any call."""

    def interrupt(self) -> None:
        """Interrupt requests in flight, keep their tokens, send no more; returns when none is in flight."""
        ...

    def resume(self) -> None:
        """Send requests again, the interrupted ones first."""
        ...


class _Job(Running[Samples]):
    """A generation on the background thread."""

    def __init__(self, work: Callable[[], Samples], *, step: int) -> None:
        super().__init__(work, name=f"rollout of step {step}")
        self.step = step

    def failure(self) -> Exception | None:
        """Return the error that the trainer's thread raises for the one of this thread."""
        if self.error is None or isinstance(self.error, (RunError, UserError)):
            return self.error
        failure = BackgroundRolloutError(
            f"the generation of step {self.step} failed in the background: {type(self.error).__name__}: {self.error}"
        )
        failure.__cause__ = self.error
        return failure


class ThreadedRollouts(Generic[Samples]):
    """`protocols.BackgroundRollouts` from functions that generate this rank's samples and collect all ranks'."""

    def __init__(
        self,
        generate: Callable[[Sequence[Prompt], int], Samples],
        collect: Callable[[Samples], Rollout],
        *,
        everyone: Ranks,
        timeout_s: float,
        requests: Requests | None = None,
        beat_s: float = 5.0,
    ) -> None:
        """generate: (prompts, step) -> this rank's samples; runs on the thread and does no collective. collect: from
        the samples of all ranks this replica's rows, on the caller's thread; collective. everyone: all ranks.
        timeout_s: deadline of one wait. requests: None if generation cannot be interrupted. beat_s: the ranks meet
        this often while one waits, so that the deadline of a collective does not bound generation.
        """
        self._generate = generate
        self._collect = collect
        self._everyone = everyone
        self._timeout_s = timeout_s
        self._requests = requests
        self._beat_s = beat_s
        self._job: _Job[Samples] | None = None

    def start(self, prompts: Sequence[Prompt], *, step: int) -> None:
        assert self._job is None, f"step {step} starts while the rollout of step {self._job.step} is not taken"
        self._job = _Job(lambda: self._generate(prompts, step), step=step)

    def finish(self) -> Rollout:
        """Wait for the generation and return this replica's rows; collective.

        Raises:
            BackgroundRolloutError: on all ranks, when generation failed on any (there with its cause) or took longer
                than the deadline. RunError and UserError of the generation itself come as they are.
        """
        job = self._job
        assert job is not None, "finish() without start()"
        self._wait(job)
        self._job = None
        raise_together(job.failure(), self._everyone, error=BackgroundRolloutError)
        assert job.result is not None
        return self._collect(job.result)

    def drain(self) -> None:
        """Wait until the generation has ended or failed on all ranks; collective."""
        if self._job is not None:
            self._wait(self._job)

    def interrupt(self) -> None:
        """Interrupt the requests of all ranks; collective. Raises a rank's error on all ranks."""
        assert self._requests is not None, "this generation cannot be interrupted"
        failure: Exception | None = None
        if self._job is not None:
            try:
                self._requests.interrupt()
            except RunError as error:
                failure = error
        raise_together(failure, self._everyone, error=BackgroundRolloutError)

    def resume(self) -> None:
        assert self._requests is not None, "this generation cannot be interrupted"
        if self._job is not None:
            self._requests.resume()

    def close(self) -> None:
        """Cancel the generation; an error that `finish` has not raised is logged."""
        job, self._job = self._job, None
        if job is None:
            return
        if job.wait(0.0):
            log.warning("the background generation of step %d is cancelled", job.step)
        elif job.error is not None:
            log.error("the background generation of step %d had failed", job.step, exc_info=job.error)

    def _wait(self, job: _Job[Samples]) -> None:
        """Wait until the job has ended on all ranks; raises on all of them after the deadline."""
        begin = time.monotonic()
        while True:
            running = job.wait(min(self._beat_s, max(0.0, begin + self._timeout_s - time.monotonic())))
            late = running and time.monotonic() - begin >= self._timeout_s
            some_running, some_late = self._everyone.max(torch.tensor([int(running), int(late)])).tolist()
            if some_late:
                raise BackgroundRolloutError(
                    f"waited {self._timeout_s:g} s for the generation of step {job.step} in the background, and it has "
                    "not ended on every rank"
                )
            if not some_running:
                return
