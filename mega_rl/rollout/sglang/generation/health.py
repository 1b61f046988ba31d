"""Health checks of a generation's replicas, and the tasks that run them. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from mega_rl.rollout.sglang.generation.failures import NoAnswer, RequestFailure
from mega_rl.rollout.sglang.generation.jobs import Policy
from mega_rl.rollout.sglang.generation.replicas import Replica
from mega_rl.rollout.sglang.generation.results import State


class Helpers:
    """Background tasks of a generation, at most one of each name."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake  # called at the end of each
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._once: set[str] = set()

    def start(
        self, name: str, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any, once: bool = False
    ) -> None:
        """Start a task unless one of this name runs, or with `once` has run."""
        if name in self._tasks:
            return
        task = self._tasks[name] = asyncio.get_running_loop().create_task(work(*arguments))
        task.add_done_callback(lambda _: self._wake())
        if once:
            self._once.add(name)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return all tasks."""
        return list(self._tasks.values())

    def collect(self) -> None:
        """Forget finished tasks, and raise the error of one that failed."""
        for name, task in list(self._tasks.items()):
            if task.done() and name not in self._once:
                del self._tasks[name]
            if task.done() and not task.cancelled():
                task.result()


class ReplicaHealth:
    """Replicas that serve one version of the weights; probes suspects and checks silent ones."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        version: int,
        policy: Policy,
        helpers: Helpers,
        nonce: str,
        changed: Callable[[], None],
        evict: Callable[[Replica, RequestFailure], None],
    ) -> None:
        """nonce: begins the ids of probes. changed: called when a probe has changed a state. evict: ends requests."""
        self._replicas, self._version, self._policy = replicas, version, policy
        self._helpers, self._nonce, self._changed, self._evict = helpers, nonce, changed, evict

    def usable(self) -> list[Replica]:
        """Return the replicas that get requests, now or after a moment."""
        mixed = self._policy.mixed_versions
        return [replica for replica in self._replicas if replica.may_serve(self._version, mixed_versions=mixed)]

    def can_recover(self) -> bool:
        """Return whether some replica with usable weights is READY, or SUSPECT and so may become READY."""
        mixed = self._policy.mixed_versions
        return any(
            replica.state in (State.READY, State.SUSPECT) and replica.holds(self._version, mixed_versions=mixed)
            for replica in self._replicas
        )

    def update(self) -> None:
        """Start probes of suspects, and checks of replicas that are silent with requests in flight."""
        now = asyncio.get_running_loop().time()
        for replica in self._replicas:
            if replica.state is State.SUSPECT:
                self._helpers.start(f"probe {replica.index}", self._probe, replica)
            silent = now - replica.last_sign_of_life >= self._policy.stall_timeout_s
            if replica.state is State.READY and replica.in_flight and silent:
                self._helpers.start(f"check {replica.index}", self._check, replica)

    async def _probe(self, replica: Replica) -> None:
        await replica.probe(
            f"{self._nonce}-probe-{replica.index}",
            version=self._version,
            mixed_versions=self._policy.mixed_versions,
            timeout_s=self._policy.stall_timeout_s,
            changed=self._changed,
        )

    async def _check(self, replica: Replica) -> None:
        """Check a silent replica with requests in flight; if it does not generate, make it SUSPECT and evict them."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        try:
            await replica.client.check_alive(timeout_s=self._policy.stall_timeout_s)
        except NoAnswer as failure:
            if replica.state is not State.READY or replica.last_sign_of_life > asked:
                return
            replica.move(State.SUSPECT, failure.what)
            where = f"server {replica.client.endpoint.index}"
            self._evict(replica, NoAnswer("stalled", f"{where}: no sign of life with requests in flight: {failure}"))
        else:
            replica.last_sign_of_life = loop.time()
