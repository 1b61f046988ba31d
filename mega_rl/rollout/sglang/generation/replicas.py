"""Replica state machine: which servers get requests, and how failures take them out of rotation.

    READY --failures in a row--> SUSPECT --a real generation--> READY
    READY, SUSPECT --answers with another weight version--> STALE
    SUSPECT --PROBES generations failed--> DOWN
    any --mark_stale, mark_down, mark_ready--> STALE, DOWN, READY

Only the caller, who can restart a server and send it weights, leads out of STALE and DOWN. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from mega_rl.rollout.sglang.generation.client import SglangClient
from mega_rl.rollout.sglang.generation.failures import KINDS, RequestFailure
from mega_rl.rollout.sglang.generation.results import ReplicaStats, State

logger = logging.getLogger(__name__)

FAILURES_IN_ROW = 3  # tries without an answer that make a server suspect
BAD_ANSWERS_IN_ROW = 12  # the same for answers that came and were bad: more, since samples may be to blame
PROBES = 3
_PROBE_WAIT_S = 0.2  # before the second probe; doubles


class Replica:
    """State of one server on the event loop of its router."""

    def __init__(self, index: int, client: SglangClient, *, capacity: int, near: bool = False) -> None:
        self.index = index  # in the fleet
        self.client = client
        self.capacity = capacity
        self.near = near  # on this rank's host: asked before all that are not
        self.state = State.STALE
        self.version = -1  # of its weights, as the caller said
        self.reason = "no weights have been sent to it"
        self._planned = True  # this state is one that the caller wanted, not a failure
        self.in_flight = 0
        self.dispatched = 0
        self.busy_until = 0.0  # loop time
        self.last_sign_of_life = 0.0  # loop time
        self._failures = 0
        self._bad_answers = 0
        self.stats = self._fresh_stats()

    def _fresh_stats(self) -> ReplicaStats:
        return ReplicaStats(self.client.endpoint.index, self.state, self.reason)

    def begin(self) -> None:
        """Reset the counts for a new generation."""
        self.stats = self._fresh_stats()

    def report(self) -> ReplicaStats:
        """Return the counts of this generation so far."""
        self.stats.state, self.stats.reason = self.state, self.reason
        return self.stats

    def holds(self, version: int, *, mixed_versions: bool) -> bool:
        """Return whether its weights may sample for `version`: that version, or with `mixed_versions` a later one."""
        return self.version == version or (mixed_versions and self.version > version)

    def may_serve(self, version: int, *, mixed_versions: bool) -> bool:
        """Return whether it is READY and holds weights for `version`; it may be busy for a moment."""
        return self.state is State.READY and self.holds(version, mixed_versions=mixed_versions)

    def has_room(self, now: float) -> bool:
        """Return whether it has capacity for a request at loop time `now`."""
        return self.in_flight < self.capacity and now >= self.busy_until

    def sent(self, now: float) -> None:
        """Count a request sent to it."""
        if self.in_flight == 0:
            self.last_sign_of_life = now  # nothing was awaited before
        self.in_flight += 1
        self.dispatched += 1
        self.stats.requests += 1
        self.stats.most_in_flight = max(self.stats.most_in_flight, self.in_flight)

    def answered(self, now: float, tokens: int) -> None:
        """Count a valid answer: the server is healthy."""
        self._failures = self._bad_answers = 0
        self.last_sign_of_life = now
        self.stats.answers += 1
        self.stats.tokens += tokens

    def failed(self, now: float, failure: RequestFailure, *, wait_s: float) -> None:
        """Record a failed try against this server."""
        charged = KINDS[failure.kind].charged
        if charged == "sample":
            self._failures = 0
            self._bad_answers += failure.kind != "rejected"  # which is about what we sent
            self.last_sign_of_life = now
        elif charged == "busy":
            self.busy_until = max(self.busy_until, now + wait_s)
            self.last_sign_of_life = now
        else:
            self._failures += 1
        if charged == "stale":
            self.move(State.STALE, str(failure))
        elif self.state is State.READY and (
            charged == "down" or self._failures >= FAILURES_IN_ROW or self._bad_answers >= BAD_ANSWERS_IN_ROW
        ):
            self.move(State.SUSPECT, str(failure))

    def move(self, state: State, reason: str, *, planned: bool = False) -> None:
        """Change the state and log it; changes that every weight update makes are logged at debug level."""
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
        self.state = state
        self.reason = reason

    async def probe(
        self, rid: str, *, version: int, mixed_versions: bool, timeout_s: float, changed: Callable[[], None]
    ) -> None:
        """Probe a SUSPECT server with real generations until it is READY, STALE or, after `PROBES` failures, DOWN."""
        for number in range(PROBES):
            if number:
                await asyncio.sleep(_PROBE_WAIT_S * 2 ** (number - 1))
            if self.state is not State.SUSPECT:
                return  # the caller knew better
            try:
                await self.client.probe(
                    rid=f"{rid}-{number}", version=version, mixed_versions=mixed_versions, timeout_s=timeout_s
                )
            except RequestFailure as failure:
                if self.state is State.SUSPECT and KINDS[failure.kind].charged == "stale":
                    self.move(State.STALE, str(failure))
                    changed()
                elif self.state is State.SUSPECT:
                    self.reason = str(failure)
            else:
                if self.state is State.SUSPECT:
                    self.move(State.READY, "")
                    changed()
                return
        if self.state is State.SUSPECT:
            self.move(State.DOWN, f"{PROBES} probes failed, the last: {self.reason}")
            changed()
