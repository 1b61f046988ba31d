"""Environments whose trajectories play over many weight updates: what trains, and what a resumed run does."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mega_rl.agents import environment
from mega_rl.agents.environment import Environment, Policy
from mega_rl.agents.trajectory import Trajectory
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.generation.engine import RoutedLayers
from mega_rl.types import Draw, Prompt
from mega_rl.workers.flights import number_of
from mega_rl.workers.rollout import RolloutContext
from tests.helpers.distributed import run_ranks
from tests.helpers.fleet import SAMPLING, Numbered, StreamRun, logits_of
from tests.helpers.selection import FULL
from tests.unit_tests.workers import stream_on_ranks as cases
from tests.unit_tests.workers.test_stream import assert_once, erratic, trained


@dataclass
class Game(Environment):
    """Turns with a tool between them that answers a number; some conversations begin anew, or fork."""

    timeout_s: float = 60.0
    max_failed_share: float = 1.0
    tool_s: float = 0.0
    salt: int = 0  # of the tool's answers; another one: it is not a function of its inputs

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        for number in range(2 + prompt.index % 3):
            turn = await policy.turn(limit=2 + (prompt.index + number) % 4)
            await asyncio.sleep(self.tool_s)
            answer = 10 + (sum(turn.token_ids) + self.salt) % 7
            if answer == 12:
                trajectory.open((*prompt.token_ids, 50 + number))
            elif answer == 13 and len(trajectory.branches) < 3:
                trajectory.fork(trajectory.branch, len(trajectory.branch.parts))
            trajectory.give([answer])
            trajectory.tool_calls += 1


def played(k: int, **given: Any) -> StreamRun:
    return StreamRun(k, given.pop("ranks", SingleRank()), environment=given.pop("environment", Game()), **given)


def assert_exact(run: StreamRun) -> None:
    """Each token has the log-prob of its version's weights after the tokens before its turn, and is not too old."""
    for number, (current, batch) in enumerate(zip(run.versions, run.taken, strict=True)):
        rows = batch.samples.rollout
        for row, (ids, mask) in enumerate(zip(rows.tokens.tolist(), rows.loss_mask.tolist(), strict=True)):
            start = 0
            for place, trains in enumerate(mask):
                if not trains:
                    continue
                if not mask[place - 1] or rows.turn[row, place] != rows.turn[row, place - 1]:
                    start = place
                version = int(rows.token_versions[row, place])
                assert run.oldest(number) <= version <= current
                expected = logits_of(run.policy.published[version], ids[:start]).log_softmax(0)[ids[place]]
                assert float(rows.rollout_logprobs[row, place]) == pytest.approx(float(expected), abs=1e-6)


def content(run: StreamRun) -> list[bytes]:
    """Return what each step trained: tokens, masks, log-probs, versions, rewards."""
    names = ("tokens", "loss_mask", "rollout_logprobs", "token_versions", "prompt_index", "sample_index")
    return [
        b"".join(getattr(one.samples.rollout, name).numpy().tobytes() for name in names)
        + one.rewards.totals.numpy().tobytes()
        for one in run.taken
    ]


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(("k", "publishes"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
def test_trajectories_train_once_and_none_too_old(k: int, publishes: int, free: bool) -> None:
    run = played(k, free=free, steps=8, publishes=publishes, fleet=erratic(1) if free else {}).run()
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(32))
    assert_exact(run)
    rows = [one.samples.rollout for one in run.taken]
    assert any(one.branch is not None and one.branch.any() for one in rows)
    assert max(int(one.turn.max()) for one in rows) > 2
    mixed = [
        len(own[mask].unique()) for one in rows for own, mask in zip(one.token_versions, one.loss_mask, strict=True)
    ]
    assert k * publishes == 1 or max(mixed) > 1, "no trajectory was sampled by several versions"
    run.kill()


def killed(k: int, draw: random.Random, steps: int, publishes: int) -> tuple[list[bytes], int]:
    """Return what the steps of a run trained that is killed at random steps, and the number of kills."""
    done: dict[int, bytes] = {}
    saved: dict[str, Any] | None = None
    kills = 0
    while True:
        run = played(k, steps=steps, publishes=publishes)
        if saved is not None:
            run.resume(saved)
        first, last = run.done, draw.randint(run.done, steps + 2)  # beyond the end: it ends
        while run.done < min(last, steps):
            run.run(1)
            saved = run.saved() if draw.random() < 0.5 else saved
        run.kill()
        for step, own in enumerate(content(run), first):
            assert done.setdefault(step, own) == own
        if run.done == steps:
            return [done[step] for step in range(steps)], kills
        kills += 1


@pytest.mark.parametrize(("k", "publishes"), [(4, 1), (2, 3)])
def test_killed_runs_train_what_one_that_was_not_trains(k: int, publishes: int) -> None:
    """Steps ahead, locked, with turns, branches and tools: to the bit, whatever was cut in the middle."""
    kills, draw, steps = 120 if FULL else 8, random.Random(3), 10
    whole = played(k, steps=steps, publishes=publishes).run()
    whole.kill()
    expected = hashlib.sha256(b"".join(content(whole))).hexdigest()
    while kills > 0:
        got, number = killed(k, draw, steps, publishes)
        assert hashlib.sha256(b"".join(got)).hexdigest() == expected
        kills -= number


@dataclass
class Pair(Game):
    """Two conversations side by side."""

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        branches = [trajectory.branches[0], trajectory.open((*prompt.token_ids, 60))]
        for _ in range(2):
            await asyncio.gather(*(policy.turn(one, limit=4) for one in branches))


def test_turns_side_by_side_share_a_quantum() -> None:
    """The later one gets what the earlier one leaves; no server counts as lost, and a resumed run is equal."""
    whole = played(4, steps=8, environment=Pair()).run(4)
    saved = whole.saved()
    whole.run()
    assert_exact(whole)
    again = played(4, steps=8, environment=Pair()).resume(saved).run()
    assert content(again) == content(whole)[4:]
    whole.kill()
    again.kill()


def test_a_resumed_run_pays_once_for_its_tokens() -> None:
    whole = played(4, steps=8).run(4)
    saved, engine = whole.saved(), whole.flow.engine
    before = engine.tokens  # type: ignore[attr-defined]
    whole.run()
    again = played(4, steps=8).resume(saved).run()
    assert content(again) == content(whole)[4:]
    assert again.flow.engine.tokens == whole.flow.engine.tokens - before  # type: ignore[attr-defined]
    whole.kill()
    again.kill()


def test_a_checkpoint_right_after_a_resume_is_the_one_before() -> None:
    """Turns that no environment has asked for yet are kept."""
    first = played(4, steps=8, free=True, fleet=erratic(2)).run(4)
    saved = first.saved()
    again = played(4, steps=8, free=True, fleet=erratic(2), environment=Game(tool_s=0.2)).resume(saved)
    for name in ("flow/token_ids", "flow/versions"):
        assert sorted(again.saved()["tensors"][name].tolist()) == sorted(saved["tensors"][name].tolist())
    first.kill()
    again.kill()


@pytest.mark.parametrize("own", [None, Game()])
def test_lost_servers_change_nothing_in_a_locked_run(own: Game | None) -> None:
    """Requests whose server died get what is left of their round after the servers are back."""
    fleet = {"pace": lambda key, number: 2}
    whole = StreamRun(4, SingleRank(), environment=own, fleet=fleet).run()
    dies = {"loses": lambda key, number: random.Random(f"{key} {number}").random() < 0.2}
    run = StreamRun(4, SingleRank(), environment=own, fleet=fleet | dies).run()
    assert content(run) == content(whole)
    assert run.flow.engine.tokens == whole.flow.engine.tokens  # type: ignore[attr-defined]
    whole.kill()
    run.kill()


def test_free_trajectories_lose_and_double_nothing() -> None:
    """Kills, other layouts, failed turns and an erratic fleet, with and without dynamic sampling."""
    faults, seed = 150 if FULL else 12, 0
    while faults > 0:
        draw, seed = random.Random(seed), seed + 1
        broken = draw.randrange(7)
        fleet = {**erratic(seed), "fails": lambda key, broken=broken: sum(key) % 7 == broken}
        k, parts = draw.choice([1, 2, 4]), list[StreamRun]()
        given = {"free": True, "waves": draw.choice([0, 4]), "steps": 8, "fleet": fleet}
        while not parts or parts[-1].done < 8:
            run = played(k, **given)
            if parts:
                run.resume(parts[-1].saved(), same_layout=draw.random() < 0.7)
                parts[-1].kill()
            parts.append(run.run(min(draw.randint(1, 4), 8 - run.done)))
            faults -= 1
        assert_once(*parts)
        for run in parts:
            assert_exact(run)
        parts[-1].kill()


def test_kept_turns_answer_only_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that answers otherwise after a resume: what followed its answer is sampled anew, and counted."""
    first = played(4, steps=8).run(4)
    again = played(4, steps=8, environment=Game(salt=1)).resume(first.saved())
    numbers, metrics = list[Any](), again.stream.metrics
    monkeypatch.setattr(again.stream, "metrics", lambda: numbers.append(one := metrics()) or one)  # type: ignore[arg-type]
    again.run()
    assert_once(first, again)
    assert_exact(again)
    assert sum(one["agent/replays_drifted"] for one in numbers) > 0
    first.kill()
    again.kill()


@dataclass
class Blocks(Game):
    """Once, a trajectory blocks the loop."""

    timeout_s: float = 0.3
    blocks: threading.Event = field(default_factory=threading.Event)

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        if prompt.index == 6 and trajectory.sample_index == 1 and not self.blocks.is_set():
            await policy.turn(limit=2)
            self.blocks.set()
            time.sleep(3.0)
        await super().run(policy, prompt, trajectory)


def test_a_blocking_trajectory_costs_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others play again from their kept turns, so that they train what they would have trained."""
    monkeypatch.setattr(environment, "GRACE_S", 0.2)
    expected = played(2, steps=4).run()
    run = played(2, steps=4, environment=Blocks())
    run.flow.timeout_s = 10.0
    run.run()
    assert_exact(run)
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(16))
    failed = Counter[tuple[int, int]]()
    for batch in run.taken:
        rows, tickets = batch.samples.rollout, batch.samples.tickets
        if rows.failed is not None:
            for place in rows.failed.nonzero().flatten():
                failed[int(tickets[rows.prompt_index[place]]), int(rows.sample_index[place])] += 1
    assert failed == {(6, 1): 1}
    assert content(run)[0] == content(expected)[0]
    assert run.flow.engine.tokens <= expected.flow.engine.tokens  # type: ignore[attr-defined]
    expected.kill()
    run.kill()


def test_a_trajectory_gets_its_quantum_over_all_its_turns() -> None:
    """Locked: in a round no trajectory samples more than its quantum, in however many turns."""
    run = played(4, steps=8)
    run.stream.publish()
    run.flow.add(Draw(0, 12, 0), dict(enumerate(Numbered().take(0, 12))))
    for rounds in range(1, 5):
        run.flow.go_on()
        run.flow.pause()
        got, turns = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for ticket, flight in run.flow.flights.items():
            for key, sample in flight.samples.items():
                got[ticket, number_of(key)] += len(sample.token_ids)
                turns[ticket, number_of(key)] += 1
        assert max(got.values()) == rounds * run.flow.quantum
        assert rounds == 1 or max(turns[one] for one in got if got[one] == max(got.values())) > 1
    run.kill()


def test_ranks_train_what_one_rank_trains() -> None:
    """Two replicas, and one of two ranks: weights to the bit, tickets, rows and what is dropped."""
    alone = cases.run_of(SingleRank(), waves=0, together=False, environment=Game()).run()
    alone.kill()
    expected = cases.facts(alone)
    of_ranks: list[dict[str, Any]] = run_ranks(2, cases.on_ranks, Game(), timeout_s=120)
    for name in ("0 False", "0 True", "0 False resumed", "0 True resumed"):
        first = cases.SAVED if "resumed" in name else 0
        for number, step in enumerate(expected["steps"][first:]):
            own = [runs[name]["steps"][number] for runs in of_ranks]
            assert all(one["tickets"] == step["tickets"] for one in own)
            assert own[0]["rows"] | own[1]["rows"] == step["rows"]
        assert all(bool((runs[name]["weights"] == expected["weights"]).all()) for runs in of_ranks)


def test_arrivals_without_experts_fit_to_those_with_some() -> None:
    """With routing replay, groups whose trajectories have all failed have its columns, too."""
    layers = RoutedLayers((False, True, True), top_k=2)
    engine, tokenizer = SimpleNamespace(routed=layers), cast(Any, None)
    context = RolloutContext(tokenizer, engine, SAMPLING, 1, 7, SingleRank(), SingleRank(), lambda: 3)
    failed = Trajectory(Prompt(0, (3, 4), "", ""), 0, 0, 8, end="error")
    rows = context.rollout([failed], with_versions=True)
    assert rows.routing is not None
    assert rows.routing.shape[2:] == (2, 2)
