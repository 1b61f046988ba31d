"""A run's servers, built from the config: started or joined, and connected with the trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import torch

from mega_rl.config.facts import divisors, listed
from mega_rl.config.rules.servers import is_loopback
from mega_rl.config.schema import RolloutConfig, SglangServerConfig, TrainerConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.engines.base import EngineSettings, ModelEngine
from mega_rl.engines.models.build import DTYPES
from mega_rl.errors import PeerError, RunError, UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.protocols import Ranks
from mega_rl.rollout.hidden_tokens import ids_of
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.http.keys import Keys
from mega_rl.rollout.sglang.server.addresses import check_urls, listening_address, ranks_on_this_host
from mega_rl.rollout.sglang.server.memory import TAGS, DeviceShare, ServersMemory, release_at_start
from mega_rl.rollout.sglang.server.pool import JoinedServers, ServerPool, StartedServers
from mega_rl.rollout.sglang.server.process import ServerProcess
from mega_rl.rollout.sglang.server.settings import ServerSettings
from mega_rl.rollout.sglang.weights.checks import ExpectedServer, sent_tensors
from mega_rl.rollout.sglang.weights.probe import LIMITS, Probe
from mega_rl.rollout.sglang.weights.reshard import sending_bytes
from mega_rl.rollout.sglang.weights.sync import SglangWeightSync
from mega_rl.rollout.sglang.weights.transport import RanksLost, Server, TrainerWeights, Transport
from mega_rl.rollout.sglang.weights.transports.choose import Placement, choose_transport, hosts_of, leader_of
from mega_rl.types import IdRanges

log = logging.getLogger(__name__)

_COUNT = "rollout.sglang.server.count"
_TP = "rollout.sglang.server.tp"
_NODES = "rollout.sglang.server.nodes"


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

    Where the launcher keeps servers, healthy ones are adopted from the ranks before these, and left to the next ones.

    Servers with their own devices are starting, and `wait_ready` waits for them. Those that share the trainer's devices
    are ready and have released their memory: a server sizes its KV cache by the memory that is free when it starts, so
    the trainer's models must come after it, and into an empty device.

    Args:
        settings, hf: of the policy.
        process: makes the process of a server, given its settings, number and folder.

    Raises:
        UserError: servers do not fit the host's devices or their memory.
        RunError: a start failed.
    """
    sglang, server = rollout.sglang, rollout.sglang.server
    if rollout.backend != "sglang":
        return None
    per_host = ranks_on_this_host(world.size)
    hosts = world.size // per_host
    if sglang.urls:
        check_urls(sglang.urls, hosts=hosts)
        return JoinedServers(world, sglang.urls, Keys.read(Path(sglang.keys_file)), timeout_s=sglang.start_timeout_s)
    on_gpus = accelerator.device.type == "cuda"  # a CPU's memory is the host's, which needs no turns
    colocated = sglang.placement == "colocated" or (sglang.placement == "auto" and on_gpus and not trainer.async_steps)
    check_hosts(server.nodes, hosts=hosts)
    count = servers_per_host(server, accelerator, ranks_per_host=per_host, colocated=colocated)
    if world.rank == 0:
        log.info("%d SGLang server(s) of %d rank(s) on each %d host(s) of the trainer", count, server.tp, server.nodes)
    host = listening_address(server.host, world, hosts=hosts)
    fraction = server.mem_fraction
    if colocated and on_gpus:
        smallest = -int(world.max(torch.tensor(-accelerator.total_memory())))
        fraction = device_share(rollout, settings, hf, total=smallest, world_size=world.size).fraction(fraction)
        if not server.mem_fraction and world.rank == 0:
            log.info("colocated SGLang servers may fill %g of a device with weights and KV cache", fraction)
    common = server_settings(
        rollout, trainer, settings, accelerator, host=host, colocated=colocated, mem_fraction=fraction
    )
    first_gpu = 0 if colocated else per_host  # servers with their own devices have those after the trainer's
    here = [replace(common, base_gpu=first_gpu + place * common.tp_here) for place in range(count)]
    folder = Path(trainer.run_dir) / "sglang"
    pool = StartedServers(world, here, ranks_per_host=per_host, folder=folder, process=process)
    resources.push(partial(_close, pool))
    if colocated:
        pool.wait_ready()
        release_at_start(pool, world, timeout_s=sglang.sync.timeout_s)
    return pool


def _close(
    pool: ServerPool, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Leave or end the servers.

    A failure that the run found by itself ends them: they may have a part in it. After a user's mistake, or when the
    run was stopped, nobody comes for them.
    """
    is_theirs = isinstance(error, (RunError, UserError)) and not isinstance(error, PeerError | RanksLost)
    if isinstance(error, Exception) and not is_theirs:
        pool.leave()
    else:
        pool.close()


def check_hosts(nodes: int, *, hosts: int) -> None:
    """Raise UserError where servers that span several hosts each do not divide the trainer's."""
    if hosts % nodes:
        raise UserError(
            f"{_NODES}={nodes}: the trainer runs on {hosts} host(s), and each server takes {nodes} of them; "
            f"legal: {listed(divisors(hosts))}"
        )


def servers_per_host(
    server: SglangServerConfig, accelerator: Accelerator, *, ranks_per_host: int, colocated: bool
) -> int:
    """Return how many servers each host has a part of: the setting, or for 0 as many as its devices hold, one on a CPU.

    Raises UserError where the devices are too few.
    """
    if accelerator.device.type != "cuda":
        return server.count or 1
    visible = accelerator.device_count()
    devices = ranks_per_host if colocated else visible - ranks_per_host
    tp_here = server.tp // server.nodes
    count = server.count or devices // tp_here
    sizes = f"{_TP}={server.tp}" + (f" over {_NODES}={server.nodes}" if server.nodes > 1 else "")
    if visible < ranks_per_host or count < 1 or count * tp_here > devices:
        where = "share the devices of" if colocated else "have their own devices (rollout.sglang.placement) next to"
        advice = "lower them" if colocated else "lower them, start fewer ranks per host, or set placement=colocated"
        raise UserError(
            f"{_COUNT}={server.count} and {sizes}: the servers of a host {where} its {ranks_per_host} rank(s), and "
            f"this process sees {visible} device(s); {advice}; a launcher must show all devices of a host to each of "
            "its processes"
        )
    idle = devices - count * tp_here
    if idle:
        log.warning(
            "%s=%d and %s leave %d of %d devices of each host idle while responses are generated",
            *(_COUNT, server.count, sizes, idle, devices),
        )
    return count


def server_settings(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    settings: EngineSettings,
    accelerator: Accelerator,
    *,
    host: str,
    colocated: bool,
    mem_fraction: float,
) -> ServerSettings:
    """Return the settings that a host's servers share."""
    sglang, server = rollout.sglang, rollout.sglang.server
    return ServerSettings(
        model_path=Path(settings.model.path),
        host=host,
        tp=server.tp,
        nodes=server.nodes,
        dtype=_name_of(_dtype(rollout, settings)),
        device=accelerator.device.type,
        max_total_tokens=server.max_total_tokens,
        mem_fraction=mem_fraction,
        memory_saver=colocated,
        deterministic=trainer.deterministic,
        seed=trainer.seed,
        start_timeout_s=sglang.start_timeout_s,
        return_routing=sglang.return_routing,
        args={
            name: value
            for name, value in server.args.items()
            if name not in ("max_total_tokens", "mem_fraction_static")
        }
        | ({"enable_fp32_lm_head": True} if settings.model.fp32_head else {}),
    )


def device_share(
    rollout: RolloutConfig, settings: EngineSettings, hf: HFConfig, *, total: int, world_size: int
) -> DeviceShare:
    """Return how many bytes of a device of `total` bytes the policy and one rank of a colocated server need."""
    engine, tp, itemsize = settings.engine, rollout.sglang.server.tp, _dtype(rollout, settings).itemsize
    count = sum(prod(tensor.shape) for tensor in hf_tensors(hf, head="lm").values())
    if engine.backend == "fsdp":
        policy = 4 * count // (engine.fsdp.shard_ranks or world_size)  # shards are FP32
    else:
        layout = ParallelLayout.of_engine(engine, world_size=world_size)
        sharding = Sharding(hf, layout)
        stages = (
            sum(
                prod(param.shape)
                for vp_stage in range(layout.vpp)
                for param in build_plan(sharding, layout.coordinates(first), vp_stage=vp_stage)
            )
            for first in range(0, world_size, layout.stage_size)
        )
        policy = max(stages) * DTYPES[settings.model.dtype].itemsize
    return DeviceShare(
        total=total,
        policy=policy + sending_bytes(hf, bucket_bytes=rollout.bucket_mib << 20, itemsize=itemsize),
        weights=count * itemsize // tp,
        tp=tp,
    )


def _dtype(rollout: RolloutConfig, settings: EngineSettings) -> torch.dtype:
    """Return the dtype of the servers' weights."""
    return DTYPES[settings.model.dtype if rollout.dtype == "auto" else rollout.dtype]


def _name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" of torch.bfloat16, as servers call it."""
    return str(dtype).removeprefix("torch.")


# -- connection ------------------------------------------------------------------------------------------------------


@dataclass
class Connection:
    """Connection of a run with its servers, equal on all ranks; a context whose end closes the clients.

    The pool ends servers. Unless an error ends the context, for then ranks or servers may be gone, servers release the
    memory through which weights travelled.
    """

    router: ServerRouter
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
        """Restart lost servers where the run started them, and send them the current weights; collective.

        Raises RunError on all ranks when one does not come back.
        """
        self._servers.bring_back(lost)
        for index in lost:
            self._controls[index].endpoint = self._servers.endpoints[index]
            self.router.move(index, self._servers.endpoints[index])
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


def connect(
    rollout: RolloutConfig,
    dtype: torch.dtype,
    servers: ServerPool,
    *,
    actor: ModelEngine,
    world: Ranks,
    hidden_tokens: IdRanges,
) -> Connection:
    """Return the connection with servers that are ready; collective.

    dtype: of the servers' weights. hidden_tokens: no response may hold them. Raises UserError when no transport, or not
    the requested one, reaches the servers.
    """
    sglang, hf = rollout.sglang, actor.sharding.hf
    placement = Placement(hosts=hosts_of(world), colocated=servers.colocated)
    resources = ExitStack()
    # Every rank has a control of every server; only the one that leads a server uses it.
    clients = (Control(endpoint, sglang.sync.timeout_s) for endpoint in servers.endpoints)
    controls = [resources.enter_context(closing(client)) for client in clients]
    reached = [_reached(servers, index, control, placement) for index, control in enumerate(controls)]
    transport = choose_transport(
        sglang.sync.transport,
        TrainerWeights(actor, dtype),
        reached,
        placement,
        bucket_bytes=rollout.bucket_mib << 20,
        timeout_s=sglang.sync.timeout_s,
    )
    own = {i: controls[i] for i, one in enumerate(reached) if leader_of(one, transport, placement) == world.rank}
    per_rank = math.ceil(sglang.max_concurrency / world.size)
    # The ranks of a host ask the servers that the run started there, equally many on each host.
    near = {
        server.index: math.ceil(sglang.max_concurrency / sum(map(placement.hosts.count, set(server.hosts))))
        for server in reached
        if servers.nodes(server.index) and placement.hosts[world.rank] in server.hosts
    }
    router = ServerRouter(
        servers.endpoints,
        vocab_size=hf.vocab_size,
        max_concurrency=near or per_rank,
        retries=sglang.retries,
        request_timeout_s=sglang.request_timeout_s,
        allow_mixed_versions=sglang.partial_rollout,
    )
    hidden = ids_of(hidden_tokens, hf.vocab_size)
    return Connection(
        router=resources.enter_context(router),
        sync=_weight_sync(rollout, dtype, transport, router, world, actor=actor, own=own, hidden=hidden),
        memory=ServersMemory(
            world, own, servers, released=TAGS if servers.colocated else ()
        ),  # released at their start
        concurrency=sum(near.values()) or per_rank * len(controls),
        max_positions=hf.max_position_embeddings,
        _servers=servers,
        _controls=controls,
        _actor=actor,
        _transport=transport,
        _resources=resources,
    )


def _reached(servers: ServerPool, index: int, control: Control, placement: Placement) -> Server:
    """Return a server with the hosts of its nodes; a joined one may be anywhere unless its URL is loopback."""
    nodes = servers.nodes(index) or ((0,) if is_loopback(urlsplit(control.endpoint.url).hostname or "") else ())
    hosts = [placement.hosts[rank] for rank in nodes]
    return Server(index, servers.tp[index], hosts[0] if hosts else None, control, tuple(hosts[1:]))


def _weight_sync(
    rollout: RolloutConfig,
    dtype: torch.dtype,
    transport: Transport,
    router: ServerRouter,
    world: Ranks,
    *,
    actor: ModelEngine,
    own: Mapping[int, Control],
    hidden: Sequence[int],
) -> SglangWeightSync:
    sync, hf, limits = rollout.sglang.sync, actor.sharding.hf, LIMITS[_name_of(dtype)]
    probe = Probe(actor.forward, world, hf.vocab_size, rollout.temperature, sync.probe_tokens, limits, tuple(hidden))
    return SglangWeightSync(
        transport,
        router,
        world,
        controls=own,
        num_servers=len(router.states()),
        expected=ExpectedServer(
            hf=hf,
            sent=sent_tensors(actor.sharding, dtype),
            dtype=_name_of(dtype),
            tp=None if rollout.sglang.urls else rollout.sglang.server.tp,
            routing=rollout.sglang.return_routing,
        ),
        probe=probe if sync.probe_tokens else None,
        verify_interval=rollout.verify_interval,
    )
