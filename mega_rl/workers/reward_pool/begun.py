"""Table of responses whose scoring has begun before they are asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")

KEPT_BATCHES = 4  # generation is one step ahead of scoring, and a validation may come between; others are left over


class Begun(Generic[Value]):
    """Values by key, several of one key in their order; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, deque[tuple[int, Value]]] = {}
        self._batch = 0

    def add(self, key: Hashable, value: Value) -> None:
        """Add one value."""
        with self._lock:
            self._entries.setdefault(key, deque()).append((self._batch, value))

    def take(self, key: Hashable) -> Value | None:
        """Return and remove the first value of a key; None without one."""
        with self._lock:
            entries = self._entries.get(key)
            if entries is None:
                return None
            _, value = entries.popleft()
            if not entries:
                del self._entries[key]
            return value

    def end_batch(self) -> None:
        """Drop what none of the last batches has taken: samples of a generation that failed."""
        with self._lock:
            self._batch += 1
            oldest = self._batch - KEPT_BATCHES
            kept = {
                key: deque(entry for entry in entries if entry[0] > oldest) for key, entries in self._entries.items()
            }
            self._entries = {key: entries for key, entries in kept.items() if entries}
