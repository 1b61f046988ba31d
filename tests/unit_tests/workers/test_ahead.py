"""One step ahead: what is generated when and with which weights, and how long a step takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits, StalenessGuard
from mega_rl.types import Experience, Metrics, Prompt, Rollout
from mega_rl.workers.ahead import OneStepAhead, ThreadedRollouts
from tests.helpers.fakes import FakePolicy, FakePrompts, held_out
from tests.helpers.loops import FakeRun, RunSettings

STEPS = 4


class TurningPrompts(FakePrompts):
    """The same four prompts, in another order in each of four steps."""

    def batch(self, step: int) -> list[Prompt]:
        prompts = super().batch(step)
        return prompts[step % 4 :] + prompts[: step % 4]


class Recorded:
    """A background that generates at once, when it is asked to finish; writes down what it is asked."""

    def __init__(self, policy: FakePolicy) -> None:
        self.policy, self.events = policy, policy.events
        self.rollout: Rollout | None = None

    def start(self, prompts: Sequence[Prompt], *, step: int) -> None:
        self.events.append(f"start {step}")
        self.rollout = self.policy.generate(prompts, step=step)
        self.events.remove("generate")

    def finish(self) -> Rollout:
        self.events.append("finish")
        assert self.rollout is not None
        return self.rollout

    def drain(self) -> None:
        self.events.append("drain")

    def interrupt(self) -> None:
        self.events.append("interrupt")

    def resume(self) -> None:
        self.events.append("resume")

    def close(self) -> None:
        self.events.append("close")


def run_of(
    policy: FakePolicy, background: Any, *, partial: bool = False, steps: int = STEPS, start: int = 0, **parts: Any
) -> tuple[FakeRun, OneStepAhead]:
    """A trainer of fakes whose rollouts are one step ahead."""
    ahead = OneStepAhead(
        source=policy, background=background, sync=policy, prompts=TurningPrompts().batch, steps=steps, partial=partial
    )
    trainer = FakeRun(
        grpo=True, prompts=TurningPrompts(), settings=RunSettings(steps=steps, **parts), start=start,
        rollout=ahead, sync=ahead, actor=policy,
        guard=MismatchGuard(
            MismatchLimits(mean=1.0, share=1.0, max=0.01), ranks=SingleRank(), current=lambda: ahead.weight_version
        ),
    )  # fmt: skip
    return trainer, ahead


def steps_only(events: list[str]) -> list[str]:
    """Without what has nothing to do with rollouts; two updates a step count as one."""
    kept = [event for event in events if event not in ("old_logprobs", "reward")]
    return [event for place, event in enumerate(kept) if kept[place - 1 : place + 1] != ["update_actor"] * 2]


# A step that neither resumes nor ends a run: the next generation begins before the step trains.
DRAINED = ["finish", "start {next}", "update_actor", "drain", "publish"]
LAST = ["finish", "update_actor", "publish"]


def step_of(events: list[str], number: int) -> list[str]:
    return [event.format(next=number + 1) for event in events]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 3}, ["publish", "start 0", *step_of(DRAINED, 0), *step_of(DRAINED, 1), *LAST]),
        (
            {"steps": 2, "partial": True},
            ["publish", "start 0", "finish", "start 1", "update_actor", "interrupt", "publish", "resume", *LAST],
        ),
        (
            {"steps": 2, "val_interval": 1},
            ["publish", "validate", "start 0", *step_of(DRAINED, 0), "validate", *LAST, "validate"],
        ),
        ({"steps": 4, "start": 3}, ["publish", "start 3", *LAST]),
    ],
    ids=["drained", "interrupted", "validated", "resumed"],
)
def test_the_order_of_events(settings: dict[str, Any], expected: list[str]) -> None:
    """A generation is drained or interrupted before weights are sent, and none is extra."""
    policy = FakePolicy([])
    trainer, _ = run_of(policy, Recorded(policy), **settings)
    trainer.validation = held_out(FakePrompts().batch(0))
    trainer.fit()
    assert steps_only(policy.events) == expected


def test_every_sample_but_the_first_steps_is_one_version_old() -> None:
    """The samples are those of the weights before the update beside which they were made, to the bit."""
    policy = FakePolicy([])
    seen: list[tuple[Rollout, Metrics]] = []
    trainer, ahead = run_of(policy, threads_of(policy))
    guard = StalenessGuard(limit=1, ranks=SingleRank(), current=lambda: ahead.weight_version)
    generate = ahead.generate
    versions = {}

    def watched(prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: object = None) -> Rollout:
        versions[policy.weight_version] = policy.published.clone()
        rollout = generate(prompts, step=step, greedy=greedy)
        seen.append((rollout, guard(rollout)))
        return rollout

    ahead.generate = watched  # type: ignore[method-assign]
    trainer.fit()
    assert [metrics["rollout/staleness_mean"] for _, metrics in seen] == [0.0, 1.0, 1.0, 1.0]
    assert [metrics["rollout/staleness_max"] for _, metrics in seen] == [0.0, 1.0, 1.0, 1.0]
    for rollout, _ in seen:
        logprobs = versions[int(rollout.weight_version[0])].log_softmax(0)[rollout.tokens] * rollout.loss_mask
        assert torch.equal(rollout.rollout_logprobs, logprobs)
    records = trainer.metrics.records
    assert [record["rollout/stale_tokens_fraction"] for record in records.values()] == [0.0, 1.0, 1.0, 1.0]
    assert max(record.get("rollout/stale_logprob_diff_max", 0.0) for record in records.values()) > 0.01


def test_servers_answer_a_prompt_with_the_trainers_weights_now_and_then() -> None:
    """After a rollout is taken and before the next generation begins: no token is older, and no update lies between."""
    policy = FakePolicy([])
    trainer, ahead = run_of(policy, Recorded(policy), steps=4)
    starts: list[int] = []

    def compare(sampled: Rollout) -> Metrics:
        starts.append(sum(event.startswith("start") for event in policy.events))
        assert sampled.weight_version.unique().tolist() == [policy.weight_version]
        return {"rollout/logprob_diff_mean": 0.25, "importance/k3": 99.0}

    ahead.compare, ahead.check_interval = compare, 2
    trainer.fit()
    assert starts == [1, 3], "of steps 1 and 3, each before the next one's generation begins"
    records = trainer.metrics.records
    assert records[3]["rollout/logprob_diff_mean"] == 0.25, "all tokens that step 3 trains are older"
    assert records[3]["importance/k3"] != 99.0
    assert "rollout/logprob_diff_mean" not in records[2]


def threads_of(
    policy: FakePolicy, generate: Callable[[Sequence[Prompt], int], Rollout] | None = None
) -> ThreadedRollouts:
    return ThreadedRollouts(
        generate or (lambda prompts, step: policy.generate(prompts, step=step)),
        lambda rows: rows,
        everyone=SingleRank(),
        timeout_s=20.0,
    )


class Overlapping(FakePolicy):
    """Each step's training and the next step's generation wait for each other to be in progress, up to a deadline."""

    def __init__(self, *, steps: int) -> None:
        super().__init__([])
        self.generation_began = [threading.Event() for _ in range(steps)]
        self.training_began = [threading.Event() for _ in range(steps)]
        self.generating = 0
        self.most_generating = 0
        self.sent_while_generating = False

    def generate(self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: object = None) -> Rollout:
        self.generating += 1
        self.most_generating = max(self.most_generating, self.generating)
        self.generation_began[step].set()
        if step > 0:
            assert self.training_began[step - 1].wait(20), f"step {step - 1} does not train beside this generation"
        rollout = super().generate(prompts, step=step, greedy=greedy)
        self.generating -= 1
        return rollout

    def update(self, minibatch: Experience, *, step: int, inspect: Any = None) -> Metrics:
        self.training_began[step].set()
        if step + 1 < len(self.generation_began):
            assert self.generation_began[step + 1].wait(20), f"step {step + 1} is not generated beside this training"
        return super().update(minibatch, step=step, inspect=inspect)

    def publish(self) -> Metrics:
        self.sent_while_generating |= self.generating > 0
        return super().publish()


def test_a_step_trains_while_the_next_one_is_generated() -> None:
    policy = Overlapping(steps=6)
    trainer, _ = run_of(policy, threads_of(policy), steps=6)
    trainer.fit()
    assert policy.most_generating == 1
    assert not policy.sent_while_generating


class Checkpoints:
    """Keeps in memory what a run goes on from."""

    def __init__(self, policy: FakePolicy) -> None:
        self.policy = policy
        self.ahead: OneStepAhead | None = None
        self.kept: dict[int, tuple[torch.Tensor, int, dict[str, torch.Tensor]]] = {}

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Metrics | None = None) -> None:
        assert self.ahead is not None
        rollout = {name: tensor.clone() for name, tensor in self.ahead.state().items()}
        self.kept[step] = (self.policy.logits.clone(), state["weight_version"], rollout)

    def poll(self) -> Metrics:
        return {}

    def finish(self) -> None: ...


def saving_run(
    policy: FakePolicy, background: Any, *, start: int = 0, **settings: Any
) -> tuple[FakeRun, OneStepAhead, Checkpoints]:
    trainer, ahead = run_of(policy, background, start=start, save_interval=1, **settings)
    checkpoints = Checkpoints(policy)
    trainer.checkpoints, checkpoints.ahead = checkpoints, ahead
    return trainer, ahead, checkpoints


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("saved", [1, 2, 3])
def test_a_resumed_run_trains_on_the_rollout_that_was_under_way(saved: int, partial: bool) -> None:
    """Bit for bit what the run without an end did, tokens, versions and weights; nothing is generated again."""
    policy = FakePolicy([])
    trainer, _, checkpoints = saving_run(policy, Recorded(policy), partial=partial)
    trainer.fit()
    expected = trainer.metrics.records

    logits, version, rollout = checkpoints.kept[saved]
    assert int(rollout["step"]) == saved
    resumed = FakePolicy([])
    resumed.logits = logits
    resumed.resume_at(version)
    trainer, ahead, again = saving_run(resumed, Recorded(resumed), start=saved, partial=partial)
    ahead.restore(rollout)
    trainer.fit()
    actual = trainer.metrics.records
    assert torch.equal(resumed.logits, policy.logits)
    for step in range(saved + 1, STEPS + 1):
        assert {**actual[step], "rollout/ahead_wait_s": 0} == {**expected[step], "rollout/ahead_wait_s": 0}
        assert again.kept[step][2].keys() == checkpoints.kept[step][2].keys()
        for name, tensor in checkpoints.kept[step][2].items():
            assert torch.equal(again.kept[step][2][name], tensor), (step, name)
    assert [event for event in resumed.events if event.startswith("start")] == [
        f"start {step}" for step in range(saved + 1, STEPS)
    ]
    assert checkpoints.kept[STEPS][2] == {}


def test_a_failed_generation_ends_the_run_at_the_step_that_needs_it() -> None:
    """The step before trains to its end, and its checkpoint has no rollout."""
    policy = FakePolicy([])

    def generate(prompts: Sequence[Prompt], step: int) -> Rollout:
        if step == 2:
            raise ConnectionError("refused")
        return policy.generate(prompts, step=step)

    trainer, ahead, checkpoints = saving_run(policy, threads_of(policy, generate))
    with pytest.raises(RunError, match=r"generation of step 2 .*ConnectionError: refused") as caught:
        trainer.fit()
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert list(checkpoints.kept) == [1, 2]
    assert checkpoints.kept[1][2] != {}
    assert checkpoints.kept[2][2] == {}
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout of step")]
