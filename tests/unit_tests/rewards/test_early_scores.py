"""Trajectories that are scored while others run: the same rewards as at the end, each response once, faults heard."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from mega_rl.agents.environment import Environment, Policy
from mega_rl.agents.trajectory import Trajectory
from mega_rl.errors import HungError, RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rewards.call import plan
from mega_rl.rewards.pool import FunctionRewards, WorkerPool
from mega_rl.rewards.role import TextScorer
from mega_rl.rewards.score import Item, Outcome, Report, ResponseReader, RewardError, ignore
from mega_rl.types import Prompt, Rollout, ends_of
from tests.helpers.fleet import StreamRun
from tests.helpers.threads import ThreadGroup
from tests.unit_tests.rewards.reward_cases import PROMPTS, called, pooled
from tests.unit_tests.rewards.reward_cases import own as in_process
from tests.unit_tests.rewards.test_role import ALONE, scorer_of
from tests.unit_tests.workers import test_own_rollouts as own

WAIT_S = 20.0
READER = ResponseReader(lambda ids: "".join(map(str, ids)), (1,))  # the stop token of `own.Answers`


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@dataclass
class Watched:
    """A source that notes each response with the thread that asks, and waits at a gate."""

    source: Any
    holds: str = ""  # the response that waits there; empty: each
    gate: threading.Event = field(default_factory=threading.Event)
    calls: list[tuple[str, str]] = field(default_factory=list)
    scored: int = 0
    inside: int = 0
    most: int = 0  # calls at a time

    def score(self, items: Sequence[Item], report: Report = ignore) -> list[Outcome]:
        self.calls += [(threading.current_thread().name, response.text) for _, response in items]
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.holds not in ("", *(response.text for _, response in items)) or self.gate.wait(WAIT_S)
        outcomes: list[Outcome] = self.source.score(items, report)
        self.inside -= 1
        self.scored += len(outcomes)
        return outcomes

    @property
    def early(self) -> list[str]:
        return [text for thread, text in self.calls if thread == "early scores"]


ODD = {"50": ValueError("none"), "51": None, "53": {"b": 1.0}, "60": {"a": -0.25, "c": 2.0}}


async def odd(response: str, prompt_index: int) -> object:
    """Parts; an error, no score and other parts among them, the first trajectory's too."""
    if isinstance(got := ODD.get(response, {"a": prompt_index / 7, "b": 0.1 * len(response)}), Exception):
        raise got
    return got


def of_eight() -> Rollout:
    """Four samples of two prompts; sample 2 of prompt 0 has two rows, and sample 3 of prompt 1 has failed."""
    rows = [(0, 0, 50, 0), (0, 1, 51, 0), (0, 2, 52, 0), (0, 2, 59, 1), (0, 3, 53, 0)]
    rows += [(1, 0, 60, 0), (1, 1, 61, 0), (1, 2, 62, 0), (1, 3, 63, 0)]
    prompts, samples, tokens, branches = torch.tensor(rows).unbind(1)
    ids = torch.stack([torch.full_like(tokens, 3), tokens, torch.full_like(tokens, 9)], dim=1)
    rollout = Rollout.from_rows(
        ids,
        prompt_lengths=torch.ones_like(tokens),
        lengths=torch.full_like(tokens, 3),
        end=ends_of(tokens != 61),
        prompt_index=prompts,
        sample_index=samples,
    )
    rollout.branch, rollout.failed = branches, tokens == 63
    return rollout


TRAJECTORIES = [slice(0, 1), slice(1, 2), slice(2, 4), *(slice(row, row + 1) for row in range(4, 9))]
TEXTS = ["50", "51", "52\n59", "53", "60", "61", "62"]


def score_on(size: int, replicas: int, how: str, rows: Callable[[], Rollout] = of_eight) -> list[Any]:
    """Return (rewards, metrics without times, calls) of each rank; it began its share of trajectories before.

    how: "late", "all" (all have been scored), "some" (one is being scored, the others wait), as the score is due.
    """
    groups = [ThreadGroup(size) for _ in range(replicas)]

    def work(ranks: Any) -> Any:
        replica = groups[ranks.rank // size].rank(ranks.rank % size)
        source = Watched(called(odd))
        scorer = scorer_of(source, replica, ranks, failure_score=-1.0, max_failed_share=1.0)
        share = TRAJECTORIES[replica.rank * 8 // size : (replica.rank + 1) * 8 // size]
        if how == "all":
            source.gate.set()
        for one in share if how != "late" else ():
            scorer.begin(of_eight()[one], PROMPTS)
            until(lambda: bool(source.calls))
        count = sum(not of_eight()[one].failed.any() for one in share)  # type: ignore[union-attr]
        if how == "all":
            until(lambda: len(source.calls) == count)
        before = len(source.calls)
        assert before == {"all": count, "some": min(count, 1), "late": 0}[how]
        threading.Timer(0.2, source.gate.set).start()
        rewards = scorer.score(rows(), PROMPTS)
        metrics = {name: value for name, value in scorer.metrics().items() if not name.startswith("time/")}
        return rewards, metrics, [text for _, text in source.calls]

    results = ThreadGroup(size * replicas).run(work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def same(one: Any, other: Any) -> bool:
    parts = [rewards.parts.values for rewards in (one[0], other[0])]
    return (
        torch.equal(one[0].totals.nan_to_num(-9), other[0].totals.nan_to_num(-9))
        and torch.equal(parts[0].nan_to_num(-9), parts[1].nan_to_num(-9))
        and one[0].parts.names == other[0].parts.names
        and one[1] == other[1]
    )


@pytest.mark.parametrize("how", ["all", "some"])
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (2, 1), (1, 2), (3, 1)])
def test_early_scores_are_those_of_the_end(size: int, replicas: int, how: str) -> None:
    """Bit for bit, with failures, parts that differ and a response left out; a source sees each response once."""
    late, early = (score_on(size, replicas, one) for one in ("late", how))
    assert late[0][1]["reward/errors"] >= 3.0 * replicas  # which parts are the others depends on the number of ranks
    assert all(same(one, other) for one, other in zip(late, early, strict=True))
    for replica in range(replicas):
        ranks = early[replica * size : (replica + 1) * size]
        assert Counter(text for *_, calls in ranks for text in calls) == Counter(TEXTS)


@pytest.mark.parametrize("size", [1, 2])
def test_response_of_another_run_is_scored_anew(size: int) -> None:
    """A trajectory ran again, as its server was lost: only its own response is scored twice."""

    def again() -> Rollout:
        rows = of_eight()
        rows.tokens[1, 1], rows.tokens[7, 1] = 57, 53
        return rows

    late, early = (score_on(size, 1, how, again) for how in ("late", "all"))
    assert all(same(one, other) for one, other in zip(late, early, strict=True))
    assert Counter(text for *_, calls in early for text in calls) == Counter([*TEXTS, "57", "53"])


def test_responses_that_wait_are_shared_by_the_ranks() -> None:
    """One rank began all of them and is at the first when they are due."""
    sources = [Watched(called(odd)) for _ in range(2)]

    def work(ranks: Any) -> Any:
        scorer = scorer_of(sources[ranks.rank], ranks, failure_score=-1.0, max_failed_share=1.0)
        for one in TRAJECTORIES if ranks.rank == 0 else ():
            scorer.begin(of_eight()[one], PROMPTS)
            until(lambda: bool(sources[0].calls))
        threading.Timer(0.2, sources[ranks.rank].gate.set).start()
        return scorer.score(of_eight(), PROMPTS)

    assert not [one for one in ThreadGroup(2).run(work) if isinstance(one, Exception)]
    assert [len(source.calls) for source in sources] == [4, 3]


def test_groups_wait_for_their_own_scores_only() -> None:
    """A response that is slow holds up no other group, and one of other data with the same number stands for none."""

    async def graded(response: str, answer: str) -> float:
        return float(response) + float(answer) / 8

    source = Watched(called(graded), holds="60")
    scorer, others = scorer_of(source), [replace(one, answer="4") for one in PROMPTS]
    scorer.begin(of_eight()[:1], PROMPTS)
    until(lambda: source.scored == 1)
    scorer.begin(of_eight()[5:6], PROMPTS)
    until(lambda: len(source.calls) == 2)
    assert scorer.score(of_eight()[:1], PROMPTS).totals.tolist() == [50.25]
    source.gate.set()
    scorer.begin(of_eight()[:1], PROMPTS)
    until(lambda: source.scored == 3)
    assert scorer.score(of_eight()[:1], others).totals.tolist() == [50.5]
    assert scorer.score(of_eight()[5:6], PROMPTS).totals.tolist() == [60.625]
    assert [text for _, text in source.calls] == ["50", "60", "50", "50"]


def test_error_of_the_thread_reaches_every_rank() -> None:
    def fails(response: str) -> float:
        raise RewardError(f"no service for {response}")

    def work(ranks: Any) -> Any:
        source = Watched(called(fails if ranks.rank else odd))
        source.gate.set()
        scorer = scorer_of(source, ranks)
        scorer.begin(of_eight()[5 * ranks.rank : 5 * ranks.rank + 1], PROMPTS)
        until(lambda: bool(source.early))
        return scorer.score(of_eight(), PROMPTS)

    assert [str(error) for error in ThreadGroup(2).run(work)] == ["no service for 60"] * 2


def test_forgotten_responses_are_neither_scored_nor_counted() -> None:
    source = Watched(called(odd))
    scorer = scorer_of(source, failure_score=-1.0, max_failed_share=1.0)
    for one in TRAJECTORIES:
        scorer.begin(of_eight()[one], PROMPTS)
        until(lambda: bool(source.calls))
    scorer.forget()
    assert [text for _, text in source.calls] == ["50"]
    # The next generation comes while the source has not answered; it gets its own turn.
    scorer.begin(of_eight()[4:5], PROMPTS)
    time.sleep(0.05)
    threading.Timer(0.2, source.gate.set).start()
    rewards = scorer.score(of_eight(), PROMPTS)
    assert same((rewards, 0), (score_on(1, 1, "late")[0][0], 0))
    assert Counter(text for _, text in source.calls) == Counter([*TEXTS, "50"])
    assert source.most == 1
    until(lambda: "early scores" not in {thread.name for thread in threading.enumerate()})


def test_thread_that_hangs_ends_the_run() -> None:
    source = Watched(called(odd))
    scorer = scorer_of(source, timeout_s=0.2)
    scorer.begin(of_eight()[:1], PROMPTS)
    until(lambda: bool(source.early))
    with pytest.raises(HungError, match=r"rank 0 has scored no response for 0.2 s"):
        scorer.score(of_eight(), PROMPTS)
    source.gate.set()


def test_pool_that_closes_leaves_no_worker() -> None:
    """A run ended by an error ends its reward workers, also in the middle of early scores."""
    with pooled("naughty", timeout_s=5.0) as workers:
        scorer = scorer_of(workers, reader=ResponseReader(lambda ids: "hang"))
        for one in TRAJECTORIES:
            scorer.begin(of_eight()[one], PROMPTS)
        time.sleep(0.5)
        scorer.forget()
        begin = time.monotonic()
        workers.pool.close()  # type: ignore[union-attr]
        assert time.monotonic() - begin < 4.0


def test_functions_that_need_company_or_the_main_thread_score_at_the_end() -> None:
    async def several(responses: list[str]) -> list[float]:
        return [0.0 for _ in responses]

    def one(response: str) -> float:
        return 0.0

    workers: Any = object.__new__(WorkerPool)
    for functions, pool, early in (
        ([odd], None, True),
        ([one], None, False),
        ([one], workers, True),
        ([odd, one], None, False),
        ([several], None, False),
        ([one, several], workers, False),
    ):
        planned = [plan(function, name=str(place)) for place, function in enumerate(functions)]  # type: ignore[arg-type]
        assert FunctionRewards(planned, pool=pool).can_begin_early is early
    assert FunctionRewards([plan(several, batch_size=1)]).can_begin_early


@dataclass
class Patient(Environment):
    """Plays one trajectory that ends when the others have been scored, and one that fails if asked to."""

    source: Any = None
    fails: tuple[int, int] = (-1, -1)
    timeout_s: float = WAIT_S
    max_failed_share: float = 0.25

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        place = (trajectory.prompt_index, trajectory.sample_index)
        await policy.turn()
        if place == self.fails:
            raise ValueError("a tool broke")
        while place == (1, 1) and self.source.scored < (3 if self.fails[0] < 0 else 2):
            await asyncio.sleep(0.001)


def play(source: Any, engine: Any = None, **settings: Any) -> tuple[TextScorer, Rollout]:
    source.gate.set()
    scorer = scorer_of(source, ALONE, reader=READER)
    rollouts = own.played(engine or own.Answers(), Patient(source=source, **settings))
    rollouts.scores = scorer
    return scorer, rollouts.generate(own.PROMPTS, step=3)


@pytest.mark.parametrize("engine", [own.Answers, partial(own.Answers, loses=True)])
@pytest.mark.parametrize("kind", ["asynchronous", "workers"])
def test_trajectories_are_scored_while_another_one_runs(kind: str, engine: Callable[[], Any]) -> None:
    """In workers, too, and where servers were lost: the last trajectory waits for the scores of the others."""
    with pooled("short", num_workers=2) if kind == "workers" else nullcontext(in_process("awaited")) as functions:
        source = Watched(functions)
        scorer, rows = play(source, engine())
        assert source.scored >= 3
        assert scorer.score(rows, own.PROMPTS).totals.tolist() == [9.0] * 4
        assert len(source.calls) == 4
        assert scorer.metrics()["time/reward_latency_s"] > 0


WHOLE = ResponseReader(READER.decode)


@dataclass
class Second(Environment):
    """A turn of each sample; the second sample of a prompt ends when the first has been scored."""

    source: Any = None
    timeout_s: float = WAIT_S
    max_failed_share: float = 0.0
    first: dict[int, str] = field(default_factory=dict)  # response by ticket

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        turn = await policy.turn(limit=3)
        if trajectory.sample_index == 0:
            self.first[trajectory.prompt_index] = WHOLE.decode(turn.token_ids)
        while trajectory.sample_index and self.first.get(trajectory.prompt_index) not in self.source.early:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("free", [False, True])
def test_trajectories_ahead_are_scored_while_their_group_plays(free: bool) -> None:
    """Groups come while others are in progress, and each sample trains with its own reward."""
    source = Watched(called(length_of))
    source.gate.set()
    run = StreamRun(2, SingleRank(), free=free, environment=Second(source=source), steps=4)
    run.flow.rollouts.scores = run.collector.rewards = scorer_of(source, reader=WHOLE)  # type: ignore[union-attr, assignment]
    run.run()
    trained = 0
    for batch in run.taken:
        rows = batch.samples.rollout
        texts = [text.text for _, text in WHOLE.texts(rows, range(len(rows.tokens)), batch.samples.prompts)]
        assert batch.samples.rewards.totals.tolist() == [float(len(text)) for text in texts]
        trained += len(texts)
    assert trained == 4 * 4 * 2
    assert len(source.early) == len(source.calls) >= trained
    run.kill()


def test_failed_trajectories_are_not_scored() -> None:
    source = Watched(called(length_of))
    scorer, rows = play(source, fails=(0, 1))
    assert scorer.score(rows, own.PROMPTS).totals.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert len(source.calls) == 3
    rollouts = own.played(own.Answers(), own.Scores(last=1.5))
    rollouts.scores = scorer
    with pytest.raises(RunError, match=r"4 of 4 .* set a score, which needs reward.source=environment"):
        rollouts.generate(own.PROMPTS, step=3)
    assert len(source.calls) == 3


async def length_of(response: str) -> float:
    return float(len(response))


def test_generation_that_raises_leaves_nothing_to_score() -> None:
    """The scores of its trajectories are in no later step."""
    source = Watched(called(length_of))
    scorer = scorer_of(source, ALONE, reader=READER)
    source.gate.set()
    rollouts = own.played(own.Answers(), Patient(source=source, fails=(0, 1), max_failed_share=0.0))
    rollouts.scores = scorer
    with pytest.raises(RunError, match="1 of 4 trajectories failed"):
        rollouts.generate(own.PROMPTS, step=3)
    before = len(source.calls)
    assert scorer.score(own.played(own.Answers(), own.Fails()).generate(own.PROMPTS, step=4), own.PROMPTS)
    assert len(source.calls) == before + 3
