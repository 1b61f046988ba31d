"""Nodes of a Ray cluster: a placement group with a bundle on each, and an actor in each bundle."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Protocol

from mega_rl.errors import RunError, UserError
from mega_rl.launcher.signals import StopSignals
from mega_rl.schedulers.ray.driver import NodeLost
from mega_rl.schedulers.ray.node import NodeLauncher, NodeOutput

log = logging.getLogger(__name__)

LOCAL = "local"
POLL_S = 5.0  # of one call to an actor, which returns as soon as there is something
CALL_S = 60.0  # in which an actor answers a call that does nothing of its own
# A broken connection to an actor may heal; Ray declares a node dead in half of this.
UNAVAILABLE_S = 90.0
PATIENCE_S = 30.0  # between two lines that say what is waited for
SHOWN = ("GPU", "CPU")  # of a node's resources
THREADS = 4  # of an actor: one reads output, the others hand on signals


class RayCluster:
    """A Ray cluster that this process is connected to; a driver in Ray's words."""

    def __init__(self, address: str) -> None:
        """address: "" for that of RAY_ADDRESS or of the Ray on this machine, "local" to start one for this process.

        Raises UserError where there is no Ray, as a package or as a cluster.
        """
        self._ray = _import_ray()
        if address.startswith("ray://"):
            raise UserError(
                f"--address={address}: signals and exit codes need a driver inside the cluster; use 'ray job submit "
                "--address http://HEAD:8265 -- mega-rl launch ray ...', or run it on a node of the cluster"
            )
        settings = {"log_to_driver": False, "logging_level": logging.WARNING}
        if address == LOCAL:
            # Ray's ports are open to the network and run whatever they are sent: with a token, without a dashboard.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            settings |= {"include_dashboard": False}
        try:
            self._ray.init(address=address or "auto", **settings)
        except ConnectionError as error:
            raise UserError(
                f"no Ray cluster at {address or os.environ.get('RAY_ADDRESS') or 'this machine'} "
                f"({_last_line(error)}); start one with RAY_AUTH_MODE=token ray start --head, give its --address, or "
                f"--address {LOCAL} for a Ray of this machine alone"
            ) from error

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()

    def has_gpus(self) -> bool:
        """Return whether any node of the cluster has a GPU."""
        return self._ray.cluster_resources().get("GPU", 0) > 0

    def ships_folder(self) -> bool:
        """Return whether nodes run in copies of a folder, the working directory of `ray job submit`."""
        return bool(self._ray.get_runtime_context().runtime_env.get("working_dir"))

    def place(
        self,
        nodes: int,
        bundle: Mapping[str, float],
        *,
        wait_s: float,
        stop: StopSignals,
    ) -> RayPlacement | None:
        """Return that many nodes with a bundle of resources on each; None when a signal came first.

        Raises RunError when the cluster has not had them within `wait_s` seconds.
        """
        util = self._ray.util
        group = util.placement_group([dict(bundle)] * nodes, strategy="STRICT_SPREAD")
        deadline, next_line = time.monotonic() + wait_s, time.monotonic() + 2.0
        while not group.wait(1):
            if stop.take():
                util.remove_placement_group(group)
                return None
            if time.monotonic() > deadline:
                util.remove_placement_group(group)
                raise RunError(
                    f"{nodes} nodes with {_in_words(bundle)} free on each were not there within {wait_s:g} s; the "
                    f"cluster has {self._inventory()}; add nodes, or wait longer with --wait-s"
                )
            if time.monotonic() > next_line:
                log.info("waiting for %d nodes with %s each; there are %s", nodes, _in_words(bundle), self._inventory())
                next_line = time.monotonic() + PATIENCE_S
        return RayPlacement(self._ray, group, nodes, bundle)

    def _inventory(self) -> str:
        """Return the nodes that are alive with their CPUs and GPUs, in words."""
        nodes = [
            f"{node['NodeManagerAddress']} with {_in_words({name: node['Resources'].get(name, 0) for name in SHOWN})}"
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return "; ".join(nodes) or "no nodes"


class RemoteMethod(Protocol):
    """Method of an actor."""

    def remote(self, *arguments: object) -> object:
        """Call it on the actor's node; returns a reference to its result."""


class NodeActor(Protocol):
    """Ray's handle of a `NodeLauncher` on another node."""

    free_port: RemoteMethod
    checkpoints: RemoteMethod
    start: RemoteMethod
    poll: RemoteMethod
    signal: RemoteMethod


class RayPlacement:
    """Actors on the nodes of a placement group; a `NodesPlacement` of the driver."""

    def __init__(self, ray: ModuleType, group: object, nodes: int, bundle: Mapping[str, float]) -> None:
        """bundle: what each node's actor takes."""
        self._ray, self._group, self._bundle = ray, group, bundle
        self._errors = importlib.import_module("ray.exceptions")
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places = ray.util.placement_group_table(group)["bundles_to_node_id"]
        self.addresses: Sequence[str] = [addresses[places[node]] for node in range(nodes)]
        self._actors = [self._actor(node) for node in range(nodes)]
        self._calls: dict[object, int] = {}  # the node of each call of poll that has not been answered
        self._unavailable: dict[int, float] = {}  # by node: since when

    def free_port(self) -> int:
        with self._errors_in_words():
            return int(self._ray.get(self._actors[0].free_port.remote(self.addresses[0]), timeout=CALL_S))

    def checkpoints(self, run_dir: str) -> Sequence[str]:
        with self._errors_in_words():
            return tuple(self._ray.get(self._actors[0].checkpoints.remote(run_dir), timeout=CALL_S))

    def start(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], wait_for_lock_of: str) -> None:
        for node, (actor, command) in enumerate(zip(self._actors, commands, strict=True)):
            actor.start.remote(list(command), dict(environment), os.getcwd(), wait_for_lock_of)
            self._ask(node)

    def poll(self, wait_s: float) -> Sequence[tuple[int, NodeOutput]]:
        answered, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=wait_s)
        outputs = [self._taken(call) for call in answered]
        if any(node in self._unavailable for node in self._calls.values()):
            time.sleep(wait_s)  # their calls are answered at once
        return outputs

    def signal(self, number: int) -> None:
        for node in set(self._calls.values()):
            self._actors[node].signal.remote(number)

    def remove(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        self._ray.util.remove_placement_group(self._group)

    def _actor(self, node: int) -> NodeActor:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        actor: NodeActor = (
            self._ray.remote(NodeLauncher)
            .options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=0,  # a launcher that starts again alone would find no other
                max_concurrency=THREADS,
                scheduling_strategy=place,
            )
            .remote()
        )
        return actor

    def _ask(self, node: int) -> None:
        self._calls[self._actors[node].poll.remote(POLL_S)] = node

    def _taken(self, call: object) -> tuple[int, NodeOutput]:
        """Return the answer to a call of poll, and ask again unless it was the last."""
        node = self._calls.pop(call)
        try:
            output: NodeOutput = self._ray.get(call)
        except self._errors.ActorUnavailableError as error:
            since = self._unavailable.setdefault(node, time.monotonic())
            if time.monotonic() - since > UNAVAILABLE_S:
                return node, NodeOutput(lost=f"{self.addresses[node]}: {_last_line(error)}")
            self._ask(node)
            return node, NodeOutput()
        except self._errors.RayError as error:
            return node, NodeOutput(lost=f"{self.addresses[node]}: {_last_line(error)}")
        self._unavailable.pop(node, None)
        if output.exit_code is None:
            self._ask(node)
        return node, output

    @contextlib.contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        """Raise NodeLost for an actor that is gone and RunError for one that cannot work, each in one line."""
        try:
            yield
        except self._errors.RayActorError as error:
            if error.actor_init_failed:
                raise RunError(f"a node cannot start launchers: {_last_line(error)}") from error
            raise NodeLost(f"node 0 is lost: {self.addresses[0]}: {_last_line(error)}") from error
        except self._errors.GetTimeoutError as error:
            raise NodeLost(f"node 0 is lost: {self.addresses[0]}: no answer within {CALL_S:g} s") from error
        except self._errors.RayError as error:
            raise RunError(f"a node cannot start launchers: {_last_line(error)}") from error


def _import_ray() -> ModuleType:
    """Return the package. Raises UserError where it is missing."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed; install it here and on every node: pip install 'mega_rl[ray]'")
    return importlib.import_module("ray")


def _in_words(resources: Mapping[str, float]) -> str:
    """Return resources as "8 GPU and 16 CPU"; those of none are left out."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "no resources"


def _last_line(error: BaseException) -> str:
    """Return the last line of a message of Ray's, in which the cause stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
