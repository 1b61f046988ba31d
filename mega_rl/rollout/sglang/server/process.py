"""One SGLang server or node of one, as a process that the trainer starts."""

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

from mega_rl.environment import processors, python_module
from mega_rl.errors import RunError, UserError
from mega_rl.processes import PIPE, STDOUT, Child
from mega_rl.rollout.sglang.http.control import Control, ServerError
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.server import group, launcher
from mega_rl.rollout.sglang.server.installation import require_sglang
from mega_rl.rollout.sglang.server.nodes import Node
from mega_rl.rollout.sglang.server.settings import ServerSettings, arguments, environment

__all__ = ["ServerProcess", "ServerSettings"]

log = logging.getLogger(__name__)

PROGRAM = python_module(launcher.__name__)

_STOP_S = 20.0  # SIGKILL needs milliseconds; a GPU's driver may hold a process for seconds
_POLL_S = 0.1
_HEALTH_S = 10.0  # for one answer
_TELLING_LINES = 12
_LONGEST_LINE = 300


class ServerProcess:
    """A server that this process starts; it ends when this process does, in whatever way.

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
        self._child: Child | None = None  # leader of the server's process group; None while stopped
        self._exit_code: int | None = None  # the last process's, once it was stopped
        self._scratch: Path | None = None  # private folder
        self._endpoint: Endpoint | None = None
        self._reserved = ExitStack()  # sockets that hold ports until the server is ready
        self._started, self._log_start, self._starts = 0.0, 0, 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Return the main process's id, also that of the server's process group; None while stopped."""
        return None if self._child is None else self._child.pid

    @property
    def exit_code(self) -> int | None:
        """Return the main process's exit code, negative for a signal; None while it runs."""
        return self._exit_code if self._child is None else self._child.exit_code

    def reserve_meeting(self) -> Node:
        """Return a meeting of the server's nodes at this one; holds its ports until readiness."""
        self._reserved.close()
        store, life = (reserve_port(self.settings.host, self._reserved) for _ in range(2))
        return Node(0, self.settings.host, store, life)

    def start(self, meeting: Node | None = None) -> None:
        """Start the process and return at once. Raises UserError where SGLang is missing.

        meeting: of a server on several nodes, as the first one reserved it.
        """
        assert self._child is None, f"{self.name} runs already"
        assert (meeting is not None) == (self.settings.nodes > 1), f"{self.name}: meeting {meeting}"
        log.info("starting SGLang server %d, log in %s", self.index, self.log_file)
        packages = require_sglang(device=self.settings.device).folder
        host = self.settings.http_host
        port = reserve_port(host, self._reserved)
        self._endpoint = Endpoint(self.index, f"http://{f'[{host}]' if ':' in host else host}:{port}", Keys.random())
        self._scratch = scratch = Path(tempfile.mkdtemp(prefix=launcher.SCRATCH_PREFIX))  # 0700
        # A restarted server draws other noise than before, far from the seeds of the run's other servers.
        own = replace(self.settings, seed=(self.settings.seed + (self._starts << 16)) % (1 << 31))
        self._started, self._starts = time.monotonic(), self._starts + 1
        try:
            self._endpoint.keys.write(scratch / launcher.KEYS_FILE)
            if meeting is not None:
                replace(meeting, number=self.settings.node).write(scratch)
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with self.log_file.open("ab") as output:
                self._log_start = output.tell()
                self._child = Child(
                    self.name,
                    [*PROGRAM, *arguments(own, port, meeting)],
                    streams=(PIPE, output, STDOUT),
                    env=environment(own, scratch=scratch, packages=packages),
                )
            os.sched_setaffinity(self._child.pid, processors())  # its GPUs may be near others than this rank's
        except (OSError, RunError):
            self._remove_scratch()
            raise

    def wait_ready(self) -> Endpoint:
        """Wait until the server generates, or a further node has loaded its part.

        Raises RunError with the log's last lines, after which nothing of the server is left here.
        """
        assert self._endpoint is not None, f"{self.name} was not started"
        if (problem := self._wait_for_start(self._endpoint)) is not None:
            lines = telling_lines(self.log_file, self._log_start)
            self.stop()
            raise RunError(
                "\n  ".join([f"{self.name} did not start: {problem}; log: {self.log_file}, last lines:", *lines])
            )
        self._reserved.close()
        log.info("%s is ready after %.1f s", self.name, time.monotonic() - self._started)
        return self._endpoint

    def abort(self) -> None:
        """Kill the server's processes without waiting for their end; `wait_ready` in another thread then raises."""
        if self._child is not None:
            self._remove_scratch()
            group.kill(self._child.pid)

    def stop(self) -> None:
        """End every process of the server and wait for that; may be called twice.

        Raises RunError for a process that SIGKILL does not end.
        """
        self._reserved.close()
        if self._child is None:
            return
        self._remove_scratch()  # before the kill as well: a launcher may kill this rank meanwhile
        if left := group.end(self._child.pid, deadline_s=_STOP_S):
            raise RunError(f"{self.name}: processes {left} are still there {_STOP_S:g} s after SIGKILL")
        self._exit_code = self._child.end()
        self._remove_scratch()
        self._child = None

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _wait_for_start(self, endpoint: Endpoint) -> str | None:
        """Wait until /health answers; generate one token, unless this is a further node; return the problem."""
        timeout_s = self.settings.start_timeout_s
        deadline = self._started + timeout_s
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        last = "no answer"
        with closing(Control(endpoint, _HEALTH_S)) as control:
            while True:
                if (code := self.exit_code) is not None:
                    return f"its process ended with exit code {code} before /health answered"
                if time.monotonic() >= deadline:
                    return f"/health did not answer 200 within {timeout_s:g} s (last: {last})"
                try:
                    control.call("GET", "/health")
                    break
                except ServerError as error:
                    last = str(error)
                    time.sleep(_POLL_S)
            if self.settings.node:
                return None
            control.timeout_s = max(1.0, deadline - time.monotonic())
            try:
                answer = control.object("POST", "/generate", body)
            except ServerError as error:
                return f"the first generation failed: {error}"
        good = len(answer.get("output_ids", ())) == 1
        return None if good else f"the first generation was answered {str(answer)[:_LONGEST_LINE]}"


def telling_lines(log_file: Path, start: int) -> list[str]:
    """Return a log's last lines after byte `start`, without source code and SGLang's settings."""
    with log_file.open("rb") as file:
        file.seek(max(start, log_file.stat().st_size - 200_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    plain = [line[:_LONGEST_LINE] for line in lines if line.strip() and not line[0].isspace()]
    return [line for line in plain if "server_args=" not in line][-_TELLING_LINES:]


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
