"""Metrics of all ranks in rank order: scalars and lists, on every rank.

The reference is the same numbers made on one rank. Sixteen-digit numbers travel as they are: no tolerance.
"""

from __future__ import annotations

import math

import pytest

from mega_rl.parallel.comm import GroupRanks
from tests.helpers.selection import FULL
from tests.special_distributed.program import finish, group_of_mine, pass_under_torchrun, world


def metrics(rank: int) -> dict[str, float | list[float]]:
    """Numbers that say whose they are; every rank enters them in another order and has another number of losses."""
    actual: list[tuple[str, float | list[float]]] = [
        ("actor/loss", [rank + 0.1 * i for i in range(3 * rank)]),  # none on rank 0
        ("actor/grad_norm", 1.0 / (rank + 3)),
        ("rollout/sequences", 10 + rank),
        ("kl/ref", [math.inf, -1e-300 * rank]),
    ]
    return dict(actual[rank % 4 :] + actual[: rank % 4])


def gathered_in_rank_order(ranks: GroupRanks, members: list[int]) -> None:
    """`members` are the world's ranks in the group, in its order."""
    assert ranks.size == len(members)
    mine = members[ranks.rank]
    given = metrics(mine)
    gathered = ranks.gather_json(given)
    assert given == metrics(mine), "the input changed"
    expected = [metrics(member) for member in members]
    assert gathered == expected, f"{gathered}, expected {expected}"
    assert ranks.gather_json({}) == [{}] * ranks.size
    not_a_number = ranks.gather_json({"loss": math.nan if ranks.rank else 1.0})
    assert [math.isnan(one["loss"]) for one in not_a_number] == [False] + [True] * (ranks.size - 1)


def main() -> None:
    with world() as ranks:
        gathered_in_rank_order(ranks, [0, 1, 2, 3])
        pairs = [[0, 2], [1, 3]]  # data parallelism beside tensor parallelism
        gathered_in_rank_order(GroupRanks(group_of_mine(pairs)), pairs[ranks.rank % 2])
        finish(ranks)


@pytest.mark.skipif(not FULL, reason="make test-full: parallel/test_comm.py has two ranks")
def test_under_torchrun() -> None:
    pass_under_torchrun(__file__)


if __name__ == "__main__":
    main()
