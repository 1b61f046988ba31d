"""How the prompts of a step are shared over all ranks, and how a replica puts its rows together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_rl.parallel.comm import SingleRank, share
from mega_rl.types import Draws, Prompt, Rollout
from mega_rl.workers.rollout import EVALUATION, RolloutWorker

PROMPTS = [Prompt(index=100 + i, token_ids=(2 + i,), text=f"p{i}", answer=str(i)) for i in range(7)]


@dataclass
class Place(SingleRank):
    """A rank of a group, for arithmetic only."""

    rank: int
    size: int


class Replica(Place):
    """Ranks of one replica in one process: the others' rows have been handed over before."""

    def __init__(self, rank: int, size: int, rows: list[Rollout]) -> None:
        super().__init__(rank, size)
        self.rows = rows

    def gather_rows(self, rows: Rollout) -> Rollout:
        assert torch.equal(self.rows[self.rank].prompt_index, rows.prompt_index)
        return torch.cat(self.rows)  # type: ignore[call-overload, no-any-return]


class CountingEngine:
    """A rollout engine whose samples are made of what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], list[int], bool, int]] = []

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
        draws: Draws | None = None,
    ) -> Rollout:
        self.calls.append((seed, list(prompt_index), greedy, n))
        count = len(prompts) * n
        index = torch.tensor(list(prompt_index), dtype=torch.int64).repeat_interleave(n)
        first = torch.tensor([p.token_ids[0] for p in prompts], dtype=torch.int64).repeat_interleave(n)
        return Rollout.from_rows(
            torch.stack([first, first], dim=1),
            prompt_lengths=torch.ones(count, dtype=torch.int64),
            lengths=torch.full((count,), 2),
            prompt_index=index,
            sample_index=torch.arange(n).repeat(len(prompts)),
            weight_version=torch.ones(count, dtype=torch.int64),
        )


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_a_partition(count: int, size: int) -> None:
    """Every item once, in order, and as even as can be."""
    parts = [share(count, Place(rank, size)) for rank in range(size)]
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def generate_everywhere(count: int, *, dp: int, replica: int, greedy: bool = False) -> list[list[Rollout]]:
    """What every rank holds after a step with `count` prompts, by data-parallel rank and rank of the replica."""
    actual = []
    for group in range(dp):
        # First each rank's own rows: a replica of one gathers nothing.
        rows: list[Rollout] = []
        for rank in range(replica):
            alone = Replica(rank, replica, [])
            alone.gather_rows = lambda own: own  # type: ignore[method-assign]
            rows.append(worker(group, dp, alone).generate(PROMPTS[:count], step=3, greedy=greedy))
        gathered = [Replica(rank, replica, rows) for rank in range(replica)]
        actual.append([worker(group, dp, one).generate(PROMPTS[:count], step=3, greedy=greedy) for one in gathered])
    return actual


def worker(group: int, dp: int, replica: Replica) -> RolloutWorker:
    return RolloutWorker(engine=CountingEngine(), data_parallel=Place(group, dp), replica=replica, n=3, seed=8)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_every_row_is_generated_once_and_known_to_its_replica(count: int) -> None:
    """Two replicas of two ranks; with 1 to 3 prompts some ranks have none."""
    ranks = generate_everywhere(count, dp=2, replica=2)
    for first, second in ranks:
        assert torch.equal(first.prompt_index, second.prompt_index)
        assert torch.equal(first.tokens, second.tokens)
    index = torch.cat([replica[0].prompt_index for replica in ranks])
    sample = torch.cat([replica[0].sample_index for replica in ranks])
    assert index.tolist() == [prompt for prompt in range(count) for _ in range(3)]
    assert sample.tolist() == [0, 1, 2] * count
    tokens = torch.cat([replica[0].tokens for replica in ranks])[:, 0]
    assert tokens.tolist() == [PROMPTS[prompt].token_ids[0] for prompt in index.tolist()]


@pytest.mark.parametrize(
    ("kind", "seed", "places", "n"),
    [
        ({}, (8, 5), 0, 3),
        ({"greedy": True}, (8, 5), 0, 1),
        ({"draws": Draws(4, 1.0)}, (8, 5, EVALUATION, 0), 0, 4),
        ({"draws": Draws(2, 1.0, stream=9, first=40)}, (8, 5, EVALUATION, 9), 40, 2),
    ],
)
def test_seeds_follow_from_run_step_and_set(kind: dict[str, Any], seed: tuple[int, ...], places: int, n: int) -> None:
    """Only training has seeds of two words. Engines draw by places in the set; rows point into the part."""
    engine = CountingEngine()
    one = RolloutWorker(engine=engine, data_parallel=SingleRank(), replica=SingleRank(), n=3, seed=8)
    rows = one.generate(PROMPTS, step=5, **kind)
    assert engine.calls == [(seed, list(range(places, places + 7)), "greedy" in kind, n)]
    assert rows.prompt_index.tolist() == [index for index in range(7) for _ in range(n)]
