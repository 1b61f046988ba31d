"""The whole loop on fakes: order, intervals, learning, stopping. No Megatron-Core, well under a second."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from mega_rl.algorithms.advantages import ESTIMATORS, Distillation
from mega_rl.algorithms.kl import KLController
from mega_rl.rewards.role import AbsentScorer
from mega_rl.trainer.collect import SamplingPlan
from mega_rl.trainer.loop import Event, StepLog, fit_together
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits, RolloutMismatchError
from mega_rl.trainer.policy_gradient import PolicyGradientRules
from mega_rl.types import Metrics, Rewards, TokenOutputs
from mega_rl.workers.models import reference_updates
from tests.helpers.fakes import FakePrompts, FakeRanks, FakeReward, held_out
from tests.helpers.loops import FakeRun, RunSettings


def test_ppo_learns_what_is_rewarded() -> None:
    run = FakeRun(settings=RunSettings(steps=80))
    run.fit()
    assert run.metrics.records[1]["reward/mean"] < 0.3
    assert run.metrics.records[80]["reward/mean"] > 0.8


@pytest.mark.parametrize(
    "name", [name for name, area in ESTIMATORS.items() if not (area.needs_critic or area.needs_reference)]
)
def test_every_estimator_without_a_critic_teaches_it(name: str) -> None:
    """Two samples of each prompt; a reward is the share of right tokens, and pass_at_k asks for one in four."""
    settings = {"pass_at_k": {"k": 1, "right_above": 0.2}}.get(name, {})
    run = FakeRun(
        grpo=True,
        settings=RunSettings(steps=80),
        estimator=ESTIMATORS[name](**settings),
        plan=SamplingPlan(greedy=ESTIMATORS[name].needs_greedy),
        reward=FakeReward([], parts=ESTIMATORS[name].needs_parts),
    )
    run.fit()
    assert run.metrics.records[1]["reward/mean"] < 0.3
    assert run.metrics.records[80]["reward/mean"] > (0.8 if name == "grpo" else 0.5)


def test_a_student_comes_to_its_teacher_without_a_reward() -> None:
    """The teacher prefers token 3 and the reward token 5; the KL between the two policies themselves, exactly."""
    trainer = FakeRun(grpo=True, reference=FakeFrozen(), estimator=Distillation(), settings=RunSettings(steps=60))
    teacher = torch.zeros(8)
    teacher[3] = 1.0
    far = float(torch.nn.functional.kl_div(teacher.log_softmax(0), torch.full((8,), 0.125), reduction="sum"))
    trainer.fit()
    student = trainer.actor.logits.log_softmax(0)
    near = float((student.exp() * (student - teacher.log_softmax(0))).sum())
    assert near < 0.02 * far
    assert trainer.metrics.records[60]["kl/ref"] < 0.1 * trainer.metrics.records[1]["kl/ref"]


@pytest.mark.parametrize("interval", [1, 2])
def test_the_reference_is_updated_after_the_policy(interval: int) -> None:
    trainer = FakeRun(settings=RunSettings(steps=4, save_interval=1))
    events = trainer.events

    def mix() -> float:
        events.append("mix")
        return 0.25

    trainer.update_reference = reference_updates(interval, mix)
    trainer.fit()
    records = trainer.metrics.records
    assert [record["kl/reference_step"] for record in records.values()] == [n - n % interval for n in range(1, 5)]
    assert [n for n, record in records.items() if record.get("kl/reference_distance")] == [
        n for n in range(1, 5) if n % interval == 0
    ]
    first = events.index("mix")
    assert events[first - 1 : first + 2] == ["update_actor", "mix", "publish"]  # and so before the step is saved


@pytest.mark.parametrize("interval", [0, 1, 2, 3, 9])
def test_weights_are_published_within_steps(interval: int) -> None:
    """Between updates of the actor, never after the last one of a step; the updates are the same."""
    usual, run = FakeRun(grpo=True), FakeRun(grpo=True)
    usual.minibatches = run.minibatches = dataclasses.replace(run.minibatches, minibatch_size=1, epochs=3)
    usual.fit()
    trainer = run.build()
    algorithm: Any = trainer.algorithm
    send: Any = lambda: run.events.append("within") or {"sync/own": 1.0}  # noqa: E731
    algorithm.rules = dataclasses.replace(algorithm.rules, interval=interval, publish=send)
    trainer.fit()
    updates = run.events.count("update_actor") // 3
    every = [["update_actor", *(["within"] if interval and n % interval == 0 else [])] for n in range(1, updates)]
    expected = [event for one in every for event in one] + ["update_actor"]
    assert updates > 3
    assert [one for one in run.events if one in ("update_actor", "within")] == expected * 3
    assert [one for one in run.events if one != "within"] == usual.events
    assert torch.equal(run.actor.logits, usual.actor.logits)
    assert ("sync/own" in run.metrics.records[1]) == (0 < interval < updates)


def test_validation_saving_and_dumps_keep_their_intervals() -> None:
    settings = RunSettings(steps=5, val_interval=2, save_interval=3, rollout_interval=4, rollout_samples=3)
    trainer = FakeRun(settings=settings, validation=held_out(FakePrompts().batch(0)))
    trainer.fit()
    records = trainer.metrics.records
    assert [step for step, record in records.items() if "val/reward_mean" in record] == [0, 2, 4, 5]
    assert list(trainer.checkpoints.saved) == [3]
    assert {step: len(rows) for step, rows in trainer.metrics.dumps.items()} == {1: 2, 4: 2, 5: 2}
    assert {step: len(rows) for step, rows in trainer.metrics.val_dumps.items()} == {0: 3, 2: 3, 4: 3, 5: 3}
    assert len({row["prompt"] for row in trainer.metrics.val_dumps[2]}) == 3
    assert all("advantage_mean" not in row for row in trainer.metrics.val_dumps[2])
    assert trainer.metrics.dumps[4][0]["prompt"] == "p0"
    assert trainer.metrics.dumps[4][0]["weight_version"] == 4
    rows = trainer.metrics.dumps[4]
    places = [(row["step"], row["prompt_index"], row["sample_index"]) for row in rows]
    assert places == [(4, 0, 0), (4, 0, 1)]
    assert any(row["advantage_mean"] for row in rows)
    for row in rows:
        assert len(row["rendered_prompt"].split("+")) == row["prompt_tokens"] > 0
        assert len(row["response"].split()) == row["response_tokens"] - row["finished"] > 0


def test_a_stop_request_ends_after_the_step_and_saves() -> None:
    answers = iter([False, True])
    trainer = FakeRun(settings=RunSettings(steps=9), stop_requested=lambda: next(answers))
    assert trainer.fit() == 2
    assert list(trainer.checkpoints.saved) == [2]
    assert trainer.checkpoints.saved[2]["weight_version"] == 3
    assert list(trainer.metrics.records) == [1, 2]


def test_a_record_has_the_metrics_of_its_step() -> None:
    """Metrics of events, too; the timer begins with each step, and before the first there is a record if any number."""
    run = FakeRun(settings=RunSettings(steps=3))
    resets, reset = list[int](), run.timer.reset
    run.timer.reset = lambda: (resets.append(len(run.metrics.records)), reset())
    trainer = run.build()
    trainer.events = [Noting([], trainer.log)]
    trainer.fit()
    records = run.metrics.records
    assert [record.get("own/number") for record in records.values()] == [0.0, 1.0, None, None]
    assert records[0] == {"own/number": 0.0}
    assert "time/sync_weights_s" in records[1]
    assert resets == [1, 2, 3, 4]


def test_a_step_is_saved_when_its_record_is_written() -> None:
    """A kill leaves no checkpoint without its record; metrics of the save are in the next record, or join the last."""
    run = FakeRun(settings=RunSettings(steps=3, save_interval=1, memory_interval=1, hf_interval=2))
    log = run.metrics.log

    def note(step: int, metrics: Metrics) -> None:
        run.events.append(f"log {step}")
        log(step, metrics)

    run.metrics.log = note
    run.fit()
    shown = [event for event in run.events if event.startswith(("log", "save", "export"))]
    first = ["log 1", "save", "save 1 in memory"]
    assert shown == [*first, "log 2", "save", "save 2 in memory", "export 2", "log 3", "save", "log 3"]
    assert [record.get("checkpoint/step") for record in run.metrics.records.values()] == [None, 1.0, 3.0]
    assert run.checkpoints.saved[3]["metrics"].keys() < run.metrics.records[3].keys()


def test_a_resumed_run_starts_at_its_step_and_validates_no_start() -> None:
    trainer = FakeRun(
        settings=RunSettings(steps=5, val_interval=5), start=3, validation=held_out(FakePrompts().batch(0))
    )
    assert trainer.fit() == 5
    assert list(trainer.metrics.records) == [4, 5]


def test_the_adaptive_kl_coefficient_follows_the_reference_kl() -> None:
    kl = KLController(0.1, target=1e-6, horizon=16)
    reference = FakeFrozen()
    trainer = FakeRun(kl=kl, reference=reference, settings=RunSettings(steps=1))
    trainer.fit()
    assert trainer.metrics.records[1]["kl/ref"] > 1e-3
    assert kl.value == pytest.approx(0.1 * 1.1)  # four prompts of two samples: half the horizon, half the largest step
    assert trainer.metrics.records[1]["kl/coef"] == pytest.approx(0.1)


def test_steps_of_the_critic_alone_leave_the_kl_coefficient() -> None:
    """A policy that stands still has a KL of 0 to its start, whatever the coefficient."""
    kl = KLController(0.1, target=0.05, horizon=16)
    trainer = FakeRun(kl=kl, settings=RunSettings(steps=5), reference=FakeFrozen())
    policy = trainer.actor
    trainer.actor = LateActor(policy, first_step=3)
    trainer.fit()
    coefficients = [trainer.metrics.records[step]["kl/coef"] for step in range(1, 6)]
    assert coefficients[:4] == [0.1] * 4  # the fourth step is the first that updates, with the coefficient before
    assert coefficients[4] == pytest.approx(0.1 * 0.9)  # half the horizon, half the largest step


@dataclasses.dataclass
class LateActor:
    """An actor whose first steps change nothing, as those of `algorithm.critic_warmup_steps`."""

    actor: Any
    first_step: int

    def evaluate(self, batch: Any) -> Any:
        return self.actor.evaluate(batch)

    def update(self, minibatch: Any, *, step: int, inspect: Any = None) -> Any:
        if step < self.first_step:
            return {}
        return self.actor.update(minibatch, step=step, inspect=inspect) | {"kl/ref": 0.0}


class FakeFrozen:
    """A reference policy that prefers token 3."""

    def evaluate(self, batch: Any) -> Any:

        logits = torch.zeros(8)
        logits[3] = 1.0
        return TokenOutputs(logprobs=logits.log_softmax(0)[batch.tokens] * batch.loss_mask)


def test_a_rollout_engine_with_other_weights_stops_the_run() -> None:
    trainer = FakeRun()
    trainer.sync.publish()
    trainer.rollout.published = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 3.0])
    with pytest.raises(RolloutMismatchError, match=r"mismatch.max_limit=0.5; the worst is token id 7 at position \d"):
        trainer.step(0)
    assert "update_actor" not in trainer.events


def single_update(trainer: FakeRun) -> FakeRun:
    """The trainer with one update a step, whose forward gives the old log-probs."""
    trainer.minibatches = dataclasses.replace(trainer.minibatches, minibatch_size=4)
    trainer.rules = PolicyGradientRules(recompute_old_logprobs=False)
    return trainer


def test_a_single_update_spares_the_forward_and_still_compares() -> None:
    trainer = single_update(FakeRun(grpo=True))
    trainer.sync.publish()
    metrics = trainer.step(0)
    events = trainer.events
    assert events[events.index("reward") :] == ["reward", "update_actor", "old_logprobs", "publish"]
    assert metrics["rollout/logprob_diff_max"] < 1e-6
    assert "old_logprobs" not in trainer.timer.phases


def test_a_single_update_is_stopped_before_it_changes_a_weight() -> None:
    trainer = single_update(FakeRun(grpo=True))
    trainer.sync.publish()
    trainer.rollout.published = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 3.0])
    with pytest.raises(RolloutMismatchError, match="token id 7"):
        trainer.step(0)
    assert not trainer.actor.logits.any()


class Noting(Event):
    """Writes down each call; asks for the end after `last` steps, and adds the step to the log."""

    def __init__(self, notes: list[str], log: StepLog | None = None, *, last: int = 99) -> None:
        self.notes, self.log, self.last = notes, log, last

    def before(self, step: int) -> bool:
        self.notes.append(f"before {step}")
        return step == self.last

    def evaluated(self, step: int, evaluated: Any) -> None:
        self.notes.append(f"evaluated {step}")

    def updated(self, step: int) -> None:
        self.notes.append(f"updated {step}")

    def after(self, done: int, evaluated: Any) -> None:
        self.notes.append(f"after {done}" + " with nothing" * (evaluated is None))
        if self.log is not None and done < 2:
            self.log.add({"own/number": float(done)})

    def finish(self, done: int) -> None:
        self.notes.append(f"finish {done}")


def test_an_event_ends_the_run_after_its_step() -> None:
    """Events act around each step in their order; those behind the one that ends the run act, too."""
    run = FakeRun(settings=RunSettings(steps=9))
    run.more_events = [Noting(run.events, last=2), Noting(run.events)]
    assert run.fit() == 2
    step = ["generate", "reward", "old_logprobs", "values"]
    updates = ["update_critic"] * 2 + ["update_actor"] * 2
    expected = ["publish", *["after 0 with nothing"] * 2]
    for number in range(2):
        expected += [*[f"before {number}"] * 2, *step, *[f"evaluated {number}"] * 2, *updates]
        expected += [*[f"updated {number}"] * 2, "publish", *[f"after {number + 1}"] * 2]
    assert run.events == [*expected, *["before 2"] * 2, *["finish 2"] * 2]
    assert list(run.metrics.records) == [1, 2]


def in_turn(runs: list[FakeRun], turns: list[int]) -> list[int]:
    """Train fake runs together; `turns` gets the number of the run at each turn."""
    trainers = [run.build() for run in runs]
    for number, trainer in enumerate(trainers):
        trainer.take_turn = partial(turns.append, number)
    return fit_together(trainers)


def test_runs_in_turn_end_one_by_one_and_stop_together() -> None:
    turns: list[int] = []
    runs = [
        FakeRun(settings=RunSettings(steps=steps), stop_requested=lambda: len(turns) > 12) for steps in (1, 9, 9, 2)
    ]
    assert in_turn(runs, turns) == [1, 2, 2, 2]
    assert turns == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3]
    assert [sum(event.startswith("save") for event in run.events) for run in runs] == [0, 1, 1, 1]


def test_failure_of_a_run_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    runs = [FakeRun(settings=RunSettings(steps=9)) for _ in range(2)]
    runs[1].guard = MismatchGuard(MismatchLimits(mean=-1.0, share=1.0, max=1.0), ranks=FakeRanks())
    with pytest.raises(RolloutMismatchError):
        in_turn(runs, [])
    assert "run 2 of 2 cannot continue, which ends them all" in caplog.text
    assert "publish" in runs[0].events[1:]


def test_a_student_without_a_reward_learns_as_with_one_of_zeros() -> None:
    """Weights to the bit; of rewards there is no number, no column and no call, in validations neither."""
    runs = {}
    for name, reward in {"zeros": ZeroReward(), "none": AbsentScorer()}.items():
        trainer = FakeRun(
            grpo=True,
            reference=FakeFrozen(),
            estimator=Distillation(),
            reward=reward,
            validation=held_out(FakePrompts().batch(0)),
            settings=RunSettings(steps=8, val_interval=1, rollout_interval=1, rollout_samples=2),
        )
        trainer.fit()
        runs[name] = trainer
    assert torch.equal(runs["zeros"].actor.logits, runs["none"].actor.logits)
    assert runs["none"].actor.logits.any()
    for step, record in runs["none"].metrics.records.items():
        beside = runs["zeros"].metrics.records[step]
        kept = {name: value for name, value in beside.items() if not name.startswith(("reward/", "val/reward_"))}
        assert len(kept) < len(beside)
        assert record == kept
    sink = runs["none"].metrics
    rows = [row for dump in (sink.dumps, sink.val_dumps) for step in dump.values() for row in step]
    assert len(rows) == 2 * (8 + 9)
    assert not {name for row in rows for name in row if name.startswith("reward")}
    assert {name for name in sink.records[0] if name.startswith("val/")} == {"val/response_tokens_mean"}


class ZeroReward(FakeReward):
    """A reward that is always 0."""

    def __init__(self) -> None:
        super().__init__([])

    def score(self, rollout: Any, prompts: Any) -> Rewards:
        return Rewards(torch.zeros(len(rollout.lengths)))
