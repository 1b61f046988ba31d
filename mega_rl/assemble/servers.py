"""Servers of a run: how many, on which devices, with how much of their memory; started or joined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import psutil
import torch

from mega_rl.accelerator import Accelerator
from mega_rl.assemble.plan import RunPlan
from mega_rl.assemble.sglang import name_of
from mega_rl.config.facts import divisors, listed
from mega_rl.config.rules.servers import is_loopback
from mega_rl.config.schema import Config
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.errors import PeerError, RunError, UserError
from mega_rl.models.build import DTYPES
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.http.keys import Keys
from mega_rl.rollout.sglang.server.device_share import DeviceShare
from mega_rl.rollout.sglang.server.memory import release_at_start
from mega_rl.rollout.sglang.server.pool import (
    JoinedServers,
    ServerPool,
    StartedServers,
    ranks_on_this_host,
    url_of_master,
)
from mega_rl.rollout.sglang.server.process import ServerProcess
from mega_rl.rollout.sglang.server.settings import ServerSettings, address_of
from mega_rl.rollout.sglang.weights.reshard import sending_bytes
from mega_rl.rollout.sglang.weights.transport import RanksLost
from mega_rl.rollout.sglang.weights.transports.server_group import address_towards
from mega_rl.workers.residency import TAGS

log = logging.getLogger(__name__)

_COUNT = "rollout.sglang.server.count"
_TP = "rollout.sglang.server.tp"
_NODES = "rollout.sglang.server.nodes"


def is_colocated(config: Config, accelerator: Accelerator) -> bool:
    """Return whether servers share the trainer's devices. A CPU's memory is the host's, which needs no turns."""
    sglang = config.rollout.sglang
    if sglang.placement == "auto":
        return accelerator.device.type == "cuda" and not sglang.urls and not config.trainer.async_steps
    return sglang.placement == "colocated"


def start_servers(
    plan: RunPlan,
    accelerator: Accelerator,
    world: Ranks,
    resources: ExitStack,
    *,
    process: Callable[[ServerSettings, int, Path], ServerProcess] = ServerProcess,
) -> ServerPool | None:
    """Return the servers of a run over SGLang, which `resources` ends; None with the embedded engine; collective.

    Where the launcher keeps servers, those that are healthy are adopted from the ranks before these, and left to the
    ranks after these by an error that they have no part in.

    Servers with devices of their own are on their way up, and `wait_ready` waits for them. Those that share the
    trainer's devices are ready and have released their memory: a server sizes its KV cache by what is free when it
    starts, so the trainer's models must come after it, and into an empty device.

    process: makes the process of a server, given its settings, number and folder.

    Raises UserError where servers do not fit the host's devices or their memory, RunError for a failed start.
    """
    config, sglang = plan.config, plan.config.rollout.sglang
    if config.rollout.backend != "sglang":
        return None
    per_host = ranks_on_this_host(world.size)
    hosts = world.size // per_host
    if sglang.urls:
        check_urls(sglang.urls, hosts=hosts)
        return JoinedServers(world, sglang.urls, Keys.read(Path(sglang.keys_file)), timeout_s=sglang.start_timeout_s)
    colocated = is_colocated(config, accelerator)
    check_hosts(config, hosts=hosts)
    count = servers_per_host(config, accelerator, ranks_per_host=per_host, colocated=colocated)
    tp_here, nodes = sglang.server.tp // sglang.server.nodes, sglang.server.nodes
    if world.rank == 0:
        where = "every host" if nodes == 1 else f"every {nodes} hosts"
        log.info("%d SGLang server(s) of %d rank(s) each on %s of the trainer", count, sglang.server.tp, where)
    host = listening_address(sglang.server.host, world, hosts=hosts)
    share = _mem_fraction(plan, accelerator, world, colocated=colocated)
    settings = _settings(plan, accelerator, host=host, share=share)
    first_gpu = 0 if colocated else per_host  # servers of their own devices have those after the trainer's
    pool = StartedServers(
        world,
        [settings(first_gpu + place * tp_here) for place in range(count)],
        ranks_per_host=per_host,
        folder=Path(config.trainer.run_dir) / "sglang",
        process=process,
    )
    resources.push(partial(_close, pool))
    if colocated:
        pool.wait_ready()
        release_at_start(pool, world, tuple(reversed(TAGS)), timeout_s=sglang.sync.timeout_s)
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


def check_hosts(config: Config, *, hosts: int) -> None:
    """Raise UserError where servers that span several hosts each do not divide the trainer's."""
    nodes = config.rollout.sglang.server.nodes
    if hosts % nodes:
        raise UserError(
            f"{_NODES}={nodes}: the trainer runs on {hosts} host(s), and each server takes {nodes} of them; "
            f"legal: {listed(divisors(hosts))}"
        )


def check_urls(urls: Sequence[str], *, hosts: int) -> None:
    """Raise UserError for a server on loopback that ranks of several hosts would have to ask."""
    local = [url for url in urls if is_loopback(urlsplit(url).hostname or "")]
    if hosts > 1 and local and not is_loopback(urlsplit(url_of_master()).hostname or ""):
        raise UserError(
            f"rollout.sglang.urls={local[0]}: the run has {hosts} hosts, of which one reaches it; name one for all"
        )


def listening_address(setting: str, world: Ranks, *, hosts: int) -> str:
    """Return the address of this host on which servers listen, for `rollout.sglang.server.host=setting`; collective.

    On several hosts the address towards MASTER_ADDR takes the place of loopback: every rank asks servers of every host.

    Raises UserError on all ranks where hosts meet and the address of one is loopback.
    """
    own = address_of(setting)
    if hosts == 1 or not is_loopback(own):
        return own
    master, own = url_of_master(), address_towards(url_of_master())
    here = [f"{name} ({address_of(name)})" for name in psutil.net_if_addrs() if not is_loopback(address_of(name))]
    addresses, interfaces = zip(*world.gather_json([own, here]), strict=True)
    local = [rank for rank, address in enumerate(addresses) if is_loopback(address)]
    if local and len(local) < world.size:  # all are loopback: every rank is on this machine
        raise UserError(
            f"rollout.sglang.server.host={setting}: the run has {hosts} hosts, whose servers must reach each other's "
            f"ranks, and {master} (MASTER_ADDR) is loopback on the host of rank {local[0]}; name the interface between "
            f"hosts: {', '.join(interfaces[local[0]]) or 'that host has none'}"
        )
    if world.rank == 0:
        log.info("SGLang servers listen on each host's address towards %s, with keys", master)
    return own


def servers_per_host(config: Config, accelerator: Accelerator, *, ranks_per_host: int, colocated: bool) -> int:
    """Return how many servers each host has a part of: the setting, or for 0 as many as its devices hold, one on a CPU.

    Raises UserError where the devices are too few.
    """
    server = config.rollout.sglang.server
    if accelerator.device.type != "cuda":
        return server.count or 1
    visible = accelerator.device_count()
    devices = ranks_per_host if colocated else visible - ranks_per_host
    tp_here = server.tp // server.nodes
    count = server.count or devices // tp_here
    sizes = f"{_TP}={server.tp}" + (f" over {_NODES}={server.nodes}" if server.nodes > 1 else "")
    if visible < ranks_per_host or count < 1 or count * tp_here > devices:
        where = "share the devices of" if colocated else "have devices of their own (rollout.sglang.placement) beside"
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


def _settings(plan: RunPlan, accelerator: Accelerator, *, host: str, share: float) -> Callable[[int], ServerSettings]:
    """Return the settings of a server by the number of its first device."""
    config, sglang = plan.config, plan.config.rollout.sglang

    def settings(base_gpu: int) -> ServerSettings:
        return ServerSettings(
            model_path=Path(config.model.path),
            host=host,
            tp=sglang.server.tp,
            nodes=sglang.server.nodes,
            dtype=name_of(plan.rollout_dtype),
            device=accelerator.device.type,
            max_total_tokens=sglang.server.max_total_tokens,
            mem_fraction=share,
            memory_saver=is_colocated(config, accelerator),
            deterministic=config.trainer.deterministic,
            base_gpu=base_gpu,
            seed=config.trainer.seed,
            start_timeout_s=sglang.start_timeout_s,
            return_routing=sglang.return_routing,
            args=dict(sglang.server.args) | ({"enable_fp32_lm_head": True} if config.model.fp32_head else {}),
        )

    return settings


def _mem_fraction(plan: RunPlan, accelerator: Accelerator, world: Ranks, *, colocated: bool) -> float:
    """Return the share of a device for a server's weights and KV cache, 0 for SGLang's own choice; collective."""
    setting = plan.config.rollout.sglang.server.mem_fraction
    if not colocated or accelerator.device.type != "cuda":
        return setting
    smallest = -int(world.max(torch.tensor(-accelerator.total_memory())))
    fraction = device_share(plan, total=smallest, world_size=world.size).fraction(setting)
    if not setting and world.rank == 0:
        log.info("colocated SGLang servers may fill %g of a device with weights and KV cache", fraction)
    return fraction


def device_share(plan: RunPlan, *, total: int, world_size: int) -> DeviceShare:
    """Return what of a device of `total` bytes the policy and a rank of a colocated server need."""
    config, tp = plan.config, plan.config.rollout.sglang.server.tp
    hf, itemsize = plan.models["actor"].hf, plan.rollout_dtype.itemsize
    count = sum(prod(tensor.shape) for tensor in hf_tensors(hf, head="lm").values())
    return DeviceShare(
        total=total,
        policy=_policy_bytes(plan, world_size, count)
        + sending_bytes(hf, bucket_bytes=config.rollout.bucket_mib << 20, itemsize=itemsize),
        weights=count * itemsize // tp,
        tp=tp,
    )


def _policy_bytes(plan: RunPlan, world_size: int, count: int) -> int:
    """Return the bytes of the largest part of the policy on a rank; count: parameters of the whole model."""
    config = plan.config
    if config.engine.backend == "fsdp":
        return 4 * count // (config.engine.fsdp.shard_ranks or world_size)  # shards are FP32
    layout = ParallelLayout.of_engine(config.engine, world_size=world_size)
    sharding = Sharding(plan.models["actor"].hf, layout)
    largest = max(
        sum(
            prod(param.shape)
            for vp_stage in range(layout.vpp)
            for param in build_plan(sharding, layout.coordinates(first), vp_stage=vp_stage)
        )
        for first in range(0, world_size, layout.stage_size)
    )
    return largest * DTYPES[config.model.dtype].itemsize
