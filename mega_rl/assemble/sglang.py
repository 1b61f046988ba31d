"""A run's servers, ready, connected with the trainer: the router, the weight sync, and what brings servers back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from mega_rl.config.rollout_rules import is_loopback
from mega_rl.config.schema import Config
from mega_rl.engines.base import ModelEngine
from mega_rl.errors import RunError
from mega_rl.models.build import DTYPES
from mega_rl.parallel.agreement import merge_failures
from mega_rl.parallel.comm import GroupRanks
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.http.ask_all import each
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.sglang.weights.checks import ExpectedServer, sent_tensors
from mega_rl.rollout.sglang.weights.probe import Probe, probe_limit
from mega_rl.rollout.sglang.weights.source import TrainerWeights
from mega_rl.rollout.sglang.weights.sync import SglangWeightSync
from mega_rl.rollout.sglang.weights.transport import Server, Transport
from mega_rl.rollout.sglang.weights.transports.choose import Placement, choose_transport, hosts_of, leader_of


@dataclass
class Connection:
    """What the rest of a run asks of its servers; equal on all ranks. A context: its end is the clients'.

    Servers are the pool's to end. They are asked to leave what weights travelled through unless an error ends the
    context, for then ranks or servers may be gone.
    """

    fleet: ServerRouter
    sync: SglangWeightSync
    memory: ServersMemory
    concurrency: int  # requests in flight of one rank at all servers together
    max_positions: int
    _servers: ServerPool
    _controls: Sequence[Control]
    _actor: ModelEngine
    _transport: Transport
    _resources: ExitStack
    _make_room: Callable[[], None] = field(default=lambda: None)

    def bring_back(self, lost: Sequence[int]) -> None:
        """Lost servers are started anew where that is ours to do, and sent the weights of now; collective.

        Raises RunError on all ranks when one does not come back.
        """
        self._servers.bring_back(lost)
        for index in lost:
            self._controls[index].move(self._servers.endpoints[index])
            self.fleet.move(index, self._servers.endpoints[index])
        self.memory.started_anew(lost)
        # Between generation and training the policy may be on the host.
        offloaded = self._actor.is_offloaded("parameters")
        if offloaded:
            self._actor.onload(gradients=False, optimizer=False)
        try:
            self.sync.refit(lost)
        finally:
            if offloaded:
                self._actor.offload(gradients=False, optimizer=False)

    def before_proof(self, make_room: Callable[[], None]) -> None:
        """Call `make_room` in every update when the weights have been loaded and before the server generates."""
        self._make_room = make_room

    def weights_loaded(self, servers: Sequence[int]) -> Mapping[int, str]:
        """For the sync, see `before_proof`."""
        self._make_room()
        return {}

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if error is None:
                self._transport.close()


class ServersMemory:
    """`protocols.ServerMemory` of all servers."""

    def __init__(self, ranks: GroupRanks, controls: Mapping[int, Control]) -> None:
        self._ranks, self._controls = ranks, controls
        self._released: dict[int, set[str]] = {index: set() for index in controls}

    def started_anew(self, servers: Sequence[int]) -> None:
        """These hold everything, as a server does that has just started."""
        for index in self._released.keys() & set(servers):
            self._released[index] = set()

    def release(self, tags: Sequence[str]) -> None:
        """See `protocols.ServerMemory`. Raises RunError on all ranks when a server does not."""
        self._all("give back", self._release, tags)

    def resume(self, tags: Sequence[str]) -> None:
        """See `protocols.ServerMemory`. Raises RunError on all ranks when a server does not."""
        self._all("take", self._resume, tags)

    # SGLang fails when it is to release what it has released, or to resume what it holds.
    def _release(self, index: int, tags: Sequence[str]) -> None:
        held = [tag for tag in tags if tag not in self._released[index]]
        if held:
            self._controls[index].release_memory(held)
            self._released[index].update(held)

    def _resume(self, index: int, tags: Sequence[str]) -> None:
        gone = [tag for tag in tags if tag in self._released[index]]
        if gone:
            self._controls[index].resume_memory(gone)
            self._released[index].difference_update(gone)

    def _all(self, verb: str, ask: Callable[[int, Sequence[str]], None], tags: Sequence[str]) -> None:
        _, failed = each(list(self._controls), lambda index: ask(index, tags))
        failed = merge_failures(failed, self._ranks)
        if failed:
            raise RunError(f"servers did not {verb} the memory of {', '.join(tags)}: " + "; ".join(failed.values()))


def connect(
    config: Config, servers: ServerPool, *, actor: ModelEngine, world: GroupRanks, colocated: bool
) -> Connection:
    """The connection with servers that are ready; collective.

    Raises UserError when no transport, or not the one that is asked for, reaches them.
    """
    rollout, sglang = config.rollout, config.sglang
    resources = ExitStack()
    dtype = DTYPES[config.model.dtype if rollout.dtype == "auto" else rollout.dtype]
    dtype_name = str(dtype).removeprefix("torch.")
    endpoints = servers.endpoints
    placement = Placement(hosts=hosts_of(world), colocated=colocated)
    # Every rank has a control of every server; the one that leads a server is the one that uses it.
    everyone = [Control(endpoint, timeout_s=sglang.sync_timeout_s) for endpoint in endpoints]
    for control in everyone:
        resources.callback(control.close)
    reached = [
        Server(index, servers.tp[index], _host_of(control.endpoint.url, servers, index, placement), control)
        for index, control in enumerate(everyone)
    ]
    transport = choose_transport(
        sglang.transport,
        TrainerWeights(actor, dtype),
        reached,
        placement,
        bucket_bytes=rollout.bucket_mib << 20,
        timeout_s=sglang.sync_timeout_s,
        folder=Path(config.trainer.run_dir) / "sglang",
        source=Path(config.model.path),
    )
    own = {
        server.index: control
        for server, control in zip(reached, everyone, strict=True)
        if leader_of(server, transport, placement) == world.rank
    }
    hf = actor.sharding.hf
    per_rank = math.ceil(sglang.max_concurrency / world.size)
    fleet = resources.enter_context(
        ServerRouter(
            endpoints,
            vocab_size=hf.vocab_size,
            max_concurrency=per_rank,
            retries=sglang.retries,
            request_timeout_s=sglang.request_timeout_s,
            allow_mixed_versions=sglang.partial_rollout,
        )
    )
    connection: Connection
    sync = SglangWeightSync(
        transport,
        fleet,
        world,
        controls=own,
        num_servers=len(endpoints),
        expected=ExpectedServer(
            hf=hf,
            sent=sent_tensors(actor.sharding, dtype),
            dtype=dtype_name,
            tp=None if sglang.urls else sglang.tp,
        ),
        probe=_probe(config, actor, world, dtype_name) if sglang.probe_tokens else None,
        verify_interval=rollout.verify_interval,
        after_send=lambda sent: connection.weights_loaded(sent),
    )
    connection = Connection(
        fleet=fleet,
        sync=sync,
        memory=ServersMemory(world, own),
        concurrency=per_rank * len(endpoints),
        max_positions=hf.max_position_embeddings,
        _servers=servers,
        _controls=everyone,
        _actor=actor,
        _transport=transport,
        _resources=resources,
    )
    return connection


def _probe(config: Config, actor: ModelEngine, world: GroupRanks, dtype: str) -> Probe:
    return Probe(
        evaluate=actor.forward,
        ranks=world,
        vocab_size=actor.sharding.hf.vocab_size,
        temperature=config.rollout.temperature,
        num_tokens=config.sglang.probe_tokens,
        limit=probe_limit(config.sglang.probe_limit, dtype),
    )


def _host_of(url: str, servers: ServerPool, index: int, placement: Placement) -> str | None:
    """The host of a server, as the ranks' hosts are spelled; None for one that may be anywhere."""
    owner = servers.owner(index)
    if owner is None and is_loopback(urlsplit(url).hostname or ""):
        owner = 0
    return None if owner is None else placement.hosts[owner]
