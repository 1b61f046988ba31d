"""Rollouts one step ahead of training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mega_rl.errors import RunError, UserError
from mega_rl.protocols import BackgroundRollouts, RolloutSource, WeightSync
from mega_rl.types import Draws, Metrics, Prompt, Rollout

log = logging.getLogger(__name__)

CHECKED = "rollout/logprob_diff"  # metrics of a comparison


@dataclass
class OneStepAhead:
    """Rollout source and weight sync of a run whose servers generate step k + 1 while step k trains.

    When step k's rollout is taken, step k + 1's generation begins with the current weights, which step k has yet to
    update: its samples are one version old when they train. Only the first rollout of a run does not overlap with
    training, and is of the current version. The last step starts no generation.

    A publish waits for the generation (`partial` false), so that every response is of one version, and sends the
    weights to idle servers; or interrupts it, and responses go on under the new weights. Both happen here, around the
    sync, so that neither the loop nor the sync depends on generation in the background.

    A checkpoint (this is a `protocols.RankState`) keeps the rollout in progress, once complete: a resumed run could not
    generate it again, since its weights are newer, and trains on the same tokens.
    """

    source: RolloutSource  # for validation, which is not ahead
    background: BackgroundRollouts
    sync: WeightSync
    prompts: Callable[[int], Sequence[Prompt]]  # of a step; a pure function
    steps: int  # of the run, in all
    partial: bool = False
    clock: Callable[[], float] = time.perf_counter
    # Every `check_interval` steps idle servers answer the first prompts with the weights that the trainer still has,
    # and `compare` raises or returns their `rollout/logprob_diff_*`: tokens that train are of older weights.
    compare: Callable[[Rollout], Metrics] | None = None  # collective
    check_interval: int = 10
    check_prompts: int = 1  # one for each rank
    check_draws: Draws = field(default_factory=lambda: Draws(n=1, temperature=1.0))
    _started: int | None = field(default=None, init=False)  # step of the rollout that is in progress or complete
    _result: Rollout | RunError | UserError | None = field(default=None, init=False)  # of that step, when known
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
            self._checked = {name: value for name, value in compared.items() if name.startswith(CHECKED)}
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
        if self._started is None or self._result is not None:  # nothing is in flight
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

    def state(self) -> dict[str, Tensor]:
        """Return the rollout in progress, once complete, with its step and prompts; empty without one; collective.

        `step` int64 scalar; `prompts` [P] int64, the rows of the data set; the fields of this replica's `Rollout`. A
        failed generation leaves nothing and fails the step that needs it.
        """
        if self._started is None:
            return {}
        rollout: Any = self._finished()
        if isinstance(rollout, Exception):
            return {}
        fields: dict[str, Tensor] = {name: tensor for name, tensor in rollout.items() if tensor is not None}
        return {"step": torch.tensor(self._started), "prompts": self._rows(self._started)} | fields

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Restore the rollout of `state`; for None, or one of other prompts than this run has, generate again."""
        if tensors is None:
            return
        step = int(tensors["step"])
        if step >= self.steps or not torch.equal(tensors["prompts"], self._rows(step)):
            log.info("the rollout of step %d in the checkpoint is of other prompts: it is generated again", step)
            return
        fields = {name: tensor for name, tensor in tensors.items() if name not in ("step", "prompts")}
        self._started, self._result = step, Rollout.from_rows(**fields)

    def close(self) -> None:
        """Cancel the generation in progress, at the end of the run."""
        self._started, self._result = None, None
        self.background.close()

    def _finished(self) -> Rollout | RunError | UserError:
        """Wait for the generation in progress; returns its rollout or error, which stays until taken; collective."""
        if self._result is None:
            begin = self.clock()
            try:
                self._result = self.background.finish()
            except (RunError, UserError) as error:  # raised on all ranks alike, when the step needs it
                self._result = error
            self._waited_s += self.clock() - begin
        return self._result

    def _rows(self, step: int) -> Tensor:
        """[P] int64, the rows of the data set that the prompts of a step are."""
        return torch.tensor([prompt.index for prompt in self.prompts(step)], dtype=torch.int64)

    def _start(self, prompts: Sequence[Prompt], step: int) -> None:
        self.background.start(prompts, step=step)
        self._started = step

    def _with_wait(self, metrics: Metrics) -> Metrics:
        waited, self._waited_s = self._waited_s, 0.0
        return metrics | {"rollout/ahead_wait_s": waited}
