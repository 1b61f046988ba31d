"""Collect stacks and memory of this host's ranks while they live; py-spy reads them from outside."""

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
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import psutil

from mega_rl.errors import UserError, in_units
from mega_rl.tracking.health.records import health_folder, state_and_start
from mega_rl.untrusted import parse_object, read_file, read_record

WITHIN_S = 10.0  # for all ranks of a host
ONE_S = 4.0  # for one try on one process
TRIES = 2  # a process that runs on while its stacks are read may change them
AT_A_TIME = 4
MAX_BYTES = 262_144  # stacks of one rank


@dataclass(frozen=True)
class Stacks:
    """State, memory and stacks of a rank's process."""

    state: str  # letter of its state; empty: it had ended
    memory: str  # memory of process and host, in words
    text: str = ""  # stacks of its threads, or the reason why there are none

    @property
    def top(self) -> str:
        """Return the main thread's innermost line in this package, else its innermost line; empty without stacks."""
        lines = self.text.splitlines()
        threads = [i for i, line in enumerate(lines) if line.startswith("Thread ")]
        if not threads:
            return ""
        main = next((i for i in threads if '"MainThread"' in lines[i]), threads[0])
        stack = [line.strip()[:200] for line in takewhile(lambda line: line.startswith(" "), lines[main + 1 :])]
        return next((line for line in stack if "(mega_rl/" in line), next(iter(stack), ""))


def collect(run_dir: Path, processes: Mapping[int, int]) -> None:
    """Write state, memory and stacks of this host's ranks (rank -> pid), within `WITHIN_S`."""
    deadline = time.monotonic() + WITHIN_S

    def collect_one(rank: int) -> None:
        write_stacks(run_dir, rank, processes[rank], stacks_of(processes[rank], deadline=deadline))

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
    return replace(
        stacks, text="".join(c if c.isprintable() or c == "\n" else " " for c in text.decode(errors="replace"))
    )


def stacks_of(pid: int, *, deadline: float) -> str:
    """Return the stacks of a process of this host, or why there are none. deadline: on the monotonic clock."""
    program = find_py_spy()
    if program is None:
        return "no stacks: py-spy is not installed"
    # Without --nonblocking py-spy would pause the rank, and cannot read one that is stopped or in the kernel.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    reason = "there was no time"
    for _ in range(TRIES):
        left_s = min(ONE_S, deadline - time.monotonic())
        if left_s <= 0:
            break
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            reason = f"py-spy gave no answer in {left_s:.0f} s"
            continue
        text = done.stdout.decode(errors="replace")
        if done.returncode == 0 and "Thread" in text:
            return text[text.index("Thread") :]  # without the command line
        reason = "py-spy: " + " ".join(done.stderr.decode(errors="replace").split())[:400]
    return f"no stacks: {reason}"


def find_py_spy() -> str | None:
    """Return the program next to this Python, or on the path; None without it."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def write_stacks(run_dir: Path, rank: int, pid: int, text: str) -> None:
    """Write a rank's state, memory and stacks into the run's folder; ignores errors of files."""
    host, resident = psutil.virtual_memory(), 0
    with suppress(psutil.Error):
        resident = psutil.Process(pid).memory_info().rss
    memory = f"process {in_units(resident)}, host {in_units(host.available)} free of {in_units(host.total)}"
    head = {"state": state_and_start(pid)[0], "memory": memory}
    content = json.dumps(head).encode() + b"\n" + text.encode(errors="replace")[:MAX_BYTES]
    path = stacks_path(run_dir, rank)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "wb") as file:
            file.write(content)
