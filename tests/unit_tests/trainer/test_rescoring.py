"""Rescoring in runs ahead over a fleet of numbers: what it reads, and the faults of servers that it must find."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.parallel.comm import GroupRanks, SingleRank
from mega_rl.protocols import Ranks
from mega_rl.trainer.loop import StepLog
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits, PolicyChanges, Rescoring, RolloutMismatchError
from mega_rl.types import Metrics, Rollout, TokenOutputs
from tests.helpers.distributed import run_ranks
from tests.helpers.fakes import FakeSink, FakeTimer
from tests.helpers.fleet import LONGEST, StreamRun


class Watched:
    """A run whose every step is compared and rescored; `log` has the metrics of each."""

    def __init__(self, run: StreamRun, *, interval: int = 2, knows_all: bool = True) -> None:
        self.run, self.metrics, self.seen = run, list[Metrics](), list[tuple[int, Rollout]]()
        self.spoil: Callable[[Rollout], Rollout] = lambda rollout: rollout
        self.changes = PolicyChanges(run.stock.versions)
        guard = MismatchGuard(MismatchLimits(1e-3, share=0.01, max=1.0), run.replicas, self.changes)
        self.log = StepLog(FakeSink(), FakeTimer())  # type: ignore[arg-type]
        rescoring = Rescoring(
            self,
            guard,
            self.changes,
            self.newest,
            interval,
            knows_all,
            run.stage,
            self.log,  # type: ignore[arg-type]
        )
        take, publish = run.collector.take, run.stage.publish

        def watched(step: int) -> Any:
            self.log.begin()
            batch = take(step)
            self.spoil(batch.rollout)
            known = self.evaluate(batch.rollout) if knows_all else TokenOutputs(logprobs=batch.rollout.rollout_logprobs)
            self.log.add(guard(batch.rollout, known) if knows_all else {})
            rescoring.evaluated(step, SimpleNamespace(batch=batch, outputs=(known,)))  # type: ignore[arg-type]
            self.metrics.append(self.log.metrics)
            return batch

        def published(sync: Any) -> Metrics:
            if run.versions:
                rescoring.updated(run.done)
            return publish(sync)

        run.collector.take = watched  # type: ignore[method-assign]
        run.stage.publish = published  # type: ignore[method-assign]

    def evaluate(self, rollout: Rollout) -> TokenOutputs:
        logprobs: Tensor = self.run.policy.weights.log_softmax(0)[rollout.tokens % 8]
        return TokenOutputs(logprobs=(logprobs * rollout.loss_mask).float())

    def newest(self) -> Rollout | None:
        rows = self.run.stream.newest()
        if rows is not None:
            self.seen.append((self.run.policy.weight_version, rows))
        return rows


def watched(k: int, ranks: Ranks, *, free: bool = False, steps: int = 10, publishes: int = 1, **how: Any) -> Watched:
    pace = {"pace": lambda key, number: 1 + sum(key) % 3} if free else {}
    in_turns = how.pop("in_turns", False)
    given: Any = {"steps": steps, "publishes": publishes, "fleet": pace, "in_turns": in_turns}
    return Watched(StreamRun(k, ranks, free=free, **given), **how)


@pytest.mark.parametrize(("knows_all", "in_turns"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(("k", "publishes"), [(1, 1), (3, 1), (1, 2), (3, 3)])
def test_a_right_run_is_rescored_and_goes_on(
    k: int, publishes: int, free: bool, knows_all: bool, in_turns: bool
) -> None:
    """What is rescored are tokens of the weights of the moment; the policy's moves are those of its weights."""
    publishes = 1 if in_turns else publishes
    one = watched(k, SingleRank(), free=free, knows_all=knows_all, publishes=publishes, in_turns=in_turns)
    one.run.run()
    assert len(one.seen) >= 4
    if not free:
        unwatched = StreamRun(k, SingleRank(), steps=10, publishes=publishes, in_turns=in_turns).run()
        assert torch.equal(one.run.policy.weights, unwatched.policy.weights)
    for version, rows in one.seen:
        assert rows.token_versions is not None
        assert rows.loss_mask.any()
        assert (rows.token_versions[rows.loss_mask] == version).all()
        expected = one.run.policy.published[version].log_softmax(0)[rows.tokens[rows.loss_mask]]
        assert torch.allclose(rows.rollout_logprobs[rows.loss_mask].double(), expected, atol=1e-6)
    ages = {name for metrics in one.metrics for name in metrics if "diff_age_" in name}
    assert ages >= {f"rollout/logprob_diff_age_{age}" for age in ((1,) if k == 1 else (1, 2))}
    versions = [*one.run.versions, one.run.policy.weight_version]
    for own, batch, metrics in zip(pairwise(versions), one.run.taken, one.metrics, strict=True):
        assert metrics["rollout/policy_change"] == one.changes.of_versions[own[1]]
        old, new = (one.run.policy.published[version].log_softmax(0) for version in own)
        chosen = torch.tensor([0, 2, 4, 7])
        tokens = batch.rollout.tokens[chosen][batch.rollout.loss_mask[chosen]]
        assert metrics["rollout/policy_change"] == pytest.approx(float((new - old)[tokens].abs().mean()), rel=1e-4)


@pytest.mark.parametrize("knows_all", [False, True])
def test_servers_that_keep_their_weights_are_found(knows_all: bool) -> None:
    """They say the version that was sent; what they sample under the second is found before a step trains on it."""
    one = watched(2, SingleRank(), knows_all=knows_all, interval=1)
    policy = one.run.policy
    publish = policy.publish

    def kept() -> Metrics:
        publish()
        policy.published[policy.weight_version] = policy.published[1]
        return {}

    policy.publish = kept  # type: ignore[method-assign]
    with pytest.raises(RolloutMismatchError, match="trainer and rollout engine disagree"):
        one.run.run()
    assert policy.weight_version == 2


@pytest.mark.parametrize("knows_all", [False, True])
def test_older_tokens_with_other_logprobs_are_found(knows_all: bool) -> None:
    """All tokens of the current weights are right."""
    one = watched(2, SingleRank(), knows_all=knows_all, interval=100)

    def spoil(rows: Rollout) -> Rollout:
        assert rows.token_versions is not None
        older = rows.loss_mask & (rows.token_versions < one.run.policy.weight_version)
        rows.rollout_logprobs = torch.where(older, rows.rollout_logprobs - 1.0, rows.rollout_logprobs)
        return rows

    one.spoil = spoil
    with pytest.raises(RolloutMismatchError, match="1 or more steps old differ by a mean of"):
        one.run.run()


def test_a_fleet_without_a_new_token_is_not_waited_for() -> None:
    one = watched(2, SingleRank(), free=True)
    one.run.run(3)
    one.run.stream.patience_s, one.run.flow.engine.pace = 0.05, lambda key, number: 0  # type: ignore[attr-defined]
    one.run.flow.go_on()
    assert one.run.stream.newest() is None
    one.run.flow.engine.pace = lambda key, number: LONGEST  # type: ignore[attr-defined]
    assert one.run.stream.newest() is not None


def on_ranks(rank: int) -> list[Metrics]:
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    dist.init_process_group("gloo")
    metrics = []
    for together in (False, True):
        run = StreamRun(3, GroupRanks(dist.group.WORLD), steps=6, per_step=5, together=together)  # type: ignore[arg-type]
        one = Watched(run)
        run.run()
        metrics += one.metrics
    dist.destroy_process_group()
    return metrics


def test_ranks_rescore_together() -> None:
    """Two replicas, and one of two ranks: every rank has the same numbers."""
    first, second = run_ranks(2, on_ranks, timeout_s=120)
    assert first == second
    assert sum("rollout/policy_change" in metrics for metrics in first) == 12
    assert sum("rollout/logprob_diff_mean" in metrics for metrics in first) >= 4
