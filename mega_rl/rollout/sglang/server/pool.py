"""The servers of a run: started on each host of the trainer, or joined; known to every rank, brought back when lost."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
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
    """What the rest of a run needs of its servers; the same on every rank."""

    endpoints: list[Endpoint]
    tp: list[int]  # tensor-parallel ranks of each server

    def owner(self, index: int) -> int | None:
        """The rank that started a server; None where nobody of this run did."""
        ...

    def bring_back(self, lost: Sequence[int]) -> None:
        """These servers answer again, at `endpoints`, with weights of any kind; collective.

        Raises RunError on all ranks.
        """
        ...

    def close(self) -> None:
        """End what was started; no collective, may be called twice."""
        ...


class StartedServers:
    """Servers of this run's own, `per_host` on each of its hosts, owned by the first rank there.

    A server that is started again keeps its number; its address and its keys are new.
    """

    def __init__(self, ranks: Ranks, settings: Sequence[ServerSettings], *, ranks_per_host: int, folder: Path) -> None:
        """Starts this host's servers without waiting for them; `wait_ready` does. No collective.

        settings: of this host's servers; every host has as many. Their numbers go on from host to host.
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
            self._own = {
                first + place: ServerProcess(own, index=first + place, folder=folder)
                for place, own in enumerate(settings)
            }
            for server in self._own.values():
                server.start()
                log.info("starting SGLang server %d, log in %s", server.index, server.log_file)

    def owner(self, index: int) -> int | None:
        """The first rank of the server's host."""
        return self._owner[index]

    def wait_ready(self) -> None:
        """Until all servers of all hosts generate; collective. Raises ServerStartError or RunError on all ranks."""
        found: list[dict[str, Any]] = []
        for leader in self._leaders:
            with progress.phase("waiting for SGLang servers", deadline_s=self._timeout_s):
                found += run_on_one(partial(self._wait, self._own), self._ranks, source=leader)
        self.endpoints = [_endpoint(one) for one in found]

    def bring_back(self, lost: Sequence[int]) -> None:
        """Start these anew, and `endpoints` says where; collective. A server that hangs is ended first."""
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
        """Endpoints of these servers, which start side by side."""
        with ThreadPoolExecutor(len(servers)) as pool:
            ready = list(pool.map(lambda server: server.wait_ready(), servers.values()))
        # The trainer's own channel carries the keys: what it is open to, the weights are open to as well.
        return [{"index": one.index, "url": one.url, "keys": asdict(one.keys)} for one in ready]

    def close(self) -> None:
        """End this rank's servers."""
        for server in self._own.values():
            server.stop()


def _endpoint(told: dict[str, Any]) -> Endpoint:
    return Endpoint(told["index"], told["url"], Keys(**told["keys"]))


class JoinedServers:
    """Servers that somebody else has started and will end."""

    def __init__(self, ranks: Ranks, urls: Sequence[str], keys: Keys, *, timeout_s: float) -> None:
        """Reads nothing and sends nothing; `wait_ready` does. timeout_s: deadline of an answer from all of them."""
        self._ranks = ranks
        self._timeout_s = timeout_s
        self.tp: list[int] = []
        self.endpoints = [Endpoint(index, url.rstrip("/"), keys) for index, url in enumerate(urls)]

    def owner(self, index: int) -> int | None:
        """Return None: no rank of this run owns a joined server."""
        return None

    def wait_ready(self) -> None:
        """Until all answer, and say how many tensor-parallel ranks they have; collective.

        Raises RunError on all ranks.
        """
        urls = ", ".join(endpoint.url for endpoint in self.endpoints)
        log.info("waiting for SGLang servers %s, at most %g s", urls, self._timeout_s)
        with progress.phase(f"waiting for SGLang servers {urls}", deadline_s=self._timeout_s):
            self.tp = run_on_one(self._sizes, self._ranks)

    def _sizes(self) -> list[int]:
        """The servers' tensor-parallel ranks, by their own word."""
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
        """Wait until these answer again: who started them must start them anew; collective."""
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
                        f"waited {self._timeout_s:g} s (sglang.start_timeout_s) for an answer of SGLang servers {urls}"
                    )
                time.sleep(_POLL_S)
        finally:
            for control in controls:
                control.close()

    def close(self) -> None:
        """They are not ours to end."""


def _healthy(control: Control) -> bool:
    try:
        return control.healthy()
    except ServerError:
        return False


def ranks_on_this_host(world_size: int) -> int:
    """Ranks that the launcher started on this host, by its LOCAL_WORLD_SIZE; without one all are here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
