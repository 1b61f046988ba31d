"""Run a task of a verification on ranks of this machine, with a deadline.

The forms of `mega-rl verify` and `mega-rl replay` all work like this: the command writes a task, the ranks measure and
write their answers to a folder, and the command compares and prints.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError, name_of_signal
from mega_rl.operations.launcher.ranks import Assignment, environment
from mega_rl.operations.launcher.store import LOOPBACK, listen
from mega_rl.parallel.accelerator.gpus import HIDDEN
from mega_rl.processes import DEVNULL, STDOUT, Child
from mega_rl.tracking import progress
from mega_rl.verify.plan import PHASE

log = logging.getLogger(__name__)

RANK = "mega_rl.verify.rank"
GRACE_S = 2.0  # after a first failure, time for the others to report theirs
POLL_S = 0.05


class RanksFailed(RunError):
    """A rank failed, died or did not end in time."""


def run_task(
    name: str,
    arguments: object,
    folder: Path,
    *,
    label: str,
    ranks: int,
    timeout_s: float,
    use_gpus: bool = False,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run a task of `mega_rl.verify.tasks`; its files and the ranks' output go to `folder`.

    arguments: of the task, as JSON holds them. label: the work in words. watch: see `run_ranks`.

    Raises UserError and RanksFailed as `run_ranks` does.
    """
    task, phase_file = folder / "task.json", folder / PHASE
    task.write_text(json.dumps({name: arguments}), encoding="utf-8")
    phase_file.unlink(missing_ok=True)
    log.info("%d rank%s: %s", ranks, "s" * (ranks > 1), label)
    with progress.phase(f"starting {ranks} rank{'s' * (ranks > 1)}") as phase:

        def look() -> None:
            if phase_file.exists():
                phase.name = phase_file.read_text(encoding="utf-8") or phase.name
            watch()

        run_ranks(RANK, [str(task)], ranks=ranks, logs=folder, timeout_s=timeout_s, use_gpus=use_gpus, watch=look)


def run_ranks(
    module: str,
    arguments: list[str],
    *,
    ranks: int,
    logs: Path,
    timeout_s: float,
    use_gpus: bool,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run `python -m module arguments` on that many ranks; each writes to a file of `logs`.

    watch: called every POLL_S seconds while they run.

    Raises UserError if the first rank that fails reports a user's mistake, RanksFailed for any other failure and at the
    deadline. No rank is alive afterwards.
    """
    store = _store()  # this process keeps it while ranks run
    children: list[Child] = []
    try:
        for rank in range(ranks):
            variables = _environment(rank, ranks, store.port, use_gpus=use_gpus)
            children.append(_start(rank, [module, *arguments], variables, log=logs / f"rank{rank}.log"))
        first = _wait(children, timeout_s=timeout_s, watch=watch)
        waiting = [rank for rank, child in enumerate(children) if child.exit_code is None]
    finally:
        for child in children:
            child.end()
    if first is not None:
        code = children[first].wait()
        raise (UserError if code == UserError.exit_code else RanksFailed)(_last_words(first, code, logs))
    if waiting:
        raise RanksFailed(f"rank(s) {waiting} did not end within {timeout_s:g} s")


def _start(rank: int, command: Sequence[str], variables: Mapping[str, str], *, log: Path) -> Child:
    """Start a Python module with its arguments, its output in `log`."""
    with log.open("wb") as output:
        streams = (DEVNULL, output, STDOUT)
        return Child(f"rank {rank}", python_module(*command), dies_by=signal.SIGTERM, streams=streams, env=variables)


def _store() -> TCPStore:
    """Return a store that listens on the loopback interface only."""
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _environment(rank: int, ranks: int, port: int, *, use_gpus: bool) -> Mapping[str, str]:
    """Return a rank's environment: one node, one thread unless the user says otherwise."""
    base = {"OMP_NUM_THREADS": "1", **os.environ, **({} if use_gpus else HIDDEN)}
    return environment(Assignment(0, 0, 1, ranks, LOOPBACK, port), rank, base)


def _wait(children: list[Child], *, timeout_s: float, watch: Callable[[], None]) -> int | None:
    """Wait for all ranks, at most `GRACE_S` after a failure; return the first that failed."""
    deadline = time.monotonic() + timeout_s
    first = None
    while time.monotonic() < deadline:
        codes = [child.exit_code for child in children]
        if first is None:
            first = next((rank for rank, code in enumerate(codes) if code), None)
            if first is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if None not in codes:
            break
        watch()
        time.sleep(POLL_S)
    return first


def _last_words(rank: int, code: int, logs: Path) -> str:
    """Return why a rank failed: its last line, and an exception's place in this package."""
    if code < 0:
        return f"rank {rank} died of {name_of_signal(-code)}"
    said = (logs / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in said.splitlines() if line.strip()]
    if not lines:
        return f"rank {rank} ended with exit code {code}"
    places = re.findall(r'File "[^"]*/(mega_rl/[^"]+)", line (\d+), in (\w+)', said)
    where = f" ({places[-1][0]}:{places[-1][1]}, in {places[-1][2]})" if places else ""
    last = re.sub(rf"^(\[rank{rank}\]: |error: )", "", lines[-1])
    return f"rank {rank}: {last}{where}"
