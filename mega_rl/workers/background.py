"""Generation on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import raise_together
from mega_rl.protocols import Ranks
from mega_rl.types import Prompt, Rollout

log = logging.getLogger(__name__)

Samples = TypeVar("Samples")  # what this rank alone has generated


class BackgroundRolloutError(RunError):
    """Generation beside training failed or did not end in time; the error on its thread is the cause."""


class Requests(Protocol):
    """The requests of a generation under way, steered from another thread than its own. Any state allows any call."""

    def interrupt(self) -> None:
        """Break off what is in flight, keep its tokens, send nothing more; returns when nothing is in flight."""
        ...

    def resume(self) -> None:
        """Send again, first the rest of what was broken off."""
        ...


class _Job(Generic[Samples]):
    """A generation on the background thread."""

    def __init__(self, work: Callable[[], Samples], *, step: int) -> None:
        self.step = step
        self.result: Samples | None = None
        self.error: BaseException | None = None
        # A daemon: neither an exception nor a signal in the trainer waits for it.
        self.thread = threading.Thread(target=self._run, args=(work,), name=f"rollout of step {step}", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Samples]) -> None:
        try:
            self.result = work()
        except BaseException as error:
            self.error = error

    def failure(self) -> Exception | None:
        """What the trainer's thread raises in place of what this one did."""
        if self.error is None or isinstance(self.error, (RunError, UserError)):
            return self.error
        failure = BackgroundRolloutError(
            f"the generation of step {self.step} failed beside training: {type(self.error).__name__}: {self.error}"
        )
        failure.__cause__ = self.error
        return failure


class ThreadedRollouts(Generic[Samples]):
    """`protocols.BackgroundRollouts` from a function that generates what this rank has to, and one that collects it."""

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
        """Begin; returns at once."""
        assert self._job is None, f"step {step} starts while the rollout of step {self._job.step} is not taken"
        self._job = _Job(lambda: self._generate(prompts, step), step=step)

    def finish(self) -> Rollout:
        """This replica's rows; collective.

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
        """Wait until the generation has ended on all ranks, well or badly; collective."""
        if self._job is not None:
            self._wait(self._job)

    def interrupt(self) -> None:
        """Break off the requests of all ranks; collective. Raises on all ranks what a rank's requests raised."""
        assert self._requests is not None, "this generation cannot be interrupted"
        failure: Exception | None = None
        if self._job is not None:
            try:
                self._requests.interrupt()
            except RunError as error:
                failure = error
        raise_together(failure, self._everyone, error=BackgroundRolloutError)

    def resume(self) -> None:
        """Let this rank's requests go on."""
        assert self._requests is not None, "this generation cannot be interrupted"
        if self._job is not None:
            self._requests.resume()

    def close(self) -> None:
        """Give up the generation; an error that nobody has seen is logged."""
        job, self._job = self._job, None
        if job is None:
            return
        if job.thread.is_alive():
            log.warning("the generation of step %d, beside training, is given up", job.step)
        elif job.error is not None:
            log.error("the generation of step %d, beside training, had failed", job.step, exc_info=job.error)

    def _wait(self, job: _Job[Samples]) -> None:
        """Until the job has ended on all ranks; raises on all of them after the deadline."""
        begin = time.monotonic()
        while True:
            job.thread.join(min(self._beat_s, max(0.0, begin + self._timeout_s - time.monotonic())))
            running = job.thread.is_alive()
            late = running and time.monotonic() - begin >= self._timeout_s
            some_running, some_late = self._everyone.max(torch.tensor([int(running), int(late)])).tolist()
            if some_late:
                raise BackgroundRolloutError(
                    f"waited {self._timeout_s:g} s for the generation of step {job.step} beside training, and it has "
                    "not ended on every rank"
                )
            if not some_running:
                return
