"""Process group of one rank of the trainer and the ranks of many servers, and the store at which they meet.

Built as SGLang's `init_custom_process_group` builds the servers' side: the store's keys have the group's name as prefix
twice (once by torch), then the device. Groups are not registered with torch.distributed, whose own groups end together
with the world.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

SETTLE_S = 10.0  # for the trainer's side of what all servers say they have done


def address_towards(url: str) -> str:
    """Return the address of this machine's interface towards a server."""
    parts = urlsplit(url)
    family, kind, protocol, _, to = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(to)  # a datagram socket sends nothing by it
        return str(probe.getsockname()[0])


def address_for(urls: Sequence[str]) -> str:
    """Return the address of this machine that all these servers reach: loopback only where all of them are here."""
    addresses = [address_towards(url) for url in urls]
    return next((one for one in addresses if not ipaddress.ip_address(one).is_loopback), addresses[0])


class Rendezvous:
    """Store on one rank of the trainer at which the members of groups meet; one for groups of any names."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float) -> None:
        """Listen where these servers reach this machine, on a free port."""
        self.address = address_for(urls)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.create_server((self.address, 0), family=family, backlog=128)
        self.port: int = listener.getsockname()[1]
        self._keys = 0  # in the store once the expected group is complete
        self._store: TCPStore | None = TCPStore(
            self.address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # torch's own socket would listen on all interfaces
        )

    def expect(self, members: int) -> None:
        """Take note that the next group has this many members, each of which leaves a key."""
        if self._store is not None:
            # One key counts the store's clients: torch makes it when the first of them comes.
            self._keys = max(1, self._store.num_keys()) + members

    def close(self, *, absent: int = 0) -> None:
        """End the store: whoever waits there for others gets an error at once.

        `absent`: members of the expected group that will not come, for which the others would wait. First let these
        arrive, for at most `SETTLE_S` seconds: a member that finds no store tries again until its own deadline.
        """
        store, self._store = self._store, None
        deadline = time.monotonic() + SETTLE_S
        while store is not None and absent and store.num_keys() < self._keys - absent and time.monotonic() < deadline:
            time.sleep(0.02)


class ServerGroup:
    """Group in which this rank is 0, the source of every broadcast, and servers' ranks are 1 and on."""

    def __init__(self, name: str, *, backend: str, size: int, timeout_s: float) -> None:
        """backend: "gloo" or "nccl". size: ranks, this one among them."""
        self.name, self._backend, self._size = name, backend, size
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None

    def join(self, address: str, port: int, *, towards: Sequence[str]) -> Future[None]:
        """Start to join the others at a rendezvous. towards: the servers' URLs.

        The future raises OSError or RuntimeError.
        """

        def join() -> None:
            store = TCPStore(address, port, is_master=False, timeout=self._timeout, wait_for_workers=False)
            named = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
            if self._backend == "gloo":
                kind: Any = dist.ProcessGroupGloo
                options = kind._Options()
                options._devices = [kind.create_device(hostname=address_for(towards))]
                named = PrefixStore("cpu/", named)
            else:
                kind = dist.ProcessGroupNCCL
                options = kind.Options()
                named = PrefixStore("cuda/", named)
            options._timeout = self._timeout
            self._group = kind(named, 0, self._size, options)

        return _on_a_thread(join)

    def broadcast(self, data: Tensor) -> Future[None]:
        """Start to send `data` [n] uint8 to all servers' ranks; it must not change until the future is done.

        The future raises RuntimeError. On a thread, because the first broadcast over NCCL waits for its peers.
        """

        group = self._group

        def broadcast() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            group.broadcast([data], options).wait(self._timeout)

        return _on_a_thread(broadcast)

    def close(self) -> None:
        """End the group, and with it what is under way: peers that wait for this rank get an error."""
        if self._group is not None:
            with suppress(RuntimeError):  # it may be broken already
                self._group.abort()
        self._group = None


def _on_a_thread(work: Callable[[], None]) -> Future[None]:
    """Return the future of work on a thread that the end of this process does not wait for."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except (OSError, RuntimeError) as error:  # of sockets, and of torch.distributed
            future.set_exception(error)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future
