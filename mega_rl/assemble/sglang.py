"""A run's servers, ready, connected with the trainer: the router, the weight sync, and what brings servers back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import torch

from mega_rl.assemble.plan import RunPlan
from mega_rl.config.rules.servers import is_loopback
from mega_rl.engines.base import ModelEngine
from mega_rl.protocols import Ranks
from mega_rl.rollout.hidden_tokens import ids_of
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.server.memory import ServersMemory
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.sglang.weights.checks import ExpectedServer, sent_tensors
from mega_rl.rollout.sglang.weights.probe import Probe, probe_limits
from mega_rl.rollout.sglang.weights.source import TrainerWeights
from mega_rl.rollout.sglang.weights.sync import SglangWeightSync
from mega_rl.rollout.sglang.weights.transport import Server, Transport
from mega_rl.rollout.sglang.weights.transports.choose import Placement, choose_transport, hosts_of, leader_of
from mega_rl.workers.residency import TAGS


@dataclass
class Connection:
    """Connection of a run with its servers, equal on all ranks; a context whose end closes the clients.

    Servers are the pool's to end. They are asked to leave what weights travelled through unless an error ends the
    context, for then ranks or servers may be gone.
    """

    fleet: ServerRouter
    sync: SglangWeightSync
    memory: ServersMemory
    concurrency: int  # requests in flight of one rank at the servers that it asks, together
    max_positions: int
    _servers: ServerPool
    _controls: Sequence[Control]
    _actor: ModelEngine
    _transport: Transport
    _resources: ExitStack

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

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if error is None:
                self._transport.close()


def connect(plan: RunPlan, servers: ServerPool, *, actor: ModelEngine, world: Ranks, colocated: bool) -> Connection:
    """Return the connection with servers that are ready; collective.

    Raises UserError when no transport, or not the one that is asked for, reaches them.
    """
    sglang = plan.config.rollout.sglang
    placement = Placement(hosts=hosts_of(world), colocated=colocated)
    resources = ExitStack()
    # Every rank has a control of every server; the one that leads a server is the one that uses it.
    controls = [Control(endpoint, timeout_s=sglang.sync.timeout_s) for endpoint in servers.endpoints]
    for control in controls:
        resources.callback(control.close)
    reached = []
    for index, control in enumerate(controls):
        first, *further = _hosts_of(control.endpoint.url, servers, index, placement) or (None,)
        reached.append(Server(index, servers.tp[index], first, control.weights, tuple(filter(None, further))))
    transport = _transport(plan, actor, reached, placement)
    own = {
        server.index: control
        for server, control in zip(reached, controls, strict=True)
        if leader_of(server, transport, placement) == world.rank
    }
    per_rank = math.ceil(sglang.max_concurrency / world.size)
    # Servers that the run started are asked by the ranks of their own hosts, which have equally many of them.
    host = placement.hosts[world.rank]
    near = {
        server.index: math.ceil(sglang.max_concurrency / sum(map(placement.hosts.count, set(server.hosts))))
        for server in reached
        if servers.nodes(server.index) and host in server.hosts
    }
    router = resources.enter_context(_router(plan, servers, max_concurrency=near or per_rank))
    return Connection(
        fleet=router,
        sync=_weight_sync(plan, transport, router, world, actor=actor, own=own, num_servers=len(controls)),
        # Colocated servers have released everything at their start.
        memory=ServersMemory(world, own, servers, released=TAGS if colocated else ()),
        concurrency=sum(near.values()) or per_rank * len(controls),
        max_positions=actor.sharding.hf.max_position_embeddings,
        _servers=servers,
        _controls=controls,
        _actor=actor,
        _transport=transport,
        _resources=resources,
    )


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" of torch.bfloat16, as servers call it."""
    return str(dtype).removeprefix("torch.")


def _transport(plan: RunPlan, actor: ModelEngine, servers: Sequence[Server], placement: Placement) -> Transport:
    config = plan.config
    return choose_transport(
        config.rollout.sglang.sync.transport,
        TrainerWeights(actor, plan.rollout_dtype),
        servers,
        placement,
        bucket_bytes=config.rollout.bucket_mib << 20,
        timeout_s=config.rollout.sglang.sync.timeout_s,
    )


def _router(plan: RunPlan, servers: ServerPool, *, max_concurrency: int | Mapping[int, int]) -> ServerRouter:
    sglang = plan.config.rollout.sglang
    return ServerRouter(
        servers.endpoints,
        vocab_size=plan.models["actor"].hf.vocab_size,
        max_concurrency=max_concurrency,
        retries=sglang.retries,
        request_timeout_s=sglang.request_timeout_s,
        allow_mixed_versions=sglang.partial_rollout,
    )


def _weight_sync(
    plan: RunPlan,
    transport: Transport,
    router: ServerRouter,
    world: Ranks,
    *,
    actor: ModelEngine,
    own: Mapping[int, Control],
    num_servers: int,
) -> SglangWeightSync:
    rollout, dtype = plan.config.rollout, plan.rollout_dtype
    sync, hf = rollout.sglang.sync, actor.sharding.hf
    probe = Probe(
        evaluate=actor.forward,
        ranks=world,
        vocab_size=hf.vocab_size,
        temperature=rollout.temperature,
        num_tokens=sync.probe_tokens,
        limits=probe_limits(name_of(dtype), mean=sync.probe_mean_limit, largest=sync.probe_max_limit),
        hidden_token_ids=tuple(ids_of(plan.engine.hidden_tokens, hf.vocab_size)),
    )
    return SglangWeightSync(
        transport,
        router,
        world,
        controls=own,
        num_servers=num_servers,
        expected=ExpectedServer(
            hf=hf,
            sent=sent_tensors(actor.sharding, dtype),
            dtype=name_of(dtype),
            tp=None if rollout.sglang.urls else rollout.sglang.server.tp,
            routing=rollout.sglang.return_routing,
        ),
        probe=probe if sync.probe_tokens else None,
        verify_interval=rollout.verify_interval,
    )


def _hosts_of(url: str, servers: ServerPool, index: int, placement: Placement) -> tuple[str, ...]:
    """Return the hosts of a server's nodes, as the ranks' hosts are spelled; none for one that may be anywhere."""
    nodes = servers.nodes(index)
    if not nodes and is_loopback(urlsplit(url).hostname or ""):
        nodes = (0,)
    return tuple(placement.hosts[rank] for rank in nodes)
