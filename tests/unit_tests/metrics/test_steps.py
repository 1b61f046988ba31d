"""What a step's meter reports, and the traces it writes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from mega_rl.metrics.steps import TOKEN_PHASES, StepMeter, StepTraces, WorkMeter
from mega_rl.metrics.timers import PhaseTimer
from mega_rl.parallel.comm import SingleRank
from mega_rl.workers.models import RoleMeter


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def meter_of(clock: Clock, *, peak: float | None = 10e12, traces: StepTraces | None = None) -> StepMeter:
    peaks: list[Mapping[str, int]] = [{"allocated": 7}, {"allocated": 5}]
    return StepMeter(PhaseTimer(clock=clock), WorkMeter(), SingleRank(), peak, lambda: peaks.pop(0), traces)


def run_step(meter: StepMeter, clock: Clock) -> dict[str, float]:
    meter.reset()
    for phase, seconds in {"generate": 5.0, "values": 1.0, "update_actor": 3.0}.items():
        with meter.phase(phase):
            clock.now += seconds
    meter.work.total += 8e12
    return dict(meter.metrics())


def test_the_rate_is_of_the_phases_in_which_models_compute() -> None:
    """8 TFLOP in 4 s, of a device that does 10 in a second; memory is this step's peak alone."""
    clock = Clock()
    record = run_step(meter_of(clock), clock)
    assert (record["perf/model_tflops"], record["perf/mfu"]) == (2.0, 0.2)
    assert record["memory/peak_allocated_bytes"] == 5
    assert record["time/step_s"] == 9.0


def test_no_share_of_a_peak_that_is_not_known() -> None:
    clock = Clock()
    record = run_step(meter_of(clock, peak=None), clock)
    assert "perf/mfu" not in record
    assert record["perf/model_tflops"] == 2.0


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    clock = Clock()
    meter = meter_of(clock, traces=StepTraces(tmp_path / "profile", steps=[2], rank=3, memory=False))
    meter.peak_memory = dict
    for _ in range(3):
        meter.reset()
        with meter.phase("values"):
            torch.ones(3).cumsum(0)
        meter.metrics()
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step_000002_rank3.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::cumsum" in names


class Work:
    """One operation a token forward, three in an update."""

    def forward(self, lengths: list[int]) -> float:
        return float(sum(lengths))

    def update(self, lengths: list[int]) -> float:
        return 3.0 * sum(lengths)


def test_a_rank_counts_its_share_of_the_work_of_its_replica() -> None:
    """Ten tokens on two ranks; a forward for a lesson counts as work only."""
    meter, batch = WorkMeter(), cast(Any, SimpleNamespace(lengths=torch.tensor([4, 6])))
    role = RoleMeter(cast(Any, Work()), meter, replica_size=2)
    meter.phase = "values"
    role.forward(batch)
    assert meter.take() == 5.0
    role.forward(batch, tokens=False)
    role.update(batch)
    assert (meter.take(), meter.take()) == (20.0, 0.0)
    assert meter.take_tokens()[TOKEN_PHASES.index("values")] == 10.0
    assert not any(meter.take_tokens())


def test_tokens_of_a_phase_are_reported_by_its_time() -> None:
    """300 tokens in 2 s; those of a phase whose rate says nothing are not reported, nor a phase without tokens."""
    clock = Clock()
    meter = meter_of(clock)
    meter.reset()
    for phase, seconds in (("values", 2.0), ("log", 1.0), ("ref_logprobs", 1.0)):
        with meter.phase(phase):
            clock.now += seconds
            if phase != "ref_logprobs":
                meter.work.count(100.0)
                meter.work.count(200.0)
    rates = {name: value for name, value in meter.metrics().items() if name.endswith("tokens_per_s")}
    assert rates == {"perf/values_tokens_per_s": 150.0}


def test_nothing_is_reported_of_a_step_without_models() -> None:
    clock = Clock()
    meter = meter_of(clock)
    meter.reset()
    assert not {"perf/model_tflops", "perf/mfu"} & meter.metrics().keys()


def test_scoring_is_a_share_of_the_step() -> None:
    clock = Clock()
    meter = meter_of(clock)
    meter.reset()
    for phase, seconds in {"generate": 6.0, "reward": 2.0}.items():
        with meter.phase(phase):
            clock.now += seconds
    assert meter.metrics()["time/reward_fraction"] == 0.25
