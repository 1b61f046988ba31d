"""Servers that span two hosts, on two ranks that stand for them, with a scripted program in SGLang's place."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from mega_rl.errors import RunError
from mega_rl.parallel import agreement
from mega_rl.parallel.comm import GroupRanks
from mega_rl.rollout.sglang.server import installation, launcher, nodes
from mega_rl.rollout.sglang.server import process as server
from mega_rl.rollout.sglang.server.pool import StartedServers
from mega_rl.rollout.sglang.server.process import ServerSettings

# A node is healthy once all are there, as SGLang's is; HOW says what a node does instead.
SCRIPTED = """
import http.server, json, os, sys, threading, time
from pathlib import Path
from mega_rl.rollout.sglang.server import nodes
options = dict(zip(sys.argv[1:], sys.argv[2:]))
number, count = int(options["--node-rank"]), int(options["--nnodes"])
how = json.loads(os.environ["HOW"]).get(str(number), "")
scratch = Path(os.environ["MEGA_RL_SGLANG_SCRATCH"])
node = nodes.Node.read(scratch)
print("node", number, "of", count, "tp", options["--tp-size"], "meets at", options["--dist-init-addr"], flush=True)
if how == "dies":
    print("RuntimeError: no memory is left")
    sys.exit(3)

def end(reason):
    print("The server ends:", reason, flush=True)
    os._exit(7)

nodes.end_together(node, end)
together = Path(os.environ["TOGETHER"])
together.mkdir(exist_ok=True)
(together / f"{node.store_port}-{number}").touch()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        there = len(list(together.glob(f"{node.store_port}-*"))) == count
        self.answer(200 if there and how != "hangs" else 503, b"")
    def do_POST(self):
        self.answer(200, b'{"output_ids": [7]}')
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


def lives(rank: int, folder: Path) -> dict[str, Any]:
    """What each rank sees of starts, deaths and restarts of a server with a node on each rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    ranks = GroupRanks(dist.group.WORLD)
    agreement.run_on_all.__kwdefaults__["beat_s"] = 0.2  # type: ignore[index]
    os.environ["TOGETHER"] = str(folder / "together")
    program = (sys.executable, "-c", SCRIPTED)
    sglang = installation.Installation("0.5.21", None)
    with (
        mock.patch.object(server, "PROGRAM", program),
        mock.patch.object(server, "require_sglang", return_value=sglang),
    ):
        cases: dict[str, Callable[..., dict[str, Any]]] = {"life": life, "dies": fails, "hangs": fails}
        return {name: case(ranks, name, folder / name) for name, case in cases.items()}


def start(ranks: GroupRanks, folder: Path, how: str, *, timeout_s: float) -> StartedServers:
    """Two servers of two ranks on two hosts; the second node of each behaves as `how` says."""
    os.environ["HOW"] = f'{{"1": "{how}"}}'
    settings = ServerSettings(Path("/some/checkpoint"), tp=2, nodes=2, start_timeout_s=timeout_s)
    return StartedServers(ranks, settings, count=2, ranks_per_host=1, folder=folder)


def life(ranks: GroupRanks, _: str, folder: Path) -> dict[str, Any]:
    """A start, the death of the second node of server 1, and its return."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mega_rl.rollout.sglang.server.pool").addHandler(handler)
    with closing(start(ranks, folder, "", timeout_s=60.0)) as pool:
        pool.wait_ready()
        own = pool._own[1]
        answer: dict[str, Any] = {
            "endpoints": [(one.index, one.url, one.keys.api_key) for one in pool.endpoints],
            "tp": pool.tp,
            "names": [one.name.partition(" on ")[0] for one in pool._own.values()],
            "logs": {index: one.log_file.read_text().splitlines()[0] for index, one in pool._own.items()},
        }
        untouched = pool.endpoints[0]
        if ranks.rank == 1:
            os.kill(own.pid or 0, signal.SIGKILL)
        began = time.monotonic()
        while own.exit_code is None and time.monotonic() - began < 20:
            time.sleep(0.02)
        answer["seconds"] = time.monotonic() - began
        answer["reason"] = own.log_file.read_text().splitlines()[-1]
        pool.bring_back([1])
        answer["again"] = [(one.index, one.url, one.keys.api_key) for one in pool.endpoints]
        answer["warnings"] = [text for text in said if "again" in text]
        answer["other is untouched"] = pool.endpoints[0] == untouched and pool._own[0].exit_code is None
        ranks.sum(torch.zeros(1))  # the first rank that leaves ends its parts of both servers, and so the other's
        processes = [one.pid for one in pool._own.values()]
    answer["left"] = [pid for pid in processes if launcher.group_members(pid or 0)]
    return answer


def fails(ranks: GroupRanks, how: str, folder: Path) -> dict[str, Any]:
    """A start in which the second node of both servers does not come up."""
    began = time.monotonic()
    with closing(start(ranks, folder, how, timeout_s=4.0 if how == "hangs" else 60.0)) as pool:
        processes = [one.pid for one in pool._own.values()]
        try:
            pool.wait_ready()
            said = "nothing"
        except RunError as error:
            said = str(error)
    left = [pid for pid in processes if launcher.group_members(pid or 0)]
    return {"said": said, "seconds": time.monotonic() - began, "left": left}


def meet(rank: int, meeting: nodes.Node) -> tuple[float, list[str]]:
    """Return a sum over the ranks of a server that meet as SGLang's do, and the addresses this one listens on."""
    import torch
    import torch.distributed as dist

    method = nodes.let_ranks_meet(replace(meeting, number=rank))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    listens = {one.laddr.ip for one in psutil.Process().net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN}
    dist.barrier()
    return float(total), sorted(listens)


def send(_: int, checkpoint: Path, address: dict[str, Any]) -> dict[int, str]:
    """Send a checkpoint to a server of two ranks over a process group; return failures."""
    from mega_rl.rollout.sglang.control import Control, Endpoint, Keys
    from mega_rl.rollout.sglang.weights import sync
    from mega_rl.rollout.sglang.weights.process_group import DistributedTransport
    from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights
    from tests.helpers.engines import make_config, running_engine

    control = Control(
        Endpoint(address["index"], address["url"], Keys(address["api_key"], address["admin_key"])), timeout_s=60.0
    )
    with closing(control), running_engine(make_config(checkpoint), trainable=False) as engine:
        sync._pause(control)
        servers = [Server(0, 2, (0, 1), control)]
        weights = TrainerWeights(engine, next(engine.models[0].parameters()).dtype)
        transport = DistributedTransport(weights, servers, bucket_bytes=20_000, timeout_s=60.0)
        failed = transport.send(version=5)
        transport.close()
        sync._finish(control, 5)
    return failed
