"""Hosts of a run's ranks, known by their tmpfs, and files sent between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mega_rl import disk
from mega_rl.checkpoint.memory.place import SHM
from mega_rl.disk import SaveError
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import first_failure
from mega_rl.parallel.comm import FilePart, GroupRanks, transfer
from mega_rl.protocols import Ranks
from mega_rl.untrusted import open_regular, read_at

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Host(NamedTuple):
    """The memory that a rank can write to."""

    key: str  # equal on two ranks if they share it
    name: str  # shown in messages
    shm: Path  # tmpfs of the host


def this_host() -> Host:
    """Return the host of this process. A container with its own /dev/shm counts as a host."""
    name = socket.gethostname()
    try:
        return Host(f"{BOOT_ID.read_text('ascii').strip()} {os.stat(SHM).st_dev}", name, SHM)
    except OSError:  # making a folder there reports the problem
        return Host(name, name, SHM)


@dataclass(frozen=True)
class Hosts:
    """Hosts of all ranks, numbered by their first ranks, as one rank sees them."""

    rank: int
    of_rank: tuple[int, ...]

    @classmethod
    def gather(cls, host: Host, ranks: Ranks) -> Hosts:
        """Return the hosts of all ranks; collective."""
        keys = ranks.gather_json(host.key)
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return cls(ranks.rank, tuple(numbers[key] for key in keys))

    @property
    def count(self) -> int:
        """Return the number of hosts."""
        return max(self.of_rank) + 1

    @property
    def own(self) -> int:
        """Return the number of this rank's host."""
        return self.of_rank[self.rank]

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first on its host, which makes and removes its folders."""
        return self.ranks_on(self.own)[0] == self.rank

    def ranks_on(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, of in enumerate(self.of_rank) if of == host]

    def replica_of(self, rank: int) -> int | None:
        """Return the next host's rank that copies a rank's shard; None on one host.

        With one host no copy is needed: what ends that host ends everything.
        """
        if self.count == 1:
            return None
        host = self.of_rank[rank]
        return self._one_of((host + 1) % self.count, self.ranks_on(host).index(rank))

    def reader_on(self, host: int, rank: int) -> int:
        """Return the rank on `host` that reads the shard of `rank`."""
        return rank if self.of_rank[rank] == host else self._one_of(host, rank)

    def _one_of(self, host: int, number: int) -> int:
        ranks = self.ranks_on(host)
        return ranks[number % len(ranks)]


class MemoryPlace(NamedTuple):
    """Place of a run's history in memory; only the host's folder differs between ranks."""

    history: str
    hosts: Hosts
    folder: Path  # on this host


def send_files(parts: Sequence[FilePart], ranks: Ranks, *, source: Path, target: Path) -> None:
    """Send parts of files in folder `source` into existing files in `target` on other hosts; collective.

    Raises RunError on all ranks.
    """
    assert isinstance(ranks, GroupRanks), "several hosts have several ranks"

    def read(part: FilePart, buffer: memoryview) -> None:
        path = source / part.file
        fd, _ = open_regular(path)
        try:
            data = read_at(fd, part.start, len(buffer), path)
        finally:
            os.close(fd)
        if len(data) != len(buffer):
            raise SaveError(f"{path}: ends before byte {part.start + len(buffer)}")
        buffer[:] = data

    def write(part: FilePart, buffer: memoryview) -> None:
        fd = disk.open_again(target / part.file)
        try:
            disk.write_at(fd, part.start, [buffer])
        finally:
            os.close(fd)

    failure = first_failure(transfer(parts, ranks, read=read, write=write), ranks)
    if failure is not None:
        raise RunError(failure)
