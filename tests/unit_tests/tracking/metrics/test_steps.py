"""A step's timer and meter, with a clock that the test moves, and the traces of chosen steps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mega_rl.parallel.comm import SingleRank
from mega_rl.tracking.metrics import steps
from mega_rl.tracking.metrics.steps import TOKEN_PHASES, PhaseTimer, StepMeter, StepTraces, WorkMeter
from mega_rl.workers.models import RoleMeter


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(steps, "perf_counter", made)
    return made


def spend(timer: PhaseTimer | StepMeter, clock: Clock, **seconds: float) -> None:
    for name, length in seconds.items():
        with timer.phase(name):
            clock.now += length


def meter_of(*, peak: float | None = 10e12, traces: StepTraces | None = None) -> StepMeter:
    peaks: list[Mapping[str, int]] = [{"allocated": 7}, {"allocated": 5}]
    meter = StepMeter(PhaseTimer(), WorkMeter(), SingleRank(), peak, lambda: peaks.pop(0), traces)
    if traces is None:
        meter.reset()
    return meter


def test_phases_add_up_to_the_step(clock: Clock) -> None:
    """A step begins when the last one was read."""
    timer = PhaseTimer()
    spend(timer, clock, generate=3.0, update_actor=1.0)
    spend(timer, clock, update_actor=4.0)
    clock.now += 1.5
    assert timer.metrics() == {
        "time/generate_s": 3.0, "time/update_actor_s": 5.0, "time/step_s": 9.5,
        "time/coverage": pytest.approx(8.0 / 9.5),
    }  # fmt: skip
    spend(timer, clock, log=2.0)
    assert timer.metrics() == {"time/log_s": 2.0, "time/step_s": 2.0, "time/coverage": 1.0}
    clock.now += 7.0
    timer.reset()
    clock.now += 1.0
    assert timer.metrics() == {"time/step_s": 1.0, "time/coverage": 0.0}
    assert timer.metrics() == {"time/step_s": 0.0, "time/coverage": 1.0}


def test_device_is_waited_for_at_both_ends(clock: Clock) -> None:
    calls: list[float] = []

    def synchronize() -> None:
        calls.append(clock.now)
        clock.now += 10.0  # the queue drains while waiting

    timer = PhaseTimer(synchronize=synchronize)
    spend(timer, clock, update_actor=1.0)
    assert calls == [100.0, 111.0]
    assert timer.metrics()["time/update_actor_s"] == 11.0, "its own queue counts, the earlier queue does not"


@pytest.mark.parametrize(("peak", "mfu"), [(10e12, 0.2), (None, None)])
def test_rate_counts_only_phases_of_models(peak: float | None, mfu: float | None, clock: Clock) -> None:
    """8 TFLOP in 4 s, on a device that does 10 in a second; memory is only this step's peak."""
    meter = meter_of(peak=peak)
    spend(meter, clock, generate=5.0, values=1.0, update_actor=3.0)
    meter.work.total += 8e12
    record = meter.metrics()
    assert (record["perf/model_tflops"], record.get("perf/mfu")) == (2.0, mfu)
    assert (record["memory/peak_allocated_bytes"], record["time/step_s"]) == (5, 9.0)


def test_tokens_are_divided_by_their_phase(clock: Clock) -> None:
    """300 tokens in 2 s; phases without tokens or without a rate are not reported."""
    meter = meter_of()
    for phase, seconds in (("values", 2.0), ("log", 1.0), ("ref_logprobs", 1.0)):
        with meter.phase(phase):
            clock.now += seconds
            if phase != "ref_logprobs":
                meter.work.count(100.0)
                meter.work.count(200.0)
    rates = {name: value for name, value in meter.metrics().items() if name.endswith("tokens_per_s")}
    assert rates == {"perf/values_tokens_per_s": 150.0}


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    meter = meter_of(traces=StepTraces(tmp_path / "profile", steps=[2], rank=3, memory=False))
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


def test_rank_counts_its_share_of_the_replica() -> None:
    """Ten tokens on two ranks; a forward for a lesson counts as work only."""
    meter, batch = WorkMeter(), cast(Any, SimpleNamespace(lengths=torch.tensor([4, 6])))
    role = RoleMeter(cast(Any, Work()), meter, replica_size=2)
    meter.phase = "values"
    role.forward(batch)
    assert meter.take()[0] == 5.0
    role.forward(batch, tokens=False)
    role.update(batch)
    done, *tokens = meter.take()
    assert (done, tokens[TOKEN_PHASES.index("values")]) == (20.0, 5.0)
    assert not any(meter.take())
