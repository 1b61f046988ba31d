"""Child processes: start, output, end with a deadline, death with the parent; work on threads.

    python -m mega_rl.processes PARENT_PID SIGNAL PROGRAM ARGUMENT...

is the program that a child with `dies_by` starts as: it asks the kernel for the signal and becomes the other program.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Generic, Self, TypeAlias, TypeVar, cast

from mega_rl.environment import python_module
from mega_rl.errors import RunError, name_of_signal

Stream: TypeAlias = int | IO[bytes] | None
Result = TypeVar("Result")

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
PR_SET_PDEATHSIG = 1
KILL_S = 10.0  # from SIGKILL to the end; a process in a file system or a driver that does not answer takes longer
POLL_S = 0.02


class ChildStartError(RunError):
    """A child process cannot be started; `__cause__` is the OSError."""


class ChildDeadlineError(RunError):
    """A child process did not end, or write its next line, in time."""


class Child:
    """A child process that leads its own session and process group: Ctrl-C reaches only its parent.

    Its process id stays its own until `wait`, `end` or `close`, so that a signal never reaches another process.
    As a context manager it ends with the block.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        dies_by: int = 0,
        blocks: Collection[int] = (),
        pass_fds: Collection[int] = (),
        streams: tuple[Stream, Stream, Stream] = (DEVNULL, None, None),
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        """Start the process. name: the child in messages, "rank 3".

        dies_by: signal from the kernel when the thread that starts the child ends; 0: none. blocks: signals that the
        child never gets, unless it unblocks them itself. streams: standard input, output and error as for `Popen`.

        Raises ChildStartError: no such program or folder, or the machine allows no further process.
        """
        assert not (dies_by and blocks), "the program that asks for the signal lets all signals through"
        self.name = name
        if dies_by:
            command = python_module("mega_rl.processes", str(os.getpid()), str(int(dies_by)), *command)
        try:
            with blocked(blocks):
                self._process = subprocess.Popen(
                    list(command),
                    pass_fds=tuple(pass_fds),
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                    env=env,
                    cwd=cwd,
                    start_new_session=True,
                )
        except OSError as error:
            raise ChildStartError(f"{os.uname().nodename}: {name} cannot be started: {error.strerror}") from error
        self.pid = self._process.pid  # also the number of its process group
        self.stdin, self.stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)  # if PIPE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self.end()

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, below 0 a signal, None while it runs. Frees no process id."""
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # a parent that ignores SIGCHLD has its children reaped by the kernel
            return self._process.poll()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def lines(self, *, within_s: float = math.inf) -> Iterator[str]:
        """Yield each line of standard output without its end, until the output ends.

        Raises ChildDeadlineError when a line takes more than `within_s` seconds.
        """
        output, rest = self.stdout.fileno(), b""
        poll = select.poll()
        poll.register(output, select.POLLIN)
        deadline = time.monotonic() + within_s
        while True:
            left_s = deadline - time.monotonic()
            if not poll.poll(None if left_s == math.inf else max(0.0, left_s) * 1000):
                raise ChildDeadlineError(f"{self.name} (process {self.pid}) wrote no line within {within_s:g} s")
            part = os.read(output, 1 << 16)
            if not part:
                break
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
                deadline = time.monotonic() + within_s
        if rest:
            yield rest.decode(errors="replace").rstrip("\r")

    def wait(self, within_s: float = math.inf) -> int:
        """Wait for the end and return the exit code; the process id is free afterwards."""
        try:
            return self._process.wait(None if within_s == math.inf else within_s)
        except subprocess.TimeoutExpired:
            raise ChildDeadlineError(f"{self.name} (process {self.pid}) has not ended within {within_s:g} s") from None

    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its children; an ended process gets none."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its group; returns at once. No effect once waited for."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace_s: float = 0.0) -> int | None:
        """End the process and its group, close its pipes, return the exit code; repeatable.

        SIGTERM comes first if there is a grace. None: not even SIGKILL has ended it within `KILL_S` seconds.
        """
        if grace_s:
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self.exit_code is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self.kill()  # also after the leader's end: it may have left others running
        self.close()
        with contextlib.suppress(ChildDeadlineError):
            return self.wait(KILL_S)
        return None

    def close(self) -> None:
        """Close this end of the pipes; the process lives on."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the rest was not flushed to a process that is gone
                    pipe.close()

    def end_in_words(self) -> str:
        """Return how it ended, "died of SIGKILL" or "ended with exit code 1"; "runs" before."""
        code = self.exit_code
        if code is None:
            return "runs"
        return f"ended with exit code {code}" if code >= 0 else f"died of {name_of_signal(-code)}"


class Running(Generic[Result]):
    """Work on a separate thread, for which no exception or signal of the caller waits.

    Once it has ended, `error` is the exception that it raised, None without one, and `result` what it returned.
    """

    def __init__(self, work: Callable[[], Result], *, name: str) -> None:
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether the work is still running after at most `seconds`."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def outcome(self) -> Result:
        """Return the result of work that has ended, or raise its error."""
        if self.error is not None:
            raise self.error
        return cast(Result, self.result)

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self.result = work()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self.error = error


@contextmanager
def blocked(numbers: Collection[int]) -> Iterator[None]:
    """Block signals inside: this thread gets them afterwards, programs started inside never do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


def main(arguments: Sequence[str]) -> None:
    """Become another program that dies with its parent, with no signal blocked and SIGHUP's default action.

    Both are inherited: some parents block signals, and nohup ignores SIGHUP.
    """
    parent, number, *command = arguments
    die_with_parent(int(parent), int(number))  # survives execve
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
