"""Stacks and memory of this host's ranks, collected while they still live. No torch.

py-spy reads the stacks from outside, of a stopped process too; where it may not, a rank that runs writes its own when
it gets a signal.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from mega_rl.errors import UserError, in_units
from mega_rl.health.heartbeat import STACKS_SIGNAL, dump_path
from mega_rl.health.processes import (
    STATES,
    ProcessState,
    catches,
    memory_limit,
    memory_of_host,
    process_state,
    resident_bytes,
    start_time,
)
from mega_rl.health.records import health_folder, read_record
from mega_rl.storage.strict_json import parse_object
from mega_rl.storage.untrusted import is_count, read_file

WITHIN_S = 10.0  # all of a host
ONE_S = 4.0  # of one try on one process
ANSWER_S = 1.0  # of faulthandler
AT_A_TIME = 4
MAX_BYTES = 262_144  # of the stacks of one rank
PY_SPY = "py-spy"


@dataclass(frozen=True)
class Stacks:
    """A rank's process as its host saw it."""

    state: ProcessState
    memory: str  # of process and host, in words
    text: str  # stacks of its threads, or why there are none

    @property
    def top(self) -> str:
        """Return the line that the main thread is at in this package, else its innermost one; empty without stacks.

        In py-spy's words, "DecodingLoop.run (mega_rl/rollout/embedded/decoding.py:91)".
        """
        lines = self.text.splitlines()
        threads = [i for i, line in enumerate(lines) if line.startswith("Thread ")]
        if not threads:
            return ""
        main = next((i for i in threads if '"MainThread"' in lines[i]), threads[0])
        stack = [line.strip()[:200] for line in takewhile(lambda line: line.startswith(" "), lines[main + 1 :])]
        return next((line for line in stack if "(mega_rl/" in line), next(iter(stack), ""))


def collect(run_dir: Path, processes: Mapping[int, int]) -> None:
    """Write state, memory and stacks of this host's ranks (rank -> pid) into the run's folder, within `WITHIN_S`.

    For the launcher of every node, before it kills ranks after a failure. An error of the file system is ignored.
    """
    deadline = time.monotonic() + WITHIN_S
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="stacks") as pool:
        list(pool.map(lambda one: _collect_one(run_dir, *one, deadline=deadline), processes.items()))


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return health_folder(run_dir) / f"stacks_{rank:05d}.txt"


def read_stacks(run_dir: Path, rank: int) -> Stacks | None:
    """Return what `collect` wrote of a rank, None without it or where it is damaged."""
    try:
        content = read_file(stacks_path(run_dir, rank), MAX_BYTES + 4096)
        head, _, text = content.partition(b"\n")
        raw = parse_object(head)
        state, memory = raw["state"], raw["memory"]
        letter, number, wait = state["state"], state["exit_signal"], state["wait"]
    except (UserError, ValueError, KeyError, TypeError):
        return None
    if (letter not in STATES and letter) or not is_count(number) or not isinstance(wait, str):
        return None
    if not isinstance(memory, str):
        return None
    printable = "".join(c if c.isprintable() or c == "\n" else " " for c in text.decode(errors="replace"))
    return Stacks(ProcessState(letter, number, wait[:100]), " ".join(memory[:400].split()), printable)


def stacks_of(run_dir: Path, rank: int, pid: int, state: ProcessState, *, deadline: float) -> str:
    """Return the stacks of a process of this host, or the reason why there are none, before `deadline` (monotonic)."""
    if not state.alive:
        return "no stacks: the process has ended"
    py_spy = find_py_spy()
    reasons = ["py-spy is not installed"] if py_spy is None else []
    # Stopped by a signal, or in the kernel, a process cannot be paused, and does not change while it is read.
    modes = [["--nonblocking"]] if state.stopped or state.state == "D" else [[], ["--nonblocking"]]
    for mode in modes if py_spy is not None else []:
        left_s = min(ONE_S, deadline - time.monotonic())
        if left_s <= 0:
            return "no stacks: there was no time"
        text, reason = _run_py_spy(str(py_spy), pid, mode, left_s)
        if text:
            return text
        reasons.append(reason)
    if state.stopped or state.state == "D":
        return f"no stacks: {'; '.join(reasons)}"
    return _ask(run_dir, rank, pid) or f"no stacks: {'; '.join(reasons)}; the rank did not answer a signal"


def find_py_spy() -> Path | None:
    """Return the program, beside this Python or on the path; None without it."""
    beside = Path(sys.executable).with_name(PY_SPY)
    if os.access(beside, os.X_OK):
        return beside
    on_path = shutil.which(PY_SPY)
    return None if on_path is None else Path(on_path)


def _collect_one(run_dir: Path, rank: int, pid: int, *, deadline: float) -> None:
    state = process_state(pid)
    write_stacks(run_dir, rank, pid, state, stacks_of(run_dir, rank, pid, state, deadline=deadline))


def write_stacks(run_dir: Path, rank: int, pid: int, state: ProcessState, text: str) -> None:
    """Write the stacks of a rank and its memory into the run's folder; an error of the file system is ignored."""
    head = {"pid": pid, "state": asdict(state), "memory": _memory(pid)}
    content = json.dumps(head).encode() + b"\n" + text.encode(errors="replace")[:MAX_BYTES]
    path = stacks_path(run_dir, rank)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "wb") as file:
            file.write(content)


def _memory(pid: int) -> str:
    available, total = memory_of_host()
    used, limit = memory_limit()
    of_group = f", control group {in_units(used)} of {in_units(limit)}" if limit else ""
    return f"process {in_units(resident_bytes(pid))}, host {in_units(available)} free of {in_units(total)}{of_group}"


def _run_py_spy(program: str, pid: int, mode: list[str], within_s: float) -> tuple[str, str]:
    """Return (stacks, "") or ("", reason)."""
    try:
        done = subprocess.run(
            [program, "dump", *mode, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy gave no answer in {within_s:.0f} s"
    except OSError as error:
        return "", f"py-spy: {error.strerror}"
    text = done.stdout.decode(errors="replace")
    if done.returncode == 0 and "Thread" in text:
        return text[text.index("Thread") :], ""  # without the command line
    lines = done.stderr.decode(errors="replace").splitlines()
    cause = next((line.strip() for line in lines if line.strip().startswith("1:")), "") or " ".join(lines[:1])
    return "", f"py-spy: {cause}"


def _ask(run_dir: Path, rank: int, pid: int) -> str:
    """Return the stacks that a rank writes itself when it gets a signal, empty without an answer.

    Only a rank with a record of this very process has set a handler; the signal would end any other.
    """
    record = read_record(run_dir, rank)
    path = dump_path(run_dir, rank)
    before = path.stat().st_size if path.exists() else 0
    try:
        process = os.pidfd_open(pid)  # before the checks: it stays this process, whoever gets the number later
    except OSError:
        return ""
    try:
        is_of_rank = record is not None and record.pid == pid and record.started == start_time(pid) != 0
        if not is_of_rank or not catches(pid, STACKS_SIGNAL):
            return ""
        signal.pidfd_send_signal(process, STACKS_SIGNAL)
    except OSError:
        return ""
    finally:
        os.close(process)
    end = time.monotonic() + ANSWER_S
    text = ""
    while time.monotonic() < end:
        time.sleep(0.05)
        with suppress(UserError):
            written = read_file(path, 16 * MAX_BYTES)[before:].decode(errors="replace")
            if written and written == text:
                return written
            text = written
    return text
