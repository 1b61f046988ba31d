"""Nodes of a server that spans hosts: how they meet and end together. Imports no torch.

Each host runs a part of such a server. Two sockets of the first node join them: the store at which SGLang's ranks meet
(SGLang's own would listen on all interfaces), and the line of life, a connection that every other part holds and the
kernel closes at any end of either. A part that loses it ends, and the trainer starts all parts again.

A connection begins with a secret of the start, and keys of the store do. Both travel in the clear, and messages between
SGLang's ranks are not protected: whoever is on that network can read them.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

FILE = "node.json"  # in a part's private folder

_SCHEME = "nodes"  # in torch.distributed's init_method
_HELLO_BYTES = 64
_HELLO_S = 10.0  # for a connection to introduce itself
_RETRY_S = 0.2
# A host that vanishes closes no connection: the kernel asks after 10 s of silence, and gives up after 30 s more.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True)
class Node:
    """One node of a server, and the address at which the nodes of one start meet."""

    number: int  # 0: it has the server's URL
    address: str  # the first node's
    store_port: int
    life_port: int
    secret: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)

    @property
    def init_address(self) -> str:
        """Return SGLang's --dist-init-addr."""
        return f"[{self.address}]:{self.store_port}" if ":" in self.address else f"{self.address}:{self.store_port}"

    def write(self, folder: Path) -> None:
        """Write it into a private folder."""
        (folder / FILE).write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> Node | None:
        """Return the node of a part's private folder; None of a server on one host."""
        file = folder / FILE
        return cls(**json.loads(file.read_text("utf-8"))) if file.exists() else None

    def hello(self) -> bytes:
        """Return the first bytes of its connection to the first node."""
        return f"{self.secret} {self.number}".encode().ljust(_HELLO_BYTES)


def let_ranks_meet(node: Node) -> str:
    """Return the init_method for ranks of this process that meet at the first node's store."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    def meet(url: str, *, timeout: Any, **_: object) -> Iterator[tuple[Any, int, int]]:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        asked = parse_qs(urlsplit(url).query)
        rank, size = int(asked["rank"][0]), int(asked["world_size"][0])
        store = TCPStore(
            node.address,
            node.store_port,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            # torch's own socket would listen on all interfaces.
            master_listen_fd=_listener(node.address, node.store_port).detach() if rank == 0 else None,
        )
        yield PrefixStore(node.secret, store), rank, size
        raise RuntimeError("the ranks of a server meet once")

    register_rendezvous_handler(_SCHEME, meet)
    return f"{_SCHEME}://{node.init_address}"


def end_together(node: Node, ended: Callable[[str], None]) -> None:
    """Connect this node with the first; a thread calls `ended` when the other end is gone.

    A further node returns when it is connected: it tries for as long as it lives, and its start has a deadline.
    """
    if node.number == 0:
        _in_thread(_accept_nodes, _listener(node.address, node.life_port), node, ended)
    else:
        _in_thread(_wait_for_end, _first_node(node), ended, f"node 0 at {node.address}")


def _in_thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="nodes", daemon=True).start()


def _accept_nodes(listener: socket.socket, node: Node, ended: Callable[[str], None]) -> None:
    with listener:
        while True:
            _in_thread(_hold, listener.accept()[0], node, ended)


def _hold(connection: socket.socket, node: Node, ended: Callable[[str], None]) -> None:
    """Wait for the end of another node; close a stranger's connection."""
    with connection:
        connection.settimeout(_HELLO_S)
        content = b""
        try:
            while len(content) < _HELLO_BYTES and (more := connection.recv(_HELLO_BYTES - len(content))):
                content += more
        except OSError:
            return
        secret, _, number = content.rstrip().partition(b" ")
        if secrets.compare_digest(secret, node.secret.encode()):
            _wait_for_end(connection, ended, f"node {int(number)} at {connection.getpeername()[0]}")


def _first_node(node: Node) -> socket.socket:
    """Return a connection to the first node, which may start later."""
    while True:
        try:
            connection = socket.create_connection((node.address, node.life_port), timeout=_HELLO_S)
        except OSError:  # its process has not come so far
            time.sleep(_RETRY_S)
        else:
            connection.sendall(node.hello())
            return connection


def _wait_for_end(connection: socket.socket, ended: Callable[[str], None], name: str) -> None:
    """Call `ended` once the other end, the node `name`, is gone."""
    with connection, suppress(OSError):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        while connection.recv(4096):
            pass
    ended(f"{name} has ended")


def _listener(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
