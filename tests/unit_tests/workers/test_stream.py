"""Generation k steps ahead: what trains when, with which versions, and what a resumed run does."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.trainer.selection import StepVersions, choose
from mega_rl.types import Draw
from tests.helpers.distributed import run_ranks
from tests.helpers.fleet import LONGEST, STOP, N, Numbered, StreamRun, token_of
from tests.helpers.selection import FULL
from tests.unit_tests.workers import stream_on_ranks as cases


def trained(run: StreamRun) -> list[list[int]]:
    """Tickets of each step."""
    return [batch.samples.tickets.tolist() for batch in run.taken]


def assert_exact(run: StreamRun) -> None:
    """Each token's log-prob is that of the weights of its version, and its token the one that those draw."""
    for place, (current, batch) in enumerate(zip(run.versions, run.taken, strict=True)):
        rows = batch.samples.rollout
        assert rows.token_versions is not None
        for row in range(len(rows.tokens)):
            mask = rows.loss_mask[row]
            versions = rows.token_versions[row][mask].tolist()
            assert versions == sorted(versions)
            assert all(run.oldest(place) <= version <= current for version in versions)
            for token, logprob, version in zip(
                rows.tokens[row][mask].tolist(), rows.rollout_logprobs[row][mask].tolist(), versions, strict=True
            ):
                expected = run.policy.published[version].log_softmax(0)[token]
                assert logprob == pytest.approx(float(expected), abs=1e-6)


def erratic(seed: int) -> dict[str, Any]:
    """A fleet whose requests come along by 0 to 5 tokens between two looks."""

    def pace(key: tuple[int, int], number: int) -> int:
        return max(0, random.Random(f"{seed} {key} {number}").randint(-1, 5))

    return {"pace": pace}


def test_a_request_over_an_update_is_as_old_as_its_start() -> None:
    """Nobody knows its tokens yet, and a step has to wait for it before they are too old."""
    run = StreamRun(2, SingleRank(), free=True, fleet={"pace": lambda *_: 0})
    run.stream.keeps, run.stream.has_all = True, lambda: True  # type: ignore[method-assign]
    run.stream.publish()
    run.stock.begin(Draw(0, 4, 0), Numbered().take(0, 4))
    run.flow.go_on()
    run.stream.publish()
    run.stock.begin(Draw(4, 4, 1), Numbered().take(4, 4))
    assert run.flow.arrived(wait=False) is None
    assert run.flow.waiting == dict.fromkeys(range(4), 1) | dict.fromkeys(range(4, 8), 2)


def assert_sampled_within_steps(run: StreamRun) -> None:
    """Tokens are of weights with which no step began, and some are as old as they may be."""
    rows = [(place, one.samples.rollout) for place, one in enumerate(run.taken)]
    versions = Counter(v for _, own in rows for v in own.token_versions[own.loss_mask].tolist())
    within = sum(count for version, count in versions.items() if version not in run.began.values())
    assert within > (20 if run.free else sum(versions.values()) / 4)
    if not run.free and run.k < 4:  # the depth adapts
        oldest = [int(own.weight_version.min()) < run.began[place - run.k + 1] for place, own in rows[run.k :]]
        assert any(oldest)


@pytest.mark.parametrize("publishes", [2, 3])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_weights_of_one_step_are_of_one_age(k: int, free: bool, publishes: int) -> None:
    """Published several times within each step: ages count steps, log-probs are of each version's own weights."""
    fleet = {"pace": lambda key, number: 1 + sum(key) % 3} if free else {}
    run = StreamRun(k, SingleRank(), free=free, steps=12, publishes=publishes, fleet=fleet).run()
    assert run.policy.weight_version == 12 * publishes + 1
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(48))
    assert_exact(run)
    assert_sampled_within_steps(run)


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_locked_run_trains_each_ticket_once_and_none_too_old(k: int, in_turns: bool) -> None:
    run = StreamRun(k, SingleRank(), steps=12, in_turns=in_turns).run()
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(48))
    assert_exact(run)
    versions = {
        v for one in run.taken for v in one.samples.rollout.token_versions[one.samples.rollout.loss_mask].tolist()
    }
    assert len(versions) > 6, "the weights that sample do not change"


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_free_run_trains_each_ticket_once_and_none_too_old(k: int, seed: int) -> None:
    run = StreamRun(k, SingleRank(), free=True, steps=12, in_turns=seed > 1, fleet=erratic(seed)).run()
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(48))
    assert_exact(run)


def test_no_step_in_turns_waits_for_the_longest_response() -> None:
    """Its servers' memory goes when four groups are complete; the fifth goes on under the next weights."""
    pace = {"pace": lambda key, look: 1 if key == (0, 0) else LONGEST}
    run = StreamRun(3, SingleRank(), free=True, in_turns=True, steps=4, fleet=pace).run(1)
    assert trained(run) == [[1, 2, 3, 4]]
    run.run(3)
    assert_exact(run)
    slow = [batch.samples.rollout for batch in run.taken if 0 in batch.samples.tickets]
    assert len(slow) == 1
    assert len(set(slow[0].token_versions[0][slow[0].loss_mask[0]].tolist())) > 1
    assert run.flow.engine.tokens == sum(int(batch.samples.rollout.loss_mask.sum()) for batch in run.taken)


def test_a_step_in_turns_that_has_its_groups_makes_no_round() -> None:
    run = StreamRun(2, SingleRank(), free=True, in_turns=True).run(1)
    looks = run.flow.engine.looks
    assert len(run.stock.pool.oldest) >= run.per_step
    run.run(1)
    assert run.flow.engine.looks == looks


def test_one_step_ahead_is_the_order_of_the_data() -> None:
    """Whole responses of the version before, four prompts in each step."""
    run = StreamRun(1, SingleRank()).run()
    assert trained(run) == [list(range(4 * step, 4 * step + 4)) for step in range(6)]
    for step, batch in enumerate(run.taken):
        assert batch.samples.rollout.weight_version.unique().tolist() == [max(1, step)]


@pytest.mark.parametrize("waves", [0, 3])
@pytest.mark.parametrize(
    ("k", "in_turns", "publishes"),
    [(1, False, 1), (2, False, 1), (8, False, 1), (1, True, 1), (3, True, 1), (1, False, 2), (2, False, 3)],
)
def test_a_resumed_run_is_the_undisturbed_one(k: int, in_turns: bool, publishes: int, waves: int) -> None:
    """From every step, bit for bit: weights, tickets, rows; with responses cut in the middle."""
    given: Any = {"waves": waves, "steps": 8, "in_turns": in_turns, "publishes": publishes}
    whole = StreamRun(k, SingleRank(), **given)
    kept = []
    for _ in range(8):
        whole.run(1)
        kept.append(whole.saved())
    for saved in kept[:-1]:
        again = StreamRun(k, SingleRank(), **given).resume(saved).run()
        assert again.stock.versions.begun == whole.stock.versions.begun
        assert torch.equal(again.policy.weights, whole.policy.weights)
        assert trained(again) == trained(whole)[saved["done"] :]
        for mine, theirs in zip(again.taken, whole.taken[saved["done"] :], strict=True):
            assert torch.equal(mine.rewards.totals, theirs.rewards.totals)
            assert torch.equal(mine.samples.rollout.token_versions, theirs.samples.rollout.token_versions)


@pytest.mark.parametrize("waves", [0, 3])
def test_a_run_on_other_ranks_loses_no_ticket(waves: int) -> None:
    """Its samples in flight are generated again, of the same tickets."""
    first = StreamRun(4, SingleRank(), waves=waves, steps=8).run(4)
    second = StreamRun(4, SingleRank(), waves=waves, steps=8).resume(first.saved(), same_layout=False).run()
    assert_once(first, second)


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = run_ranks(2, cases.on_ranks, timeout_s=120)
    return runs


@pytest.mark.parametrize("waves", [0, 3])
@pytest.mark.parametrize("together", [False, True])
def test_ranks_train_what_one_rank_trains(of_ranks: list[dict[str, Any]], waves: int, together: bool) -> None:
    """Two replicas, and one of two ranks, also resumed: weights to the bit, tickets, tokens and what is dropped."""
    alone = cases.facts(cases.run_of(SingleRank(), waves=waves, together=False).run())
    for name, first in ((f"{waves} {together}", 0), (f"{waves} {together} resumed", cases.SAVED)):
        ranks = [runs[name] for runs in of_ranks]
        for rank in ranks:
            assert torch.equal(rank["weights"], alone["weights"])
        for number, expected in enumerate(alone["steps"][first:]):
            own = [rank["steps"][number] for rank in ranks]
            assert all(step["tickets"] == expected["tickets"] for step in own)
            assert all(step["dropped"] == expected["dropped"] for step in own)
            assert own[0]["rows"] | own[1]["rows"] == expected["rows"]
            assert len(own[0]["rows"]) + len(own[1]["rows"]) == len(expected["rows"]) * (2 if together else 1)


def assert_once(*runs: StreamRun) -> None:
    """Each ticket that was drawn was trained, dropped with a reason, or is in flight: one of the three."""
    ends = Counter(ticket for run in runs for step in trained(run) for ticket in step)
    ends += Counter(one.ticket for run in runs for batch in run.taken for one in batch.dropped)
    ends += Counter(ticket for ticket, *_ in runs[-1].collector.numbers(0)["in_flight"])
    assert ends == Counter(range(runs[-1].stock.drawn))


def test_a_lower_limit_drops_what_is_too_old() -> None:
    """Resumed with one step ahead in place of eight: each ticket trains once, or is dropped by its age."""
    first = StreamRun(8, SingleRank(), steps=12).run(6)
    second = StreamRun(1, SingleRank(), steps=12).resume(first.saved()).run()
    assert_once(first, second)
    assert_exact(second)
    assert {one.reason for batch in second.taken for one in batch.dropped} == {"expired"}


def test_prompts_in_flight_out_of_order_need_their_flow() -> None:
    saved = StreamRun(4, SingleRank(), steps=8).run(3).saved()
    assert [ticket for ticket, *_ in saved["in_flight"]] != list(range(12, 12 + len(saved["in_flight"])))
    run = StreamRun(4, SingleRank(), steps=8)
    run.collector.stock = None
    with pytest.raises(UserError, match=r"trainer\.async_steps=0: the checkpoint has \d+ prompts in flight"):
        run.collector.resume(saved)


def digest(run: StreamRun) -> str:
    return hashlib.sha256(run.policy.weights.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("waves", "publishes", "k"), [(0, 1, 8), (3, 1, 8), (0, 2, 3), (3, 3, 4)])
def test_killed_runs_end_with_the_weights_of_one_that_was_not(waves: int, publishes: int, k: int) -> None:
    """Locked, steps ahead: after a kill at a random step a run goes on from its last checkpoint."""
    kills, draw, steps = 250 if FULL else 15, random.Random(waves), 16
    expected = digest(StreamRun(k, SingleRank(), waves=waves, steps=steps, publishes=publishes).run())
    while kills > 0:
        saved: dict[str, Any] | None = None
        while True:
            run = StreamRun(k, SingleRank(), waves=waves, steps=steps, publishes=publishes)
            if saved is not None:
                run.resume(saved)
            last = draw.randint(run.done, steps + 4)  # of this attempt; beyond the end: it ends
            while run.done < min(last, steps):
                run.run(1)
                saved = run.saved() if draw.random() < 0.5 else saved
            if run.done == steps:
                break
            kills -= 1
        assert digest(run) == expected


def test_free_runs_lose_and_double_nothing() -> None:
    """Kills, other layouts, failed samples and an erratic fleet, with and without dynamic sampling."""
    faults, seed = 1_000 if FULL else 30, 0
    while faults > 0:
        draw, seed = random.Random(seed), seed + 1
        broken = draw.randrange(7)
        fleet = {**erratic(seed), "fails": lambda key, broken=broken: sum(key) % 7 == broken}
        given = {"free": True, "waves": draw.choice([0, 4]), "steps": 10, "fleet": fleet}
        given |= {"in_turns": True} if seed % 2 == 0 else {"publishes": draw.choice([1, 3])}
        k, parts = draw.choice([1, 2, 4, 8]), list[StreamRun]()
        while not parts or parts[-1].done < 10:
            run = StreamRun(k, SingleRank(), **given)
            if parts:
                run.resume(parts[-1].saved(), same_layout=draw.random() < 0.7)
            parts.append(run.run(min(draw.randint(1, 5), 10 - run.done)))
            faults -= 1
        assert_once(*parts)
        for run in parts:
            assert_exact(run)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_dynamic_sampling_runs_ahead(k: int, free: bool) -> None:
    """Groups of equal rewards are dropped; those that wait too long for a step as well, and each says so."""
    run = StreamRun(k, SingleRank(), free=free, waves=6, steps=10, fleet=erratic(1) if free else {}).run()
    assert_once(run)
    assert_exact(run)
    reasons = Counter(one.reason for batch in run.taken for one in batch.dropped)
    assert set(reasons) <= {"equal", "expired"}
    assert reasons["equal"] > 10
    for batch in run.taken:
        totals = batch.samples.rewards.totals.view(-1, N)
        assert (totals[:, 0] != totals[:, 1]).all()


@pytest.mark.parametrize("free", [False, True])
def test_groups_that_are_too_old_are_sampled_again(free: bool) -> None:
    """Their prompts train later or turn out to be of equal rewards; a resumed run does the same."""
    fleet = erratic(1) if free else {}
    run = StreamRun(1, SingleRank(), free=free, waves=6, steps=10, drawn=12, redraws=True, fleet=fleet).run(6)
    saved = run.saved()
    run.run()
    assert_exact(run)
    ends = [(one.ticket, one.reason) for batch in run.taken for one in batch.dropped]
    again = {ticket for ticket, reason in ends if reason == "redrawn"}
    assert len(again) > 3
    assert {reason for _, reason in ends} == {"redrawn", "equal"}
    once = Counter(ticket for step in trained(run) for ticket in step)
    once += Counter(ticket for ticket, reason in ends if reason == "equal")
    assert set(once.values()) == {1}
    assert again & {ticket for step in trained(run) for ticket in step}
    if not free:
        resumed = StreamRun(1, SingleRank(), waves=6, steps=10, drawn=12, redraws=True).resume(saved).run()
        assert trained(resumed) == trained(run)[6:]
        assert torch.equal(resumed.policy.weights, run.policy.weights)


def test_failed_samples_leave_their_group_in_its_step() -> None:
    run = StreamRun(2, SingleRank(), fleet={"fails": lambda key: key[0] % 5 == 0 and key[1] == 0}).run()
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(24))
    for batch in run.taken:
        rows = batch.samples.rollout
        failed = torch.tensor([int(batch.samples.tickets[p]) % 5 == 0 for p in rows.prompt_index]) & (
            rows.sample_index == 0
        )
        assert torch.equal(torch.zeros_like(failed) if rows.failed is None else rows.failed, failed)


def test_a_group_about_to_be_too_old_is_waited_for() -> None:
    """One response is slow: the step in which it would be too old takes it before all younger ones."""
    slow = {"pace": lambda key, number: 1 if key == (2, 0) else LONGEST}
    run = StreamRun(2, SingleRank(), free=True, fleet=slow, steps=8).run()
    assert_exact(run)
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(32))


@pytest.mark.parametrize(("tokens", "depths", "oldest"), [(LONGEST, (2,), 1), (3, (6,), 5)])
def test_no_more_steps_are_in_flight_than_training_needs(tokens: int, depths: tuple[int, ...], oldest: int) -> None:
    """Whole responses between two looks need one step ahead; those that take four looks need more, and not eight."""
    run = StreamRun(8, SingleRank(), free=True, steps=40, fleet={"pace": lambda key, number: tokens}).run(30)
    rows = [batch.samples.rollout for batch in run.taken]
    ages = [current - int(own.weight_version.min()) for current, own in zip(run.versions, rows, strict=True)]
    assert run.stock.depth in depths
    assert max(ages[20:]) == oldest


def test_a_late_group_ends_the_run() -> None:
    run = StreamRun(2, SingleRank(), free=True, fleet={"pace": lambda key, number: 0})
    run.flow.timeout_s = 0.2
    with pytest.raises(RunError, match=r"waited 0\.2 s for a group of samples"):
        run.run()


def test_evaluations_pause_the_round() -> None:
    run = StreamRun(2, SingleRank(), free=True, fleet=erratic(3)).run(2)
    engine: Any = run.flow.engine
    run.flow.go_on()
    before = engine.looks
    engine.generate = lambda prompts, places, **_: run.taken[0].samples.rollout
    run.stream.generate([], step=2, greedy=True)
    run.run(3)
    assert engine.looks > before
    assert_exact(run)


def can_all_train(groups: list[int], count: int, begun: list[int]) -> bool:
    """Return whether the steps after this one can take all groups in time; groups: versions of their oldest tokens."""
    return all(
        place // count + 1 < len(begun) and oldest >= begun[place // count + 1]
        for place, oldest in enumerate(sorted(groups))
    )


@pytest.mark.parametrize("seed", range(300))
def test_a_choice_leaves_what_later_steps_can_take(seed: int) -> None:
    """By trying: it waits only where every choice of complete groups would leave too many to be taken in time."""
    draw = random.Random(seed)
    limit, count = draw.randint(0, 3), draw.randint(1, 3)
    publishes = draw.choices([1, 3] if seed % 2 else [1], k=limit)  # of the steps before
    begun = [9 - sum(publishes[place:]) for place in range(limit + 1)]
    versions = StepVersions(limit, lambda: 9, begun)
    tickets = draw.sample(range(40), draw.randint(0, 7))
    groups = [(ticket, draw.randint(begun[0], 9)) for ticket in tickets]
    waiting = [draw.randint(begun[0], 9) for _ in range(draw.randint(0, 4))]
    columns = torch.tensor(groups, dtype=torch.int64).view(-1, 2)
    others = torch.tensor(waiting, dtype=torch.int64)
    chosen = choose(columns[:, 0], columns[:, 1], waiting=others, count=count, versions=versions)
    good = [
        taken
        for taken in combinations(groups, count)
        if can_all_train([oldest for one, oldest in groups if (one, oldest) not in taken] + waiting, count, begun)
    ]
    if chosen is None:
        assert not good
        return
    first = sorted(sorted(groups, key=lambda group: (group[1], group[0]))[:count])
    assert [groups[place] for place in chosen.tolist()] == first
    assert not good or tuple(first) in [tuple(sorted(taken)) for taken in good]


def test_a_token_is_a_function_of_weights_seed_and_position() -> None:
    weights = torch.zeros(8, dtype=torch.float64)
    tokens = [token_of(weights, seed, 3) for seed in range(400)]
    assert set(tokens) == set(range(8))
    assert tokens == [token_of(weights, seed, 3) for seed in range(400)]
    assert STOP in tokens
