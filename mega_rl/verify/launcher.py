"""Run a task of a verification on ranks of this machine, with a deadline.

Each rank is `python -m mega_rl.verify.launcher TASK`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError, name_of_signal
from mega_rl.operations.launcher.ranks import LOOPBACK, Assignment, environment, listen
from mega_rl.parallel.accelerator import prepare
from mega_rl.parallel.accelerator.base import HIDDEN
from mega_rl.processes import DEVNULL, STDOUT, Child
from mega_rl.tracking import progress

log = logging.getLogger(__name__)

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
    """Run `run_task` of a module below `mega_rl.verify`; its files and the ranks' output go to `folder`.

    arguments: in JSON's types. label: the work in words. watch: called while the ranks run. Raises as `run_ranks`.
    """
    task = folder / "task.json"
    task.write_text(json.dumps({name: arguments}), encoding="utf-8")
    title = f"{ranks} rank{'s' * (ranks > 1)}: {label}"
    log.info("%s", title)
    with progress.phase(title):
        command = ["mega_rl.verify.launcher", str(task)]
        run_ranks(command, ranks=ranks, logs=folder, timeout_s=timeout_s, use_gpus=use_gpus, watch=watch)


def run_ranks(
    command: list[str],
    *,
    ranks: int,
    logs: Path,
    timeout_s: float,
    use_gpus: bool,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run a Python module on ranks of one node; each writes to a file of `logs`.

    Raises UserError if the first rank that fails reports a user's mistake, RanksFailed for any other failure and at the
    deadline. No rank is alive afterwards.
    """
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    # This process keeps the store while ranks run.
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    base = {"OMP_NUM_THREADS": "1", **os.environ, **({} if use_gpus else HIDDEN)}
    children: list[Child] = []
    try:
        for rank in range(ranks):
            variables = environment(Assignment(0, 0, 1, ranks, LOOPBACK, store.port), rank, base)
            with (logs / f"rank{rank}.log").open("wb") as output:
                streams = (DEVNULL, output, STDOUT)
                module = python_module(*command)
                children.append(Child(f"rank {rank}", module, dies_by=signal.SIGTERM, streams=streams, env=variables))
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
    lines = [line for line in said.splitlines() if line.strip()] or [f"ended with exit code {code}"]
    places = re.findall(r'File "[^"]*/(mega_rl/[^"]+)", line (\d+), in (\w+)', said)
    where = f" ({places[-1][0]}:{places[-1][1]}, in {places[-1][2]})" if places else ""
    last = re.sub(rf"^(\[rank{rank}\]: |error: )", "", lines[-1])
    return f"rank {rank}: {last}{where}"


def main(path: str) -> int:
    """Run the task in a file; returns the exit code, 2 for a user's mistake."""
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        accelerator = prepare("auto")
        ((name, arguments),) = json.loads(Path(path).read_text(encoding="utf-8")).items()
        module = import_module(f"mega_rl.verify.{name}")  # imports Megatron-Core
        module.run_task(arguments, accelerator)
    except UserError as error:
        sys.stderr.write("error: " + " ".join(str(error).split("\n")) + "\n")
        return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
