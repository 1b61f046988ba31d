"""Servers of a run, started on each host of the trainer or joined by URL; every rank knows their endpoints."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mega_rl import progress
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import run_on_one
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.http.control import Control, ServerError
from mega_rl.rollout.sglang.http.endpoint import Endpoint
from mega_rl.rollout.sglang.http.keys import Keys
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings

log = logging.getLogger(__name__)

_POLL_S = 0.5
_ANSWER_S = 10.0


class ServerPool(Protocol):
    """Interface to the servers of a run; the same on every rank."""

    endpoints: list[Endpoint]
    tp: list[int]  # tensor-parallel ranks of each server

    def owner(self, index: int) -> int | None:
        """Return the rank that started a server; None for a server that this run only joined."""
        ...

    def wait_ready(self) -> None:
        """Wait until every server of every host generates; at once when they do already; collective.

        Raises RunError on all ranks.
        """
        ...

    def bring_back(self, lost: Sequence[int]) -> None:
        """Restart or await these servers until they answer at `endpoints`, with weights of any kind; collective.

        Raises RunError on all ranks.
        """
        ...

    def stop(self, servers: Sequence[int]) -> None:
        """End those of these servers that this rank started, until `bring_back`; no collective."""
        ...

    def close(self) -> None:
        """End the servers that this rank started; no collective, may be called twice."""
        ...


class StartedServers:
    """Servers that this run starts, equally many on each of its hosts, owned by the first rank there.

    A server that is started again keeps its number; its address and its keys are new.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Sequence[ServerSettings],
        *,
        ranks_per_host: int,
        folder: Path,
        process: Callable[[ServerSettings, int, Path], ServerProcess] = ServerProcess,
    ) -> None:
        """Start this host's servers without waiting for them; `wait_ready` does. No collective.

        settings: of this host's servers; every host has as many. Their numbers go on from host to host.
        process: makes the process of a server, given its settings, number and folder.
        """
        self._ranks = ranks
        self._timeout_s = max(own.start_timeout_s for own in settings)
        self._leaders = range(0, ranks.size, ranks_per_host)
        self._owner = [leader for leader in self._leaders for _ in settings]
        first = ranks.rank // ranks_per_host * len(settings)
        self._own: dict[int, ServerProcess] = {}
        self.tp = [own.tp for _ in self._leaders for own in settings]
        self.endpoints: list[Endpoint] = []
        if ranks.rank in self._leaders:
            self._own = {first + place: process(own, first + place, folder) for place, own in enumerate(settings)}
            for server in self._own.values():
                server.start()
                log.info("starting SGLang server %d, log in %s", server.index, server.log_file)

    def owner(self, index: int) -> int | None:
        return self._owner[index]

    def wait_ready(self) -> None:
        if self.endpoints:
            return
        records: list[dict[str, Any]] = []
        for leader in self._leaders:
            with progress.phase("waiting for SGLang servers", deadline_s=self._timeout_s):
                records += run_on_one(partial(self._wait, self._own), self._ranks, source=leader)
        self.endpoints = [_endpoint(record) for record in records]

    def bring_back(self, lost: Sequence[int]) -> None:
        """Restart these servers, ending those that hang, and update `endpoints`; collective."""
        for leader in self._leaders:
            own = [index for index in lost if self._owner[index] == leader]
            if own:
                for one in run_on_one(partial(self._restart, own), self._ranks, source=leader):
                    self.endpoints[one["index"]] = _endpoint(one)

    def _restart(self, own: Sequence[int]) -> list[dict[str, Any]]:
        for index in own:
            log.warning("starting SGLang server %d again", index)
            self._own[index].restart()
        return self._wait({index: self._own[index] for index in own})

    def _wait(self, servers: dict[int, ServerProcess]) -> list[dict[str, Any]]:
        """Wait for these servers at the same time; return their endpoints as JSON records."""
        with ThreadPoolExecutor(len(servers)) as pool:
            ready = list(pool.map(lambda server: server.wait_ready(), servers.values()))
        # The trainer's own process group carries the keys: whoever can read it could read the weights too.
        return [{"index": one.index, "url": one.url, "keys": asdict(one.keys)} for one in ready]

    def stop(self, servers: Sequence[int]) -> None:
        for index in self._own.keys() & set(servers):
            self._own[index].stop()

    def close(self) -> None:
        self.stop(list(self._own))


def _endpoint(record: dict[str, Any]) -> Endpoint:
    return Endpoint(record["index"], record["url"], Keys(**record["keys"]))


class JoinedServers:
    """Servers that run already (`rollout.sglang.urls`); this run neither starts nor ends them."""

    def __init__(self, ranks: Ranks, urls: Sequence[str], keys: Keys, *, timeout_s: float) -> None:
        """Send nothing; `wait_ready` does. timeout_s: deadline of an answer from all of them."""
        self._ranks = ranks
        self._timeout_s = timeout_s
        self.tp: list[int] = []
        self.endpoints = [Endpoint(index, url.rstrip("/"), keys) for index, url in enumerate(urls)]

    def owner(self, index: int) -> int | None:
        return None

    def wait_ready(self) -> None:
        """Wait until all servers answer, and read their tensor-parallel sizes into `tp`; collective.

        Raises RunError on all ranks.
        """
        urls = ", ".join(endpoint.url for endpoint in self.endpoints)
        log.info("waiting for SGLang servers %s, at most %g s", urls, self._timeout_s)
        with progress.phase(f"waiting for SGLang servers {urls}", deadline_s=self._timeout_s):
            self.tp = run_on_one(self._sizes, self._ranks)

    def _sizes(self) -> list[int]:
        """Return the servers' tensor-parallel sizes from /server_info."""
        self._wait(range(len(self.endpoints)))
        sizes = []
        for endpoint in self.endpoints:
            control = Control(endpoint, timeout_s=_ANSWER_S)
            size = control.server_info().get("tp_size")
            control.close()
            if not isinstance(size, int) or size < 1:
                raise RunError(f"{endpoint.url}: /server_info says tp_size={size!r}, which is not a number of ranks")
            sizes.append(size)
        return sizes

    def bring_back(self, lost: Sequence[int]) -> None:
        """Wait until these answer again, restarted by whoever started them; collective."""
        run_on_one(lambda: self._wait(lost), self._ranks)

    def _wait(self, servers: Sequence[int]) -> None:
        deadline = time.monotonic() + self._timeout_s
        controls = [Control(self.endpoints[index], timeout_s=_ANSWER_S) for index in servers]
        try:
            while controls:
                silent = [control for control in controls if not _healthy(control)]
                if not silent:
                    return
                if time.monotonic() > deadline:
                    urls = ", ".join(control.endpoint.url for control in silent)
                    raise RunError(
                        f"waited {self._timeout_s:g} s (rollout.sglang.start_timeout_s) for an answer of SGLang "
                        f"servers {urls}"
                    )
                time.sleep(_POLL_S)
        finally:
            for control in controls:
                control.close()

    def stop(self, servers: Sequence[int]) -> None:
        """Leave joined servers running: they share no device with the trainer."""

    def close(self) -> None:
        """Leave joined servers running."""


def _healthy(control: Control) -> bool:
    try:
        return control.healthy()
    except ServerError:
        return False


def ranks_on_this_host(world_size: int) -> int:
    """Return the launcher's LOCAL_WORLD_SIZE, the ranks of this host; without it `world_size`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
