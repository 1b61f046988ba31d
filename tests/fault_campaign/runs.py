"""Runs of the campaign: started, watched, ended with a deadline, and what they leave behind."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from tests.fault_campaign.control_groups import ControlGroup, kill

ROOT = Path(__file__).parents[2]
POLL_S = 0.005
REAP_S = 30.0  # in which every process of a run ends after its launcher


@dataclass
class Launcher:
    """A launcher's process, and its place: the number of its node, its network namespace where it has one."""

    pid: int
    node: int
    output: Path
    exit_code: int | None = None
    restarts: int = 0  # by whoever has started the launcher

    def poll(self) -> int | None:
        """Return the exit code, below 0 the signal that killed it; None while it runs."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def end(self) -> None:
        """Kill it if it runs."""
        if self.exit_code is None:
            kill(self.pid)
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass
class Run:
    """A run in a folder of its own. All its processes are in `group`, whatever becomes of their parents."""

    name: str
    folder: Path
    group: ControlGroup
    random: random.Random
    environment: dict[str, str] = field(default_factory=dict)
    launchers: list[Launcher] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)  # of the hosts; none: all is on this one

    def start(self, commands: Sequence[Sequence[str]]) -> None:
        """Start a launcher for each command, in the network namespace of its number where there are some."""
        attempt = len(list(self.folder.glob("output-*-0.txt")))
        self.launchers = []
        for node, command in enumerate(commands):
            output = self.folder / f"output-{attempt}-{node}.txt"
            place = self.namespaces[node] if self.namespaces else None
            self.launchers.append(Launcher(self.spawn(command, output, place), node, output))

    def members(self) -> list[int]:
        """Return the processes of the run."""
        return self.group.members()

    def spawn(self, command: Sequence[str], output: Path, namespace: str | None) -> int:
        """Start a process of the run as a user would; returns it."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            self.group.add(os.getpid())
            if namespace is not None:
                enter_network(namespace)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.chdir(self.folder)
            os.environ.update(self.environment)
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.execve(sys.executable, [sys.executable, *command], os.environ)
        finally:
            os._exit(70)

    def steps(self) -> list[int]:
        """Return the steps in metrics.jsonl, in order."""
        path = self.folder / "run" / "metrics.jsonl"
        try:
            whole = path.read_text().rpartition("\n")[0]
        except (FileNotFoundError, NotADirectoryError, OSError):
            return []
        return [json.loads(line)["step"] for line in whole.splitlines()]

    def wait_for(self, true: Callable[[], object], *, deadline_s: float) -> bool:
        """Return whether something became true before all launchers ended and before the deadline."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if true():
                return True
            if all(launcher.poll() is not None for launcher in self.launchers):
                return bool(true())
            time.sleep(POLL_S)
        return False

    def wait(self, *, deadline_s: float) -> bool:
        """Return whether all launchers have ended before the deadline."""
        return self.wait_for(lambda: all(one.poll() is not None for one in self.launchers), deadline_s=deadline_s)

    def orphans(self) -> list[int]:
        """Return the processes that are still there `REAP_S` after the launchers' end."""
        deadline = time.monotonic() + REAP_S
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def text(self) -> str:
        """Return what the launchers of the last start wrote, one after the other."""
        return "\n".join(launcher.output.read_text(errors="replace") for launcher in self.launchers)

    def ranks(self) -> dict[int, int]:
        """Return the processes of the ranks that run, by rank."""
        return {rank: pid for pid in self.members() if (rank := rank_of(pid)) is not None}

    def pick_rank(self) -> tuple[int, int] | None:
        """Return a rank at random and its process; None where none runs."""
        ranks = sorted(self.ranks().items())
        return self.random.choice(ranks) if ranks else None

    def kill_rest(self) -> None:
        """Kill what is left of the run."""
        deadline = time.monotonic() + REAP_S
        while (left := self.members()) and time.monotonic() < deadline:
            for pid in left:
                kill(pid)
            time.sleep(0.02)

    def close(self) -> None:
        """Kill what is left and forget it."""
        for launcher in self.launchers:
            launcher.end()
        self.kill_rest()
        self.group.close()


def rank_of(pid: int) -> int | None:
    """Return the rank of a process, by its variables and its command."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    ranks = [int(one[5:]) for one in variables if one.startswith(b"RANK=")]
    return ranks[0] if ranks and b"mega_rl.cli\0train" in command else None


def enter_network(namespace: str) -> None:
    """Move this process into a named network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.close(descriptor)


def weights(run_dir: Path, step: int) -> str | None:
    """Return a hash of all tensors of a checkpoint, random states among them, None without it."""
    digest = hashlib.sha256()
    shards = sorted((run_dir / "checkpoints" / f"step_{step:06d}").glob("*.safetensors"))
    for shard in shards:
        with safe_open(shard, framework="np") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(name.encode() + tensors.get_tensor(name).tobytes())
    return digest.hexdigest()[:16] if shards else None


def last_line(text: str) -> str:
    """Return the last line that is not empty, without a terminal's control sequences."""
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")


def run_tool(*command: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a program to its end."""
    subprocess.run(command, check=True, env=None if environment is None else {**os.environ, **environment})
