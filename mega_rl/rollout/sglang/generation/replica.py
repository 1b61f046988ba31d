"""State machine of one server's place in the rotation, driven by failures. Imports no torch.

    READY --failures in a row, or no sign of life--> SUSPECT --a real generation--> READY
    READY, SUSPECT --answers with another weight version--> STALE
    SUSPECT --PROBES generations failed--> DOWN
    any --`ServerRouter.mark`--> STALE, DOWN, READY, LEFT

Only the caller, who can restart a server and send it weights, leads out of STALE and DOWN.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from mega_rl.rollout.sglang.generation.client import SglangClient
from mega_rl.rollout.sglang.generation.samples import RequestFailure, State

logger = logging.getLogger(__name__)

FAILURES_IN_ROW = 3  # tries without an answer that make a server suspect
BAD_ANSWERS_IN_ROW = 12  # the same for bad answers: more, since samples may be to blame
PROBES = 3
_DRAIN_S = 0.05  # between looks at the requests of a server that leaves
_PROBE_WAIT_S = 0.2  # before the second probe; doubles


class Replica:
    """State of one server on the event loop of its router."""

    def __init__(self, client: SglangClient, *, capacity: int, near: bool = False) -> None:
        self.client = client
        self.capacity = capacity
        self.near = near  # on this rank's host: gets requests before all others
        self.state = State.STALE
        self.version = -1  # version of its weights, as the caller said
        self.reason = "no weights have been sent to it"  # why it is not READY
        self._planned = True  # the caller wanted this state, it is not a failure
        self.in_flight = self.dispatched = 0
        self.busy_until = self.last_sign_of_life = 0.0  # loop time
        self._failures = self._bad_answers = 0

    def holds(self, version: int, *, mixed_versions: bool) -> bool:
        """Return whether its weights may sample for `version`: that version, or with `mixed_versions` a later one."""
        return self.version == version or (mixed_versions and self.version > version)

    def has_room(self, now: float) -> bool:
        """Return whether it has capacity for a request at loop time `now`."""
        return self.in_flight < self.capacity and now >= self.busy_until

    def sent(self, now: float) -> None:
        """Count a request sent to it."""
        if self.in_flight == 0:
            self.last_sign_of_life = now  # nothing was awaited before
        self.in_flight += 1
        self.dispatched += 1

    def answered(self, now: float) -> None:
        """Record a valid answer: the server is healthy."""
        self._failures = self._bad_answers = 0
        self.last_sign_of_life = now

    def failed(self, now: float, failure: RequestFailure, *, wait_s: float) -> None:
        """Record a failed try against this server."""
        charge = failure.charge
        if charge in ("sample", "busy"):
            self.last_sign_of_life = now
        if charge == "sample":
            self._failures = 0
            self._bad_answers += failure.kind != "rejected"  # a rejection is about the request
        elif charge == "busy":
            self.busy_until = max(self.busy_until, now + wait_s)
        else:
            self._failures += 1
        if charge == "stale":
            self.move(State.STALE, str(failure))
        elif self.state is State.READY and (
            charge == "down" or self._failures >= FAILURES_IN_ROW or self._bad_answers >= BAD_ANSWERS_IN_ROW
        ):
            self.move(State.SUSPECT, str(failure))

    def move(self, state: State, reason: str, *, planned: bool = False) -> None:
        """Change the state and log it; planned changes, as in weight updates, at debug level."""
        if state is not self.state:
            planned = planned or (state is State.READY and self._planned)
            level = logging.DEBUG if planned else logging.INFO if state is State.READY else logging.WARNING
            logger.log(
                level, "server %d is %s%s", self.client.endpoint.index, state.value, f": {reason}" if reason else ""
            )
        if state is State.READY:
            self._failures = self._bad_answers = 0
            self.busy_until = 0.0
        self._planned = planned and state is not State.READY
        self.state, self.reason = state, reason

    async def drain(self) -> None:
        """Wait for the end of its requests in flight, then close its connections."""
        try:
            while self.in_flight:
                await asyncio.sleep(_DRAIN_S)
        finally:
            await self.client.close()

    def is_suspect(self) -> bool:
        """Return whether nobody has decided about it yet."""
        return self.state is State.SUSPECT

    async def probe(self, rid: str, *, version: int, mixed_versions: bool, timeout_s: float) -> None:
        """Probe a SUSPECT server with generations until READY, STALE or, after `PROBES` failures, DOWN."""
        for number in range(PROBES):
            if number:
                await asyncio.sleep(_PROBE_WAIT_S * 2 ** (number - 1))
            if not self.is_suspect():
                return  # the caller knew better, and may have closed the client
            failure = None
            try:
                await self.client.probe(
                    rid=f"{rid}-{number}", version=version, mixed_versions=mixed_versions, timeout_s=timeout_s
                )
            except RequestFailure as failed:
                failure = failed
            if not self.is_suspect():
                return
            if failure is None or failure.charge == "stale":
                self.move(State.READY if failure is None else State.STALE, str(failure or ""))
                return
            self.reason = str(failure)
        self.move(State.DOWN, f"{PROBES} probes failed, the last: {self.reason}")

    async def check(self, *, timeout_s: float) -> RequestFailure | None:
        """Check a silent server with requests in flight; return why they are lost, else None."""
        asked = asyncio.get_running_loop().time()
        try:
            await self.client.check_alive(timeout_s=timeout_s)
        except RequestFailure as failure:
            if self.state is not State.READY or self.last_sign_of_life > asked:
                return None
            self.move(State.SUSPECT, failure.message)
            return RequestFailure("stalled", f"{self.client.name}: no sign of life with requests in flight: {failure}")
        self.last_sign_of_life = asyncio.get_running_loop().time()
        return None


def least_loaded(replicas: Sequence[Replica], now: float) -> Replica | None:
    """Return the server with fewest requests, of this host if any; None if all are full."""
    near = [replica for replica in replicas if replica.near] or replicas
    free = [replica for replica in near if replica.has_room(now)]
    return min(free, key=lambda one: (one.in_flight, one.dispatched, one.client.endpoint.index), default=None)
