"""Nodes of a Ray cluster: a placement group with a bundle and an actor on each node."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType

from mega_rl.errors import RunError, UserError
from mega_rl.operations.launcher.signals import StopSignals
from mega_rl.operations.schedulers.ray.node import NodeLauncher, NodeOutput

log = logging.getLogger(__name__)

LOCAL = "local"
POLL_S = 5.0  # longest call to an actor, which returns as soon as there is something
CALL_S = 60.0  # for an actor to answer a short call
# A broken connection to an actor may heal; Ray declares a node dead in half of this.
UNAVAILABLE_S = 90.0
PATIENCE_S = 30.0  # between two lines that name the nodes it waits for
SHOWN = ("GPU", "CPU")  # resources of a node
THREADS = 4  # in an actor: one reads output, the others pass on signals


class NodeLost(RunError):
    """A node was lost before its launcher started; the run may be placed again."""


class RayCluster:
    """A Ray cluster that this process is connected to as a driver."""

    def __init__(self, address: str) -> None:
        """address: HOST:PORT; "": RAY_ADDRESS, or the Ray on this machine; "local": start one for this process.

        Raises UserError without the package Ray, or a cluster.
        """
        self._ray = _import_ray()
        if address.startswith("ray://"):
            raise UserError(
                f"--address={address}: signals and exit codes need a driver inside the cluster; use 'ray job submit "
                "--address http://HEAD:8265 -- mega-rl launch ray ...', or run it on a node of the cluster"
            )
        settings = {"log_to_driver": False, "logging_level": logging.WARNING}
        if address == LOCAL:
            # The ports of Ray are open to the network and run what they are sent: require a token, start no dashboard.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            settings |= {"include_dashboard": False}
        try:
            self._ray.init(address=address or "auto", **settings)
        except ConnectionError as error:
            raise UserError(
                f"no Ray cluster at {address or os.environ.get('RAY_ADDRESS') or 'this machine'} "
                f"({_last_line(error)}); start one with RAY_AUTH_MODE=token ray start --head, give its --address, or "
                f"--address {LOCAL} for a Ray of only this machine"
            ) from error

    def close(self) -> None:
        """Leave the cluster; a cluster started here ends."""
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
        """Return nodes with a bundle of resources on each; None when a signal came first.

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
        """Return the living nodes with their CPUs and GPUs, in words."""
        nodes = [
            f"{node['NodeManagerAddress']} with {_in_words({name: node['Resources'].get(name, 0) for name in SHOWN})}"
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return "; ".join(nodes) or "no nodes"


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
        actor = partial(ray.remote(NodeLauncher).options, max_restarts=0, max_concurrency=THREADS)
        resources = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
        self._actors = [
            actor(**resources, scheduling_strategy=place(group, placement_group_bundle_index=node)).remote()
            for node in range(nodes)
        ]
        self._calls: dict[object, int] = {}  # node of each unanswered call of poll
        self._unavailable: dict[int, float] = {}  # node: since when

    def prepare(self, run_dir: str) -> tuple[int, Sequence[str]]:
        """Return a free port of node 0, and a run's complete checkpoints as it sees them.

        Raises NodeLost for an actor that is gone, RunError for an actor that cannot work.
        """
        lost = f"node 0 is lost: {self.addresses[0]}"
        try:
            port, saved = self._ray.get(self._actors[0].prepare.remote(self.addresses[0], run_dir), timeout=CALL_S)
        except self._errors.GetTimeoutError as error:
            raise NodeLost(f"{lost}: no answer within {CALL_S:g} s") from error
        except self._errors.RayError as error:
            if isinstance(error, self._errors.RayActorError) and not error.actor_init_failed:
                raise NodeLost(f"{lost}: {_last_line(error)}") from error
            raise RunError(f"a node cannot start launchers: {_last_line(error)}") from error
        return int(port), tuple(saved)

    def start(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], wait_for_lock_of: str) -> None:
        """Start the launcher of every node with its arguments of `mega-rl train`; see `NodeLauncher.start`."""
        for node, (actor, command) in enumerate(zip(self._actors, commands, strict=True)):
            log.info("node %d is %s", node, self.addresses[node])
            actor.start.remote(list(command), dict(environment), os.getcwd(), wait_for_lock_of)
            self._ask(node)

    def poll(self, wait_s: float) -> Sequence[tuple[int, NodeOutput]]:
        """Return (node, output) pairs within `wait_s` seconds; ended and lost nodes say no more."""
        answered, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=wait_s)
        outputs = [self._taken(call) for call in answered]
        if any(node in self._unavailable for node in self._calls.values()):
            time.sleep(wait_s)  # their calls are answered at once
        return outputs

    def signal(self, number: int) -> None:
        """Send a signal to the launcher of every node that is there."""
        for node in set(self._calls.values()):
            self._actors[node].signal.remote(number)

    def remove(self) -> None:
        """Give the nodes back and kill what still runs there."""
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        self._ray.util.remove_placement_group(self._group)

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


def _import_ray() -> ModuleType:
    """Return the package. Raises UserError if it is missing."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed; install it here and on every node: pip install 'mega_rl[ray]'")
    return importlib.import_module("ray")


def _in_words(resources: Mapping[str, float]) -> str:
    """Return resources as "8 GPU and 16 CPU", without those of amount 0."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "no resources"


def _last_line(error: BaseException) -> str:
    """Return the last line of a message of Ray, which holds the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
