"""Generation over several SGLang servers, from a program that is not asynchronous. Imports no torch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from mega_rl.errors import RunError, UserError
from mega_rl.rollout.sglang.generation.client import SglangClient
from mega_rl.rollout.sglang.generation.failures import NoAnswer
from mega_rl.rollout.sglang.generation.jobs import Job, Policy
from mega_rl.rollout.sglang.generation.replicas import Replica
from mega_rl.rollout.sglang.generation.results import FleetResult, Progress, State
from mega_rl.rollout.sglang.generation.samples import Key, Sample, SampleRequest, Sampling
from mega_rl.rollout.sglang.generation.scheduler import SampleScheduler
from mega_rl.rollout.sglang.http.endpoint import Endpoint

# An SGLang server whose scheduler died answers /health for another 65 s while generation hangs (0.5.20).
STALL_S = 30.0
_GRACE_S = 5.0  # for aborted requests to answer
_SLACK_S = 30.0  # beyond a generation's deadline, until FleetHungError
_CALL_S = 10.0  # for a short function on the event loop

Result = TypeVar("Result")


class FleetHungError(RunError):
    """A generation went on after its deadline: a defect of mega_rl, raised instead of waited for."""


class Handle:
    """A pending generation."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, generation: SampleScheduler, deadline: float, total: int
    ) -> None:
        self._loop = loop
        self._generation = generation
        self._deadline = deadline
        self._total = total
        self._future = asyncio.run_coroutine_threadsafe(generation.run(), loop)

    def done(self) -> bool:
        """Return whether the generation has ended, so that `result` returns at once."""
        return self._future.done()

    def result(self) -> FleetResult:
        """Wait for the generation's result. Raises FleetHungError for one that runs on after its deadline."""
        try:
            return self._future.result(timeout=max(0.0, self._deadline - time.monotonic()) + _SLACK_S)
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            self._future.cancel()
            ended = len(self._generation.result.samples) + len(self._generation.result.failures)
            raise FleetHungError(
                f"a generation went on {_SLACK_S:g} s after its deadline, with {ended} of {self._total} samples ended"
            ) from None

    def interrupt(self) -> None:
        """Stop sending, abort requests in flight and keep their tokens: `result` then returns within seconds."""
        self._loop.call_soon_threadsafe(self._generation.interrupt)

    def cancel(self) -> None:
        """Cancel the generation."""
        self._future.cancel()


class ServerRouter:
    """Router of requests to the servers of a run. Replicas begin STALE until `mark_ready` says which weights they hold.

    Its event loop runs in its own thread, so that generation goes on while the trainer trains. Call methods from other
    threads, one at a time.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        vocab_size: int,
        max_concurrency: int | Mapping[int, int],
        retries: int,
        request_timeout_s: float,
        allow_mixed_versions: bool = False,
        stall_timeout_s: float = STALL_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Create the clients; send nothing.

        Args:
            vocab_size: tokens that the servers' embedding has; a prompt with another one kills a server.
            max_concurrency: requests in flight at one server; or those of the servers on this rank's host, by their
                place in `endpoints`: others are asked only while none of these serves.
            retries: further tries of a sample after a bad answer; a server that dies does not use one up.
            request_timeout_s: seconds of a sample from its first try to its last.
            allow_mixed_versions: partial rollouts: responses may go on under later weights.
            stall_timeout_s: seconds without a token from a server with requests until it is checked; a check takes as
                long at most. At most a quarter of request_timeout_s is used.
            grace_s: seconds for aborted requests to answer with what they have.
        """
        assert endpoints, "a fleet needs a server"
        near: Mapping[int, int] = {}
        if not isinstance(max_concurrency, int):
            near, max_concurrency = max_concurrency, -(-sum(max_concurrency.values()) // len(endpoints))
        self._vocab_size = vocab_size
        self._policy = Policy(
            retries=retries,
            request_timeout_s=request_timeout_s,
            stall_timeout_s=min(stall_timeout_s, request_timeout_s / 4),
            grace_s=grace_s,
            mixed_versions=allow_mixed_versions,
        )
        self._replicas = [
            Replica(
                index,
                SglangClient(endpoint, vocab_size=vocab_size, max_concurrency=capacity),
                capacity=capacity,
                near=index in near,
            )
            for index, endpoint in enumerate(endpoints)
            for capacity in [near.get(index, max_concurrency)]
        ]
        self._generation: SampleScheduler | None = None
        self._handle: Handle | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-fleet", daemon=True)
        self._thread.start()

    def __enter__(self) -> ServerRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel a pending generation, close all connections and end the thread. May be called twice."""
        if not self._thread.is_alive():
            return
        if self._handle is not None and not self._handle.done():
            self._handle.cancel()
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=_CALL_S * 2)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_CALL_S)
        for replica in self._replicas:
            await replica.client.close()

    def mark_ready(self, index: int, version: int) -> None:
        """Put server `index` of `endpoints` into rotation: it holds the weights of `version`, verified."""
        self._mark(index, State.READY, "", version=version)

    def mark_stale(self, index: int, reason: str = "it must be sent the weights") -> None:
        """Stop new traffic until `mark_ready`; requests in flight go on, without stall checks."""
        self._mark(index, State.STALE, reason)

    def mark_down(self, index: int, reason: str = "it has ended") -> None:
        """Take a dead server out of rotation; its requests in flight are retried elsewhere at once."""
        self._mark(index, State.DOWN, reason)

    def move(self, index: int, endpoint: Endpoint) -> None:
        """Point at a restarted server's new address and keys; it stays out of rotation until `mark_ready`."""
        self._call(lambda: self._replicas[index].client.move(endpoint))

    def states(self) -> list[tuple[State, str]]:
        """Return each replica's state and why it is not READY, in the order of `endpoints`."""
        return self._call(lambda: [(replica.state, replica.reason) for replica in self._replicas])

    def generate(
        self,
        requests: Sequence[SampleRequest],
        sampling: Sampling,
        *,
        version: int,
        deadline: float,
        partials: Mapping[Key, Sample] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetResult:
        """Start a generation and wait for its result; see `start`."""
        return self.start(
            requests, sampling, version=version, deadline=deadline, partials=partials, progress=progress
        ).result()

    def start(
        self,
        requests: Sequence[SampleRequest],
        sampling: Sampling,
        *,
        version: int,
        deadline: float,
        partials: Mapping[Key, Sample] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Handle:
        """Begin a generation; one at a time.

        Args:
            requests: keys all different.
            version: of the weights that samples come from, or from which on with allow_mixed_versions.
            deadline: time.monotonic() at which samples without an answer become failures of kind "deadline".
            partials: responses so far, as in `FleetResult.unserved`; those of other versions begin anew, unless
                allow_mixed_versions.
            progress: called on the fleet's thread, five times a second at most.

        Raises:
            UserError: for a prompt that holds a token outside the vocabulary, or none.
        """
        if self._handle is not None and not self._handle.done():
            raise RuntimeError("a generation is pending; interrupt it or wait for its result")
        if not self._thread.is_alive():
            raise RuntimeError("the fleet is closed")
        keys = {request.key for request in requests}
        assert len(keys) == len(requests), "two requests have one key"
        for request in requests:
            self._check_prompt(request)
        jobs = [Job(request, self._usable_partial((partials or {}).get(request.key), version)) for request in requests]

        def make() -> SampleScheduler:
            return SampleScheduler(
                self._replicas,
                jobs,
                sampling=sampling,
                version=version,
                deadline=self._loop.time() + deadline - time.monotonic(),
                policy=self._policy,
                progress=progress,
            )

        self._generation = self._call(make)
        self._handle = Handle(self._loop, self._generation, deadline, len(requests))
        return self._handle

    def _check_prompt(self, request: SampleRequest) -> None:
        foreign = next((token for token in request.prompt if not 0 <= token < self._vocab_size), None)
        if foreign is not None or not request.prompt:
            fault = "is empty" if foreign is None else f"holds token {foreign}, the model has {self._vocab_size} tokens"
            raise UserError(f"prompt {request.key[0]} {fault}; check that the tokenizer is the model's own")

    def _usable_partial(self, partial: Sample | None, version: int) -> Sample:
        if partial is None:
            return Sample()
        if not self._policy.mixed_versions and any(number != version for number in partial.versions):
            return Sample()
        return partial

    def _mark(self, index: int, state: State, reason: str, *, version: int | None = None) -> None:
        def mark() -> None:
            replica = self._replicas[index]
            if version is not None:
                replica.version = version
            replica.move(state, reason, planned=state is State.STALE)
            if self._generation is not None:
                where = f"server {replica.client.endpoint.index}"
                dead = NoAnswer("server_down", f"{where}: {reason}") if state is State.DOWN else None
                self._generation.replica_changed(replica, dead)

        self._call(mark)

    def _call(self, work: Callable[[], Result]) -> Result:
        """Run a short function on the event loop and return its result."""

        async def run() -> Result:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=_CALL_S)
