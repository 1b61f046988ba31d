"""Collect stacks and memory of this host's ranks while they live.

py-spy reads the stacks from outside, even of a stopped process. Without it, a rank writes its stacks on a signal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

import psutil

from mega_rl.errors import UserError, in_units
from mega_rl.tracking.health.heartbeat import STACKS_SIGNAL, dump_path
from mega_rl.tracking.health.process_state import STATES, ProcessState, catches, memory_limit, process_state, start_time
from mega_rl.tracking.health.records import health_folder, load_record
from mega_rl.untrusted import parse_object, read_file, read_record

WITHIN_S = 10.0  # for all ranks of a host
ONE_S = 4.0  # for one try on one process
ANSWER_S = 1.0  # for faulthandler
AT_A_TIME = 4
MAX_BYTES = 262_144  # stacks of one rank


@dataclass(frozen=True)
class Stacks:
    """State, memory and stacks of a rank's process."""

    state: ProcessState
    memory: str  # memory of process and host, in words
    text: str = ""  # stacks of its threads, or the reason why there are none

    @property
    def top(self) -> str:
        """Return the main thread's innermost line in this package, else its innermost line; empty without stacks.

        The words are py-spy's: "DecodingLoop.run (mega_rl/rollout/embedded/decoding.py:91)".
        """
        lines = self.text.splitlines()
        threads = [i for i, line in enumerate(lines) if line.startswith("Thread ")]
        if not threads:
            return ""
        main = next((i for i in threads if '"MainThread"' in lines[i]), threads[0])
        stack = [line.strip()[:200] for line in takewhile(lambda line: line.startswith(" "), lines[main + 1 :])]
        return next((line for line in stack if "(mega_rl/" in line), next(iter(stack), ""))


def collect(run_dir: Path, processes: Mapping[int, int]) -> None:
    """Write state, memory and stacks of this host's ranks (rank -> pid), within `WITHIN_S`.

    The launcher of every node calls it before it kills ranks after a failure. Ignores errors of the file system.
    """
    deadline = time.monotonic() + WITHIN_S

    def collect_one(rank: int) -> None:
        pid = processes[rank]
        state = process_state(pid)
        write_stacks(run_dir, rank, pid, state, stacks_of(run_dir, rank, pid, state, deadline=deadline))

    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="stacks") as pool:
        list(pool.map(collect_one, processes))


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return health_folder(run_dir) / f"stacks_{rank:05d}.txt"


def read_stacks(run_dir: Path, rank: int) -> Stacks | None:
    """Return the stacks that `collect` wrote for a rank; None without readable ones."""
    try:
        content = read_file(stacks_path(run_dir, rank), MAX_BYTES + 4096)
        head, _, text = content.partition(b"\n")
        stacks = read_record(Stacks, {**parse_object(head), "text": ""})
    except (UserError, ValueError):
        return None
    if stacks.state.state not in ("", *STATES):
        return None
    return replace(
        stacks, text="".join(c if c.isprintable() or c == "\n" else " " for c in text.decode(errors="replace"))
    )


def stacks_of(run_dir: Path, rank: int, pid: int, state: ProcessState, *, deadline: float) -> str:
    """Return the stacks of a process of this host, or why there are none.

    deadline: a time of the monotonic clock."""
    if not state.alive:
        return "no stacks: the process has ended"
    py_spy = find_py_spy()
    reasons = ["py-spy is not installed"] if py_spy is None else []
    # A stopped process, or one in the kernel, cannot be paused, and does not change while it is read.
    stands_still = state.stopped or state.state == "D"
    modes = [["--nonblocking"]] if stands_still else [[], ["--nonblocking"]]
    for mode in modes if py_spy is not None else []:
        left_s = min(ONE_S, deadline - time.monotonic())
        if left_s <= 0:
            return "no stacks: there was no time"
        text, reason = _run_py_spy(str(py_spy), pid, mode, left_s)
        if text:
            return text
        reasons.append(reason)
    if stands_still:
        return f"no stacks: {'; '.join(reasons)}"
    return _ask(run_dir, rank, pid) or f"no stacks: {'; '.join(reasons)}; the rank did not answer a signal"


def find_py_spy() -> Path | None:
    """Return the program next to this Python, or on the path; None without it."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    return None if program is None else Path(program)


def write_stacks(run_dir: Path, rank: int, pid: int, state: ProcessState, text: str) -> None:
    """Write a rank's stacks and memory into the run's folder; ignores errors of files."""
    used, limit = memory_limit()
    host = psutil.virtual_memory()
    resident = 0
    with suppress(psutil.Error):
        resident = psutil.Process(pid).memory_info().rss
    memory = f"process {in_units(resident)}, host {in_units(host.available)} free of {in_units(host.total)}"
    memory += f", control group {in_units(used)} of {in_units(limit)}" if limit else ""
    head = {"pid": pid, "state": asdict(state), "memory": memory}
    content = json.dumps(head).encode() + b"\n" + text.encode(errors="replace")[:MAX_BYTES]
    path = stacks_path(run_dir, rank)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "wb") as file:
            file.write(content)


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
    """Return the stacks that a rank writes itself on a signal; empty without an answer.

    Only a process with a rank's record has set a handler; the signal would end any other.
    """
    record, path = load_record(run_dir, rank), dump_path(run_dir, rank)
    is_rank = record is not None and record.pid == pid and record.started == start_time(pid) != 0
    if not is_rank or not catches(pid, STACKS_SIGNAL):
        return ""
    before = path.stat().st_size if path.exists() else 0
    with suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
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
