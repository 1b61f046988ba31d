"""Rollouts one step ahead of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mega_rl.protocols import BackgroundRollouts, RolloutSource, WeightSync
from mega_rl.types import Metrics, Prompt, Rollout


@dataclass
class AheadOfTraining:
    """Rollout source and weight sync of a run whose servers generate step k + 1 while step k trains.

    When step k's rollout is taken, step k + 1's generation begins with the weights of now, which step k has yet to
    improve: its samples are one version old when they train. Only the first rollout of a run (also of a resumed one)
    is waited for from beginning to end, and is of the current version. Nothing is generated beyond the last step.

    A publish waits for the generation (`partial` false), so that every response is of one version, and sends the
    weights to idle servers; or interrupts it, and responses go on under the new weights. Both stand here, around the
    sync, so that neither the loop nor the sync knows of generation in the background.
    """

    source: RolloutSource  # for validation, which is greedy and not ahead
    background: BackgroundRollouts
    sync: WeightSync
    prompts: Callable[[int], Sequence[Prompt]]  # of a step; a pure function
    steps: int  # of the run, in all
    partial: bool = False
    clock: Callable[[], float] = time.perf_counter
    _started: int | None = field(default=None, init=False)  # the step whose rollout is under way
    _waited_s: float = field(default=0.0, init=False)

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False) -> Rollout:
        """The step's rollout, waiting for what it still lacks; the next step's is then under way."""
        if greedy:
            return self.source.generate(prompts, step=step, greedy=True)
        if self._started is None:
            self._start(prompts, step)
        assert self._started == step, f"step {step} is asked for and step {self._started} is under way"
        begin = self.clock()
        rollout = self.background.finish()
        self._waited_s += self.clock() - begin
        self._started = None
        if step + 1 < self.steps:
            self._start(self.prompts(step + 1), step + 1)
        return rollout

    def metrics(self) -> Metrics:
        """The source's."""
        return self.source.metrics()

    @property
    def weight_version(self) -> int:
        """The sync's."""
        return self.sync.weight_version

    def resume_at(self, version: int) -> None:
        """The sync's."""
        self.sync.resume_at(version)

    def publish(self) -> Metrics:
        """Send the weights between requests; `rollout/ahead_wait_s` is what generation has held training up."""
        if self._started is None:
            return self._with_wait(self.sync.publish())
        begin = self.clock()
        if self.partial:
            self.background.interrupt()
        else:
            self.background.drain()
        self._waited_s += self.clock() - begin
        metrics = self.sync.publish()
        if self.partial:
            self.background.resume()
        return self._with_wait(metrics)

    def close(self) -> None:
        """Give up the rollout under way, at the end of the run."""
        self._started = None
        self.background.close()

    def _start(self, prompts: Sequence[Prompt], step: int) -> None:
        self.background.start(prompts, step=step)
        self._started = step

    def _with_wait(self, metrics: Metrics) -> Metrics:
        waited, self._waited_s = self._waited_s, 0.0
        return metrics | {"rollout/ahead_wait_s": waited}
