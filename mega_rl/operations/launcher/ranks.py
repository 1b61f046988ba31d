"""Start and end the ranks of one node, and the store in which all ranks meet.

    python -m mega_rl.operations.launcher.ranks ADDRESS LISTENER LIFELINE

is that store. It outlives ranks and a killed launcher, listens at one address and unpickles no value. Each start of the
ranks has a new store, without keys of dead ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from mega_rl.environment import own_cores, python_module
from mega_rl.errors import LAST_WORD, UserError
from mega_rl.processes import DEVNULL, Child, ChildDeadlineError
from mega_rl.tracking.health.records import GENERATION, INNOCENT_CODES, UNSAID

LOOPBACK = "127.0.0.1"
KEY = "MEGA_RL_LAUNCH_KEY"  # only launchers see it: other programs inherit the environment of ranks
# Slurm sends SIGUSR1 before the time limit; SIGHUP and SIGQUIT end ranks without a checkpoint, as they end any program.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
STOPPED = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))  # ranks that have saved
INNOCENT = tuple(INNOCENT_CODES.values())
# Exit codes with a meaning. Believed only if the rank's command reports them: a library may call os._exit(0).
MEANINGFUL = (0, UserError.exit_code, *INNOCENT, *STOPPED)
# Ends the other ranks after a failure. They do not catch it. SIGTERM would let them finish a step that cannot finish.
END_NOW = signal.SIGHUP
END_GRACE_S = 5.0  # from END_NOW to SIGKILL
CLOSE_S = 10.0  # from SIGKILL to the end


@dataclass(frozen=True)
class RankEnd:
    """End of a rank's process.

    code: its exit code, plus UNSAID if it is not to be believed; below 0 the signal that killed it.
    """

    rank: int
    pid: int
    code: int


@dataclass(frozen=True)
class Assignment:
    """A node's part in one generation of the run; a restart begins another one."""

    generation: int
    node: int  # place among the run's nodes, from 0
    nodes: int
    nproc: int  # ranks on each node
    master_addr: str  # address of the ranks' store
    master_port: int
    resume: str = ""  # value of checkpoint.resume; empty: as the program's arguments say

    @property
    def ranks(self) -> range:
        """Return the ranks of this node."""
        return range(self.node * self.nproc, (self.node + 1) * self.nproc)


def environment(
    assignment: Assignment, local_rank: int, base: Mapping[str, str], *, interface: str = "lo"
) -> dict[str, str]:
    """Return the environment of a rank: the launcher's, with the variables that torchrun would set.

    interface: network interface towards the other nodes. Gloo listens there, and on a single node NCCL, unless `base`
    names others: anybody may connect to what listens there.
    """
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if assignment.nodes == 1 else [])]
    variables = {name: interface for name in names} if interface else {}
    variables["OMP_NUM_THREADS"] = str(own_cores(assignment.nproc))
    variables |= {name: value for name, value in base.items() if name != KEY}
    return variables | {
        "RANK": str(assignment.ranks[local_rank]),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(assignment.nodes * assignment.nproc),
        "LOCAL_WORLD_SIZE": str(assignment.nproc),
        "GROUP_RANK": str(assignment.node),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's env:// joins the store as a client on every rank
        GENERATION: str(assignment.generation),
    }


class NodeRanks:
    """The ranks of this node, of one generation after another."""

    def __init__(self, program: Sequence[str], *, variables: Mapping[str, str], interface: str = "lo") -> None:
        """program: a module and its arguments. variables: as `base` of `environment`."""
        self._program, self._variables, self._interface = program, variables, interface
        self._running: dict[int, Child] = {}
        self._last_words = -1  # descriptor of the generation's file, see LAST_WORD
        self._kill_at = float("inf")

    @property
    def processes(self) -> dict[int, int]:
        """Return the process of each rank that has not ended."""
        return {rank: child.pid for rank, child in self._running.items()}

    def start(self, assignment: Assignment, *, lifeline: int | None = None) -> None:
        """Start the ranks; those of the generation before have ended. lifeline: see `rank_store`."""
        assert not self._running, "ranks of an earlier generation still run"
        self._kill_at = float("inf")
        resume = [f"checkpoint.resume={assignment.resume}"] if assignment.resume else []
        self._forget_last_words()
        self._last_words = word = os.memfd_create("last words of ranks")
        for local_rank, rank in enumerate(assignment.ranks):
            variables = environment(assignment, local_rank, self._variables, interface=self._interface)
            self._running[rank] = Child(
                f"rank {rank}",
                python_module(*self._program, *resume),
                dies_by=signal.SIGTERM,
                pass_fds=[word] if lifeline is None else [word, lifeline],
                streams=(None, None, None),
                env={**variables, LAST_WORD: str(word)},
            )

    def poll(self) -> list[RankEnd]:
        """Return the ranks that have ended since the last call; kill those whose time is over."""
        if time.monotonic() >= self._kill_at:
            self.kill()
        ends = []
        for rank, child in list(self._running.items()):
            code = child.exit_code
            if code is None:
                continue
            if code in MEANINGFUL and os.pread(self._last_words, 1, rank) != bytes([code + 1]):
                code += UNSAID
            if code not in (0, *STOPPED):
                child.kill()  # processes that a failed rank has left running
            child.wait()
            del self._running[rank]
            ends.append(RankEnd(rank, child.pid, code))
        return ends

    def signal(self, number: int) -> None:
        """Send a signal to the ranks, not to what they have started."""
        for child in self._running.values():
            child.signal(number)

    def end(self) -> None:
        """End the ranks by END_NOW, after END_GRACE_S by SIGKILL; return at once."""
        self.signal(END_NOW)
        self.signal(signal.SIGCONT)  # a stopped process takes no other signal
        self._kill_at = min(self._kill_at, time.monotonic() + END_GRACE_S)

    def kill(self) -> None:
        """Kill the ranks and their process groups."""
        for child in self._running.values():
            child.kill()

    def close(self) -> None:
        """Kill the ranks that still run."""
        self.kill()
        for child in self._running.values():
            with suppress(ChildDeadlineError):  # in a file system that does not answer
                child.wait(CLOSE_S)
        self._running.clear()
        self._forget_last_words()

    def _forget_last_words(self) -> None:
        if self._last_words >= 0:
            os.close(self._last_words)
        self._last_words = -1


class StopSignals:
    """Context manager that collects the signals to this process in their order.

    A signal that the process ignored at its start, as SIGHUP under nohup, stays ignored. Signals blocked before are let
    through.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
        self.first = 0
        self._numbers = numbers
        self._pending: list[int] = []
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        numbers = [number for number in self._numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._remember) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> list[int]:
        """Return the signals that came since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self._pending.append(number)


@contextmanager
def rank_store(address: str) -> Iterator[tuple[int, int]]:
    """Keep a store for ranks that run inside; yield its port, which answers at once, and its lifeline.

    address: of this machine. Raises UserError for an address of another machine, RunError when no further process may
    start.
    """
    # The store ends when the last holder of the lifeline does: the launcher or, if it was killed, the ranks, which need
    # their store while they save.
    read, lifeline = os.pipe()
    try:
        with listen(address) as listener:
            own, port = listener.getsockname()[:2]
            fds = [listener.fileno(), read]
            command = python_module("mega_rl.operations.launcher.ranks", own, *map(str, fds))
            store = Child("the ranks' store", command, blocks=SIGNALS, pass_fds=fds, streams=(DEVNULL, DEVNULL, None))
        with store:
            yield port, lifeline
    finally:
        os.close(read)
        os.close(lifeline)


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
