"""A run's servers, built from the config: started or joined, and connected with the trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mega_rl.config.schema import RolloutConfig, SglangServerConfig, TrainerConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.companions import config_changes
from mega_rl.converters.plan.parameters import num_elements
from mega_rl.engines.base import EngineSettings, ModelEngine
from mega_rl.engines.models.build import DTYPES
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import ADAPTER, Control
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.server.addresses import listening_address, ranks_on_this_host
from mega_rl.rollout.sglang.server.fleet import JoinedServers
from mega_rl.rollout.sglang.server.memory import TAGS, ServersMemory, memory_fraction, release_at_start
from mega_rl.rollout.sglang.server.pool import ServerPool, StartedServers
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings
from mega_rl.rollout.sglang.weights.adapters import AdapterPush, goes_apart, server_arguments
from mega_rl.rollout.sglang.weights.checks import LIMITS, ExpectedServer, Probe, sent_shapes
from mega_rl.rollout.sglang.weights.choice import transport_for
from mega_rl.rollout.sglang.weights.reshard import policy_bytes, sending_bytes
from mega_rl.rollout.sglang.weights.sync import ServerTable, SglangWeightSync, server_of
from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights, Transport
from mega_rl.rollout.tokens import ids_of
from mega_rl.types import IdRanges

log = logging.getLogger(__name__)


def start_servers(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    settings: EngineSettings,
    hf: HFConfig,
    accelerator: Accelerator,
    world: Ranks,
    resources: ExitStack,
    *,
    process: Callable[[ServerSettings, int, Path], ServerProcess] = ServerProcess,
) -> ServerPool | None:
    """Return the servers of a run over SGLang, which `resources` ends; None with another backend; collective.

    Servers with their own devices are starting. Those that share the trainer's devices are ready and have released
    their memory: a server sizes its KV cache by the memory that is free when it starts, so the trainer's models must
    come after it. settings, hf: of the policy.

    Raises UserError where servers do not fit the host's devices or their memory, RunError for a failed start.
    """
    sglang, server = rollout.sglang, rollout.sglang.server
    if rollout.backend != "sglang":
        return None
    per_host = ranks_on_this_host(world.size)
    hosts = world.size // per_host
    if sglang.urls:
        keys, timeout_s = Path(sglang.keys_file), sglang.start_timeout_s
        return JoinedServers(world, sglang.urls, keys, timeout_s=timeout_s, hosts=hosts)
    device = accelerator.device.type
    on_gpus = device == "cuda"  # a CPU's memory is the host's, which needs no turns
    colocated = sglang.placement == "colocated" or (sglang.placement == "auto" and on_gpus and not trainer.async_steps)
    count = servers_per_host(server, accelerator, ranks_per_host=per_host, colocated=colocated)
    if world.rank == 0:
        log.info("%d SGLang server(s) of %d rank(s) on each %d host(s) of the trainer", count, server.tp, server.nodes)
    apart, _ = goes_apart(hf, sglang.sync.adapter, joined=False, takes_turns=colocated and on_gpus)
    args = server_arguments(hf.adapter, device) if apart else {}
    if colocated and on_gpus:
        smallest = -int(world.max(torch.tensor(-accelerator.total_memory())))
        policy, weights = colocated_bytes(rollout, settings, hf, world_size=world.size)
        fraction = memory_fraction(server.mem_fraction, total=smallest, policy=policy, weights=weights, tp=server.tp)
        args["mem_fraction_static"] = fraction
        if world.rank == 0:
            log.info("colocated SGLang servers may fill %g of a device with weights and KV cache", fraction)
    common = replace(
        _server_settings(rollout, trainer, settings, args),
        config_changes=config_changes(hf),  # weights on disk may be quantised, and those that come are not
        host=listening_address(server.host, world, hosts=hosts),
        device=device,
        memory_saver=colocated,
        base_gpu=0 if colocated else per_host,  # servers with their own devices have those after the trainer's
    )
    folder = Path(trainer.run_dir) / "sglang"
    pool = StartedServers(world, common, count=count, ranks_per_host=per_host, folder=folder, process=process)
    resources.callback(pool.close)
    if colocated:
        pool.wait_ready()
        release_at_start(pool, world, timeout_s=sglang.sync.timeout_s)
    return pool


def _server_settings(
    rollout: RolloutConfig, trainer: TrainerConfig, settings: EngineSettings, more: dict[str, object]
) -> ServerSettings:
    """Return the settings of a run's servers, without their place. more: arguments next to the config's."""
    server = rollout.sglang.server
    args = server.args | more
    if rollout.sglang.sync.in_flight == "keep":  # overlapped with an update, a step would give tokens the new version
        args["disable_overlap_schedule"] = True
    if settings.model.fp32_head:
        args["enable_fp32_lm_head"] = True
    return ServerSettings(
        model_path=Path(settings.model.path),
        tp=server.tp,
        nodes=server.nodes,
        dtype=_name_of(_dtype(rollout, settings)),
        deterministic=trainer.deterministic,
        seed=trainer.seed,
        start_timeout_s=rollout.sglang.start_timeout_s,
        return_routing=rollout.sglang.return_routing,
        args=args,
    )


def servers_per_host(
    server: SglangServerConfig, accelerator: Accelerator, *, ranks_per_host: int, colocated: bool
) -> int:
    """Return the servers per host: the setting, or for 0 what fits its devices (CPU: one).

    Raises UserError where the devices are too few.
    """
    if accelerator.device.type != "cuda":
        return server.count or 1
    visible = accelerator.device_count()
    devices = ranks_per_host if colocated else visible - ranks_per_host
    tp_here = server.tp // server.nodes
    count = server.count or devices // tp_here
    given = f"rollout.sglang.server.count={server.count} and rollout.sglang.server.tp={server.tp}"
    if server.nodes > 1:
        given += f" over rollout.sglang.server.nodes={server.nodes}"
    if visible < ranks_per_host or count < 1 or count * tp_here > devices:
        where = "share the devices of" if colocated else "have their own devices (rollout.sglang.placement) next to"
        advice = "lower them" if colocated else "lower them, start fewer ranks per host, or set placement=colocated"
        raise UserError(
            f"{given}: the servers of a host {where} its {ranks_per_host} rank(s), and this process sees {visible} "
            f"device(s); {advice}; a launcher must show all devices of a host to each of its processes"
        )
    if idle := devices - count * tp_here:
        log.warning("%s leave %d of %d devices of each host idle while responses are generated", given, idle, devices)
    return count


def colocated_bytes(
    rollout: RolloutConfig, settings: EngineSettings, hf: HFConfig, *, world_size: int
) -> tuple[int, int]:
    """Return the device bytes of the policy and of a colocated server's weights per rank."""
    engine, itemsize = settings.engine, _dtype(rollout, settings).itemsize
    count = num_elements(hf)
    if engine.backend == "fsdp":
        policy = 4 * count // (engine.fsdp.shard_ranks or world_size)  # shards are FP32
    else:
        layout = ParallelLayout.of_engine(engine, world_size=world_size)
        policy = policy_bytes(hf, layout, DTYPES[settings.model.dtype].itemsize)
    sending = sending_bytes(hf, bucket_bytes=rollout.bucket_mib << 20, itemsize=itemsize)
    return policy + sending, count * itemsize // rollout.sglang.server.tp


def _dtype(rollout: RolloutConfig, settings: EngineSettings) -> torch.dtype:
    """Return the dtype of the servers' weights."""
    return DTYPES[settings.model.dtype if rollout.dtype == "auto" else rollout.dtype]


def _name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" of torch.bfloat16, as servers call it."""
    return str(dtype).removeprefix("torch.")


# -- connection ------------------------------------------------------------------------------------------------------


@dataclass
class Connection:
    """Connection of a run with its servers, which the pool ends."""

    router: ServerRouter
    sync: SglangWeightSync
    memory: ServersMemory
    concurrency: int  # requests in flight of one rank at the servers that it asks, together
    adapter: str  # name of the policy's adapters at the servers; empty: their weights are the policy's
    _table: ServerTable
    _actor: ModelEngine

    def bring_back(self, lost: Sequence[int], *, refit: bool = True) -> None:
        """Restart lost servers where the run started them, let joined ones leave and join; collective.

        refit: send them the last published weights, which the trainer still holds; else they wait for the next.

        Raises RunError on all ranks when one that the run started does not come back, or none is left.
        """
        due = self._table.change(lost)
        self.memory.started_anew(lost)
        if not (refit and due):
            return
        # Between generation and training the policy may be on the host.
        offloaded = self._actor.is_offloaded("parameters")
        if offloaded:
            self._actor.onload(("parameters",))
        try:
            self.sync.refit(due)
        finally:
            if offloaded:
                self._actor.offload(("parameters",))


def connect(
    rollout: RolloutConfig,
    dtype: torch.dtype,
    pool: ServerPool,
    resources: ExitStack,
    *,
    actor: ModelEngine,
    world: Ranks,
    hidden_tokens: IdRanges,
) -> Connection:
    """Return the connection with servers that are ready; `resources` closes it. hidden_tokens: never in a response."""
    sglang, hf, joined = rollout.sglang, actor.sharding.merged.hf, bool(rollout.sglang.urls)
    servers = {one.index: server_of(pool, one.index, sglang.sync.timeout_s) for one in pool.endpoints}
    resources.callback(lambda: list(map(Control.close, (one.receiver for one in servers.values()))))
    weights = _weights(rollout, dtype, pool, actor, world)
    transport = _transport(rollout, weights, pool, servers.values(), world)
    # After an error ranks or servers may be gone.
    resources.push(lambda kind, *_: transport.close() if kind is None else None)
    per_rank, host = math.ceil(sglang.max_concurrency / world.size), world.rank // pool.ranks_per_host
    # A rank asks the servers of its host; the ranks of a server's hosts share its requests equally.
    near = {
        one.index: math.ceil(sglang.max_concurrency / (len(one.hosts) * pool.ranks_per_host))
        for one in servers.values()
        if host in one.hosts
    }
    router = ServerRouter(
        pool.endpoints,
        vocab_size=hf.vocab_size,
        max_concurrency=near or per_rank,
        retries=sglang.retries,
        request_timeout_s=sglang.request_timeout_s,
    )
    resources.callback(router.close)
    leads = lambda server: transport.leader_of(server) == world.rank  # noqa: E731
    hidden, limits = tuple(ids_of(hidden_tokens, hf.vocab_size)), LIMITS[_name_of(dtype)]
    adapter, tokens = ADAPTER if weights.apart else "", sglang.sync.probe_tokens
    probe = Probe(actor.forward, world, hf.vocab_size, rollout.temperature, tokens, limits, hidden, adapter)
    keeps = sglang.sync.in_flight == "keep"
    tp, shapes = None if joined else sglang.server.tp, sent_shapes(actor.sharding.merged)
    expected = ExpectedServer(hf, shapes, _name_of(dtype), tp, sglang.return_routing, weights.apart, keeps)
    table = ServerTable(pool, router, expected, servers, leads, sglang.sync.timeout_s)
    return Connection(
        router=router,
        sync=SglangWeightSync(
            transport,
            table,
            world,
            probe=probe if probe.num_tokens else None,
            adapters=AdapterPush(weights, servers, world) if weights.apart else None,
            keeps=keeps,
        ),
        memory=ServersMemory(world, table.own, pool, released=TAGS if pool.colocated else ()),  # since their start
        concurrency=sum(near.values()) or per_rank,  # joined servers leave: deadlines hold for one
        adapter=adapter,
        _table=table,
        _actor=actor,
    )


def _weights(
    rollout: RolloutConfig, dtype: torch.dtype, pool: ServerPool, actor: ModelEngine, world: Ranks
) -> TrainerWeights:
    """Return the actor's weights as servers get them; logs why adapters come merged."""
    setting, joined = rollout.sglang.sync.adapter, bool(rollout.sglang.urls)
    takes_turns = pool.colocated and actor.device.type == "cuda"
    apart, why = goes_apart(actor.sharding.hf, setting, joined=joined, takes_turns=takes_turns)
    if why and world.rank == 0:
        log.info("servers get merged weights: %s", why)
    return TrainerWeights(actor, dtype, apart)


def _transport(
    rollout: RolloutConfig, weights: TrainerWeights, pool: ServerPool, servers: Collection[Server], world: Ranks
) -> Transport:
    """Return the way of weights to these servers."""
    takes_turns = pool.colocated and weights.engine.device.type == "cuda"
    return transport_for(
        weights,
        servers,
        world,
        delta=rollout.sglang.sync.delta,
        joined=bool(rollout.sglang.urls),
        shared=[rank // pool.ranks_per_host for rank in range(world.size)] if takes_turns else None,
        bucket_bytes=rollout.bucket_mib << 20,
        timeout_s=rollout.sglang.sync.timeout_s,
    )
