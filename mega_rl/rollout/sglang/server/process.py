"""One SGLang server, or a node's part of one, as a process of the trainer's: started, proved ready, stopped."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil

from mega_rl.errors import RunError, UserError
from mega_rl.rollout.sglang.http.endpoint import Endpoint
from mega_rl.rollout.sglang.http.keys import Keys
from mega_rl.rollout.sglang.server import group, launcher
from mega_rl.rollout.sglang.server.installation import require_sglang
from mega_rl.rollout.sglang.server.nodes import MeetingPlace, Node, end_reason
from mega_rl.rollout.sglang.server.readiness import Readiness
from mega_rl.rollout.sglang.server.settings import ServerSettings, arguments, environment

__all__ = ["ServerProcess", "ServerSettings", "ServerStartError", "ServerStopError"]

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", launcher.__name__)
PORT_TRIES = 3

_STOP_S = 20.0  # SIGKILL needs milliseconds; a GPU's driver may hold a process for seconds
_TELLING_LINES = 12
_LONGEST_LINE = 300


class ServerStartError(RunError):
    """A server did not start. The message names the server, what it waited for, the log and its last lines."""


class ServerStopError(RunError):
    """Processes of a server outlived SIGKILL. The message names them."""


class ServerProcess:
    """A server that this process starts; it ends when this process does, in whatever way.

    Of a server on several nodes each has such a process: the first one reserves their meeting, and all start with it.

    Its output goes to `<folder>/server-<index>.log`, of a further node to `server-<index>-node-<number>.log`. Use as a
    context manager, or call `start` and `stop`.
    """

    def __init__(self, settings: ServerSettings, index: int, folder: Path) -> None:
        self.settings = settings
        self.index = index
        part = f"-node-{settings.node}" if settings.node else ""
        self.log_file = folder / f"server-{index}{part}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None  # of the last process, once it was stopped
        self._scratch: Path | None = None
        self._keys = Keys.random()
        self._reserved: list[socket.socket] = []
        self._meeting: MeetingPlace | None = None
        self._port = 0
        self._started = 0.0
        self._log_start = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def name(self) -> str:
        """Return the server's name for messages."""
        own = self.settings
        part = f", node {own.node} of {own.nodes} on {os.uname().nodename}" if own.nodes > 1 else ""
        return f"SGLang server {self.index}{part}"

    @property
    def pid(self) -> int | None:
        """Return the main process's id, also that of the server's process group; None while stopped."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the main process runs; the server's other processes end with it."""
        return self._process is not None and self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Return the main process's exit code, negative for a signal; None while it runs and before the first start.

        `waitid` does not reap the process: until `stop` its id, and so its group's, is not reused.
        """
        process = self._process
        if process is None:
            return self._exit_code
        try:
            state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this program ignores SIGCHLD, so the kernel has reaped it
            return process.poll()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def reserve_meeting(self) -> MeetingPlace:
        """Return a meeting of the server's nodes at this one, the first; its ports are held until it is ready."""
        self._release_ports()
        self._reserved = [reserve_port(self.settings.host) for _ in range(2)]
        store, life = (one.getsockname()[1] for one in self._reserved)
        return MeetingPlace(self.settings.host, store, life)

    def start(self, meeting: MeetingPlace | None = None) -> None:
        """Start the process and return at once. Raises UserError where SGLang is missing.

        meeting: of a server on several nodes, the same on all of them.
        """
        assert self._process is None, f"{self.name} runs already"
        assert (meeting is not None) == (self.settings.nodes > 1), f"{self.name}: meeting {meeting}"
        self._started, self._meeting = time.monotonic(), meeting
        self._spawn()

    def wait_ready(self) -> Endpoint:
        """Wait until the server generates, or a further node has loaded its part.

        Raises ServerStartError, after which nothing of the server is left here.
        """
        assert self._process is not None, f"{self.name} was not started"
        deadline = self._started + self.settings.start_timeout_s
        for attempt in range(1, PORT_TRIES + 1):
            problem = self._problem(deadline)
            if problem is None:
                break
            clash = not self.alive and "address already in use" in log_since(self.log_file, self._log_start).lower()
            lines = telling_lines(self.log_file, self._log_start)
            self.stop()
            if not clash or attempt == PORT_TRIES or self._meeting is not None:  # a meeting is for one start
                raise ServerStartError(
                    "\n  ".join([f"{self.name} did not start: {problem}; log: {self.log_file}, last lines:", *lines])
                )
            log.warning("%s: another program took port %d meanwhile; trying another port", self.name, self._port)
            self._spawn()
        self._release_ports()
        log.info("%s is ready after %.1f s", self.name, time.monotonic() - self._started)
        return Endpoint(self.index, f"http://{_in_url(self.settings.http_host)}:{self._port}", self._keys)

    def abort(self) -> None:
        """Kill the server's processes without waiting for their end; `wait_ready` in another thread then raises."""
        process = self._process
        if process is not None:
            group.kill(process.pid)

    def end_reason(self) -> str:
        """Return which other node's end has ended this part, empty where none has."""
        return "" if self._meeting is None else end_reason(log_since(self.log_file, self._log_start))

    def stop(self) -> None:
        """End every process of the server and wait for that; may be called twice.

        Raises ServerStopError for a process that SIGKILL does not end.
        """
        process = self._process
        if process is None:
            return
        self._release_ports()
        left = group.end(process.pid, deadline_s=_STOP_S)
        if left:
            raise ServerStopError(f"{self.name}: processes {left} are still there {_STOP_S:g} s after SIGKILL")
        self._exit_code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        assert self._scratch is not None
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._process = None

    def _spawn(self) -> None:
        packages = require_sglang(device=self.settings.device).folder
        self._keys = Keys.random()
        self._reserved.append(reserve_port(self.settings.http_host))
        self._port = self._reserved[-1].getsockname()[1]
        self._scratch = scratch = Path(tempfile.mkdtemp(prefix="mega-rl-sglang-"))  # 0700
        self._keys.write(scratch / launcher.KEYS_FILE)
        if self._meeting is not None:
            Node(self.settings.node, self._meeting).write(scratch)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [*PROGRAM, *arguments(self.settings, self._port, self._meeting)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(self.settings, scratch=scratch, packages=packages),
                start_new_session=True,
            )

    def _release_ports(self) -> None:
        while self._reserved:
            self._reserved.pop().close()

    def _problem(self, deadline: float) -> str | None:
        """Wait until the server is ready; return None then, else the problem."""
        own = self.settings
        check = Readiness(own.http_host, self._port, self._keys, lambda: self.exit_code, own.start_timeout_s)
        return check.wait_for_health(deadline) or (None if own.node else check.first_token(deadline))


def log_since(log_file: Path, start: int) -> str:
    """Return a log from byte `start` on."""
    with log_file.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace")


def telling_lines(log_file: Path, start: int) -> list[str]:
    """Return a log's last lines from byte `start` on, without quoted source code and SGLang's list of its settings."""
    with log_file.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - 200_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    kept = [line[:_LONGEST_LINE] for line in lines if line.strip() and not line[0].isspace()]
    return [line for line in kept if "server_args=" not in line][-_TELLING_LINES:]


def reserve_port(host: str) -> socket.socket:
    """Return a socket bound to a free port: held so, and not listening, it lets the server alone bind there too.

    Raises UserError for an address that this host does not have.
    """
    with ExitStack() as undo:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            bound = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, 0))
        except OSError as error:
            raise UserError(
                f"rollout.sglang.server.host={host!r} is no interface and no address of {os.uname().nodename} "
                f"({error}); legal: {', '.join(sorted(psutil.net_if_addrs()))}, or an address of one of them"
            ) from None
        undo.pop_all()
    return bound


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
