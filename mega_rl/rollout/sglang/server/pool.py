"""Servers of a run that are started on the trainer's hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

from mega_rl.config.values import divisors, listed
from mega_rl.errors import UserError
from mega_rl.parallel.agreement import run_on_all
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Endpoint, Keys
from mega_rl.rollout.sglang.server.fleet import Fits, JoinedServers
from mega_rl.rollout.sglang.server.nodes import Node
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


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

    def bring_back(self, lost: Sequence[int], fits: Fits = lambda _: ()) -> tuple[list[int], dict[int, str]]:
        """Restart these servers, until they answer at `endpoints` with weights of any kind; collective.

        Returns `lost`: none leaves. Raises RunError on all ranks.
        """
        for index in sorted(self._own.keys() & set(lost)):
            log.warning("starting SGLang server %d again", index)
        run_on_all(lambda: self.stop(lost), self._ranks)  # no old part may be there when a new one starts
        self._start(lost)
        for index, endpoint in self._wait(lost).items():
            self.endpoints[index] = endpoint
        return list(lost), {}

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


ServerPool: TypeAlias = StartedServers | JoinedServers
