"""The driver of a run on several nodes: it starts a launcher on each, shows what they write, and places them again."""

from __future__ import annotations

import logging
import math
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mega_rl.errors import RunError, UserError, name_of_signal
from mega_rl.launcher.ranks import KEY
from mega_rl.launcher.signals import STOPPED, StopSignals
from mega_rl.schedulers.ray.node import NodeOutput

log = logging.getLogger(__name__)

POLL_S = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# After the first node has ended badly: seconds until the others are told to end, and until they are killed. Launchers
# end one another; these are for those that cannot. Without a lost node's ranks nothing can be saved.
AFTER_A_LOSS = (0.0, 30.0)
AFTER_A_FAILURE = (30.0, 400.0)
AFTER_A_SIGNAL = (math.inf, 900.0)  # every node has had it, and its ranks end their step and save
AFTER_A_STOP = (30.0, 900.0)  # of one node, by a signal that was not the driver's
GIVE_UP_S = 120.0  # after the kill: what still says nothing is taken for lost


class NodeLost(RunError):
    """A node was lost before its launcher started; the run may be placed again."""


class NodesPlacement(Protocol):
    """Nodes that a run has been given, numbered from 0."""

    addresses: Sequence[str]

    def free_port(self) -> int:
        """Return a port of node 0 at which no program listens."""

    def checkpoints(self, run_dir: str) -> Sequence[str]:
        """Return the complete checkpoints of a run folder as node 0 sees them, oldest first."""

    def start(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], wait_for_lock_of: str) -> None:
        """Start the launcher of every node with its arguments of `mega-rl train`; see `NodeLauncher.start`."""

    def poll(self, wait_s: float) -> Sequence[tuple[int, NodeOutput]]:
        """Return what nodes have to say, in at most `wait_s` seconds; a node that has ended or is lost says no more."""

    def signal(self, number: int) -> None:
        """Send a signal to the launcher of every node that is there."""

    def remove(self) -> None:
        """Give the nodes back; what still runs there is killed."""


@dataclass(frozen=True)
class NodesRun:
    """A run to be driven.

    arguments: of `mega-rl train`, without the launch options. resume: the recipe's checkpoint.resume. node_restarts:
    placements after the first one, each for lost nodes. max_restarts: of `mega-rl train`, in a placement.
    environment: of the launchers, besides the key that they know one another by.
    """

    arguments: Sequence[str]
    nodes: int
    nproc_per_node: int
    run_dir: str
    resume: str
    node_restarts: int
    max_restarts: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class End:
    """End of one placement's launchers; `reason` is why the run should be placed again, empty if it should not."""

    exit_code: int
    reason: str = ""


def drive(
    run: NodesRun,
    place: Callable[[StopSignals], NodesPlacement | None],
    *,
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run until the ranks have ended, placed again after the loss of a node; returns the exit code.

    place: returns nodes, None when a signal came first. write: gets each line of the nodes' output.

    Raises RunError when a node is lost and no restarts are left.
    """
    earlier: Sequence[str] | None = None  # checkpoints that were there before the run
    with StopSignals(SIGNALS) as stop:
        for restarts in range(run.node_restarts + 1):
            placement = place(stop)
            if placement is None:
                return 128 + stop.first
            try:
                saved = placement.checkpoints(run.run_dir)
                earlier = saved if earlier is None else earlier
                resume = run.resume if not restarts or saved[-1:] == earlier[-1:] else "auto"
                end = _run_once(run, placement, stop, resume=resume, again=restarts > 0, write=write, clock=clock)
            except NodeLost as error:
                end = End(error.exit_code, str(error))
            finally:
                placement.remove()
            if not end.reason:
                return end.exit_code
            if restarts < run.node_restarts:
                log.warning(
                    "%s: restart %d of at most %d, from the newest checkpoint",
                    *(end.reason, restarts + 1, run.node_restarts),
                )
    raise RunError(f"{end.reason}; --node-restarts={run.node_restarts} are used up; start the run again to resume it")


def commands(run: NodesRun, *, address: str, port: int, resume: str) -> list[list[str]]:
    """Return the arguments of `mega-rl train` for each node."""
    options = ["--nnodes", str(run.nodes), "--nproc-per-node", str(run.nproc_per_node)]
    options += ["--master-addr", address, "--master-port", str(port), "--max-restarts", str(run.max_restarts)]
    overrides = [] if resume == run.resume else [f"checkpoint.resume={resume}"]
    return [[*options, "--node-rank", str(node), *run.arguments, *overrides] for node in range(run.nodes)]


def _run_once(
    run: NodesRun,
    placement: NodesPlacement,
    stop: StopSignals,
    *,
    resume: str,
    again: bool,
    write: Callable[[str], None],
    clock: Callable[[], float],
) -> End:
    """Start the launchers and wait for their end, handing on signals; see `drive`."""
    for node, address in enumerate(placement.addresses):
        log.info("node %d is %s", node, address)
    started = commands(run, address=placement.addresses[0], port=placement.free_port(), resume=resume)
    environment = {**run.environment, KEY: secrets.token_hex(32)}  # of this placement: no launcher of another may join
    placement.start(started, environment, run.run_dir if again else "")
    watch = _Ends(run.nodes, clock)
    while not watch.over:
        for number in stop.take():
            placement.signal(number)
            watch.signalled()
        for node, output in placement.poll(POLL_S):
            for line in output.lines:
                write(f"[node {node}] {line}")
            watch.add(node, output)
        for number in watch.due():
            placement.signal(number)
    return watch.end(stopped_by=stop.first)


class _Ends:
    """Ends of the nodes of one placement, and what is due for those that have not ended."""

    def __init__(self, nodes: int, clock: Callable[[], float]) -> None:
        self._nodes, self._clock = nodes, clock
        self._codes: dict[int, int] = {}  # in the order of the ends
        self._lost: dict[int, str] = {}
        self._due: dict[int, float] = {}  # the time of each signal that has not been sent
        self._sent: set[int] = set()
        self._give_up = math.inf

    @property
    def over(self) -> bool:
        """Return whether every node has ended or is lost; GIVE_UP_S after they were killed all are."""
        return len(self._codes) + len(self._lost) == self._nodes or self._clock() > self._give_up

    def add(self, node: int, output: NodeOutput) -> None:
        """Note the end of a node, if this is one."""
        if output.lost:
            self._lost[node] = output.lost
            self._hurry(AFTER_A_LOSS)
        elif output.exit_code is not None and output.exit_code < 0:
            self._lost[node] = f"its launcher was killed by {name_of_signal(-output.exit_code)}"
            self._hurry(AFTER_A_LOSS)
        elif output.exit_code is not None:
            self._codes[node] = output.exit_code
            if output.exit_code:
                self._hurry(AFTER_A_STOP if output.exit_code in STOPPED else AFTER_A_FAILURE)

    def signalled(self) -> None:
        """Note that the nodes have got a signal of the user's, after which the driver sends none but the kill."""
        self._sent.add(signal.SIGTERM)
        self._hurry(AFTER_A_SIGNAL)

    def due(self) -> list[int]:
        """Return the signals that the nodes should get now."""
        now = self._clock()
        signals = [number for number, when in self._due.items() if when <= now]
        self._due = {number: when for number, when in self._due.items() if when > now}
        self._sent.update(signals)
        if signal.SIGKILL in signals:
            self._give_up = min(self._give_up, now + GIVE_UP_S)
        return signals

    def end(self, *, stopped_by: int) -> End:
        """Return how the run ended, all nodes together. A mistake of the user's is never tried again."""
        for node in set(range(self._nodes)) - {*self._codes, *self._lost}:
            self._lost[node] = "its launcher did not end when it was killed"
        failures = [code for code in self._codes.values() if code]
        if UserError.exit_code in failures:
            return End(UserError.exit_code)
        if stopped_by and (failures or self._lost):
            return End(next((code for code in failures if code not in STOPPED), 128 + stopped_by))
        if self._lost:
            node, reason = next(iter(self._lost.items()))
            return End(RunError.exit_code, f"node {node} is lost: {reason}")
        if failures and failures[0] in STOPPED:
            node = next(node for node, code in self._codes.items() if code)
            return End(failures[0], f"node {node} was told to end by {name_of_signal(failures[0] - 128)}")
        return End(failures[0] if failures else 0)

    def _hurry(self, after: tuple[float, float]) -> None:
        """Have the nodes told to end, then killed, each once; the first time of either counts."""
        for number, seconds in zip((signal.SIGTERM, signal.SIGKILL), after, strict=True):
            if number not in self._sent:
                self._due[number] = min(self._clock() + seconds, self._due.get(number, math.inf))
