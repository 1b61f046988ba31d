"""Ranks of one node: child processes of its launcher, each the leader of a session and process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from mega_rl.cores import threads_per_rank
from mega_rl.environment import LAST_WORD, python_module
from mega_rl.errors import RunError, UserError
from mega_rl.health.endings import UNSAID
from mega_rl.launcher.leash import leashed
from mega_rl.launcher.signals import STOPPED
from mega_rl.launcher.warden import Warden

KEY = "MEGA_RL_LAUNCH_KEY"  # of launchers; ranks, whose environment other programs inherit, do not see it
GENERATION = "MEGA_RL_GENERATION"
# Exit codes of ranks that a launcher has started and that did nothing wrong: the connection to another rank broke
# (EX_TEMPFAIL of sysexits.h), or another rank did not come to a collective in time. They say nothing themselves.
LOST_PEER, WAITED_IN_VAIN = 75, 76
INNOCENT = (LOST_PEER, WAITED_IN_VAIN)
MEANINGFUL = (0, UserError.exit_code, *INNOCENT, *STOPPED)  # to be believed only where the rank's command gives them
THREADS = "OMP_NUM_THREADS"
# Ends ranks of which one has failed: none of them catches it, so it needs neither a step's end nor a Python thread that
# gets to run. SIGTERM would have them finish a step that cannot be finished, and say that they do.
END_NOW = signal.SIGHUP
END_GRACE_S = 5.0  # from END_NOW to SIGKILL
CLOSE_S = 10.0  # from SIGKILL to the end


@dataclass(frozen=True)
class RankEnd:
    """End of a rank's process.

    code: its exit code, plus UNSAID where it is not to be believed; below 0 the signal that killed it.
    """

    rank: int
    pid: int
    code: int


@dataclass(frozen=True)
class Assignment:
    """Part of a node in a run's start; a restart is another generation, perhaps of other nodes."""

    generation: int
    node: int  # place among the run's nodes, from 0
    nodes: int
    nproc: int  # ranks of each node
    master_addr: str  # of the ranks' store
    master_port: int
    resume: str = ""  # value of checkpoint.resume; empty: as the program's own arguments say

    @property
    def ranks(self) -> range:
        """Return the ranks of this node."""
        return range(self.node * self.nproc, (self.node + 1) * self.nproc)


def environment(
    assignment: Assignment, local_rank: int, base: Mapping[str, str], *, interface: str = "lo"
) -> dict[str, str]:
    """Return the environment of a rank: the launcher's own, and the variables that torchrun would set.

    interface: of the network by which nodes reach one another. Gloo takes it, NCCL on a single node as well, unless
    `base` names others: what listens there has no key.
    """
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if assignment.nodes == 1 else [])]
    variables = {name: interface for name in names} if interface else {}
    variables[THREADS] = str(threads_per_rank(assignment.nproc))
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
    """Ranks of this node in one generation after another."""

    def __init__(
        self,
        program: Sequence[str],
        *,
        variables: Mapping[str, str],
        interface: str = "lo",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """program: a module and its arguments. variables: of the ranks, see `environment`."""
        self._program, self._variables, self._interface, self._clock = program, variables, interface, clock
        self._warden = Warden()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._last_words = -1  # descriptor of the generation's file, see LAST_WORD
        self._kill_at = float("inf")

    @property
    def processes(self) -> dict[int, int]:
        """Return the process of each rank that has not ended."""
        return {rank: process.pid for rank, process in self._running.items()}

    def start(self, assignment: Assignment, *, lifeline: int | None = None) -> None:
        """Start the ranks; none of an earlier generation may be running. lifeline: see `RankStore`.

        Raises RunError when the machine allows no further process.
        """
        assert not self._running, "ranks of an earlier generation still run"
        self._kill_at = float("inf")
        resume = [f"checkpoint.resume={assignment.resume}"] if assignment.resume else []
        command = leashed(python_module(*self._program, *resume))
        self._forget_last_words()
        self._last_words = word = os.memfd_create("last words of ranks")
        for local_rank, rank in enumerate(assignment.ranks):
            variables = environment(assignment, local_rank, self._variables, interface=self._interface)
            try:
                self._running[rank] = process = subprocess.Popen(
                    command,
                    env={**variables, LAST_WORD: str(word)},
                    pass_fds=[word] if lifeline is None else [word, lifeline],
                    start_new_session=True,  # a terminal's Ctrl-C comes by the launcher, once
                )
            except OSError as error:
                raise RunError(f"{socket.gethostname()}: rank {rank} cannot be started: {error.strerror}") from None
            self._warden.watch(process.pid)

    def poll(self) -> list[RankEnd]:
        """Return the ranks that have ended since the last call; kill those whose time is over."""
        if self._clock() >= self._kill_at:
            self.kill()
        ends = []
        for rank, process in list(self._running.items()):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # The number is the process's until it is waited for: a group of this number is of this rank.
            code = _peek(process.pid)
            if code in MEANINGFUL and os.pread(self._last_words, 1, rank) != bytes([code + 1]):
                code += UNSAID
            if code not in (0, *STOPPED):
                _signal_group(process.pid, signal.SIGKILL)  # what a failed rank has left running
            process.wait()
            del self._running[rank]
            ends.append(RankEnd(rank, process.pid, code))
        return ends

    def signal(self, number: int) -> None:
        """Send a signal to the ranks, not to what they have started."""
        for process in self._running.values():
            os.kill(process.pid, number)  # Popen's own would wait for one that has ended

    def end(self) -> None:
        """End the ranks of a run that has failed, by END_NOW and after END_GRACE_S by SIGKILL; returns at once."""
        self.signal(END_NOW)
        self.signal(signal.SIGCONT)  # a stopped process takes no other signal
        self._kill_at = min(self._kill_at, self._clock() + END_GRACE_S)

    def kill(self) -> None:
        """Kill the ranks and their process groups."""
        for process in self._running.values():
            _signal_group(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs, and end the warden."""
        self.kill()
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a file system that does not answer
                process.wait(CLOSE_S)
        self._running.clear()
        self._forget_last_words()
        self._warden.close()

    def _forget_last_words(self) -> None:
        if self._last_words >= 0:
            os.close(self._last_words)
        self._last_words = -1


def interface_of(address: str) -> str:
    """Return the network interface of this machine that has an address; empty where none does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(
            one.family in (socket.AF_INET, socket.AF_INET6) and one.address.partition("%")[0] == address
            for one in addresses
        ):
            return str(name)
    return ""


def _peek(pid: int) -> int:
    """Return the exit code of a child that has ended and was not waited for, below 0 for a signal."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
