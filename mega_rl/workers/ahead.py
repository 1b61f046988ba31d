"""Rollouts one step ahead of training: generation on a background thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import raise_together
from mega_rl.processes import Running
from mega_rl.protocols import Ranks, RolloutSource, WeightSync
from mega_rl.types import Draws, Metrics, Prompt, Rollout

log = logging.getLogger(__name__)


class BackgroundRolloutError(RunError):
    """Generation in the background failed or was late; `__cause__` is its thread's error."""


@dataclass
class ThreadedRollouts:
    """Generation of one step's samples while the trainer does something else, the same on all ranks."""

    generate: Callable[[Sequence[Prompt], int], Any]  # this rank's samples of a step; on the thread, no collective
    collect: Callable[[Any], Rollout]  # this replica's rows from all ranks' samples; on the caller's thread
    everyone: Ranks
    timeout_s: float  # deadline of one wait
    # Its `interrupt` returns when no request is in flight, `resume` sends them again; None: it cannot be interrupted.
    requests: Any = None
    beat_s: float = 5.0  # the ranks meet this often, so that the deadline of a collective does not bound generation
    _job: Running[Any] | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)  # step of the job

    def start(self, prompts: Sequence[Prompt], *, step: int) -> None:
        """Begin a generation with the weights that the engine holds now; returns at once."""
        assert self._job is None, f"step {step} starts while the rollout of step {self._step} is not taken"
        self._step = step
        self._job = Running(lambda: self.generate(prompts, step), name=f"rollout of step {step}")

    def finish(self) -> Rollout:
        """Wait for the generation and return this replica's rows; collective."""
        self.drain()
        job, self._job = self._job, None
        assert job is not None, "finish() without start()"
        failure = job.error
        if failure is not None and not isinstance(failure, (RunError, UserError)):
            failure = BackgroundRolloutError(
                f"the generation of step {self._step} failed in the background: {type(failure).__name__}: {failure}"
            )
            failure.__cause__ = job.error
        raise_together(failure, self.everyone, error=BackgroundRolloutError)
        return self.collect(job.result)

    def drain(self) -> None:
        """Wait until the generation has ended or failed on all ranks; `finish` raises its error; collective."""
        if self._job is None:
            return
        begin = time.monotonic()
        while True:
            running = self._job.wait(min(self.beat_s, max(0.0, begin + self.timeout_s - time.monotonic())))
            late = running and time.monotonic() - begin >= self.timeout_s
            some_running, some_late = self.everyone.max(torch.tensor([int(running), int(late)])).tolist()
            if some_late:
                raise BackgroundRolloutError(
                    f"waited {self.timeout_s:g} s for the generation of step {self._step} in the background, and it "
                    "has not ended on every rank"
                )
            if not some_running:
                return

    def interrupt(self) -> None:
        """Interrupt all ranks' requests and keep their tokens; collective; raises any rank's error."""
        failure: Exception | None = None
        if self._job is not None:
            try:
                self.requests.interrupt()
            except RunError as error:
                failure = error
        raise_together(failure, self.everyone, error=BackgroundRolloutError)

    def resume(self) -> None:
        """Continue the interrupted requests with the current weights."""
        if self._job is not None:
            self.requests.resume()

    def close(self) -> None:
        """Cancel the generation and log an error that `finish` has not raised; no collective, never blocks."""
        job, self._job = self._job, None
        if job is not None and job.wait(0.0):
            log.warning("the background generation of step %d is cancelled", self._step)
        elif job is not None and job.error is not None:
            log.error("the background generation of step %d had failed", self._step, exc_info=job.error)


@dataclass
class OneStepAhead:
    """Rollout source and weight sync of servers that generate one step ahead of training.

    When step k's rollout is taken, step k + 1's generation begins with the weights that step k has yet to update: its
    samples are one version old when they train. A publish waits for the generation; with `partial` it interrupts it,
    and responses continue under the new weights. A checkpoint keeps the rollout in progress, once complete: a resumed
    run has newer weights and could not generate it again.
    """

    source: RolloutSource  # for validation, which is not ahead
    background: ThreadedRollouts
    sync: WeightSync
    prompts: Callable[[int], Sequence[Prompt]]  # a step's; a pure function
    steps: int  # length of the run
    partial: bool = False
    # Every `check_interval` steps idle servers answer the first prompts with the trainer's weights, and `compare`
    # raises or returns their `rollout/logprob_diff_*`.
    compare: Callable[[Rollout], Metrics] | None = None  # collective
    check_interval: int = 10
    check_prompts: int = 1  # one for each rank
    check_draws: Draws = field(default_factory=lambda: Draws(n=1, temperature=1.0))
    _started: int | None = field(default=None, init=False)  # step of the rollout that is in progress or complete
    _result: Rollout | RunError | UserError | None = field(default=None, init=False)  # outcome of `_started`
    _waited_s: float = field(default=0.0, init=False)
    _checked: Metrics = field(default_factory=dict, init=False)

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return the step's rollout once it is complete; the next step's generation then begins."""
        if greedy or draws is not None:
            return self.source.generate(prompts, step=step, greedy=greedy, draws=draws)
        if self._started is None:
            self._start(prompts, step)
        assert self._started == step, f"step {step} is asked for while step {self._started} is in progress"
        rollout = self._finished()
        self._started, self._result = None, None
        if isinstance(rollout, Exception):
            raise rollout
        if self.compare is not None and step % self.check_interval == 0:
            sampled = self.source.generate(prompts[: self.check_prompts], step=step, draws=self.check_draws)
            compared = self.compare(sampled)
            self._checked = {name: one for name, one in compared.items() if name.startswith("rollout/logprob_diff")}
        if step + 1 < self.steps:
            self._start(self.prompts(step + 1), step + 1)
        return rollout

    def metrics(self) -> Metrics:
        checked, self._checked = self._checked, {}
        return self.source.metrics() | checked

    @property
    def weight_version(self) -> int:
        return self.sync.weight_version

    def resume_at(self, version: int) -> None:
        self.sync.resume_at(version)

    def publish(self) -> Metrics:
        """Send the weights between requests; `rollout/ahead_wait_s` is the time that training waited for generation."""
        in_flight = self._started is not None and self._result is None
        begin = time.perf_counter()
        if in_flight:
            (self.background.interrupt if self.partial else self.background.drain)()
            self._waited_s += time.perf_counter() - begin
        metrics = self.sync.publish()
        if in_flight and self.partial:
            self.background.resume()
        waited, self._waited_s = self._waited_s, 0.0
        return metrics | {"rollout/ahead_wait_s": waited}

    def state(self) -> dict[str, Tensor]:
        """Return the fields of the rollout in progress, once complete; empty without one; collective."""
        rollout: Any = None if self._started is None else self._finished()
        if self._started is None or isinstance(rollout, Exception):
            return {}
        fields: dict[str, Tensor] = {name: tensor for name, tensor in rollout.items() if tensor is not None}
        return {"step": torch.tensor(self._started), "prompts": self._rows(self._started)} | fields

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Restore the rollout of `state`; generate again for None or if it has other prompts."""
        step = self.steps if tensors is None else int(tensors["step"])
        if tensors is not None and step < self.steps and torch.equal(tensors["prompts"], self._rows(step)):
            fields = {name: tensor for name, tensor in tensors.items() if name not in ("step", "prompts")}
            self._started, self._result = step, Rollout.from_rows(**fields)

    def close(self) -> None:
        """Cancel the generation in progress, at the end of the run."""
        self._started, self._result = None, None
        self.background.close()

    def _finished(self) -> Rollout | RunError | UserError:
        """Wait for the generation in progress; returns its rollout or error, which stays until taken; collective."""
        if self._result is None:
            begin = time.perf_counter()
            try:
                self._result = self.background.finish()
            except (RunError, UserError) as error:  # raised on all ranks alike, when the step needs it
                self._result = error
            self._waited_s += time.perf_counter() - begin
        return self._result

    def _rows(self, step: int) -> Tensor:
        """[P] int64, the rows of the data set that the prompts of a step are."""
        return torch.tensor([prompt.index for prompt in self.prompts(step)], dtype=torch.int64)

    def _start(self, prompts: Sequence[Prompt], step: int) -> None:
        self.background.start(prompts, step=step)
        self._started = step
