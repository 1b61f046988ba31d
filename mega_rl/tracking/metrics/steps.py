"""Costs of a step: time by phase, rate of computation, peak memory, traces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from mega_rl.protocols import Ranks
from mega_rl.tracking import progress
from mega_rl.types import Metrics

MODEL_PHASES = ("old_logprobs", "ref_logprobs", "values", "update_critic", "update_actor")
TOKEN_PHASES = ("generate", *MODEL_PHASES)
PEAKS = {
    "allocated": "memory/peak_allocated_bytes",
    "reserved": "memory/peak_reserved_bytes",
    "host": "memory/host_bytes",
}


class PhaseTimer:
    """Wall-clock seconds of each phase of a step, and the share they cover.

    A step lasts from one call of `metrics` (or `reset`) to the next. Time spent after `metrics`, such as writing them,
    belongs to the following step.
    """

    def __init__(self, *, synchronize: Callable[[], None] = lambda: None) -> None:
        """synchronize: waits for the accelerator; called at both ends of each phase."""
        self._synchronize = synchronize
        self._running: str | None = None
        self._seconds: dict[str, float] = {}
        self._step_start = perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `name` and show it; entering it twice adds up.

        Raises RuntimeError when nested.
        """
        if self._running is not None:
            raise RuntimeError(
                f"phase {name!r} starts inside phase {self._running!r}: phases add up, so they do not nest"
            )
        self._synchronize()
        self._running = name
        start = perf_counter()
        try:
            with progress.phase(name.replace("_", " ")):
                yield
                self._synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - start
            self._running = None

    def reset(self) -> None:
        """Begin a step now; drop the times so far."""
        assert self._running is None, f"step ends inside phase {self._running!r}"
        self._seconds = {}
        self._step_start = perf_counter()

    def metrics(self) -> Metrics:
        """`time/<phase>_s` of each phase, `time/step_s` and `time/coverage` (share of the step); begins a step."""
        step_s = perf_counter() - self._step_start
        covered = sum(self._seconds.values())
        record = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        record["time/step_s"] = step_s
        record["time/coverage"] = covered / step_s if step_s > 0.0 else 1.0
        self.reset()
        return record


@dataclass
class WorkMeter:
    """This rank's share of its replica's work: operations, and tokens by phase."""

    total: float = 0.0  # floating-point operations
    phase: str = ""  # in progress
    tokens: dict[str, float] = field(default_factory=dict)  # tokens by phase

    def count(self, tokens: float) -> None:
        """Add tokens to those of the phase in progress."""
        self.tokens[self.phase] = self.tokens.get(self.phase, 0.0) + tokens

    def take(self) -> list[float]:
        """Return the operations since the last call, and the tokens of each of TOKEN_PHASES."""
        taken = [self.total, *(self.tokens.get(phase, 0.0) for phase in TOKEN_PHASES)]
        self.total, self.tokens = 0.0, {}
        return taken


class StepTraces:
    """Traces of whole steps by torch's profiler, in Chrome's format, and histories of a GPU's memory."""

    def __init__(self, folder: Path, *, steps: Collection[int], rank: int, memory: bool) -> None:
        """steps: counted from 1. memory: also write the GPU allocator's history."""
        self._folder, self._steps, self._rank, self._memory = folder, steps, rank, memory
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Start a trace if this step is one of the chosen."""
        if step not in self._steps:
            return
        if self._memory:
            torch.cuda.memory._record_memory_history()
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def end(self, step: int) -> None:
        """Write the trace that `begin` started."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = self._folder / f"step_{step:06d}_rank{self._rank}"
        self._profiler.export_chrome_trace(f"{stem}.json.gz")
        self._profiler = None
        if self._memory:
            torch.cuda.memory._dump_snapshot(f"{stem}_memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)


@dataclass
class StepMeter:
    """A step's timer that also reports the models' rate of computation and the device's peak memory."""

    timer: PhaseTimer
    work: WorkMeter
    ranks: Ranks  # all ranks of the run
    peak_flops: float | None  # operations per second of a device; None if not known
    peak_memory: Callable[[], Mapping[str, int]]  # bytes by name since the last call; none on a CPU
    traces: StepTraces | None = None
    step: int = 0  # steps done
    scores: bool = True  # the run has rewards

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `PhaseTimer.phase` does."""
        with self.timer.phase(name):
            self.work.phase = name
            yield

    def reset(self) -> None:
        """Begin a step now."""
        self.work.take()
        self.peak_memory()
        if self.traces is not None:
            self.traces.begin(self.step + 1)
        self.timer.reset()

    def metrics(self) -> Metrics:
        """Return the timer's metrics, rates and peaks; ends the step; collective.

        All but times are equal on all ranks.
        """
        record = self.timer.metrics()
        self.step += 1
        if self.traces is not None:
            self.traces.end(self.step)
        peaks = dict(self.peak_memory())
        largest = self.ranks.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist() if peaks else []
        record |= {PEAKS[name]: value for name, value in zip(peaks, largest, strict=True)}
        if self.scores and "time/reward_s" in record and record["time/step_s"] > 0.0:
            record["time/reward_fraction"] = record["time/reward_s"] / record["time/step_s"]
        seconds = sum(record.get(f"time/{name}_s", 0.0) for name in MODEL_PHASES)
        work = torch.tensor(self.work.take(), dtype=torch.float64)
        done, *tokens = (self.ranks.sum(work) / self.ranks.size).tolist()
        for name, number in zip(TOKEN_PHASES, tokens, strict=True):
            if number > 0.0 and record.get(f"time/{name}_s", 0.0) > 0.0:
                record[f"perf/{name}_tokens_per_s"] = number / record[f"time/{name}_s"]
        if seconds > 0.0 and done > 0.0:
            record["perf/model_tflops"] = done / seconds / 1e12
            if self.peak_flops:
                record["perf/mfu"] = done / seconds / self.peak_flops
        return record
