"""Launchers, their stores and ranks forked from a process that has the imports, three seconds of a core for each.

What follows the fork is the program's own `main`: what a user's process does after its imports. A child closes the
descriptors that `subprocess` would not have handed on, and takes the default actions of signals.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

COMMAND_LINE = ["-m", "mega_rl.cli"]
STORE = ["-P", "-m", "mega_rl.launcher.store"]
LEASH = ["-P", "-m", "mega_rl.launcher.leash"]
LAUNCHER = ["-P", "-m", "mega_rl.launcher"]
RANK = ["-P", *COMMAND_LINE]


def run_command(command: Sequence[str]) -> NoReturn:
    """Run `mega-rl` with these arguments, after `COMMAND_LINE`, in this forked process; never returns."""
    from mega_rl.cli import app
    from mega_rl.launcher import ranks, store

    assert list(command[:2]) == COMMAND_LINE, command
    logging.getLogger().handlers.clear()
    for module in (ranks, store):  # of this process alone, which is one launcher
        setattr(module, "subprocess", _Subprocess())  # noqa: B010 - a module, to a type checker
    os.execve = _become  # type: ignore[assignment]  # of this process alone, as above
    _end(lambda: app.main(list(command[2:])))


def _become(path: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the launcher in this process, which would execute it."""
    from mega_rl.launcher.launch import Launch, launch
    from mega_rl.tracking.progress.terminal import show_progress

    assert list(command[1:4]) == LAUNCHER, command
    show_progress(live=False, beside_ranks=True)
    _end(lambda: launch(Launch.parse(command[4])))


def _end(main: Callable[[], int | None]) -> NoReturn:
    """End this process with the exit code of `main`, its output written."""
    code = 1
    try:
        code = main() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Subprocess:
    """The module subprocess, whose Popen forks what it would execute, where that has the imports to make."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        words = list(command)
        if words[1:4] == STORE:
            from mega_rl.launcher import store

            return ForkedProcess(words, lambda: store.main(words[4:]), **options)
        if words[1:4] == LEASH and words[6:9] == RANK:
            return ForkedProcess(words, lambda: _rank(words[4], words[9:]), **options)
        return subprocess.Popen(command, **options)


class ForkedProcess:
    """A child with the methods of subprocess.Popen that a launcher calls."""

    def __init__(
        self,
        command: Sequence[str],
        main: Callable[[], int | None],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Collection[int] = (),
        start_new_session: bool = False,
        stdout: int | None = None,
        **_: Any,
    ) -> None:
        self.args = list(command)
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            if start_new_session:
                os.setsid()
            if stdout == subprocess.DEVNULL:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *pass_fds}:
                try:
                    os.close(descriptor)
                except OSError:
                    continue  # the one that listed them
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            _end(main)

    def poll(self) -> int | None:
        """Return the exit code, below 0 a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended. Raises TimeoutExpired."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _rank(parent: str, arguments: Sequence[str]) -> int:
    """Run a rank: leave a note of its process, and be on the leash of its launcher."""
    from mega_rl.cli import app

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        return 128 + signal.SIGTERM
    notes = Path("pids")
    notes.mkdir(exist_ok=True)
    (notes / str(os.getpid())).write_text(os.environ["RANK"])
    return app.main(list(arguments))
