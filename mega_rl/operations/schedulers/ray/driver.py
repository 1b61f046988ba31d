"""The driver of a run on Ray: start launchers, show their output, replace lost nodes."""

from __future__ import annotations

import logging
import math
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from mega_rl.errors import RunError, UserError, name_of_signal
from mega_rl.operations.launcher.ranks import KEY
from mega_rl.operations.launcher.signals import STOPPED, StopSignals
from mega_rl.operations.launcher.supervisor import DEFAULT_RESTARTS
from mega_rl.operations.schedulers.options import (
    MaxRestarts,
    NodeRestarts,
    Nodes,
    RanksPerNode,
    RecipeFacts,
    Variables,
    variables,
)
from mega_rl.operations.schedulers.ray.placement import NodeLost, RayPlacement

log = logging.getLogger(__name__)

POLL_S = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# After the first node has ended badly: seconds until the other nodes get SIGTERM, and until they are killed. Launchers
# normally end one another. Without a lost node's ranks nothing can be saved.
AFTER_A_LOSS = (0.0, 30.0)
AFTER_A_FAILURE = (30.0, 400.0)
AFTER_A_SIGNAL = (math.inf, 900.0)  # every node got it, and its ranks end their step and save
AFTER_A_STOP = (30.0, 900.0)  # one node got a signal that was not the driver's
GIVE_UP_S = 120.0  # after the kill, a node that says nothing is lost


@dataclass(frozen=True)
class RayRun:
    """A run on nodes of a Ray cluster; every field is an option of the command."""

    nodes: Nodes
    nproc_per_node: RanksPerNode
    cpus_per_node: Annotated[
        int, typer.Option("--cpus-per-node", min=0, help="CPUs asked of each node; default: one for each rank.")
    ] = 0
    address: Annotated[
        str,
        typer.Option("--address", help="Ray cluster as HOST:PORT, or local for this machine's; default: RAY_ADDRESS."),
    ] = ""
    wait_s: Annotated[float, typer.Option("--wait-s", min=0, help="Longest wait for free nodes, in seconds.")] = 600.0
    max_restarts: MaxRestarts = DEFAULT_RESTARTS
    node_restarts: NodeRestarts = 3
    env: Variables = None


@dataclass(frozen=True)
class End:
    """End of one placement's launchers. reason: why to place the run again; empty: do not."""

    exit_code: int
    reason: str = ""


def drive(
    run: RayRun,
    facts: RecipeFacts,
    place: Callable[[StopSignals], RayPlacement | None],
    *,
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run until the ranks have ended, through losses of nodes; return the exit code.

    place: returns nodes, None when a signal came first. write: gets each line of the nodes' output.

    Raises RunError when a node is lost and no restarts are left.
    """
    keys = variables(run.env)
    earlier: Sequence[str] | None = None  # checkpoints from before the run
    with StopSignals(SIGNALS) as stop:
        for restarts in range(run.node_restarts + 1):
            placement = place(stop)
            if placement is None:
                return 128 + stop.first
            try:
                port, saved = placement.prepare(facts.run_dir)
                earlier = saved if earlier is None else earlier
                resume = facts.resume if not restarts or saved[-1:] == earlier[-1:] else "auto"
                started = commands(run, facts, placement.addresses[0], port, resume=resume)
                # A new key for each placement: no launcher of an earlier one may join.
                environment = {**keys, KEY: secrets.token_hex(32)}
                placement.start(started, environment, facts.run_dir if restarts else "")
                end = _watch(run.nodes, placement, stop, write=write, clock=clock)
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


def commands(run: RayRun, facts: RecipeFacts, address: str, port: int, *, resume: str) -> list[list[str]]:
    """Return each node's arguments of `mega-rl train`. address, port: node 0's launcher."""
    options = ["--nnodes", str(run.nodes), "--nproc-per-node", str(run.nproc_per_node)]
    options += ["--master-addr", address, "--master-port", str(port), "--max-restarts", str(run.max_restarts)]
    overrides = [*facts.overrides, *([] if resume == facts.resume else [f"checkpoint.resume={resume}"])]
    recipe = ["--config", facts.recipe]
    return [[*options, "--node-rank", str(node), *recipe, *overrides] for node in range(run.nodes)]


def _watch(
    nodes: int,
    placement: RayPlacement,
    stop: StopSignals,
    *,
    write: Callable[[str], None],
    clock: Callable[[], float],
) -> End:
    """Wait for all launchers, show their output, pass on signals, end those that hang."""
    codes: dict[int, int] = {}  # in the order of the ends
    lost: dict[int, str] = {}
    due = {int(signal.SIGTERM): math.inf, int(signal.SIGKILL): math.inf}  # time of each signal that was not sent yet
    give_up = math.inf
    while len(codes) + len(lost) < nodes and clock() <= give_up:
        for number in stop.take():
            placement.signal(number)
            due.pop(signal.SIGTERM, None)  # afterwards the driver sends only the kill
            _hurry(due, clock(), AFTER_A_SIGNAL)
        for node, output in placement.poll(POLL_S):
            for line in output.lines:
                write(f"[node {node}] {line}")
            if output.gone:
                lost[node] = output.gone
                _hurry(due, clock(), AFTER_A_LOSS)
            elif output.exit_code is not None:
                codes[node] = output.exit_code
                _hurry(due, clock(), _after(output.exit_code))
        for number in [number for number, when in due.items() if when <= clock()]:
            placement.signal(number)
            del due[number]
            give_up = clock() + GIVE_UP_S if number == signal.SIGKILL else give_up
    for node in set(range(nodes)) - {*codes, *lost}:
        lost[node] = "its launcher did not end when it was killed"
    return _end_of(codes, lost, stopped_by=stop.first)


def _after(exit_code: int) -> tuple[float, float]:
    if exit_code in STOPPED:
        return AFTER_A_STOP
    return AFTER_A_FAILURE if exit_code else (math.inf, math.inf)


def _hurry(due: dict[int, float], now: float, after: tuple[float, float]) -> None:
    """Plan SIGTERM and SIGKILL, each once and at its earliest time."""
    for number, seconds in zip((signal.SIGTERM, signal.SIGKILL), after, strict=True):
        if number in due:
            due[number] = min(now + seconds, due[number])


def _end_of(codes: Mapping[int, int], lost: Mapping[int, str], *, stopped_by: int) -> End:
    """Return how the run ended. A mistake of the user is not tried again."""
    failures = [code for code in codes.values() if code]
    if UserError.exit_code in failures:
        return End(UserError.exit_code)
    if stopped_by and (failures or lost):
        return End(next((code for code in failures if code not in STOPPED), 128 + stopped_by))
    if lost:
        node, reason = next(iter(lost.items()))
        return End(RunError.exit_code, f"node {node} is lost: {reason}")
    if failures and failures[0] in STOPPED:
        node = next(node for node, code in codes.items() if code)
        return End(failures[0], f"node {node} was told to end by {name_of_signal(failures[0] - 128)}")
    return End(failures[0] if failures else 0)
