"""One rank works, the others learn what came of it, however long it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from mega_rl.errors import RunError, UserError


class Messages(Protocol):
    """The part of `mega_rl.parallel.comm.GroupRanks` that is needed."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any: ...


def result_of(ranks: Messages, work: Callable[[], Any], *, source: int = 0, beat_s: float = 5.0) -> Any:
    """What `work`, called on rank `source` alone, returns (JSON); collective.

    While it runs the ranks meet every `beat_s` seconds, so the deadline of a collective is no bound on the work, which
    must have one of its own, and a dead rank is noticed. `work` runs on a thread of its own and may do no collective.

    Raises:
        RunError: on all ranks, when the work raised; on `source` the error itself, whatever it is.
    """
    if ranks.rank != source:
        while True:
            told = ranks.broadcast_json(None, source=source)
            if "error" in told:
                error = UserError if told["user"] else RunError
                raise error(told["error"])
            if "result" in told:
                return told["result"]
    done: dict[str, Any] = {}

    def run() -> None:
        try:
            done["result"] = work()
        except BaseException as error:
            done["error"] = error

    thread = threading.Thread(target=run, name="result_of", daemon=True)
    thread.start()
    while True:
        thread.join(beat_s)
        if thread.is_alive():
            ranks.broadcast_json({}, source=source)
        elif "error" in done:
            error = done["error"]
            ranks.broadcast_json({"error": str(error), "user": isinstance(error, UserError)}, source=source)
            raise error
        else:
            return ranks.broadcast_json({"result": done["result"]}, source=source)["result"]
