"""One SGLang server as a process of the trainer's: started, proved ready, stopped with all that it started."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from mega_rl.errors import RunError
from mega_rl.rollout.sglang.http.endpoint import Endpoint
from mega_rl.rollout.sglang.http.keys import Keys
from mega_rl.rollout.sglang.server import group, launcher
from mega_rl.rollout.sglang.server.installation import require_sglang
from mega_rl.rollout.sglang.server.settings import ServerSettings, arguments, environment

__all__ = ["ServerProcess", "ServerSettings", "ServerStartError", "ServerStopError"]

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", launcher.__name__)
PORT_TRIES = 3

_POLL_S = 0.1
_HEALTH_S = 10.0  # for one answer
_STOP_S = 20.0  # SIGKILL needs milliseconds; a GPU's driver may hold a process for seconds
_TELLING_LINES = 12
_LONGEST_LINE = 300


class ServerStartError(RunError):
    """A server did not start. The message names the server, what it waited for, the log and its last lines."""


class ServerStopError(RunError):
    """Processes of a server outlived SIGKILL. The message names them."""


class ServerProcess:
    """A server that this process starts; it ends when this process does, in whatever way.

    Its output goes to `<folder>/server-<index>.log`. Use as a context manager, or call `start` and `stop`.
    """

    def __init__(self, settings: ServerSettings, index: int, folder: Path) -> None:
        self.settings = settings
        self.index = index
        self.log_file = folder / f"server-{index}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None  # of the last process, once it was stopped
        self._scratch: Path | None = None
        self._keys = Keys.random()
        self._reserved: socket.socket | None = None
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
        return f"SGLang server {self.index}"

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

    def start(self) -> None:
        """Start the process and return at once. Raises UserError where SGLang is missing."""
        assert self._process is None, f"{self.name} runs already"
        self._started = time.monotonic()
        self._spawn()

    def wait_ready(self) -> Endpoint:
        """Wait until the server generates. Raises ServerStartError, after which nothing of the server is left."""
        assert self._process is not None, f"{self.name} was not started"
        deadline = self._started + self.settings.start_timeout_s
        for attempt in range(1, PORT_TRIES + 1):
            problem = self._wait_for_health(deadline) or self._first_token(deadline)
            if problem is None:
                break
            clash = not self.alive and self._port_was_taken()
            lines = telling_lines(self.log_file, self._log_start)
            self.stop()
            if not clash or attempt == PORT_TRIES:
                raise ServerStartError(
                    "\n  ".join([f"{self.name} did not start: {problem}; log: {self.log_file}, last lines:", *lines])
                )
            log.warning("%s: another program took port %d meanwhile; trying another port", self.name, self._port)
            self._spawn()
        self._release_port()
        log.info("%s is ready after %.1f s", self.name, time.monotonic() - self._started)
        return Endpoint(self.index, f"http://{_in_url(self.settings.host)}:{self._port}", self._keys)

    def restart(self) -> None:
        """Stop the server if it runs, and start it with new keys on a new port; does not wait."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End every process of the server and wait for that; may be called twice.

        Raises ServerStopError for a process that SIGKILL does not end.
        """
        process = self._process
        if process is None:
            return
        self._release_port()
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
        self._reserved = reserve_port(self.settings.host)
        self._port = self._reserved.getsockname()[1]
        self._scratch = scratch = Path(tempfile.mkdtemp(prefix="mega-rl-sglang-"))  # 0700
        self._keys.write(scratch / launcher.KEYS_FILE)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [*PROGRAM, *arguments(self.settings, self._port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(self.settings, scratch=scratch, packages=packages),
                start_new_session=True,
            )

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _wait_for_health(self, deadline: float) -> str | None:
        """Wait until /health answers 200; return None then, else the problem."""
        last = "no answer"
        while time.monotonic() < deadline:
            code = self.exit_code
            if code is not None:
                return f"its process ended with exit code {code} before /health answered"
            try:
                status, _ = self._call("GET", "/health", None, timeout_s=_HEALTH_S)
                if status == 200:
                    return None
                last = f"status {status}"
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {error}"
            time.sleep(_POLL_S)
        return f"/health did not answer 200 within {self.settings.start_timeout_s:g} s (last: {last})"

    def _first_token(self, deadline: float) -> str | None:
        """Generate one token; return None on success, else the problem."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        try:
            status, content = self._call("POST", "/generate", body, timeout_s=max(1.0, deadline - time.monotonic()))
            answer = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            code = self.exit_code
            ended = "" if code is None else f"; its process ended with exit code {code}"
            return f"the first generation failed: {type(error).__name__}: {error}{ended}"
        if status != 200 or not isinstance(answer, dict) or len(answer.get("output_ids", ())) != 1:
            return f"the first generation was answered {status}: {str(answer)[:_LONGEST_LINE]}"
        return None

    def _call(self, method: str, path: str, body: Any, *, timeout_s: float) -> tuple[int, bytes]:
        """Return (status, body) of one request; proxies of the environment are ignored."""
        connection = http.client.HTTPConnection(self.settings.host, self._port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self._keys.api_key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _port_was_taken(self) -> bool:
        with self.log_file.open("rb") as file:
            file.seek(self._log_start)
            return b"address already in use" in file.read().lower()


def telling_lines(log_file: Path, start: int) -> list[str]:
    """Return a log's last lines from byte `start` on, without quoted source code and SGLang's list of its settings."""
    with log_file.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - 200_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    kept = [line[:_LONGEST_LINE] for line in lines if line.strip() and not line[0].isspace()]
    return [line for line in kept if "server_args=" not in line][-_TELLING_LINES:]


def reserve_port(host: str) -> socket.socket:
    """Return a socket bound to a free port: held so, and not listening, it lets the server alone bind there too."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, 0))
    return bound


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
