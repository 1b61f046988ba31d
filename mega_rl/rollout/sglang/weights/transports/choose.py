"""Choice of the transport from the setting, the hosts of trainer and servers, and their devices."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch

from mega_rl.config.rules.rollout import is_loopback
from mega_rl.errors import UserError
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.server.pool import ServerPool
from mega_rl.rollout.sglang.weights.reshard import first_ranks
from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights, Transport
from mega_rl.rollout.sglang.weights.transports.cuda_ipc import CudaIpcTransport
from mega_rl.rollout.sglang.weights.transports.process_group import DistributedTransport
from mega_rl.rollout.sglang.weights.transports.shared_memory import SharedMemoryTransport

# Transports of each rollout.sglang.sync.transport, best first. Between GPUs a process group is faster than the way
# through the host's memory; between CPUs it is that way, only longer.
_SETTINGS = {
    "auto": ("cuda_ipc", "shared_memory", "distributed"),
    "auto on GPUs": ("cuda_ipc", "distributed", "shared_memory"),
    "shared_memory": ("cuda_ipc", "shared_memory"),
    "distributed": ("distributed",),
}


def host_identity() -> str:
    """Return an identity, equal for processes that see one /proc on one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii") if sys.platform == "linux" else ""
    namespace = os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""
    return hashlib.sha256(f"{os.uname().nodename} {boot} {namespace}".encode()).hexdigest()[:15]


def hosts_of(ranks: Ranks) -> tuple[str, ...]:
    """Return the `host_identity` of every rank; collective."""
    mine = torch.zeros(ranks.size, dtype=torch.int64)
    mine[ranks.rank] = int(host_identity(), 16)
    return tuple(f"{number:015x}" for number in ranks.sum(mine).tolist())


@dataclass(frozen=True)
class Placement:
    """Hosts of the trainer's ranks, and whether servers share their devices; the same on all ranks."""

    hosts: tuple[str, ...]  # one for each rank of the trainer: `hosts_of`
    colocated: bool  # servers share the trainer's devices and take turns with it


def servers_of(pool: ServerPool, controls: Sequence[Control], placement: Placement) -> list[Server]:
    """Return the servers of a run with the hosts of their nodes.

    A server that the run joined may be on any host, unless its URL is loopback.
    """
    servers = []
    for index, control in enumerate(controls):
        nodes = pool.nodes(index) or ((0,) if is_loopback(urlsplit(control.endpoint.url).hostname or "") else ())
        hosts = tuple(placement.hosts[rank] for rank in nodes)
        servers.append(Server(index, pool.tp[index], hosts, control))
    return servers


def choose_transport(
    setting: str,
    weights: TrainerWeights,
    servers: Sequence[Server],
    placement: Placement,
    *,
    bucket_bytes: int,
    timeout_s: float,
) -> Transport:
    """Return the transport for `rollout.sglang.sync.transport=setting`; equal arguments on all ranks, no communication.

    timeout_s: of a server's answer.

    Raises UserError, with the reasons, when the setting is not possible.
    """
    reasons = []
    on_gpu = weights.device.type == "cuda"
    for name in _SETTINGS["auto on GPUs" if setting == "auto" and on_gpu else setting]:
        reason = why_not(name, weights, servers, placement)
        if reason is None:
            if name == "distributed":
                return DistributedTransport(weights, servers, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
            over_memory = CudaIpcTransport if name == "cuda_ipc" else SharedMemoryTransport
            return over_memory(weights, servers, hosts=placement.hosts, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        reasons.append(f"{name}: {reason}")
    others = "" if setting == "auto" else "; try auto"
    raise UserError(f"rollout.sglang.sync.transport={setting} is not possible ({'; '.join(reasons)}){others}")


def why_not(name: str, weights: TrainerWeights, servers: Sequence[Server], placement: Placement) -> str | None:
    """Return the reason why a transport cannot reach these servers, or None."""
    on_gpu = weights.device.type == "cuda"
    if name == "cuda_ipc":
        return _why_not_cuda_ipc(servers, placement, on_gpu=on_gpu)
    if name == "shared_memory":
        return _why_not_shared_memory(servers, placement)
    return _why_not_distributed(weights, servers, placement, on_gpu=on_gpu)


def _why_not_cuda_ipc(servers: Sequence[Server], placement: Placement, *, on_gpu: bool) -> str | None:
    if not on_gpu:
        return "the trainer runs on CPUs"
    if not placement.colocated:
        return "servers have GPUs of their own"
    reason = _why_not_together(servers, placement)
    if reason is not None:
        return reason
    for host in dict.fromkeys(host for server in servers for host in server.hosts):
        shares = [server.hosts.count(host) * server.tp // len(server.hosts) for server in servers]
        needed, there = sum(shares), placement.hosts.count(host)
        if needed > there:
            return (
                f"servers of one host have {needed} tensor-parallel ranks together, the trainer has {there} GPUs there"
            )
    return None


def _why_not_shared_memory(servers: Sequence[Server], placement: Placement) -> str | None:
    if not hasattr(os, "memfd_create"):
        return "memory without a file is shared on Linux only"
    spanning = [server.index for server in servers if len(server.hosts) > 1]
    if spanning:
        return f"server {spanning[0]} has ranks on several hosts, which share no memory with one sender"
    return _why_not_together(servers, placement)


def _why_not_together(servers: Sequence[Server], placement: Placement) -> str | None:
    """Return why some server shares no host with a rank of the trainer, or None."""
    for server in servers:
        if not server.hosts:
            return f"whether server {server.index} runs on the trainer's host is not known"
        if not set(server.hosts) <= set(placement.hosts):
            return f"server {server.index} runs on a host without ranks of the trainer"
    return None


def _why_not_distributed(
    weights: TrainerWeights, servers: Sequence[Server], placement: Placement, *, on_gpu: bool
) -> str | None:
    if on_gpu and placement.colocated:
        return "NCCL has no groups of several processes on one GPU, and servers share the trainer's"
    # Servers meet each other and the first rank of every pipeline stage.
    hosts = {placement.hosts[rank] for rank in first_ranks(weights.engine.sharding.layout)}
    hosts |= {host for server in servers for host in server.hosts or ("",)}
    for server in servers:
        url = "" if server.receiver is None else server.receiver.endpoint.url
        if len(hosts) > 1 and is_loopback(urlsplit(url).hostname or ""):
            return (
                f"server {server.index} at {url} listens on loopback, and has to be reached from other hosts; name an "
                "interface's address in rollout.sglang.server.host"
            )
    return None
