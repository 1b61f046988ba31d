"""Bytes of a download, shown as a phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mega_rl.tracking import progress


class Meter:
    """Bytes of one download, counted from several threads."""

    def __init__(self, phase: progress.Phase) -> None:
        self._phase = phase
        self._lock = threading.Lock()
        self._total = self._done = 0

    def expect(self, num_bytes: int) -> None:
        """Add to the size of the whole."""
        with self._lock:
            self._total += num_bytes
            self._phase.report(self._done, self._total or None)

    def advance(self, num_bytes: float) -> None:
        """Count bytes that have arrived, or (negative) that must come again."""
        with self._lock:
            self._done += int(num_bytes)
            self._phase.report(self._done)

    def adapter(self) -> type:
        """Return a class for `snapshot_download(tqdm_class=...)` that feeds this meter."""
        return type("Adapter", (_Adapter,), {"meter": self})


class _Adapter:
    """Subset of tqdm that huggingface_hub calls; only its bar of bytes written to disk feeds the meter."""

    meter: Meter

    def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **settings: Any) -> None:
        # One bar counts files, one the bytes received, one the bytes written: only the last knows the real total.
        self._counts = settings.get("unit") == "B" and not str(settings.get("desc", "")).startswith("Downloading")
        self.n = initial
        self._total = 0
        self.total = total or 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, total: int | None) -> None:
        grown = (total or 0) - self._total
        self._total = total or 0
        if self._counts:
            self.meter.expect(grown)

    @property
    def format_dict(self) -> dict[str, Any]:
        return {"rate": None}

    def update(self, num: float | None = 1) -> None:
        self.n += int(num or 0)
        if self._counts:
            self.meter.advance(num or 0)

    def __enter__(self) -> _Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the meter holds no resources."""

    def close(self) -> None:
        """Do nothing: the meter holds no resources."""

    def refresh(self, *_: Any, **__: Any) -> None:
        """Do nothing: the live line shows the bytes."""

    set_description = set_description_str = set_postfix_str = refresh


@contextmanager
def metered(label: str, *, announce: bool) -> Iterator[Meter]:
    """Show a download while the block runs. announce: the log gets a line of it."""
    with progress.phase(f"downloading {label}", unit="B", announce=announce) as phase:
        yield Meter(phase)
