"""A sandbox on this machine: bubblewrap, a filter of system calls, and limits."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import IO

from mega_rl.rewards.sandbox import Execution, Limits, SandboxError, Status
from mega_rl.rewards.sandbox.bubblewrap import INSTALL, Tool, choose_uid, command
from mega_rl.rewards.sandbox.seccomp import build_filter

START_S = 20.0  # for bubblewrap to have made its namespaces, on a busy machine
END_S = 10.0  # for a killed sandbox to be gone
LOOK_S = 0.02  # between two looks at the memory and the outputs
SHOWN_BYTES = 400  # longest error of bubblewrap in a message
INODE_BYTES = 1024  # kernel memory for a file, however short
_HINT = (
    "bubblewrap needs user namespaces, or root with CAP_SYS_ADMIN: on the host set kernel.unprivileged_userns_clone=1, "
    "user.max_user_namespaces above 0 and, on Ubuntu, an AppArmor profile for bwrap; start a container with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined; or "
    "name a service with reward.sandbox=remote"
)
_FORKS = """
import os, time
try:
    for _ in range({count}):
        if os.fork() == 0:
            time.sleep(60)
except BlockingIOError:
    print("limited", flush=True)
os.kill(-1, 9)
"""


@dataclass(frozen=True)
class LocalSandbox:
    """Runs programs under bubblewrap, each in its own namespaces, which end with it."""

    tool: Tool
    limits: Limits

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        limits = replace(self.limits, timeout_s=min(timeout_s, self.limits.timeout_s))
        with ExitStack() as stack:
            text, rules, given, stdout, stderr = (stack.enter_context(TemporaryFile()) for _ in range(5))
            for file, content in ((text, program.encode("utf-8", "replace")), (rules, build_filter()), (given, stdin)):
                file.write(content)
                file.flush()
                file.seek(0)
            uid = choose_uid()
            if uid:  # so that the program may open /dev/stdin
                for file in (given, stdout, stderr):
                    os.fchown(file.fileno(), uid, uid)
            deadline = time.monotonic() + limits.timeout_s
            run = _Run(self.tool, limits, uid, text, rules, (given, stdout, stderr))
            stack.callback(run.end)
            run.find_init()
            status = run.status(deadline)
            run.end()
            output, errors = (_read(file, limits.output_bytes) for file in (stdout, stderr))
            if status == "finished" and max(len(output), len(errors)) > limits.output_bytes:
                status = "output"
            code = run.process.returncode if status == "finished" else None
            return Execution(status, code, output, errors)

    def check(self) -> None:
        """Run a program and one that starts too many processes. Raises SandboxError."""
        outcome = self.run("print(6 * 7)", b"", timeout_s=START_S)
        if not outcome.succeeded or outcome.stdout != b"42\n":
            said = _readable(outcome.stderr) or f"{outcome.status}, exit code {outcome.return_code}"
            raise SandboxError(f"a sandbox does not work on this machine: {said}; {_HINT}")
        outcome = self.run(_FORKS.format(count=4 * self.limits.processes), b"", timeout_s=START_S)
        if b"limited" not in outcome.stdout:
            raise SandboxError(
                "the limit of processes does not bind here: it needs Linux 5.14, or the rights of root; use "
                "reward.sandbox=remote"
            )


class _Run:
    """One sandbox, whose standard streams are files: no program can block this process."""

    def __init__(
        self, tool: Tool, limits: Limits, uid: int, text: IO[bytes], rules: IO[bytes], streams: tuple[IO[bytes], ...]
    ) -> None:
        """Start bubblewrap. Raises SandboxError."""
        self._limits, self._streams = limits, streams
        self._info, info_end = os.pipe()
        self._init: int | None = None  # descriptor of the sandbox's first process, with which all others end
        self._init_pid = 0
        words = command(tool, limits, uid=uid, filter_fd=rules.fileno(), program_fd=text.fileno(), info_fd=info_end)
        stdin, stdout, stderr = streams
        try:
            self.process = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(rules.fileno(), text.fileno(), info_end),
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
            )
        except OSError as error:
            os.close(self._info)
            raise SandboxError(f"{tool.bwrap} cannot be started: {error.strerror}; {INSTALL}") from error
        finally:
            os.close(info_end)

    def find_init(self) -> None:
        """Read from bubblewrap which process is the sandbox's first. Raises SandboxError if it started none."""
        text, deadline = b"", time.monotonic() + START_S
        with open(self._info, "rb", buffering=0) as file:
            while b"}" not in text:
                if not _is_ready(file.fileno(), deadline - time.monotonic()):
                    raise SandboxError(f"bubblewrap has made no sandbox in {START_S:g} s")
                part = file.read(4096)
                if not part:
                    self.end()
                    said = _readable(_read(self._streams[2], SHOWN_BYTES)) or f"exit code {self.process.returncode}"
                    raise SandboxError(f"bubblewrap cannot make a sandbox: {said}; {_HINT}")
                text += part
        self._init_pid = int(json.loads(text)["child-pid"])
        with contextlib.suppress(OSError):  # ended already
            self._init = os.pidfd_open(self._init_pid)

    def status(self, deadline: float) -> Status:
        """Wait for the program's end, by itself or for a limit."""
        while True:
            if time.monotonic() >= deadline:
                return "timeout"
            if any(os.fstat(file.fileno()).st_size > self._limits.output_bytes for file in self._streams[1:]):
                return "output"
            if self._exceeds_memory():
                return "memory"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))
                return "finished"

    def _exceeds_memory(self) -> bool:
        """Return whether the sandbox uses too much memory; a look after its end says nothing."""
        if self._init is None or used_bytes(self._init_pid) <= self._limits.memory_bytes:
            return False
        return not _is_ready(self._init, 0)

    def end(self) -> None:
        """Kill all processes of the sandbox and wait for their end; repeatable. Raises SandboxError."""
        init, self._init = self._init, None
        gone = True
        if init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(init, signal.SIGKILL)
            gone = _is_ready(init, END_S)
            os.close(init)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        self.process.kill()
        self.process.wait()
        if not gone:
            raise SandboxError(f"a sandbox has not ended {END_S:g} s after it was killed")


def _is_ready(descriptor: int, within_s: float) -> bool:
    """Return whether there is something to read in time; of a process: whether it has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, within_s) * 1000))


def _read(file: IO[bytes], limit: int) -> bytes:
    """Return the start of a file, of one byte above the limit at most."""
    return os.pread(file.fileno(), limit + 1, 0)


def _readable(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:SHOWN_BYTES]


def used_bytes(init_pid: int) -> int:
    """Return the resident memory of a sandbox's processes and the size of its files.

    The sandbox's own /proc lists them; shared pages count in each. 0 while its first process has the root of this
    machine, and after its end.
    The caller checks that `init_pid` has not ended meanwhile.
    """
    total = 0
    with ExitStack() as stack, contextlib.suppress(FileNotFoundError, ProcessLookupError):

        def opened(name: str, below: int | None = None) -> int:
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=below)  # the same whatever happens to the path
            stack.callback(os.close, folder)
            return folder

        root = opened(f"/proc/{init_pid}/root")
        if os.path.samestat(os.fstat(root), os.stat("/")):  # bubblewrap has not changed it yet
            return 0
        processes = opened("proc", root)
        for pid in filter(str.isdigit, os.listdir(processes)):
            with (
                contextlib.suppress(OSError, IndexError),
                open(os.open(f"{pid}/statm", os.O_RDONLY, dir_fd=processes)) as file,
            ):
                total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for name in ("tmp", "dev/shm"):
            usage = os.fstatvfs(opened(name, root))
            total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * INODE_BYTES
    return total
