"""Real SGLang servers for tests, requests to them, and a look at their processes and sockets."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mega_rl.rollout.sglang.control import Endpoint
from mega_rl.rollout.sglang.server import launcher
from mega_rl.rollout.sglang.server.installation import find_sglang
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# `make test` installs SGLang for CPUs on Linux, so there it is never skipped; on a GPU machine it comes with an extra.
needs_sglang = pytest.mark.skipif(
    find_sglang() is None and (DEVICE == "cuda" or sys.platform != "linux"), reason="needs the sglang extra, on Linux"
)
START_S = 280.0  # 25 s on idle cores, 100 s and more on busy ones


@contextmanager
def running_server(
    checkpoint: Path, folder: Path, *, index: int = 0, tp: int = 1, dtype: str = "float32", **settings: Any
) -> Iterator[tuple[ServerProcess, Endpoint]]:
    """A server that generates from `checkpoint`, its log below `folder`; gone at the end.

    A start takes 25 s: share one by a fixture of scope "module".
    """
    args = {"max_total_tokens": 20000} | settings.pop("args", {})
    given = {"device": DEVICE, "start_timeout_s": START_S, "args": args, **settings}
    wanted = ServerSettings(model_path=checkpoint, tp=tp, dtype=dtype, **given)
    with ServerProcess(wanted, index=index, folder=folder) as server:
        yield server, server.wait_ready()


def request(
    endpoint: Endpoint,
    path: str,
    body: Any = None,
    *,
    key: str | None = "api",
    method: str | None = None,
    timeout_s: float = 60.0,
) -> tuple[int, Any]:
    """Status and answer (JSON where it is, else text) of one request; POST with a body, else GET.

    `key` is "api", "admin", None for none, or a key as it is.
    """
    known = {"api": endpoint.keys.api_key, "admin": endpoint.keys.admin_key}
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {known.get(key, key)}"
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(
        endpoint.url + path, data=data, headers=headers, method=method or ("GET" if body is None else "POST")
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(sent, timeout=timeout_s) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content.decode("utf-8", "replace")


def generate(endpoint: Endpoint, prompts: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
    """Return SGLang's answers with log-probs to a list of prompts; by default greedy, 8 tokens, without stop tokens."""
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
    status, answers = request(
        endpoint, "/generate", {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    )
    assert status == 200, answers
    return answers


def listening_addresses(process_group: int) -> set[str]:
    """Addresses of all TCP sockets on which processes of a group listen."""
    addresses = set()
    for process in launcher.group_members(process_group):
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                addresses.add(connection.laddr.ip)
    return addresses


def owner(checkpoint: Path, folder: Path, how: str = "wait", *, ready: bool = False) -> subprocess.Popen[str]:
    """Another program with a server of its own; see `sglang_owner`. What it says comes on its standard output."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.sglang_owner", str(checkpoint), str(folder), how, str(int(ready))],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wait_until(what: str, true: Callable[[], object], *, timeout_s: float) -> None:
    """Poll; fails with `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)


def shared_files(process_group: int) -> set[Path]:
    """Return the files of /dev/shm that the processes of a group have mapped or open."""
    files = set()
    for process in launcher.group_members(process_group):
        try:
            files |= {Path(each.path) for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
            files |= {Path(each.path) for each in process.open_files() if each.path.startswith("/dev/shm/")}
        except psutil.NoSuchProcess:
            continue
    return {path for path in files if "(deleted)" not in path.name}


def private_folder(process_group: int) -> Path:
    """Return a server's private folder with its keys, sockets and other shared files."""
    return Path(psutil.Process(process_group).environ()[launcher.SCRATCH_VARIABLE])


def assert_gone(process_group: int, files: set[Path], *, timeout_s: float = 30.0) -> None:
    """Assert that within seconds no process of a group and none of `files` is left."""
    wait_until(f"end of group {process_group}", lambda: not launcher.group_members(process_group), timeout_s=timeout_s)
    assert not [path for path in files if path.exists()]
