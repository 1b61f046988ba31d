"""Addresses of hosts and servers: interfaces, loopback, and where ranks and servers reach each other."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from mega_rl.config.rules.rollout import is_loopback
from mega_rl.errors import UserError

if TYPE_CHECKING:
    from mega_rl.protocols import Ranks

log = logging.getLogger(__name__)


def address_of(host: str) -> str:
    """Return the address of the interface `host`, IPv4 first; `host` itself if it is none."""
    of_family = {one.family: one.address for one in reversed(psutil.net_if_addrs().get(host, ()))}
    return of_family.get(socket.AF_INET, of_family.get(socket.AF_INET6, host))


def ranks_on_this_host(world_size: int) -> int:
    """Return the launcher's LOCAL_WORLD_SIZE, the ranks of this host; without it `world_size`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def url_of_master() -> str:
    """Return the launcher's MASTER_ADDR and MASTER_PORT, of rank 0's host, as a URL."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return f"http://{f'[{address}]' if ':' in address else address}:{os.environ.get('MASTER_PORT', 1)}"


def address_towards(url: str) -> str:
    """Return the address of this machine's interface towards a server."""
    parts = urlsplit(url)
    family, kind, protocol, _, to = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(to)  # a datagram socket sends nothing by it
        return str(probe.getsockname()[0])


def address_for(urls: Sequence[str]) -> str:
    """Return this machine's address for these servers: loopback only if all are local."""
    addresses = [address_towards(url) for url in urls]
    return next((one for one in addresses if not ipaddress.ip_address(one).is_loopback), addresses[0])


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
