"""Generation over several SGLang servers, from a program that is not asynchronous. Imports no torch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

from mega_rl.errors import RunError, UserError
from mega_rl.rollout.sglang.generation.client import SglangClient
from mega_rl.rollout.sglang.generation.replicas import Replica
from mega_rl.rollout.sglang.generation.samples import (
    GenerationResult,
    Key,
    Progress,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
    State,
)
from mega_rl.rollout.sglang.generation.scheduler import Job, Policy, SampleScheduler
from mega_rl.rollout.sglang.http.keys import Endpoint

# An SGLang server whose scheduler died answers /health for another 65 s while generation hangs (0.5.20).
STALL_S = 30.0
_GRACE_S = 5.0  # for aborted requests to answer
_SLACK_S = 30.0  # beyond a generation's deadline, until GenerationHungError
_CALL_S = 10.0  # for a short function on the event loop

Result = TypeVar("Result")


class GenerationHungError(RunError):
    """A generation continued after its deadline: a defect of mega_rl, raised instead of waited for."""


class ServerRouter:
    """Router of requests to the servers of a run. Servers begin STALE until `mark_ready` says which weights they hold.

    Its event loop runs in its own thread, so that generation continues while the trainer trains. Call methods from
    other threads, one at a time; `interrupt` may come next to `result`.
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
                place in `endpoints`: the router uses others only while none of these serves.
            retries: further tries of a sample after a bad answer; a server that dies does not use one up.
            request_timeout_s: seconds of a sample from its first try to its last.
            allow_mixed_versions: partial rollouts: responses may continue under later weights.
            stall_timeout_s: seconds without a token from a server with requests until it is checked; a check takes as
                long at most. At most a quarter of request_timeout_s is used.
            grace_s: seconds for aborted requests to answer with what they have.
        """
        assert endpoints, "a router needs a server"
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
        self._replicas = []
        for index, endpoint in enumerate(endpoints):
            capacity = near.get(index, max_concurrency)
            client = SglangClient(endpoint, vocab_size=vocab_size, max_concurrency=capacity)
            self._replicas.append(Replica(index, client, capacity=capacity, near=index in near))
        self._generation: SampleScheduler | None = None
        self._future: concurrent.futures.Future[GenerationResult] | None = None
        self._deadline = 0.0  # end of the generation, time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-router", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel a pending generation, close all connections and end the thread. May be called twice."""
        if not self._thread.is_alive():
            return

        async def close() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=_CALL_S)
            for replica in self._replicas:
                await replica.client.close()

        if self._future is not None:
            self._future.cancel()
        try:
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(timeout=_CALL_S * 2)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_S)
            if not self._thread.is_alive():
                self._loop.close()

    # -- rotation ------------------------------------------------------------------------------------------------------

    def mark_ready(self, index: int, version: int) -> None:
        """Put server `index` of `endpoints` into rotation: it holds the weights of `version`, verified."""
        self._mark(index, State.READY, "", version=version)

    def mark_stale(self, index: int, reason: str = "it must be sent the weights") -> None:
        """Stop new traffic until `mark_ready`; requests in flight continue, without stall checks."""
        self._mark(index, State.STALE, reason)

    def mark_down(self, index: int, reason: str = "it has ended") -> None:
        """Take a dead server out of rotation; its requests in flight are retried elsewhere at once."""
        self._mark(index, State.DOWN, reason)

    def move(self, index: int, endpoint: Endpoint) -> None:
        """Point at a restarted server's new address and keys; it stays out of rotation until `mark_ready`."""
        self._call(lambda: self._replicas[index].client.move(endpoint))

    def states(self) -> list[tuple[State, str]]:
        """Return each server's state and why it is not READY, in the order of `endpoints`."""
        return self._call(lambda: [(replica.state, replica.reason) for replica in self._replicas])

    def _mark(self, index: int, state: State, reason: str, *, version: int | None = None) -> None:
        def mark() -> None:
            replica = self._replicas[index]
            if version is not None:
                replica.version = version
            replica.move(state, reason, planned=state is State.STALE)
            if self._generation is not None:
                what = f"server {replica.client.endpoint.index}: {reason}"
                dead = RequestFailure("server_down", what) if state is State.DOWN else None
                self._generation.replica_changed(replica, dead)

        self._call(mark)

    # -- generation ----------------------------------------------------------------------------------------------------

    def start(
        self,
        requests: Sequence[SampleRequest],
        sampling: Sampling,
        *,
        version: int,
        deadline: float,
        partials: Mapping[Key, Sample] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Begin a generation; one at a time.

        Args:
            requests: keys all different.
            version: of the weights that samples come from, with allow_mixed_versions the oldest of them.
            deadline: time.monotonic() at which samples without an answer become failures of kind "deadline".
            partials: responses so far, as in `GenerationResult.unserved`; those of other versions begin anew, unless
                allow_mixed_versions.
            progress: called on the router's thread, five times a second at most.

        Raises:
            UserError: for a prompt that holds a token outside the vocabulary, or none.
        """
        if self._future is not None and not self._future.done():
            raise RuntimeError("a generation is pending; interrupt it or wait for its result")
        if not self._thread.is_alive():
            raise RuntimeError("the router is closed")
        assert len({request.key for request in requests}) == len(requests), "two requests have one key"
        jobs = []
        for request in requests:
            foreign = next((token for token in request.prompt if not 0 <= token < self._vocab_size), None)
            if foreign is not None or not request.prompt:
                has = f"holds token {foreign}, the model has {self._vocab_size} tokens"
                fault = "is empty" if foreign is None else has
                raise UserError(f"prompt {request.key[0]} {fault}; check that the tokenizer is the model's own")
            partial = (partials or {}).get(request.key, Sample())
            usable = self._policy.mixed_versions or all(number == version for number in partial.versions)
            jobs.append(Job(request, partial if usable else Sample()))

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

        self._generation, self._deadline = self._call(make), deadline
        self._future = asyncio.run_coroutine_threadsafe(self._generation.run(), self._loop)

    def result(self) -> GenerationResult:
        """Wait for the generation's result. Raises GenerationHungError for one that runs on after its deadline."""
        assert self._future is not None, "no generation was started"
        assert self._generation is not None
        try:
            return self._future.result(timeout=max(0.0, self._deadline - time.monotonic()) + _SLACK_S)
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            self._future.cancel()
            result = self._generation.result
            raise GenerationHungError(
                f"a generation continued {_SLACK_S:g} s after its deadline, with "
                f"{len(result.samples) + len(result.failures)} of {self._generation.total} samples ended"
            ) from None

    def interrupt(self) -> None:
        """Stop sending, abort requests in flight and keep their tokens: `result` then returns within seconds."""
        if self._generation is not None:
            self._loop.call_soon_threadsafe(self._generation.interrupt)

    def _call(self, work: Callable[[], Result]) -> Result:
        """Run a short function on the event loop and return its result."""

        async def run() -> Result:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=_CALL_S)
