"""Runs on Ray: a placement group, a launcher on each node, the driver that watches them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Annotated, TypeAlias

import psutil
import typer

from mega_rl.checkpoint.folders import CHECKPOINTS, LOCK_FILE, complete
from mega_rl.disk import lock_file
from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError, name_of_signal
from mega_rl.operations.launcher.ranks import KEY, STOPPED, StopSignals
from mega_rl.operations.schedulers import ClusterRun, NodeRestarts, RecipeFacts, variables
from mega_rl.processes import DEVNULL, PIPE, STDOUT, Child, ChildStartError

log = logging.getLogger(__name__)

POLL_S = 1.0
CALL_S = 60.0  # for an actor to answer a short call
LOCK_WAIT_S = 300.0  # for ranks of a lost node to end; afterwards the run names the holder of the folder
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TRAIN = python_module("mega_rl.cli", "train")
NOT_INHERITED = ("OMP_NUM_THREADS",)  # Ray sets it to the CPUs of the actor; the launcher sets its own
# After the first node has ended badly: seconds until the other nodes get SIGTERM, and until they are killed. Launchers
# normally end one another. Without a lost node's ranks nothing can be saved.
AFTER_A_LOSS = {signal.SIGTERM: 0.0, signal.SIGKILL: 30.0}
AFTER_AN_END = {signal.SIGTERM: 30.0, signal.SIGKILL: 900.0}
GIVE_UP_S = 120.0  # after the kill, a node that says nothing is lost

# A node's lines of output, and its end: the exit code of its launcher, or why it is lost; None while it runs.
Output: TypeAlias = tuple[int, Sequence[str], int | str | None]


@dataclass(frozen=True, kw_only=True)
class RayRun(ClusterRun):
    """A run on nodes of a Ray cluster; every field is an option of the command."""

    cpus_per_node: Annotated[int, typer.Option(min=0, help="CPUs asked of each node; default: one for each rank.")] = 0
    address: Annotated[str, typer.Option(help="Ray cluster as HOST:PORT; default: RAY_ADDRESS or this machine's.")] = ""
    wait_s: Annotated[float, typer.Option(min=0, help="Longest wait for free nodes, in seconds.")] = 600.0
    node_restarts: NodeRestarts = 3


class NodeLost(RunError):
    """A node was lost before its launcher started; the run may be placed again."""


class NodeLauncher:
    """Actor whose child process is a node's launcher; its threads run it and pass on signals."""

    def __init__(self, program: Sequence[str] = TRAIN) -> None:
        """program: gets the arguments of `mega-rl train`."""
        self._program = program
        self._lock = threading.Lock()
        self._stop = 0  # the last signal that came before the process
        self._child: Child | None = None

    def prepare(self, address: str, run_dir: str) -> tuple[int, list[str]]:
        """Return a free TCP port of this node, and a run's complete checkpoints, oldest first."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            port = int(listener.getsockname()[1])
        return port, [f"{one.name}@{one.stat().st_mtime_ns}" for one in complete(Path(run_dir) / CHECKPOINTS)]

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, wait_for_lock_of: str = ""
    ) -> Iterator[list[str] | int]:
        """Run `mega-rl train` in a folder; yield lines of its output, last its exit code.

        environment: added to the actor's. wait_for_lock_of: run folder that ranks of a lost node may still write to;
        the launcher starts when they have ended.
        """
        if wait_for_lock_of:
            self._wait_for_lock(Path(wait_for_lock_of) / CHECKPOINTS / LOCK_FILE)
        values = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | {**environment}
        # The kernel signals the child when the thread that started it ends; this thread outlives the child.
        start = partial(Child, dies_by=signal.SIGTERM, streams=(DEVNULL, PIPE, STDOUT), env=values, cwd=folder)
        problem = ""
        with self._lock:
            try:
                self._child = child = None if self._stop else start("the launcher", [*self._program, *arguments])
            except ChildStartError as error:
                child, problem = None, f"error: {error} in {folder}; start the run in a folder that every node has"
        if child is None:
            yield [problem] if problem else []
            yield UserError.exit_code if problem else 128 + self._stop
            return
        written: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            for line in child.lines():
                written.put(line)

        reader = threading.Thread(target=read, name="output of the launcher", daemon=True)
        reader.start()
        while reader.is_alive() or not written.empty():
            try:
                yield [written.get(timeout=POLL_S), *(written.get() for _ in range(written.qsize()))]
            except queue.Empty:
                if child.exit_code is not None:
                    break  # a process that the launcher left behind keeps the pipe open
        yield child.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, SIGKILL also to its ranks; before its start, prevent it."""
        with self._lock:
            child = self._child
            if child is None:
                self._stop = number
                return
            if child.exit_code is not None or number != signal.SIGKILL:
                child.signal(number)
                return
            ranks = psutil.Process(child.pid).children(recursive=True)
            child.kill()
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()

    def _wait_for_lock(self, path: Path) -> None:
        """Wait until a checkpoint folder's lock is free, at most LOCK_WAIT_S, or for a signal."""
        deadline = monotonic() + LOCK_WAIT_S
        while monotonic() < deadline and path.is_file() and not self._stop:
            try:
                os.close(lock_file(path))
            except BlockingIOError:
                time.sleep(0.2)
            except OSError:
                return
            else:
                return


class RayCluster:
    """A Ray cluster that this process is connected to as a driver."""

    def __init__(self, address: str) -> None:
        """address: HOST:PORT; "": RAY_ADDRESS, or the Ray on this machine.

        Raises UserError without the package Ray, or a cluster.
        """
        if importlib.util.find_spec("ray") is None:
            raise UserError("Ray is not installed; install it here and on every node: pip install 'mega_rl[ray]'")
        self._ray = importlib.import_module("ray")
        if address.startswith("ray://"):
            raise UserError(
                f"--address={address}: signals and exit codes need a driver inside the cluster; use 'ray job submit "
                "--address http://HEAD:8265 -- mega-rl launch ray ...', or run it on a node of the cluster"
            )
        try:
            self._ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise UserError(
                f"no Ray cluster at {address or os.environ.get('RAY_ADDRESS') or 'this machine'} "
                f"({_last_line(error)}); start one with RAY_AUTH_MODE=token ray start --head, or give its --address"
            ) from error

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()

    def has_gpus(self) -> bool:
        """Return whether any node of the cluster has a GPU."""
        return self._ray.cluster_resources().get("GPU", 0) > 0

    def ships_folder(self) -> bool:
        """Return whether nodes run in copies of a folder, the working directory of `ray job submit`."""
        return bool(self._ray.get_runtime_context().runtime_env.get("working_dir"))

    def place(
        self, nodes: int, bundle: Mapping[str, float], *, wait_s: float, stop: StopSignals
    ) -> RayPlacement | None:
        """Return nodes with a bundle of resources on each; None when a signal came first."""
        util = self._ray.util
        group = util.placement_group([dict(bundle)] * nodes, strategy="STRICT_SPREAD")
        wanted = (
            f"{nodes} nodes with {' and '.join(f'{amount:g} {name}' for name, amount in bundle.items())} free on each"
        )
        log.info("waiting for %s", wanted)
        deadline = monotonic() + wait_s
        while not group.wait(1):
            if stop.take():
                util.remove_placement_group(group)
                return None
            if monotonic() > deadline:
                util.remove_placement_group(group)
                raise RunError(
                    f"{wanted} were not there within {wait_s:g} s; the cluster has "
                    f"{self._ray.cluster_resources()} in all; add nodes, or wait longer with --wait-s"
                )
        return RayPlacement(self._ray, group, nodes, bundle)


class RayPlacement:
    """Nodes that a run has been given, numbered from 0, with an actor on each."""

    def __init__(self, ray: ModuleType, group: object, nodes: int, bundle: Mapping[str, float]) -> None:
        """bundle: resources of each actor."""
        self._ray, self._group = ray, group
        self._errors = importlib.import_module("ray.exceptions")
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places = ray.util.placement_group_table(group)["bundles_to_node_id"]
        self.addresses: Sequence[str] = [addresses[places[node]] for node in range(nodes)]
        place = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        # max_restarts=0: only one launcher that starts again would find no other.
        actor = partial(ray.remote(NodeLauncher).options, max_restarts=0, max_concurrency=3)
        resources = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
        self._actors = [
            actor(**resources, scheduling_strategy=place(group, placement_group_bundle_index=node)).remote()
            for node in range(nodes)
        ]
        self._runs: dict[object, int] = {}  # node of each generator that has not ended

    def prepare(self, run_dir: str) -> tuple[int, Sequence[str]]:
        """Return a free port of node 0, and a run's complete checkpoints as it sees them."""
        try:
            port, saved = self._ray.get(self._actors[0].prepare.remote(self.addresses[0], run_dir), timeout=CALL_S)
        except self._errors.RayError as error:
            gone = self._errors.GetTimeoutError, self._errors.RayActorError
            if isinstance(error, gone) and not getattr(error, "actor_init_failed", False):
                raise NodeLost(f"node 0 is lost: {self.addresses[0]}: {_last_line(error)}") from error
            raise RunError(f"a node cannot start launchers: {_last_line(error)}") from error
        return int(port), tuple(saved)

    def start(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], wait_for_lock_of: str) -> None:
        """Start the launcher of every node with its arguments of `mega-rl train`; see `NodeLauncher.run`."""
        for node, (actor, command) in enumerate(zip(self._actors, commands, strict=True)):
            log.info("node %d is %s", node, self.addresses[node])
            run = actor.run.options(num_returns="streaming")
            self._runs[run.remote(list(command), dict(environment), os.getcwd(), wait_for_lock_of)] = node

    def poll(self, wait_s: float) -> list[Output]:
        """Return outputs that come within `wait_s` seconds; ended and lost nodes say no more."""
        ready, _ = self._ray.wait(list(self._runs), num_returns=1, timeout=wait_s)
        return [self._taken(run) for run in ready]

    def signal(self, number: int) -> None:
        """Send a signal to the launcher of every node that is there."""
        for node in self._runs.values():
            self._actors[node].signal.remote(number)

    def remove(self) -> None:
        """Give the nodes back and kill what still runs there."""
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        self._ray.util.remove_placement_group(self._group)

    def _taken(self, run: Iterator[object]) -> Output:
        """Return the next output of a run, which is forgotten with its last."""
        node = self._runs[run]
        end: int | str
        try:
            said = self._ray.get(next(run))
        except self._errors.RayError as error:  # also a connection that breaks: Ray does not continue the stream
            end = f"{self.addresses[node]}: {_last_line(error)}"
        else:
            if not isinstance(said, int):
                return node, said, None
            end = said if said >= 0 else f"its launcher was killed by {name_of_signal(-said)}"
        del self._runs[run]
        return node, (), end


def drive(
    run: RayRun,
    facts: RecipeFacts,
    place: Callable[[StopSignals], RayPlacement | None],
    *,
    write: Callable[[str], None],
) -> int:
    """Run until the ranks have ended, through losses of nodes; return the exit code."""
    own = variables(run.env)
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
                environment = {**own, KEY: secrets.token_hex(32)}
                placement.start(started, environment, facts.run_dir if restarts else "")
                code, reason = _watch(run.nodes, placement, stop, write=write)
            except NodeLost as error:
                code, reason = error.exit_code, str(error)
            finally:
                placement.remove()
            if not reason:
                return code
            if restarts < run.node_restarts:
                log.warning(
                    "%s: restart %d of at most %d, from the newest checkpoint",
                    *(reason, restarts + 1, run.node_restarts),
                )
    raise RunError(f"{reason}; --node-restarts={run.node_restarts} are used up; start the run again to resume it")


def commands(run: RayRun, facts: RecipeFacts, address: str, port: int, *, resume: str) -> list[list[str]]:
    """Return each node's arguments of `mega-rl train`. address, port: node 0's launcher."""
    options = [*run.launcher_options, "--master-addr", address, "--master-port", str(port)]
    overrides = [*facts.overrides, *([] if resume == facts.resume else [f"checkpoint.resume={resume}"])]
    recipe = ["--config", facts.recipe]
    return [[*options, "--node-rank", str(node), *recipe, *overrides] for node in range(run.nodes)]


def _watch(nodes: int, placement: RayPlacement, stop: StopSignals, *, write: Callable[[str], None]) -> tuple[int, str]:
    """Wait for all launchers, show their output, pass on signals, end launchers that hang; return `_end_of`."""
    codes: dict[int, int] = {}  # in the order of the ends
    lost: dict[int, str] = {}
    due = dict.fromkeys(AFTER_A_LOSS, math.inf)  # time of each signal that was not sent yet
    give_up = math.inf

    def hurry(after: Mapping[signal.Signals, float]) -> None:
        due.update({number: min(monotonic() + after.get(number, math.inf), when) for number, when in due.items()})

    while len(codes) + len(lost) < nodes and monotonic() <= give_up:
        for number in stop.take():
            placement.signal(number)
            due.pop(signal.SIGTERM, None)  # every node got a signal; afterwards the driver sends only the kill
            hurry(AFTER_AN_END)
        for node, lines, end in placement.poll(POLL_S):
            for line in lines:
                write(f"[node {node}] {line}")
            if isinstance(end, str):
                lost[node] = end
                hurry(AFTER_A_LOSS)
            elif end is not None:
                codes[node] = end
                hurry(AFTER_AN_END if end else {})
        for number in [number for number, when in due.items() if when <= monotonic()]:
            placement.signal(number)
            del due[number]
            give_up = monotonic() + GIVE_UP_S if number == signal.SIGKILL else give_up
    for node in set(range(nodes)) - {*codes, *lost}:
        lost[node] = "its launcher did not end when it was killed"
    return _end_of(codes, lost, stopped_by=stop.first)


def _end_of(codes: Mapping[int, int], lost: Mapping[int, str], *, stopped_by: int) -> tuple[int, str]:
    """Return (exit code, why to place the run again; empty: do not)."""
    failures = [code for code in codes.values() if code]
    if UserError.exit_code in failures:
        return UserError.exit_code, ""
    if stopped_by and (failures or lost):
        return next((code for code in failures if code not in STOPPED), 128 + stopped_by), ""
    if lost:
        node, reason = next(iter(lost.items()))
        return RunError.exit_code, f"node {node} is lost: {reason}"
    if failures and failures[0] in STOPPED:
        return failures[0], f"a node was told to end by {name_of_signal(failures[0] - 128)}"
    return failures[0] if failures else 0, ""


def _last_line(error: BaseException) -> str:
    """Return the last line of a message of Ray, which holds the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
