"""Metrics of all ranks in rank order: scalars and lists, on every rank.

The reference is the same numbers made on one rank. Sixteen-digit numbers travel as they are: no tolerance.
"""

from __future__ import annotations

import math

import pytest

from mega_rl.errors import RunError
from mega_rl.parallel.comm import GroupRanks, gather_metrics
from tests.special_distributed.program import finish, group_of_mine, pass_on_four_ranks, world


def metrics(rank: int) -> dict[str, float | list[float]]:
    """Numbers that say whose they are; every rank enters them in another order and has another number of losses."""
    found: list[tuple[str, float | list[float]]] = [
        ("actor/loss", [rank + 0.1 * i for i in range(3 * rank)]),  # none on rank 0
        ("actor/grad_norm", 1.0 / (rank + 3)),
        ("rollout/sequences", 10 + rank),
        ("kl/ref", [math.inf, -1e-300 * rank]),
    ]
    return dict(found[rank % 4 :] + found[: rank % 4])


def gathered_in_rank_order(ranks: GroupRanks, members: list[int]) -> None:
    """`members` are the world's ranks in the group, in its order."""
    assert ranks.size == len(members)
    mine = members[ranks.rank]
    given = metrics(mine)
    found = gather_metrics(given, ranks)
    assert given == metrics(mine), "the input changed"
    expected = {
        "actor/loss": [member + 0.1 * i for member in members for i in range(3 * member)],
        "actor/grad_norm": [1.0 / (member + 3) for member in members],
        "rollout/sequences": [10 + member for member in members],
        "kl/ref": [number for member in members for number in (math.inf, -1e-300 * member)],
    }
    assert found == expected, f"{found}, expected {expected}"
    assert gather_metrics({}, ranks) == {}
    not_a_number = gather_metrics({"loss": math.nan if ranks.rank else 1.0}, ranks)["loss"]
    assert [math.isnan(number) for number in not_a_number] == [False] + [True] * (ranks.size - 1)


def a_name_that_one_rank_lacks_is_told_to_all(ranks: GroupRanks) -> None:
    given = {"a": 1.0, "b": 2.0} if ranks.rank != 2 else {"a": 1.0, "c": [3.0]}
    with pytest.raises(RunError) as raised:
        gather_metrics(given, ranks)
    assert str(raised.value).splitlines() == [
        "metric 'b' is not the same on all ranks: there on rank(s) 0, 1, 3; missing on rank(s) 2",
        "metric 'c' is not the same on all ranks: missing on rank(s) 0, 1, 3; there on rank(s) 2",
    ]
    assert gather_metrics({"after": ranks.rank}, ranks) == {"after": [0, 1, 2, 3]}


def main() -> None:
    with world() as ranks:
        gathered_in_rank_order(ranks, [0, 1, 2, 3])
        pairs = [[0, 2], [1, 3]]  # data parallelism beside tensor parallelism
        gathered_in_rank_order(GroupRanks(group_of_mine(pairs)), pairs[ranks.rank % 2])
        a_name_that_one_rank_lacks_is_told_to_all(ranks)
        finish(ranks)


def test_on_four_ranks() -> None:
    pass_on_four_ranks(__file__)


if __name__ == "__main__":
    main()
