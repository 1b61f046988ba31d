"""One SGLang server, or a node's part of one, as a process of the trainer's: started or adopted, ready, stopped."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Self

import psutil

from mega_rl.cores import processors
from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.server import launcher
from mega_rl.rollout.sglang.server.installation import require_sglang
from mega_rl.rollout.sglang.server.kept import KEYS_FILE, SCRATCH_PREFIX, KeptServers, owner_of
from mega_rl.rollout.sglang.server.main_process import AdoptedProcess, ChildProcess
from mega_rl.rollout.sglang.server.nodes import MeetingPlace, Node, end_reason
from mega_rl.rollout.sglang.server.readiness import Readiness, recover
from mega_rl.rollout.sglang.server.settings import ServerSettings, arguments, environment

__all__ = ["ServerProcess", "ServerSettings", "ServerStartError", "ServerStopError"]

log = logging.getLogger(__name__)

PROGRAM = python_module(launcher.__name__)
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

    Where the launcher keeps servers (`kept`), a server that is ready outlives this process, and the first `start` of
    the same server in another process adopts it. Not kept are parts of a server on several nodes, which would have to
    be adopted all or none, and servers that share the trainer's devices: next to one that holds its memory the trainer
    could not load its models.

    Of a server on several nodes each has such a process: the first one reserves their meeting, and all start with it.

    Its output goes to `<folder>/server-<index>.log`, of a further node to `server-<index>-node-<number>.log`. Use as a
    context manager, or call `start` and `stop`.
    """

    def __init__(self, settings: ServerSettings, index: int, folder: Path) -> None:
        self.settings = settings
        self.index = index
        part = f"-node-{settings.node}" if settings.node else ""
        self.log_file = folder / f"server-{index}{part}.log"
        kept = None if settings.nodes > 1 or settings.memory_saver else KeptServers.of_launcher()
        self._kept = None if kept is None or kept.is_taken(index) else kept
        self._may_adopt = self._kept is not None
        self._process: ChildProcess | AdoptedProcess | None = None
        self._exit_code: int | None = None  # of the last process, once it was stopped
        self._scratch: Path | None = None
        self._endpoint: Endpoint | None = None
        self._reserved: list[socket.socket] = []
        self._meeting: MeetingPlace | None = None
        self._is_aborted = False
        self._started = 0.0
        self._log_start = 0
        self._spawned = 0

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
        """Return the main process's exit code; None while it runs and before the first start. See `main_process`."""
        return self._exit_code if self._process is None else self._process.exit_code

    def reserve_meeting(self) -> MeetingPlace:
        """Return a meeting of the server's nodes at this one, the first; its ports are held until it is ready."""
        _close_all(self._reserved)
        self._reserved = [reserve_port(self.settings.host) for _ in range(2)]
        store, life = (one.getsockname()[1] for one in self._reserved)
        return MeetingPlace(self.settings.host, store, life)

    def start(self, meeting: MeetingPlace | None = None) -> None:
        """Start the process, or adopt one, and return at once. Raises UserError where SGLang is missing.

        meeting: of a server on several nodes, the same on all of them.
        """
        assert self._process is None, f"{self.name} runs already"
        assert (meeting is not None) == (self.settings.nodes > 1), f"{self.name}: meeting {meeting}"
        self._started, self._meeting, self._is_aborted = time.monotonic(), meeting, False
        left = self._kept.candidate(self.index, self.settings, self.name) if self._kept and self._may_adopt else None
        self._may_adopt = False  # a server that is started again is a new one
        if left is None:
            log.info("starting SGLang server %d, log in %s", self.index, self.log_file)
            self._spawn()
        else:
            self._process, self._scratch, self._endpoint = AdoptedProcess(left.main), left.scratch, left.endpoint

    def wait_ready(self) -> Endpoint:
        """Wait until the server generates, or a further node has loaded its part.

        Raises ServerStartError, after which nothing of the server is left here.
        """
        assert self._process is not None, f"{self.name} was not started"
        assert self._endpoint is not None
        is_kept = isinstance(self._process, AdoptedProcess)
        if is_kept and (problem := recover(self._endpoint, lambda: self.exit_code)) is not None:
            self.stop()
            if self._is_aborted:
                raise ServerStartError(f"{self.name} is not kept: {problem}")
            log.warning("%s is not kept: %s; starting another one", self.name, problem)
            self._started, is_kept = time.monotonic(), False
            self._spawn()
        if not is_kept:
            self._wait_for_start()
        _close_all(self._reserved)
        if self._kept is not None:
            assert self._scratch is not None
            self._kept.keep(self._process.pid, self._endpoint, self._scratch, self.settings)
        log.info("%s is %s after %.1f s", self.name, "kept" if is_kept else "ready", time.monotonic() - self._started)
        return self._endpoint

    def abort(self) -> None:
        """Kill the server's processes without waiting for their end; `wait_ready` in another thread then raises."""
        self._is_aborted = True
        _remove(self._scratch)
        process = self._process
        if process is not None:
            process.kill()

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
        _close_all(self._reserved)
        _remove(self._scratch)
        left = process.end(deadline_s=_STOP_S)
        if left:
            raise ServerStopError(f"{self.name}: processes {left} are still there {_STOP_S:g} s after SIGKILL")
        self._exit_code = process.close()
        _remove(self._scratch)
        self._process = None

    def leave(self) -> None:
        """Leave a server that is kept to the ranks that may come after this process; end any other, as `stop` does."""
        if self._scratch is None or owner_of(self._scratch) is None:
            self.stop()
        self._process = None

    def _spawn(self) -> None:
        packages = require_sglang(device=self.settings.device).folder
        keys, host = Keys.random(), self.settings.http_host
        self._reserved.append(reserve_port(host))
        port = self._reserved[-1].getsockname()[1]
        self._endpoint = Endpoint(self.index, f"http://{_in_url(host)}:{port}", keys)
        self._scratch = scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))  # 0700
        try:
            keys.write(scratch / KEYS_FILE)
            if self._meeting is not None:
                Node(self.settings.node, self._meeting).write(scratch)
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            # A restarted server draws other noise than before, far from the seeds of the run's other servers.
            own = replace(self.settings, seed=(self.settings.seed + (self._spawned << 16)) % (1 << 31))
            self._spawned += 1
            line_of_life = nullcontext(subprocess.PIPE) if self._kept is None else self._kept.life()
            with self.log_file.open("ab") as output, line_of_life as life:
                self._log_start = output.tell()
                self._process = ChildProcess(
                    subprocess.Popen(
                        [*PROGRAM, *arguments(own, port, self._meeting)],
                        stdin=life,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment(self.settings, scratch=scratch, packages=packages),
                        start_new_session=True,
                    )
                )
            os.sched_setaffinity(self._process.pid, processors())  # its GPUs may be near others than this rank's
        except OSError:
            _remove(self._scratch)
            raise

    def _wait_for_start(self) -> None:
        """Wait until the process that was started is ready, on another port if need be. Raises ServerStartError."""
        own = self.settings
        deadline = self._started + own.start_timeout_s
        for attempt in range(1, PORT_TRIES + 1):
            assert self._endpoint is not None
            check = Readiness(self._endpoint, lambda: self.exit_code, own.start_timeout_s)
            problem = check.wait_for_health(deadline) or (None if own.node else check.first_token(deadline))
            if problem is None:
                return
            clash = not self.alive and "address already in use" in log_since(self.log_file, self._log_start).lower()
            lines = telling_lines(self.log_file, self._log_start)
            self.stop()
            if not clash or attempt == PORT_TRIES or self._meeting is not None:  # a meeting is for one start
                raise ServerStartError(
                    "\n  ".join([f"{self.name} did not start: {problem}; log: {self.log_file}, last lines:", *lines])
                )
            url = self._endpoint.url
            log.warning("%s: another program took %s meanwhile; trying another port", self.name, url)
            self._spawn()


def _remove(scratch: Path | None) -> None:
    """Remove a server's private folder: before it is killed as well, since a launcher may kill this rank meanwhile."""
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def _close_all(sockets: list[socket.socket]) -> None:
    while sockets:
        sockets.pop().close()


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
