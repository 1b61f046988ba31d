"""The store in which ranks find one another; its process outlives ranks and a killed launcher.

    python -m mega_rl.operations.launcher.store ADDRESS LISTENER LIFELINE

It listens at one address and unpickles no value. Each start of the ranks has a new store, without keys of dead ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from mega_rl.environment import python_module
from mega_rl.errors import UserError
from mega_rl.operations.launcher.reaper import SIGNALS
from mega_rl.processes import DEVNULL, Child, ChildStartError

LOOPBACK = "127.0.0.1"


class RankStore:
    """A store's process, as its launcher sees it. The port answers at once."""

    def __init__(self, address: str) -> None:
        """address: an address of this machine.

        Raises UserError for an address of another machine, RunError when no further process may start.
        """
        listener = listen(address)
        self.port = int(listener.getsockname()[1])
        # The store ends when the last holder of the other end does: the launcher or, if it was killed, the ranks, which
        # need their store while they save.
        read, self.lifeline = os.pipe()
        fds = [listener.fileno(), read]
        own = str(listener.getsockname()[0])
        command = python_module("mega_rl.operations.launcher.store", own, *map(str, fds))
        try:
            with listener:
                streams = (DEVNULL, DEVNULL, None)
                self._child = Child("the ranks' store", command, blocks=SIGNALS, pass_fds=fds, streams=streams)
        except ChildStartError:
            os.close(self.lifeline)
            raise
        finally:
            os.close(read)

    def close(self) -> None:
        """End the store; the ranks have ended."""
        os.close(self.lifeline)
        self._child.end()


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address; port 0: any free one. Raises UserError."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        raise UserError(
            f"--master-addr={address}: node 0 cannot listen at port {port or 'any'} of it ({error.strerror or error}); "
            "give a name or an address of node 0 that the other nodes reach, and a free --master-port"
        ) from None
    listener.listen(1024)
    return listener


def main(arguments: Sequence[str]) -> None:
    """Keep the store until no process holds the lifeline's other end."""
    from torch._C._distributed_c10d import TCPStore

    address, listener, lifeline = arguments[0], int(arguments[1]), int(arguments[2])
    with socket.socket(fileno=os.dup(listener)) as copy:
        port = int(copy.getsockname()[1])
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    assert store.port == port
    os.read(lifeline, 1)
    os._exit(0)  # without torch's teardown


if __name__ == "__main__":
    main(sys.argv[1:])
