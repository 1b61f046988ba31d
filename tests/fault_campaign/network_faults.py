"""Faults between hosts, which are network namespaces of this machine, and of services that a run asks."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.fault_campaign.control_groups import kill
from tests.fault_campaign.faults import Fault
from tests.fault_campaign.inputs import TIMEOUT_S
from tests.fault_campaign.orders import HIT, ORDER, free_port, give_order, serve, take_order
from tests.fault_campaign.runs import Run, run_tool
from tests.two_hosts import INTERFACE

RULES = "add table inet faults; add chain inet faults input {{ type filter hook input priority 0; }}; \
add rule inet faults input iifname {interface} {rule} drop"


@dataclass
class Partition(Fault):
    """The link between two hosts is cut, for ever or for `seconds`."""

    seconds: float = 0.0
    nodes: int = 2

    def fire(self, run: Run) -> str:
        if not run.ranks():
            return ""
        node = run.random.randrange(2)
        run_tool("ip", "-n", run.namespaces[node], "link", "set", INTERFACE, "down")
        if self.seconds:
            run.wait_for(lambda: False, deadline_s=self.seconds)
            self.heal(run)
        return f"host {node} is cut off" + (f" for {self.seconds:g} s" if self.seconds else "")

    def heal(self, run: Run) -> None:
        for host in run.namespaces:
            run_tool("ip", "-n", host, "link", "set", INTERFACE, "up")


@dataclass
class LossyLink(Fault):
    """A host loses a share of the packets that reach it, for `seconds`."""

    percent: int = 10
    seconds: float = 3.0
    nodes: int = 2

    def fire(self, run: Run) -> str:
        if not run.ranks():
            return ""
        self._host = run.namespaces[run.random.randrange(2)]
        rule = f"numgen random mod 100 < {self.percent}"
        inside = ("ip", "netns", "exec", self._host, "nft")
        run_tool(*inside, RULES.format(interface=INTERFACE, rule=rule))
        run.wait_for(lambda: False, deadline_s=self.seconds)
        run_tool(*inside, "delete table inet faults")
        return f"{self.percent} % of the packets to a host are lost for {self.seconds:g} s"


@dataclass
class SlowLink(Fault):
    """A host sends at most so many kilobits a second, for `seconds`."""

    kbit: int = 500
    seconds: float = 3.0
    nodes: int = 2

    def fire(self, run: Run) -> str:
        if not run.ranks():
            return ""
        node = run.random.randrange(2)
        queue = ("dev", INTERFACE, "root")
        limit = ("tbf", "rate", f"{self.kbit}kbit", "burst", "32kbit", "latency", "2s")
        run_tool("tc", "-n", run.namespaces[node], "qdisc", "add", *queue, *limit)
        run.wait_for(lambda: False, deadline_s=self.seconds)
        run_tool("tc", "-n", run.namespaces[node], "qdisc", "del", *queue)
        return f"host {node} sends {self.kbit} kbit/s for {self.seconds:g} s"


@dataclass
class BadService(Fault):
    """A reward service that answers wrongly, late or not at all, for a number of requests or for ever."""

    how: str = "500"
    times: int = 2  # of requests; 0: all from now on
    _service = 0  # its process

    def prepare(self, run: Run) -> None:
        port = free_port()
        self._service = serve(port, handler(run.folder))
        self.reward = (
            *("reward.source=http", f"reward.source.url=http://127.0.0.1:{port}/score"),
            f"reward.source.timeout_s={TIMEOUT_S - 2:g}",
        )

    def fire(self, run: Run) -> str:
        give_order(run.folder, self.how, self.times)
        hit = run.wait_for((run.folder / HIT).exists, deadline_s=60.0)
        return f"the reward service: {self.how}, {self.times or 'all'} times" if hit else ""

    def heal(self, run: Run) -> None:
        (run.folder / ORDER).unlink(missing_ok=True)

    def close(self, run: Run) -> None:
        if self._service:
            kill(self._service, signal.SIGKILL)
            os.waitpid(self._service, 0)
        self._service = 0


def handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    """Return a handler of requests that follows the orders in a folder."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            items = json.loads(self.rfile.read(int(self.headers["content-length"])))["items"]
            how = take_order(folder)
            scores = [sum(digit in "13579" for digit in item["response"]) / 4 for item in items]
            if how == "close":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if how == "hang":
                time.sleep(3600)
            body = json.dumps({"scores": scores}).encode()
            bodies = {
                "garbage": b"<html>busy</html>",
                "short": json.dumps({"scores": scores[:-1]}).encode(),
                "nan": json.dumps({"scores": [float("nan")] * len(scores)}).encode(),
                "text": json.dumps({"scores": ["good"] * len(scores)}).encode(),
                "long": b"[" * (1 << 22),
                "cut": body[: len(body) // 2],
            }
            status = int(how) if how.isdigit() else 200
            content = bodies.get(how, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) * (2 if how == "cut" else 1)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Write no log."""

    return Handler
