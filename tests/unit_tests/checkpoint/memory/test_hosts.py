"""Which ranks share a host, and which rank keeps whose copy."""

from __future__ import annotations

from mega_rl.checkpoint.memory.hosts import Hosts, this_host

THREE = Hosts(rank=3, of_rank=(0, 0, 0, 1, 2, 2))


def test_copies_go_to_the_next_host_and_around() -> None:
    """Spread over its ranks, where it has fewer, too."""
    assert [THREE.replica_of(rank) for rank in range(6)] == [3, 3, 3, 4, 0, 1]


def test_shard_is_read_by_owner_or_copy_holder() -> None:
    assert THREE.reader_on(2, 4) == 4
    assert [THREE.reader_on(1, rank) for rank in range(3)] == [3, 3, 3]
    assert (THREE.own, THREE.is_first, THREE.ranks_on(2)) == (1, True, [4, 5])


def test_hosts_are_numbered_by_their_first_ranks() -> None:
    class Answers:
        rank, size = 1, 4

        def gather_json(self, value: object) -> list[str]:
            return ["x", "y", "x", "z"]

    hosts = Hosts.gather(this_host(), Answers())  # type: ignore[arg-type]
    assert (hosts.of_rank, hosts.count, hosts.own) == ((0, 1, 0, 2), 3, 1)
