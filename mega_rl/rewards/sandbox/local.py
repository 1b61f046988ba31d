"""A sandbox on this machine: bubblewrap, a filter of system calls, and limits."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

import psutil

from mega_rl.rewards.sandbox.bubblewrap import INSTALL, Tool, choose_uid, command
from mega_rl.rewards.sandbox.limits import Execution, Limits, SandboxError, Status
from mega_rl.rewards.sandbox.seccomp import build_filter

START_S = 20.0  # for bubblewrap to have made its namespaces, on a busy machine
END_S = 10.0  # for a killed sandbox to be gone
LOOK_S = 0.02  # between two looks at the memory
SHOWN_BYTES = 400  # longest error of bubblewrap in a message


@dataclass(frozen=True)
class LocalSandbox:
    """Runs programs under bubblewrap, each in its own namespaces, which end with it."""

    tool: Tool
    limits: Limits

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        limits = replace(self.limits, timeout_s=min(timeout_s, self.limits.timeout_s))
        with _started(self.tool, limits, program) as run:
            return run.finish(stdin)

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


@contextmanager
def _started(tool: Tool, limits: Limits, program: str) -> Iterator[_Run]:
    """Start a sandbox; at the end of the block all of its processes have ended."""
    with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as rules:
        text.write(program.encode("utf-8", "replace"))
        rules.write(build_filter())
        for file in (text, rules):
            file.flush()
            file.seek(0)
        info, info_end = os.pipe()
        uid = choose_uid()
        words = command(tool, limits, uid=uid, filter_fd=rules.fileno(), program_fd=text.fileno(), info_fd=info_end)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(rules.fileno(), text.fileno(), info_end),
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
            )
        except OSError as error:
            os.close(info)
            raise SandboxError(f"{tool.bwrap} cannot be started: {error.strerror}; {INSTALL}") from error
        finally:
            os.close(info_end)
    if uid:  # so that the program may open /dev/stdin
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            os.fchown(stream.fileno(), uid, uid)
    run = _Run(process, limits)
    try:
        run.find_init(info)
        yield run
    finally:
        run.end()


class _Run:
    """One sandbox: its pipes, its deadline, its end."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._begin = time.monotonic()
        self._init: int | None = None  # descriptor of the sandbox's first process, with which all others end
        self._init_pid = 0

    def find_init(self, info: int) -> None:
        """Read from bubblewrap which process is the sandbox's first. Raises SandboxError if it started none.

        info: descriptor that bubblewrap writes to; it is closed.
        """
        text, deadline = b"", time.monotonic() + START_S
        with open(info, "rb", buffering=0) as file, selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            while b"}" not in text:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise SandboxError(f"bubblewrap has made no sandbox in {START_S:g} s")
                part = file.read(4096)
                if not part:
                    raise SandboxError(f"bubblewrap cannot make a sandbox: {self._complaint()}; {_HINT}")
                text += part
        self._init_pid = int(json.loads(text)["child-pid"])
        with contextlib.suppress(OSError):  # ended already
            init = os.pidfd_open(self._init_pid)
            if parent_of(self._init_pid) == self._process.pid:
                self._init = init
            else:  # ended already, and another process has got its number
                os.close(init)

    def _exceeds_memory(self) -> bool:
        """Return whether the sandbox uses too much memory; a look after its end says nothing."""
        if self._init is None or used_bytes(self._init_pid) <= self._limits.memory_bytes:
            return False
        return not self._gone(within_s=0)

    def _gone(self, *, within_s: float) -> bool:
        """Return whether the sandbox's first process has ended, or does so in time."""
        with selectors.DefaultSelector() as selector:
            assert self._init is not None
            selector.register(self._init, selectors.EVENT_READ)
            return bool(selector.select(within_s))

    def _complaint(self) -> str:
        assert self._process.stderr is not None
        self._process.kill()
        return _readable(self._process.stderr.read(1 << 16)) or f"exit code {self._process.wait()}"

    def finish(self, stdin: bytes) -> Execution:
        """Feed the program, read its output, and return its end, by itself or for a limit."""
        streams = _Streams(self._process, stdin, self._limits.output_bytes)
        deadline = self._begin + self._limits.timeout_s
        status: Status | None = None
        look = 0.0
        while status is None:
            now = time.monotonic()
            if now >= deadline:
                status = "timeout"
            elif streams.overflown:
                status = "output"
            elif now >= look and self._exceeds_memory():
                status = "memory"
            elif self._process.poll() is not None:
                streams.drain()
                status = "output" if streams.overflown else "finished"
            else:
                look = now + LOOK_S if now >= look else look
                streams.turn(min(LOOK_S, deadline - now))
        seconds = time.monotonic() - self._begin
        code = self._process.returncode if status == "finished" else None
        self.end()
        streams.close()
        return Execution(status, code, bytes(streams.stdout), bytes(streams.stderr), seconds)

    def end(self) -> None:
        """Kill all processes of the sandbox and wait for their end. Raises SandboxError."""
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            gone = self._gone(within_s=END_S)
            os.close(self._init)
            self._init = None
            if not gone:
                raise SandboxError(f"a sandbox has not ended {END_S:g} s after it was killed")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _Streams:
    """Standard streams of a sandbox. None can block this process; each output is bounded."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, limit: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdout, self.stderr = bytearray(), bytearray()
        self._limit = limit
        self._stdin = process.stdin
        self._rest = memoryview(stdin)
        self._selector = selectors.DefaultSelector()
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, self.stdout)
        self._selector.register(process.stderr, selectors.EVENT_READ, self.stderr)
        self._selector.register(process.stdin, selectors.EVENT_WRITE)
        self._write(process.stdin)

    @property
    def overflown(self) -> bool:
        """Return whether an output is longer than it may be."""
        return max(len(self.stdout), len(self.stderr)) > self._limit

    def turn(self, seconds: float) -> None:
        """Move what can be moved, waiting for it for at most so long."""
        if not self._selector.get_map():
            time.sleep(min(seconds, 0.002))  # the program has closed its streams and continues
            return
        for key, _ in self._selector.select(max(0.0, seconds)):
            stream = key.fileobj
            assert not isinstance(stream, int)
            if key.data is None:
                self._write(self._stdin)
            elif not self._read(key.fd, key.data):
                self._selector.unregister(stream)

    def drain(self) -> None:
        """Read what an ended program has left in its pipes."""
        for key in list(self._selector.get_map().values()):
            while key.data is not None and not self.overflown and self._read(key.fd, key.data, end_if_empty=True):
                pass

    def close(self) -> None:
        self._selector.close()

    def _read(self, descriptor: int, into: bytearray, *, end_if_empty: bool = False) -> bool:
        """Read once; return whether there may be more."""
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return not end_if_empty
        into += part[: self._limit + 1 - len(into)]
        return bool(part)

    def _write(self, stream: IO[bytes]) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(stream.fileno(), self._rest[: 1 << 16]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it reads no more
            pass
        self._selector.unregister(stream)
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def _readable(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:SHOWN_BYTES]


INODE_BYTES = 1024  # kernel memory for a file, however short
FOLDERS = ("tmp", "dev/shm")


def used_bytes(init_pid: int) -> int:
    """Return the resident memory of a process and its descendants, and their files' size.

    Shared pages count in each process. Without access to the sandbox's folders, their files do not count: those of a
    folder are limited by its size. The caller checks that `init_pid` has not ended meanwhile.
    """
    total, tree, parents = 0, [init_pid], {init_pid}
    for pid in tree:
        with contextlib.suppress(OSError, ValueError), _opened(f"/proc/{pid}") as process:
            parent, resident = _status(process)
            if pid != init_pid and parent not in parents:  # another process has got the number since
                continue
            total += resident
            parents.add(pid)
            tree += _children(process, pid)
    for name in FOLDERS:
        with contextlib.suppress(OSError), _opened(f"/proc/{init_pid}/root/{name}") as folder:
            if os.fstat(folder).st_dev in _host_devices():  # bubblewrap has not changed the root yet
                continue
            usage = os.fstatvfs(folder)
            total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * INODE_BYTES
    return total


def parent_of(pid: int) -> int:
    """Return the number of a process's parent. Raises OSError if the process is gone."""
    with _opened(f"/proc/{pid}") as process:
        return _status(process)[0]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Yield a descriptor of a folder, which stays the same whatever happens to the path."""
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


def _status(process: int) -> tuple[int, int]:
    """Return (parent, resident bytes) of a process by the descriptor of its folder."""
    fields = dict(line.split(":", 1) for line in _text(process, "status").splitlines())
    return int(fields["PPid"]), int(fields.get("VmRSS", "0 kB").split()[0]) << 10  # a zombie has no memory


def _children(process: int, pid: int) -> list[int]:
    tasks = os.open("task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=process)
    try:
        texts = [_text(tasks, f"{task}/children") for task in os.listdir(tasks)]
    except FileNotFoundError:  # a thread has ended, or a kernel without CONFIG_PROC_CHILDREN
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
    finally:
        os.close(tasks)
    return [int(child) for text in texts for child in text.split()]


def _text(folder: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=folder), encoding="utf-8", errors="replace") as file:
        return file.read()


def _host_devices() -> set[int]:
    """Return the file systems of this machine that the folders' paths name outside of a sandbox."""
    return {os.stat(path).st_dev for path in ("/", *(f"/{folder}" for folder in FOLDERS)) if os.path.exists(path)}
