"""One SGLang server or node of one, as a process that the trainer starts or adopts."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Self

import psutil

from mega_rl.cores import processors
from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError
from mega_rl.processes import PIPE, STDOUT, Child
from mega_rl.rollout.sglang.http.control import Control, ServerError
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.server import launcher
from mega_rl.rollout.sglang.server.group import ProcessIdentity
from mega_rl.rollout.sglang.server.installation import require_sglang
from mega_rl.rollout.sglang.server.kept import (
    KEPT_PREFIX,
    KEYS_FILE,
    SCRATCH_PREFIX,
    UNKNOWN_EXIT,
    KeptServer,
    KeptServers,
)
from mega_rl.rollout.sglang.server.nodes import Node, end_reason
from mega_rl.rollout.sglang.server.settings import ServerSettings, arguments, environment

__all__ = ["ServerProcess", "ServerSettings", "ServerStartError", "ServerStopError"]

log = logging.getLogger(__name__)

PROGRAM = python_module(launcher.__name__)
PORT_TRIES = 3

_STOP_S = 20.0  # SIGKILL needs milliseconds; a GPU's driver may hold a process for seconds
_POLL_S = 0.1
_HEALTH_S = 10.0  # for one answer
_ADOPT_S = 30.0  # a healthy server needs two, one of them for an abort of its requests
_TELLING_LINES = 12
_LONGEST_LINE = 300


class ServerStartError(RunError):
    """A server did not start; the message has the reason and the log's last lines."""


class ServerStopError(RunError):
    """Processes of a server outlived SIGKILL. The message names them."""


class ServerProcess:
    """A server that this process starts; it ends when this process does, in whatever way.

    Where the launcher keeps servers (`kept`), a server that is ready outlives this process, and the first `start` of
    the same server in another process adopts it. Not kept are parts of a server on several nodes, which would have to
    be adopted all or none, and servers that share the trainer's devices: next to one that holds its memory the trainer
    could not load its models.

    A server on several nodes has such a process on each: the first one reserves their meeting, and all start with it.

    Its output goes to `<folder>/server-<index>.log`, of a further node to `server-<index>-node-<number>.log`. Use as a
    context manager, or call `start` and `stop`.
    """

    def __init__(self, settings: ServerSettings, index: int, folder: Path) -> None:
        self.settings = settings
        self.index = index
        self.name = f"SGLang server {index}"  # in messages
        if settings.nodes > 1:
            self.name += f", node {settings.node} of {settings.nodes} on {os.uname().nodename}"
        self.log_file = folder / f"server-{index}{f'-node-{settings.node}' if settings.node else ''}.log"
        kept = None if settings.nodes > 1 or settings.memory_saver else KeptServers.of_launcher()
        taken = kept is not None and (record := kept.records().get(index)) is not None and record.is_anothers
        self._kept = None if taken else kept
        self._may_adopt = self._kept is not None
        self._main: ProcessIdentity | None = None  # leader of the server's process group; None while stopped
        self._child: Child | None = None  # the same process; None for an adopted one
        self._exit_code: int | None = None  # the last process's, once it was stopped
        self._scratch: Path | None = None  # private folder
        self._endpoint: Endpoint | None = None
        self._reserved = ExitStack()  # sockets that hold ports until the server is ready
        self._meeting: Node | None = None
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
    def pid(self) -> int | None:
        """Return the main process's id, also that of the server's process group; None while stopped."""
        return None if self._main is None else self._main.pid

    @property
    def alive(self) -> bool:
        """Return whether the main process runs; the server's other processes end with it."""
        return self._main is not None and self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Return the main process's exit code, negative for a signal; None while it runs."""
        if self._main is None:
            return self._exit_code
        if self._child is not None:
            return self._child.exit_code
        return None if self._main.runs else UNKNOWN_EXIT

    def reserve_meeting(self) -> Node:
        """Return a meeting of the server's nodes at this one; holds its ports until readiness."""
        self._reserved.close()
        store, life = (reserve_port(self.settings.host, self._reserved) for _ in range(2))
        return Node(0, self.settings.host, store, life)

    def start(self, meeting: Node | None = None) -> None:
        """Start the process, or adopt one, and return at once. Raises UserError where SGLang is missing.

        meeting: of a server on several nodes, as the first one reserved it.
        """
        assert self._main is None, f"{self.name} runs already"
        assert (meeting is not None) == (self.settings.nodes > 1), f"{self.name}: meeting {meeting}"
        self._started, self._meeting, self._is_aborted = time.monotonic(), meeting, False
        left = self._kept.candidate(self.index, self.settings) if self._kept and self._may_adopt else None
        self._may_adopt = False  # a server that is started again is a new one
        if left is None:
            log.info("starting SGLang server %d, log in %s", self.index, self.log_file)
            self._spawn()
        else:
            record, self._endpoint = left
            self._main, self._scratch = record.main, record.scratch

    def wait_ready(self) -> Endpoint:
        """Wait until the server generates, or a further node has loaded its part.

        Raises ServerStartError, after which nothing of the server is left here.
        """
        assert self._endpoint is not None, f"{self.name} was not started"
        is_kept = self._child is None
        if is_kept and (problem := recover(self, self._endpoint)) is not None:
            self.stop()
            if self._is_aborted:
                raise ServerStartError(f"{self.name} is not kept: {problem}")
            log.warning("%s is not kept: %s; starting another one", self.name, problem)
            self._started, is_kept = time.monotonic(), False
            self._spawn()
        if not is_kept:
            self._wait_for_start()
        self._reserved.close()
        if self._kept is not None and self._main is not None and self._scratch is not None:
            self._kept.keep(self._main, self._endpoint, self._scratch, self.settings)
        log.info("%s is %s after %.1f s", self.name, "kept" if is_kept else "ready", time.monotonic() - self._started)
        return self._endpoint

    def abort(self) -> None:
        """Kill the server's processes without waiting for their end; `wait_ready` in another thread then raises."""
        self._is_aborted = True
        if self._main is not None:
            self._remove_scratch()
            self._main.kill_group()

    def end_reason(self) -> str:
        """Return which other node's end has ended this part, empty where none has."""
        return "" if self._meeting is None else end_reason(log_since(self.log_file, self._log_start))

    def stop(self) -> None:
        """End every process of the server and wait for that; may be called twice.

        Raises ServerStopError for a process that SIGKILL does not end.
        """
        if self._main is None:
            return
        self._reserved.close()
        self._remove_scratch()  # before the kill as well: a launcher may kill this rank meanwhile
        if left := self._main.end_group(deadline_s=_STOP_S):
            raise ServerStopError(f"{self.name}: processes {left} are still there {_STOP_S:g} s after SIGKILL")
        self._exit_code = UNKNOWN_EXIT if self._child is None else self._child.end()
        self._remove_scratch()
        self._main = self._child = None

    def leave(self) -> None:
        """Leave a kept server to later ranks; end any other, as `stop` does."""
        if self._scratch is not None and KeptServer.read(self._scratch) is None:
            self.stop()
        self._main = self._child = None

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _spawn(self) -> None:
        packages = require_sglang(device=self.settings.device).folder
        host = self.settings.http_host
        port = reserve_port(host, self._reserved)
        self._endpoint = Endpoint(self.index, f"http://{f'[{host}]' if ':' in host else host}:{port}", Keys.random())
        prefix, folder = SCRATCH_PREFIX, None
        if self._kept is not None and self._kept.folder.is_dir():  # else the launcher was killed
            prefix, folder = KEPT_PREFIX, self._kept.folder
        self._scratch = scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))  # 0700
        try:
            self._endpoint.keys.write(scratch / KEYS_FILE)
            if self._meeting is not None:
                replace(self._meeting, number=self.settings.node).write(scratch)
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            # A restarted server draws other noise than before, far from the seeds of the run's other servers.
            own = replace(self.settings, seed=(self.settings.seed + (self._spawned << 16)) % (1 << 31))
            self._spawned += 1
            with self.log_file.open("ab") as output:
                self._log_start = output.tell()
                self._child = Child(
                    self.name,
                    [*PROGRAM, *arguments(own, port, self._meeting)],
                    streams=(PIPE, output, STDOUT),
                    env=environment(self.settings, scratch=scratch, packages=packages),
                )
            self._main = ProcessIdentity.of_own(self._child.pid)
            os.sched_setaffinity(self._child.pid, processors())  # its GPUs may be near others than this rank's
        except (OSError, RunError):
            self._remove_scratch()
            raise

    def _wait_for_start(self) -> None:
        """Wait until the process is ready, on another port if necessary. Raises ServerStartError."""
        timeout_s = self.settings.start_timeout_s
        deadline = self._started + timeout_s
        for attempt in range(1, PORT_TRIES + 1):
            assert self._endpoint is not None
            if (problem := wait_for_start(self, self._endpoint, deadline, timeout_s)) is None:
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


# -- readiness: functions return the problem, None for none ----------------------------------------------------------


def wait_for_start(server: ServerProcess, endpoint: Endpoint, deadline: float, timeout_s: float) -> str | None:
    """Wait until /health answers 200; generate one token, unless this is a further node.

    timeout_s: of the whole wait, for messages.
    """
    last, healthy = "no answer", False
    with closing(Control(endpoint, _HEALTH_S)) as control:
        while not healthy:
            if (code := server.exit_code) is not None:
                return f"its process ended with exit code {code} before /health answered"
            if time.monotonic() >= deadline:
                return f"/health did not answer 200 within {timeout_s:g} s (last: {last})"
            try:
                control.call("GET", "/health", timeout_s=_HEALTH_S)
                healthy = True
            except ServerError as error:
                last = str(error)
                time.sleep(_POLL_S)
        if server.settings.node:
            return None
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        control.timeout_s = max(1.0, deadline - time.monotonic())
        try:
            answer = control.object("POST", "/generate", body)
        except ServerError as error:
            ended = "" if (code := server.exit_code) is None else f"; its process ended with exit code {code}"
            return f"the first generation failed: {error}{ended}"
    good = len(answer.get("output_ids", ())) == 1
    return None if good else f"the first generation was answered {str(answer)[:_LONGEST_LINE]}"


def recover(server: ServerProcess, endpoint: Endpoint) -> str | None:
    """Bring an adopted server to the state of a new one, whatever it was doing.

    Abort requests in flight, resume a paused generation, and claim no version of weights: those of an update that
    was cut short have two versions.
    """
    deadline = time.monotonic() + _ADOPT_S
    try:
        with closing(Control(endpoint, timeout_s=_ADOPT_S / 2)) as control:
            # A paused server aborts no request that waits for its end.
            control.call("POST", "/continue_generation", {})
            control.call("POST", "/pause_generation", {"mode": "abort"})
            control.call("POST", "/continue_generation", {})
            control.succeed("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
            control.flush()
    except ServerError as error:
        return str(error)
    # Not before: SGLang's /health generates a token, and so waits while generation is paused.
    return wait_for_start(server, endpoint, deadline, _ADOPT_S)


def log_since(log_file: Path, start: int) -> str:
    """Return a log from byte `start` to its end."""
    with log_file.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace")


def telling_lines(log_file: Path, start: int) -> list[str]:
    """Return a log's last lines after byte `start`, without source code and SGLang's settings."""
    lines = log_since(log_file, max(start, log_file.stat().st_size - 200_000)).splitlines()
    kept = [line[:_LONGEST_LINE] for line in lines if line.strip() and not line[0].isspace()]
    return [line for line in kept if "server_args=" not in line][-_TELLING_LINES:]


def reserve_port(host: str, until: ExitStack) -> int:
    """Return a free port, which a bound, silent socket holds for the server `until` then.

    Raises UserError for an address that this host does not have.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        bound = until.enter_context(socket.socket(family, socket.SOCK_STREAM))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, 0))
    except OSError as error:
        raise UserError(
            f"rollout.sglang.server.host={host!r} is no interface and no address of {os.uname().nodename} "
            f"({error}); legal: {', '.join(sorted(psutil.net_if_addrs()))}, or an address of one of them"
        ) from None
    return int(bound.getsockname()[1])
