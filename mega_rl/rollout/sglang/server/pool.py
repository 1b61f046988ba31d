"""Servers of a run, started on the trainer's hosts or joined by URL."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

from mega_rl.config.values import divisors, listed
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import run_on_all, run_on_one
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Control, Endpoint, Keys
from mega_rl.rollout.sglang.server.nodes import Node
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings
from mega_rl.tracking import progress

log = logging.getLogger(__name__)

_POLL_S = 0.5
_ANSWER_S = 10.0
_HEALTH_S = 5.0  # a healthy server answers /health faster


class StartedServers:
    """Servers that this run starts, equally many on each host or each `nodes` hosts; equal on all ranks.

    The first rank of a host owns the servers there, or its nodes' parts of them.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: ServerSettings,
        *,
        count: int,
        ranks_per_host: int,
        folder: Path,
        process: Callable[[ServerSettings, int, Path], ServerProcess] = ServerProcess,
    ) -> None:
        """Start this host's servers without waiting for them. Collective where they span hosts.

        settings: of the first server; the others differ by `node`, `base_gpu` and `seed`.
        count: servers that a host has a part of. Their numbers continue from host to host.

        Raises UserError where servers that span several hosts do not divide the trainer's.
        """
        self._ranks, self.ranks_per_host, nodes = ranks, ranks_per_host, settings.nodes
        self._timeout_s = settings.start_timeout_s
        self._spans_hosts = nodes > 1
        self.colocated = settings.memory_saver  # they share the trainer's devices and take turns with it
        num_hosts = -(-ranks.size // ranks_per_host)
        if num_hosts % nodes:
            raise UserError(
                f"rollout.sglang.server.nodes={nodes}: the trainer runs on {num_hosts} host(s), and each server "
                f"takes {nodes} of them; legal: {listed(divisors(num_hosts))}"
            )
        # Numbers of the trainer's hosts that each server is on, and each one's tensor-parallel ranks.
        self.hosts = [tuple(range(first, first + nodes)) for first in range(0, num_hosts, nodes) for _ in range(count)]
        self.tp = [settings.tp] * len(self.hosts)
        self.endpoints: list[Endpoint] = []
        self._own: dict[int, ServerProcess] = {}
        host, is_first = divmod(ranks.rank, ranks_per_host)
        for place in range(count if is_first == 0 else 0):
            index = host // nodes * count + place
            own = replace(
                settings,
                node=host % nodes,
                base_gpu=settings.base_gpu + place * settings.tp_here,
                seed=settings.seed + index,  # with one seed they would draw the same noise for batches of one shape
            )
            self._own[index] = process(own, index, folder)
        self._start(range(len(self.hosts)))

    def owner(self, index: int) -> int:
        """Return the rank that starts a server's first node, which has its URL."""
        return self.hosts[index][0] * self.ranks_per_host

    def wait_ready(self) -> None:
        """Wait until every server of every host generates; collective. Raises RunError on all ranks."""
        if self.endpoints:
            return
        with progress.phase("waiting for SGLang servers", deadline_s=self._timeout_s):
            ready = self._wait(range(len(self.hosts)))
        self.endpoints = [ready[index] for index in range(len(self.hosts))]

    def bring_back(self, lost: Sequence[int]) -> None:
        """Restart these servers, until they answer at `endpoints` with weights of any kind; collective.

        Raises RunError on all ranks.
        """
        for index in sorted(self._own.keys() & set(lost)):
            log.warning("starting SGLang server %d again", index)
        run_on_all(lambda: self.stop(lost), self._ranks)  # no old part may be there when a new one starts
        self._start(lost)
        for index, endpoint in self._wait(lost).items():
            self.endpoints[index] = endpoint

    def _start(self, servers: Sequence[int]) -> None:
        """Start this host's processes of these servers; collective where they span hosts."""
        own = {index: self._own[index] for index in sorted(self._own.keys() & set(servers))}
        if not self._spans_hosts:
            for server in own.values():
                server.start()
            return

        def reserve() -> list[list[object]]:
            led = [(index, server) for index, server in own.items() if self.owner(index) == self._ranks.rank]
            return [[index, asdict(server.reserve_meeting())] for index, server in led]

        # The trainer's own process group carries their secrets, as it does keys.
        every = self._ranks.gather_json(run_on_all(reserve, self._ranks))
        meetings = {index: Node(**meeting) for reserved in every for index, meeting in reserved}
        for index, server in own.items():
            server.start(meetings[index])

    def _wait(self, servers: Sequence[int]) -> dict[int, Endpoint]:
        """Wait for these servers on all hosts at the same time; return their endpoints; collective."""
        own = {index: self._own[index] for index in servers if index in self._own}

        def wait() -> list[dict[str, object]]:
            with ThreadPoolExecutor(max(1, len(own))) as pool:
                endpoints = list(pool.map(lambda server: server.wait_ready(), own.values()))
            return [asdict(endpoint) for endpoint in endpoints if self.owner(endpoint.index) == self._ranks.rank]

        def give_up() -> None:
            for server in own.values():
                server.abort()

        here = run_on_all(wait, self._ranks, cancel=give_up)
        # The trainer's own process group carries the keys: whoever can read it could read the weights too.
        records = [record for records in self._ranks.gather_json(here) for record in records]
        return {one["index"]: Endpoint(one["index"], one["url"], Keys(**one["keys"])) for one in records}

    def stop(self, servers: Sequence[int]) -> None:
        """End those of these servers that this rank started, until `bring_back`; no collective."""
        for index in self._own.keys() & set(servers):
            self._own[index].stop()

    def close(self) -> None:
        """End the servers that this rank started; no collective, may be called twice."""
        self.stop(list(self._own))


class JoinedServers:
    """Servers that run already (`rollout.sglang.urls`); this run neither starts nor ends them."""

    ranks_per_host, colocated = 1, False

    def __init__(self, ranks: Ranks, urls: Sequence[str], keys_file: Path, *, timeout_s: float) -> None:
        """Send nothing; `wait_ready` does. timeout_s: deadline of an answer from all of them."""
        self._ranks, self._timeout_s, keys = ranks, timeout_s, Keys.read(keys_file)
        self.tp: list[int] = []
        self.hosts: list[tuple[int, ...]] = [()] * len(urls)
        self.endpoints = [Endpoint(index, url.rstrip("/"), keys) for index, url in enumerate(urls)]

    def wait_ready(self) -> None:
        """Wait until all answer; collective. Raises RunError on all ranks."""
        urls = ", ".join(endpoint.url for endpoint in self.endpoints)
        with progress.phase(f"waiting for SGLang servers {urls}", deadline_s=self._timeout_s):
            self.tp = run_on_one(lambda: self._sizes(range(len(self.endpoints))), self._ranks)

    def bring_back(self, lost: Sequence[int]) -> None:
        """Wait until these servers answer; collective. Raises RunError on all ranks."""
        run_on_one(lambda: self._sizes(lost), self._ranks)

    def stop(self, servers: Sequence[int]) -> None:
        """End none."""

    def _sizes(self, servers: Sequence[int]) -> list[int]:
        """Wait until these servers answer; return their tensor-parallel sizes from /server_info."""
        deadline = time.monotonic() + self._timeout_s
        return [self._size(self.endpoints[index], deadline) for index in servers]

    def _size(self, endpoint: Endpoint, deadline: float) -> int:
        with closing(Control(endpoint, timeout_s=_ANSWER_S)) as control:
            while not control.answers("/health", timeout_s=_HEALTH_S):
                if time.monotonic() > deadline:
                    raise RunError(
                        f"waited {self._timeout_s:g} s (rollout.sglang.start_timeout_s) for an answer of SGLang "
                        f"server {endpoint.url}"
                    )
                time.sleep(_POLL_S)
            size = control.object("GET", "/server_info").get("tp_size")
        if not isinstance(size, int) or size < 1:
            raise RunError(f"{endpoint.url}: /server_info says tp_size={size!r}, which is not a number of ranks")
        return size


ServerPool: TypeAlias = StartedServers | JoinedServers
