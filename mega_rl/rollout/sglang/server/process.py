"""One SGLang server or node of one: its settings, and the process that the trainer starts."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil

import mega_rl
from mega_rl.config.rules.rollout import is_loopback
from mega_rl.converters.hf.companions import companions, copy_companions
from mega_rl.environment import interface_of, of_other_programs, processors, python_module
from mega_rl.errors import RunError, UserError
from mega_rl.processes import PIPE, STDOUT, Child
from mega_rl.rollout.sglang.control import Control, Endpoint, Keys, ServerError
from mega_rl.rollout.sglang.server import launcher
from mega_rl.rollout.sglang.server.installation import require_sglang, with_tools
from mega_rl.rollout.sglang.server.nodes import Node

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
            if own.config_changes:
                own = replace(own, model_path=scratch / "model")
                own.model_path.mkdir()
                copy_companions(own.model_path, companions(self.settings.model_path), own.config_changes)
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
        except (OSError, RunError, UserError):
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
            launcher.kill_group(self._child.pid)

    def stop(self) -> None:
        """End every process of the server and wait for that; may be called twice.

        Raises RunError for a process that SIGKILL does not end.
        """
        self._reserved.close()
        if self._child is None:
            return
        self._remove_scratch()  # before the kill as well: a launcher may kill this rank meanwhile
        if left := launcher.end_group(self._child.pid, deadline_s=_STOP_S):
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
            f"rollout.sglang.server.host={host!r} is neither an interface nor an address of {os.uname().nodename} "
            f"({error}); legal: {', '.join(sorted(psutil.net_if_addrs()))}, or an address of one of them"
        ) from None
    return int(bound.getsockname()[1])


_CPU_TOKENS = 32768  # on a CPU SGLang would size the KV cache by the machine's memory, which is the trainer's too
# Variables that a launcher sets for ranks. A server that had them would take itself for one of the ranks.
_OF_A_RANK = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "MEGA_RL_GENERATION",
)  # fmt: skip
_PREFIXES_OF_A_RANK = ("TORCHELASTIC_", "PET_", "MEGA_RL_SGLANG_")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server, or of one node's part of it."""

    model_path: Path  # checkpoint in Hugging Face's format
    # Changes of its config.json, None for a key that goes; with any, weights come only from the trainer.
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"  # address to listen on, of this host
    tp: int = 1  # tensor-parallel ranks, on all nodes
    nodes: int = 1  # hosts that it spans
    node: int = 0  # number of this one, the part's; 0 has the server's URL
    dtype: str = "float32"  # weights and activations: float32, bfloat16 or float16
    device: str = "cpu"  # or cuda
    memory_saver: bool = False  # CUDA: weights and KV cache can be released
    deterministic: bool = False  # CUDA: the same tokens whatever else is in the batch
    base_gpu: int = 0  # CUDA: the first of `tp_here` devices, counted in CUDA_VISIBLE_DEVICES
    seed: int = 0  # for draws that ignore the request's seed; on CUDA all, unless `deterministic`
    start_timeout_s: float = 600.0  # from start() to the first token
    return_routing: bool = False  # requests may ask for the experts of their tokens
    args: Mapping[str, object] = field(default_factory=dict)  # further ones, by SGLang's names; see `command_line`

    @property
    def tp_here(self) -> int:
        """Return the tensor-parallel ranks of this node."""
        return self.tp // self.nodes

    @property
    def http_host(self) -> str:
        """Return the address of requests: of a further node only this host asks, after its health."""
        return "127.0.0.1" if self.node else self.host


def arguments(settings: ServerSettings, port: int, meeting: Node | None = None) -> list[str]:
    """Return SGLang's command line; it never holds keys or trust_remote_code.

    meeting: of a server on several nodes.
    """
    given: dict[str, object] = {
        "--model-path": settings.model_path.resolve(),
        "--host": settings.http_host,
        "--port": port,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--tp-size": settings.tp,
        "--random-seed": settings.seed,
    }
    if meeting is not None:
        given |= {"--nnodes": settings.nodes, "--node-rank": settings.node, "--dist-init-addr": meeting.init_address}
    if settings.config_changes:
        given["--load-format"] = "dummy"
    flags = ["--skip-tokenizer-init", *(["--enable-return-routed-experts"] if settings.return_routing else [])]
    if settings.device == "cpu":
        given["--attention-backend"] = "torch_native"
        if "max_total_tokens" not in settings.args:
            given["--max-total-tokens"] = _CPU_TOKENS
        flags += ["--sleep-on-idle"]  # else a server without requests keeps a core busy, which the trainer needs
    else:
        given["--base-gpu-id"] = settings.base_gpu
        flags += ["--enable-memory-saver"] if settings.memory_saver else []
        flags += ["--enable-deterministic-inference"] if settings.deterministic else []
    return [*(str(part) for pair in given.items() for part in pair), *flags, *command_line(settings.args)]


def command_line(args: Mapping[str, object]) -> list[str]:
    """Return arguments of SGLang by the names of its ServerArgs as words of its command line.

    True is a flag, a list several words, a mapping JSON.
    """
    words: list[str] = []
    for name, value in args.items():
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def environment(settings: ServerSettings, *, scratch: Path, packages: Path | None) -> dict[str, str]:
    """Return the server's environment: the trainer's without what torchrun and the run have set for ranks.

    Plus paths and threads. SGLang decides about CUDA and NCCL itself.
    """
    clean = {
        name: value
        for name, value in with_tools(of_other_programs()).items()
        if name not in _OF_A_RANK and not name.startswith(_PREFIXES_OF_A_RANK)
    }
    paths = [str(Path(mega_rl.__file__).parents[1]), *([str(packages)] if packages else [])]
    clean["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [clean.get("PYTHONPATH")])])
    clean[launcher.SCRATCH_VARIABLE] = str(scratch)
    clean[launcher.TRAINER_VARIABLE] = str(os.getpid())
    clean[launcher.DEVICE_VARIABLE] = settings.device
    if settings.device == "cpu":
        clean["SGLANG_CPU_OMP_THREADS_BIND"], threads = cpu_binding(settings.tp_here, sorted(os.sched_getaffinity(0)))
        clean["OMP_NUM_THREADS"] = str(threads)
        clean["OMP_WAIT_POLICY"] = "passive"  # threads without work sleep as well
    # Colocated servers get weights from memory: no group of theirs has members elsewhere unless they span hosts.
    if is_loopback(settings.host) or (settings.device == "cuda" and settings.memory_saver and settings.nodes == 1):
        clean["GLOO_SOCKET_IFNAME"] = clean["NCCL_SOCKET_IFNAME"] = "lo"
    elif settings.nodes > 1 and (interface := interface_of(settings.host)):
        clean = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **clean}
    if settings.nodes > 1:
        clean["SGLANG_HOST_IP"] = settings.host  # for the queue of requests, which else takes the first interface
    return clean


def cpu_binding(ranks: int, cpus: Sequence[int]) -> tuple[str, int]:
    """Return each rank's CPUs in SGLang's notation, "0,1|2,3", and its threads.

    Ranks have equal shares of `cpus`; where there are more ranks than CPUs they take turns on them.
    """
    share = max(1, len(cpus) // ranks)
    groups = [[cpus[(rank * share + place) % len(cpus)] for place in range(share)] for rank in range(ranks)]
    return "|".join(",".join(map(str, own)) for own in groups), share
