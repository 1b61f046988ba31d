"""Work on threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Running(Generic[Result]):
    """Work on a thread of its own, which neither an exception nor a signal in the caller's thread waits for.

    Once it has ended, `error` is the exception that it raised, None without one, and `result` what it returned.
    """

    def __init__(self, work: Callable[[], Result], *, name: str) -> None:
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether the work is still running after at most `seconds`."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self.result = work()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self.error = error
