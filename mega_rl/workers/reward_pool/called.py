"""Note of the reward function that a worker is in, in memory that it shares with the rank: it outlives a crash."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

NOTE = struct.Struct("<HI")  # number of the name, from 1, 0 for none; how many notes there were


class CalledFunction:
    """One of some names, in shared memory."""

    def __init__(self, descriptor: int, names: Sequence[str]) -> None:
        """descriptor: an open file of `create`, which may be closed after this."""
        self._names = tuple(names)
        self._memory = mmap.mmap(descriptor, NOTE.size)

    @staticmethod
    def create() -> int:
        """Return the descriptor of new memory, which has no name."""
        descriptor = os.memfd_create("called function", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, NOTE.size)
        return descriptor

    def set(self, name: str) -> None:
        """Note one of the names, or "" for none."""
        number = self._names.index(name) + 1 if name else 0
        self._memory[:] = NOTE.pack(number, (self.count() + 1) % 2**32)

    def get(self) -> str:
        """Return the name that was noted last; "" for none, and for what another has written."""
        number, _ = NOTE.unpack(self._memory[:])
        return self._names[number - 1] if 0 < number <= len(self._names) else ""

    def count(self) -> int:
        """Return how many names were noted, modulo 2^32."""
        return int(NOTE.unpack(self._memory[:])[1])

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
