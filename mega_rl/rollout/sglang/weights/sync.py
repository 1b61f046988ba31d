"""Weight sync to SGLang servers: check, pause, send, resume, then a probe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mega_rl.errors import RunError, UserErrors
from mega_rl.parallel.agreement import merge_failures
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Control, ServerError, each
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.generation.samples import State
from mega_rl.rollout.sglang.server.fleet import JoinedServers
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.sglang.weights.adapters import AdapterPush
from mega_rl.rollout.sglang.weights.checks import ExpectedServer, Probe, check_server
from mega_rl.rollout.sglang.weights.transport import Server, Transport
from mega_rl.types import Metrics

log = logging.getLogger(__name__)

_LEAVE_S = 10.0  # for a server that has left to leave process groups too
_SCHEDULER_S = 30.0  # a scheduler ends its step and answers faster
PHASES = ("check", "pause", "send", "continue", "probe")


@dataclass
class ServerTable:
    """A run's servers by number, as the weight sync and transports ask for them; joined ones come and go."""

    pool: ServerPool
    router: ServerRouter
    expected: ExpectedServer
    servers: dict[int, Server]
    leads: Callable[[Server], bool]  # this rank steers a server; every server has one rank that does
    timeout_s: float  # of a call of servers that join

    def __post_init__(self) -> None:
        self.own = {i: one.receiver for i, one in self.servers.items() if self.leads(one)}

    def change(self, lost: Sequence[int]) -> list[int]:
        """Bring lost servers back, let others leave and join; return those that need weights; collective."""
        back, left = self.pool.bring_back(lost, lambda control: check_server(control, self.expected))
        for index, why in left.items():
            self.router.mark(index, State.LEFT, why)
            self.servers.pop(index).receiver.timeout_s = _LEAVE_S
            self.own.pop(index, None)
        for index in back:
            self.router.place(self.pool.endpoints[index])
            if index in self.servers:
                self.servers[index].receiver.endpoint = self.pool.endpoints[index]
                continue
            server = self.servers[index] = server_of(self.pool, index, self.timeout_s)
            if self.leads(server):
                self.own[index] = server.receiver
        return back

    def look(self, lost: Sequence[int]) -> Metrics:
        """Let joined servers come and leave; return how many did; lost ones have to answer; collective."""
        if not isinstance(self.pool, JoinedServers):
            return {}
        self.change(lost)
        came = len(self.pool.endpoints)
        return {"sglang/servers_joined": float(came), "sglang/servers_left": float(came - len(self.servers))}


def server_of(pool: ServerPool, index: int, timeout_s: float) -> Server:
    """Return a server of the pool."""
    return Server(index, pool.tp[index], pool.hosts[index], Control(pool.endpoints[index], timeout_s))


class NoServerError(RunError):
    """No server took an update; raised on all ranks alike."""


class SglangWeightSync:
    """`protocols.WeightSync` for SGLang servers. Methods are collective over `ranks`, all of the run's.

    From the start of an update to its last check a server is out of rotation, and returns only if it passed every
    check. A server that fails stays out and hinders no other; the next publish or `refit` tries it again.
    """

    def __init__(
        self,
        transport: Transport,
        table: ServerTable,
        ranks: Ranks,
        *,
        probe: Probe | None,
        adapters: AdapterPush | None = None,
        keeps: bool = False,
    ) -> None:
        """
        probe: None proves nothing; else it runs after every update.
        adapters: None sends all weights in every update; else a server that has the base gets its adapters only.
        keeps: requests in flight go on over `publish` with their KV cache.
        """
        self._transport, self._table, self._ranks, self._router = transport, table, ranks, table.router
        self._controls, self._servers, self._expected = table.own, table.servers, table.expected
        self._probe, self._adapters, self._keeps = probe, adapters, keeps
        # Called in every update with the servers that have all weights, before they generate; collective.
        self.after_send: Callable[[Sequence[int]], None] = lambda _: None
        self.weight_version = 0  # version of the weights last published; 0 before the first publish
        self.ready: set[int] = set()  # servers that took the last update; the same on all ranks
        self._checked: set[int] = set()

    def resume_at(self, version: int) -> None:
        """Let the next publish have `version`, so that a resumed run counts on."""
        self.weight_version = version - 1

    def publish(self) -> Metrics:
        """Send all weights to every server that answers, verify them, and raise the version.

        Raises on all ranks alike: UserErrors for servers of another model or setting (with all differences), before
        sending; RunError when no server took the update, and the version then stays.
        """
        out = [server for server in self._servers if server not in self.ready]
        metrics = self._table.look(out)
        try:
            metrics |= self._update(sorted(self._servers), self.weight_version + 1, in_place=self._keeps)
        except NoServerError:
            if not metrics:
                raise
            metrics |= self._table.look(list(self._servers))  # waits for one
            metrics |= self._update(sorted(self._servers), self.weight_version + 1)
        self.weight_version += 1
        ready = float(len(self.ready))
        return {"rollout/weight_version": float(self.weight_version), "sglang/servers_ready": ready, **metrics}

    def refit(self, servers: Sequence[int]) -> Metrics:
        """Send the last published version to these servers, as after their restart; errors as in `publish`.

        The trainer must still hold those weights. Raises RunError only when no server at all is ready afterwards.
        """
        if not self.weight_version:
            raise RuntimeError("refit was called before any weights were published")
        self._checked -= set(servers)
        return self._update(sorted(servers), self.weight_version)

    # -- one update ------------------------------------------------------------------------------------------------

    def _update(self, servers: Sequence[int], version: int, *, in_place: bool = False) -> Metrics:
        seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        requests = sum(control.requests for control in self._controls.values())
        for server in servers:
            state = State.UPDATING if in_place else State.STALE
            self._router.mark(server, state, f"it is being sent the weights of version {version}")
        self.ready &= set(self._servers) - set(servers)
        attempt = _Attempt(self._ranks, self._controls, servers)
        with _timed(seconds, "check"):
            without_base = self._check(attempt)
        with _timed(seconds, "pause"):
            if self._keeps and not in_place:  # an update that failed has left requests paused
                attempt.all_do(lambda control: control.call("POST", "/continue_generation", {}))
            attempt.all_do(partial(_pause, in_place=in_place))
        with _timed(seconds, "send"):
            need_all = [i for i in attempt.left if self._adapters is None or i in without_base]
            buckets = self._transport.buckets if need_all else ()
            if buckets:
                attempt.fail(self._transport.send(version=version, servers=need_all))
            adapters: dict[str, Tensor] = {}
            if self._adapters is not None and attempt.left:
                failed, adapters = self._adapters.send(version=version, servers=list(attempt.left))
                attempt.fail(failed)
            self.after_send(tuple(attempt.left))
        with _timed(seconds, "continue"):
            attempt.all_do(lambda control: _finish(control, version))
        largest = 0.0
        with _timed(seconds, "probe"):
            if self._probe is not None and attempt.left:
                failed, largest = self._probe(self._controls, attempt.left)
                attempt.fail(failed)
        self._conclude(attempt, version)
        requests = sum(control.requests for control in self._controls.values()) - requests
        sent = self._transport.report if buckets else {}
        return {
            **sent,
            "sync/bytes": sent.get("sync/bytes", 0.0) + sum(one.nbytes for one in adapters.values()),
            "sync/buckets": float(len(buckets) + bool(adapters)),
            "sync/tensors": float(sum(len(bucket.slots) for bucket in buckets) + len(adapters)),
            "sync/requests": float(self._ranks.sum(torch.tensor(requests))),
            "sync/probe_logprob_diff_max": largest,
            "sync/failed_servers": float(len(attempt.failed)),
            "sync/seconds": sum(seconds.values()),
            **{f"sync/{phase}_seconds": spent for phase, spent in seconds.items()},
        }

    def _check(self, attempt: _Attempt) -> set[int]:
        """Check that servers answer and, once for each until it fails, that model and settings fit.

        Returns the servers that may not have the base of adapters.
        """
        attempt.all_do(_answers)
        if self._adapters is not None:
            held = str(self.weight_version)
            own = [i for i in attempt.left if i in self._controls and i in self._checked]
            versions, _ = each(own, lambda i: self._controls[i].object("GET", "/model_info").get("weight_version"))
            # Somebody has started it again: it has its checkpoint's weights.
            lost = {i: "has other weights" for i in own if versions.get(i) != held}
            self._checked -= merge_failures(lost, self._ranks).keys()
        fresh = [i for i in attempt.left if i not in self._checked]
        wrong, silent = each(
            [i for i in fresh if i in self._controls], lambda i: check_server(self._controls[i], self._expected)
        )
        attempt.fail(silent)
        texts = {i: "\n".join(problems) for i, problems in wrong.items() if problems}
        faults = merge_failures(texts, self._ranks)
        if faults:
            raise UserErrors([line for i in sorted(faults) for line in faults[i].split("\n")])
        self._checked |= set(fresh) & set(attempt.left)
        return set(fresh)

    def _conclude(self, attempt: _Attempt, version: int) -> None:
        """Put servers that passed into rotation, log the others; RunError if none is left."""
        _, silent = each([i for i in attempt.failed if i in self._controls], lambda i: _answers(self._controls[i]))
        dead = merge_failures(silent, self._ranks)
        for i, why in attempt.failed.items():
            self._checked.discard(i)
            self._router.mark(i, State.DOWN if i in dead or self._keeps else State.STALE, why)
        self.ready |= set(attempt.left)
        for i in attempt.left:
            self._router.mark(i, State.READY, version=version)
        reasons = "\n".join(attempt.failed[i] for i in sorted(attempt.failed))
        if attempt.failed and self._ranks.rank == 0:
            log.warning(
                "weights of version %d: %d of %d servers are out of rotation until they are refit:\n%s",
                version,
                len(attempt.failed),
                len(self._servers),
                reasons,
            )
        if not self.ready:
            raise NoServerError(f"no SGLang server took the weights of version {version}:\n{reasons}")


class _Attempt:
    """Servers of one update, the same on all ranks: `left`, and `failed` with reasons."""

    def __init__(self, ranks: Ranks, controls: Mapping[int, Control], servers: Sequence[int]) -> None:
        self._ranks, self._controls = ranks, controls
        self.left = list(servers)
        self.failed: dict[int, str] = {}

    def fail(self, failed: Mapping[int, str]) -> None:
        """Drop servers that failed on some rank; collective."""
        merged = merge_failures(failed, self._ranks)
        self.failed = merged | self.failed
        self.left = [i for i in self.left if i not in merged]

    def all_do(self, ask: Callable[[Control], Any]) -> None:
        """Call `ask` for every server that is left, on the rank that steers it, concurrently; collective."""
        _, failed = each([i for i in self.left if i in self._controls], lambda i: ask(self._controls[i]))
        self.fail(failed)


def _answers(control: Control) -> None:
    if not control.answers("/server_info", timeout_s=_SCHEDULER_S):  # /health outlives a dead scheduler by a minute
        raise ServerError(control.endpoint, "/server_info", "its scheduler does not answer")


def _pause(control: Control, *, in_place: bool) -> None:
    """Stop generating and begin an update; without `in_place` end all requests and empty the prefix cache first."""
    # An abort takes about a second with requests in flight.
    control.call("POST", "/pause_generation", {"mode": "in_place" if in_place else "abort"})
    if not in_place:
        control.flush()
    try:
        _session(control, "/begin_weight_update")
    except ServerError as error:
        if error.status != 400:
            raise
        with suppress(ServerError):  # an update that did not end has left a session open
            _session(control, "/end_weight_update")
        _session(control, "/begin_weight_update")


def _session(control: Control, path: str) -> None:
    """Begin or end a session, outside of which SGLang 0.5.21 refuses weights; 0.5.20 has none."""
    try:
        control.succeed(path, {})
    except ServerError as error:
        if error.status != 404:
            raise


def _finish(control: Control, version: int) -> None:
    """End the update and resume generation. Raises ServerError: the last bucket's version is missing."""
    _session(control, "/end_weight_update")
    held = control.object("GET", "/model_info").get("weight_version")
    if held != str(version):
        what = f"weight_version is {held!r} after the update to version {version}"
        raise ServerError(control.endpoint, "/model_info", what)
    control.call("POST", "/continue_generation", {})


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start
