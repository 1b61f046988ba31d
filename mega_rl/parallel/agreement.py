"""Agreement of a group's ranks on a JSON value, failure or result; raising together."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar, cast

import torch

from mega_rl.config.schema import Origin
from mega_rl.errors import HungError, RunError, StalledError, UserError
from mega_rl.processes import Running
from mega_rl.protocols import Ranks

log = logging.getLogger(__name__)

INTERRUPT = signal.SIGRTMIN + 5  # interrupts a main thread that hangs; users' code and libraries use the alarms
LAST_GRACE_S = 30.0  # for hung work to end once it has been interrupted

Result = TypeVar("Result")


def broadcast_json(value: Any, ranks: Ranks, *, source: int = 0) -> Any:
    """Return the `value` of group rank `source` on every rank, sent as JSON; collective."""
    text = json.dumps(value if ranks.rank == source else None).encode()
    size = int(ranks.broadcast(torch.tensor(len(text)), source=source))
    sent = torch.zeros(size, dtype=torch.uint8)
    if ranks.rank == source:
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return json.loads(bytes(ranks.broadcast(sent, source=source).tolist()))


def first_failure(message: str | None, ranks: Ranks) -> str | None:
    """Return the message of the lowest rank that has one, None if no rank has; collective."""
    messages, _ = all_failures(message, ranks, most=1)
    return next(iter(messages.values()), None)


def first_names(names: list[str] | None, ranks: Ranks) -> list[str] | None:
    """Return the list of names of the lowest rank that has one, else None; collective."""
    text = first_failure(None if names is None else json.dumps(names), ranks)
    first: list[str] | None = None if text is None else json.loads(text)
    return first


def all_failures(message: str | None, ranks: Ranks, *, most: int) -> tuple[dict[int, str], int]:
    """Return (messages of the lowest `most` failing ranks by rank, number of failing ranks); collective.

    One all-reduce while no rank has a message, then one broadcast per message.
    """
    own = b"" if message is None else message.encode(errors="backslashreplace") or b"?"
    sizes = torch.zeros(ranks.size, dtype=torch.int64)
    sizes[ranks.rank] = len(own)
    sizes = ranks.sum(sizes)
    failing = [int(rank) for rank in sizes.nonzero().flatten().tolist()]
    messages = {}
    for rank in failing[:most]:
        sent = torch.tensor(list(own) if rank == ranks.rank else [0] * int(sizes[rank]), dtype=torch.uint8)
        messages[rank] = bytes(ranks.broadcast(sent, source=rank).tolist()).decode(errors="replace")
    return messages, len(failing)


def failure_of(work: Callable[[], None], ranks: Ranks) -> str | None:
    """Call `work` on every rank; return the lowest failing rank's message, None without failures; collective.

    A failure is a RunError, UserError or OSError. `work` itself does no collective.
    """
    message = None
    try:
        work()
    except (RunError, UserError, OSError) as error:
        message = str(error)
    return first_failure(message, ranks)


def all_succeed(work: Callable[[], None], ranks: Ranks, *, error: type[RunError] | type[UserError] = RunError) -> None:
    """Call `work` on every rank, as `failure_of`; raise the failure as an `error` on all ranks; collective."""
    message = failure_of(work, ranks)
    if message is not None:
        raise error(message)


def raise_together(failure: Exception | None, ranks: Ranks, *, error: type[RunError] | type[UserError]) -> None:
    """Raise on every rank if any rank has failed, else return; collective.

    A rank that has failed raises its own failure, the others an `error` with the lowest failed rank's message. Without
    it they would wait for the failed one until a collective's deadline.
    """
    message = first_failure(None if failure is None else str(failure), ranks)
    if message is not None:
        raise failure or error(message)


def merge_failures(own: Mapping[int, str], ranks: Ranks) -> dict[int, str]:
    """Return every rank's failures (number of a thing -> reason) merged, equal on all ranks; collective.

    Where several ranks give a reason for one thing, the lowest rank's counts.
    """
    texts, _ = all_failures(json.dumps(list(own.items())) if own else None, ranks, most=ranks.size)
    merged: dict[int, str] = {}
    for text in texts.values():
        merged = {int(number): str(reason) for number, reason in json.loads(text)} | merged
    return dict(sorted(merged.items()))


def run_on_one(work: Callable[[], Any], ranks: Ranks, *, source: int = 0, beat_s: float = 5.0) -> Any:
    """Call `work` only on group rank `source`, like `run_on_all`; return its JSON result everywhere; collective."""
    result = run_on_all(lambda: work() if ranks.rank == source else None, ranks, beat_s=beat_s)
    return broadcast_json(result, ranks, source=source)


def run_on_all(
    work: Callable[[], Result], ranks: Ranks, *, beat_s: float = 5.0, cancel: Callable[[], None] | None = None
) -> Result:
    """Call `work` on every rank; return this rank's result once all have ended; collective.

    Meanwhile the ranks meet every `beat_s` seconds: a collective's deadline does not limit the work, and a dead rank is
    noticed. `work` needs its own deadline, runs in its own thread and may do no collective.

    cancel: called on ranks that still work once the work of another has failed, to end theirs soon; an error of work
    that was cancelled is not reported.

    Raises RunError: on all ranks, when the work of any raised (UserError for a UserError), with the message of the
    lowest rank that failed; on a rank that failed its own error.
    """
    running = Running(work, name="run_on_all")
    cancelled = False
    while True:
        works = running.wait(beat_s)
        failed = not works and running.error is not None and not cancelled
        any_works, any_failed = ranks.max(torch.tensor([int(works), int(failed)])).tolist()
        if not any_works:
            break
        if works and any_failed and cancel is not None and not cancelled:
            cancelled = True
            cancel()
    own = None if cancelled else running.error
    described = None if own is None else json.dumps({"error": str(own), "user": isinstance(own, UserError)})
    failure = first_failure(described, ranks)
    if own is not None:
        raise own
    if failure is not None:
        state = json.loads(failure)
        error = UserError if state["user"] else RunError
        raise error(state["error"])
    return cast(Result, running.result)


def run_beside_meetings(
    work: Callable[[], Result], ranks: Ranks, *, stalled: Callable[[], str | None], beat_s: float = 5.0
) -> Result:
    """Call `work` on every rank's calling thread; return its result once all have ended; collective.

    Unlike `run_on_all`, which it is for otherwise, it suits work that sets signals, which only the main thread can: the
    meetings are on another. stalled: called there; says in words that this rank's work counts as hung, and of what.

    Stalled work of a main thread is interrupted by an exception. Where that does not end it, as in compiled code, this
    process ends, with the code of a RunError.

    Raises StalledError: on the ranks whose work has ended, when some rank's is stalled, with its message; HungError: on
    the stalled rank, at the line that it is at, unless that is in C code.
    """
    ended = threading.Event()
    with _interruptible() as interrupt:
        meetings = Running(
            lambda: _meet_until_ended(ended, ranks, stalled, beat_s, interrupt), name="run_beside_meetings"
        )
        try:
            result = work()
        finally:
            ended.set()
    while meetings.wait(beat_s):  # the others' work; each of their waits has its deadline
        pass
    meetings.outcome()
    return result


def _meet_until_ended(
    ended: threading.Event,
    ranks: Ranks,
    stalled: Callable[[], str | None],
    beat_s: float,
    interrupt: Callable[[str], None] | None,
) -> None:
    """Meet every `beat_s` seconds until all work has ended; raises StalledError on all when one stalls."""
    while True:
        running = not ended.wait(beat_s)
        reason = stalled() if running else None
        state = ranks.max(torch.tensor([int(running), int(reason is not None)])).tolist()
        if state[1]:
            message = first_failure(reason, ranks)
            if reason is not None:
                log.error("%s", reason)  # in case that the interrupt does not reach the work
                _end_work(ended, reason, interrupt)
            raise StalledError(message)
        if not state[0]:
            return


def _end_work(ended: threading.Event, reason: str, interrupt: Callable[[str], None] | None) -> None:
    """Interrupt work that hangs, and end the process if that does not help."""
    if interrupt is None:
        return
    interrupt(reason)
    if not ended.wait(LAST_GRACE_S):
        log.error("the work goes on %g s after it was interrupted: this process ends", LAST_GRACE_S)
        logging.shutdown()
        os._exit(RunError.exit_code)


@contextmanager
def _interruptible() -> Iterator[Callable[[str], None] | None]:
    """Yield a function that raises HungError in the block; None outside the main thread."""
    main, reasons = threading.main_thread(), list[str]()
    if threading.current_thread() is not main or main.ident is None:
        yield None
        return
    ident, lock, is_over = main.ident, threading.Lock(), False

    def raise_hung(number: int, frame: FrameType | None) -> None:
        if reasons:  # else it is a signal of somebody else
            raise HungError(reasons[0])

    def interrupt(reason: str) -> None:
        with lock:
            if not is_over:  # without the handler the signal would end the process
                reasons.append(reason)
                signal.pthread_kill(ident, INTERRUPT)

    previous = signal.signal(INTERRUPT, raise_hung)
    try:
        yield interrupt
    finally:
        with lock:
            is_over = True
        signal.signal(INTERRUPT, previous)


def check_commits(origins: Mapping[str, Origin], everyone: Ranks) -> None:
    """Raise RunError on every rank unless all nodes resolved names to the same commits; collective.

    `origins` are this rank's pinned names by setting.
    """
    own, failure = json.loads(json.dumps(origins)), None
    if broadcast_json(own, everyone) != own:
        read = ", ".join(f"{key}={json.dumps(name)}" for key, name in origins.items()) or "local files alone"
        failure = RunError(
            f"rank {everyone.rank} reads other models or data than rank 0: {read}; give names their commit as "
            "name@commit, and local files the same path on all nodes"
        )
    raise_together(failure, everyone, error=RunError)
