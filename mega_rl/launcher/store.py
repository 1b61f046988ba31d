"""Store in which ranks find one another, in a process of its own: no rank's death takes it away, nor the launcher's.

    python -m mega_rl.launcher.store ADDRESS LISTENER LIFELINE

It listens at one address, and no value in it is unpickled. Each start of the ranks has a store of its own, so keys of
dead ranks are nobody's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError
from mega_rl.launcher.signals import blocked

LOOPBACK = "127.0.0.1"


class RankStore:
    """A store's process, as its launcher sees it. The port answers from the first moment on."""

    def __init__(self, address: str) -> None:
        """address: of this machine.

        Raises UserError for another's, RunError when the machine allows no further process.
        """
        listener = listen(address)
        self.port = int(listener.getsockname()[1])
        # Ends when the last holder of the other end does: this launcher and, should it be killed, the ranks, which
        # still want their store while they save.
        read, self.lifeline = os.pipe()
        own = str(listener.getsockname()[0])
        command = python_module("mega_rl.launcher.store", own, str(listener.fileno()), str(read))
        try:
            with listener, blocked():
                self._process = subprocess.Popen(
                    command, pass_fds=[listener.fileno(), read], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            os.close(self.lifeline)
            raise RunError(f"{socket.gethostname()}: the ranks' store cannot be started: {error.strerror}") from None
        finally:
            os.close(read)

    def close(self) -> None:
        """End the store; the ranks have ended."""
        os.close(self.lifeline)
        self._process.kill()
        self._process.wait()


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address of this machine, 0: at any free port. Raises UserError."""
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
    os.read(int(lifeline), 1)
    os._exit(0)  # without torch's teardown


if __name__ == "__main__":
    main(sys.argv[1:])
