"""Generation over several SGLang servers, from a program that is not asynchronous. Imports no torch.

Each sample ends exactly once, in bounded time, whatever fails. Everything runs on one event loop, and a sample has at
most one try in flight: a late, duplicate or misdirected answer matches no try and is dropped.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from mega_rl.errors import RunError
from mega_rl.rollout.sglang.control import Endpoint
from mega_rl.rollout.sglang.generation.client import SglangClient
from mega_rl.rollout.sglang.generation.replica import Replica, least_loaded
from mega_rl.rollout.sglang.generation.samples import (
    NOT_RETRIED,
    GenerationResult,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
    State,
    backoff_s,
)
from mega_rl.tracking import progress

# An SGLang server whose scheduler died answers /health for another 65 s while generation hangs (0.5.21).
STALL_S = 30.0
_GRACE_S = 5.0  # for aborted requests to answer
SLACK_S = 30.0  # beyond a generation's deadline or end, until it is given up
_CALL_S = 10.0  # for a short function on the event loop
# Samples of one prompt share its prefix where they meet, so they stay together up to this imbalance.
_AFFINITY_SLACK = 8
_PROGRESS_S = 0.2
_UPDATE_S = 0.02  # between looks at a server's update

Result = TypeVar("Result")
# Takes a whole response, the last failure, or a partial sample: no server is left, or the generation was cut short.
Answered = Callable[[Sample | RequestFailure], None]


@dataclass(eq=False)
class _Job:
    """A sample: its request, its tries and their outcomes."""

    request: SampleRequest
    partial: Sample
    answer: Answered  # takes its end
    deadline: float = math.inf  # loop time
    tries: int = 0
    bad_answers: int = 0
    disruptions: int = 0  # tries that a server is to blame for
    expires: float = math.inf  # loop time
    not_before: float = 0.0  # loop time
    turn: asyncio.Future[Replica | None] | None = None  # the server of its next try; None: there is none
    attempt: asyncio.Task[Sample | RequestFailure] | None = None  # its try in flight
    evicted: RequestFailure | None = None  # why we cut its try short
    asked: Replica | None = None  # server of its last try
    rid: str = ""  # of its last try
    dropped: bool = False  # nobody waits for its answer
    last: str = "no server had room for it"  # how its last try stands or ended


@dataclass(eq=False)
class _Generation:
    """State of one generation, on the event loop."""

    replicas: Collection[Replica]  # those of this moment: servers join and leave
    sampling: Sampling
    version: int
    mixed_versions: bool
    stall_s: float
    deadline_s: Callable[[int], float]  # seconds for a number of samples
    is_open: bool = True  # requests may come
    jobs: dict[_Job, asyncio.Task[None]] = field(default_factory=dict)  # jobs in flight
    began: float = 0.0  # loop time of the first of them
    result: GenerationResult = field(default_factory=GenerationResult)
    fresh: deque[_Job] = field(default_factory=deque)  # wait for their first turn
    waiting: list[_Job] = field(default_factory=list)  # wait for another try
    flying: set[_Job] = field(default_factory=set)
    homes: dict[int, Replica] = field(default_factory=dict)  # prompt -> server that last got it
    helpers: dict[str, asyncio.Task[Any]] = field(default_factory=dict)  # probes, checks, and the abort of all requests
    group: asyncio.TaskGroup | None = None  # of jobs and helpers, while it runs
    numbers: Iterator[int] = field(default_factory=lambda: count(1))  # of requests
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    ended: int = 0  # jobs
    phase: progress.Phase = field(default_factory=lambda: progress.phase("samples"))
    reported: float = 0.0  # loop time


class ServerRouter:
    """Spreads samples over the servers of a run, which begin STALE.

    Its event loop runs in its own thread, so that generation continues while the trainer trains. Call methods from
    other threads, one at a time.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        vocab_size: int,
        max_concurrency: int | Mapping[int, int],
        retries: int,
        request_timeout_s: float,
        stall_timeout_s: float = STALL_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Create the clients; send nothing.

        Args:
            vocab_size: of the servers' embedding; a prompt with another token kills a server.
            max_concurrency: requests in flight at one server; or those of the servers on this rank's host, by their
                index: the router uses others only while none of these serves.
            retries: further tries of a sample after a bad answer; a server that dies does not use one up.
            request_timeout_s: seconds of a sample from its first try to its last.
            stall_timeout_s: seconds without a token from a server with requests until it is checked, and of the check.
            grace_s: seconds for aborted requests to answer with what they have.
        """
        self._near: Mapping[int, int] = {}
        if not isinstance(max_concurrency, int):
            self._near, max_concurrency = max_concurrency, -(-sum(max_concurrency.values()) // len(endpoints))
        self._max_concurrency = max_concurrency
        self._vocab_size, self._retries = vocab_size, retries
        self._request_timeout_s, self._grace_s = request_timeout_s, grace_s
        self._stall_timeout_s = min(stall_timeout_s, request_timeout_s / 4)
        self._replicas: dict[int, Replica] = {}  # key: the server's number in the run
        self._draining: set[asyncio.Task[None]] = set()  # ends of servers that have left
        self._generation: _Generation | None = None
        self._future: concurrent.futures.Future[GenerationResult] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-router", daemon=True)
        self._thread.start()
        for endpoint in endpoints:
            self.place(endpoint)

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
            for replica in self._replicas.values():
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

    def mark(self, index: int, state: State, reason: str = "", *, version: int | None = None) -> None:
        """Say the state of server `index`.

        READY: it holds the weights of `version`, verified. UPDATING: it gets weights while its requests wait, and
        nobody gets their answers. STALE: no new traffic; requests in flight continue, without stall checks. DOWN: its
        requests in flight are retried elsewhere at once. LEFT: as STALE, for good; after its last request its
        connections close.
        """

        def mark() -> None:
            replica, generation = self._replicas[index], self._generation
            replica.version = replica.version if version is None else version
            replica.move(state, reason, planned=state in (State.STALE, State.LEFT, State.UPDATING))
            if state is State.LEFT:
                task = self._loop.create_task(self._replicas.pop(index).drain())
                self._draining.add(task)
                task.add_done_callback(self._draining.discard)
            if generation is not None:
                if state is State.DOWN:
                    _evict(generation, replica, RequestFailure("server_down", f"{replica.client.name}: {reason}"))
                _dispatch(generation)

        _on_loop(self._loop, mark)

    def place(self, endpoint: Endpoint) -> None:
        """Add the server of a new index, or give a restarted one its new address and keys.

        It gets no requests before `mark`.
        """

        def place() -> None:
            index = endpoint.index
            if index in self._replicas:
                self._replicas[index].client.move(endpoint)
                return
            capacity = self._near.get(index, self._max_concurrency)
            client = SglangClient(endpoint, vocab_size=self._vocab_size, max_concurrency=capacity)
            self._replicas[index] = Replica(client, capacity=capacity, near=index in self._near)

        _on_loop(self._loop, place)

    def states(self) -> dict[int, tuple[State, str]]:
        """Return each server's state and why it is not READY."""
        return _on_loop(self._loop, lambda: {i: (one.state, one.reason) for i, one in self._replicas.items()})

    # -- generation ----------------------------------------------------------------------------------------------------

    def open(
        self, sampling: Sampling, *, version: int, deadline_s: Callable[[int], float], mixed_versions: bool = False
    ) -> None:
        """Begin a generation, one at a time, whose requests come by `ask` until `result`.

        version: of the weights that samples come from, with mixed_versions the oldest of them. deadline_s: seconds that
        a number of samples may take; a sample without an answer then becomes a failure of kind "deadline".
        mixed_versions: responses may continue under later weights.
        """
        assert self._future is None or self._future.done(), "a generation is pending"
        replicas = self._replicas.values()
        self._generation = _Generation(replicas, sampling, version, mixed_versions, self._stall_timeout_s, deadline_s)
        self._future = asyncio.run_coroutine_threadsafe(self._run(self._generation), self._loop)
        _on_loop(self._loop, lambda: None)  # it has begun

    def ask(self, request: SampleRequest, answer: Answered, so_far: Sample | None = None) -> Callable[[], object]:
        """Add a request to the generation; the event loop calls `answer` at its end.

        so_far: its response, which begins anew if it is of other versions than the generation may mix. The function
        that it returns drops the request, whose server then stops decoding. Raises UserError for a prompt that holds a
        token outside the vocabulary, or none.
        """
        request.check(self._vocab_size)
        generation, before = self._generation, so_far or Sample()
        assert generation is not None
        usable = generation.mixed_versions or all(number == generation.version for number in before.versions)
        job = _Job(request, before if usable else Sample(), answer)

        def add() -> None:
            assert generation.group is not None, "the generation has ended"
            now = self._loop.time()
            job.deadline = now + generation.deadline_s(len(generation.jobs) + 1)
            generation.began = generation.began if generation.jobs else now
            generation.jobs[job] = generation.group.create_task(_see_to_end(generation, job, self._sample))

        def drop() -> None:
            if job in generation.jobs:
                job.dropped = True
                self._loop.call_soon(generation.jobs[job].cancel)  # a task that has not begun would not see to its end
                if job.asked is not None and job in generation.flying:
                    abort = partial(job.asked.client.abort, job.rid, timeout_s=self._grace_s)
                    _help(generation, f"abort {job.rid}", abort)

        self._loop.call_soon_threadsafe(add)
        return partial(self._loop.call_soon_threadsafe, drop)

    def result(self, *, interrupt: bool = False) -> GenerationResult:
        """End the generation; requests in flight get no answer. Raises RunError if it does not end.

        interrupt: stop sending, abort requests in flight and answer with their tokens; this returns within seconds.
        """
        assert self._future is not None, "no generation was started"
        if (generation := self._generation) is not None:
            self._loop.call_soon_threadsafe(_close_open, generation, interrupt, self._grace_s)
        try:
            return self._future.result(timeout=SLACK_S)
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            self._future.cancel()
            raise RunError(f"a generation continued {SLACK_S:g} s after its end") from None

    def taken(self) -> GenerationResult:
        """Return the counts of the generation that runs, which begin again; zero without one."""

        def take() -> GenerationResult:
            if (generation := self._generation) is None:
                return GenerationResult()
            result, now = generation.result, self._loop.time()
            spent, generation.began = now - generation.began if generation.jobs else 0.0, now
            taken = replace(result, seconds=result.seconds + spent)
            result.requests = result.retries = result.tokens = 0
            result.seconds, result.failed_tries = 0.0, Counter()
            return taken

        return _on_loop(self._loop, take)

    async def _run(self, generation: _Generation) -> GenerationResult:
        """Run until no more will come and each sample has ended or is unserved."""
        try:
            async with asyncio.TaskGroup() as group:
                generation.group = group
                _help(generation, "watch", partial(_watch, generation))
        finally:
            self._generation = generation.group = None
            generation.phase.end()
        return generation.result

    async def _sample(self, generation: _Generation, job: _Job) -> Sample | RequestFailure | None:
        """Return a whole response, the last failure, or None where no server is left."""
        while not job.partial.is_whole(job.request, generation.sampling):
            job.turn = self._loop.create_future()
            (generation.waiting if job.tries else generation.fresh).append(job)
            _dispatch(generation)
            try:
                if (replica := await job.turn) is None:
                    return None
                now = self._loop.time()
                if now >= job.expires:
                    return RequestFailure("timeout", f"no answer in {self._request_timeout_s:g} s: {job.last}")
                outcome = await self._try(generation, job, replica, now)
            finally:
                if not job.turn.cancelled() and (given := job.turn.result()) is not None:
                    given.in_flight -= 1
                generation.flying.discard(job)
            if isinstance(outcome, RequestFailure):
                if _failed(generation, job, replica, outcome, retries=self._retries):
                    return outcome
            elif outcome is not None and outcome.finish != "partial":
                replica.answered(self._loop.time())
        return job.partial

    async def _try(
        self, generation: _Generation, job: _Job, replica: Replica, now: float
    ) -> Sample | RequestFailure | None:
        """Request the rest of a sample, and keep what comes; None: cut short with the generation."""
        result, before = generation.result, len(job.partial.token_ids)
        if job.tries == 0:
            job.expires = now + self._request_timeout_s
        result.requests += 1
        result.retries += job.tries > 0
        job.tries += 1
        job.evicted, job.asked = None, replica
        job.rid = f"{generation.nonce}-{job.request.key[0]}-{job.request.key[1]}-{next(generation.numbers)}"
        job.last = f"{replica.client.name} had not answered try {job.tries}"
        remaining = job.expires - now
        # A server that lost the request must not use up its time: the first try gets half, the next half of the rest.
        timeout_s = remaining / 2 if job.disruptions < self._retries else remaining
        key = job.request.key

        async def attempt() -> Sample | RequestFailure:
            try:
                return await replica.client.generate(
                    job.request,
                    generation.sampling,
                    rid=job.rid,
                    version=replica.version,
                    timeout_s=timeout_s,
                    partial=job.partial,
                    mixed_versions=generation.mixed_versions,
                    grace_s=min(self._grace_s, timeout_s / 4),
                )
            except RequestFailure as failure:
                return failure

        job.attempt = self._loop.create_task(attempt())
        generation.flying.add(job)
        try:
            await asyncio.wait({job.attempt})
        finally:
            if not job.attempt.done():  # the generation ends: let it close its connection
                job.attempt.cancel()
                await asyncio.wait({job.attempt})
        while replica.state is State.UPDATING:  # tokens of weights that may fail their proof
            await asyncio.sleep(_UPDATE_S)
        outcome = job.evicted if job.evicted or job.attempt.cancelled() else job.attempt.result()
        got = outcome.partial if isinstance(outcome, RequestFailure) else outcome
        if got is not None:
            result.tokens += len(got.token_ids) - before
            job.partial = got
        whole = job.partial.is_whole(job.request, generation.sampling)  # maybe aborted at its last token
        if isinstance(outcome, Sample) and outcome.finish == "partial" and not whole and not result.interrupted:
            new = len(outcome.token_ids) - before
            return RequestFailure("aborted", f"{replica.client.name}, sample {key}: given up after {new} tokens")
        return outcome


def _dispatch(generation: _Generation) -> None:
    """Give samples their turns, first retries; end the wait where no server is left."""
    now, usable = asyncio.get_running_loop().time(), _serving(generation, State.READY)
    suspects = _serving(generation, State.SUSPECT)
    returning = any(one.state is State.UPDATING for one in generation.replicas)
    for replica in suspects:
        rid = f"{generation.nonce}-probe-{replica.client.endpoint.index}"
        probe = partial(replica.probe, rid, version=generation.version, mixed_versions=generation.mixed_versions)
        then = partial(_dispatch, generation)
        _help(generation, rid, partial(probe, timeout_s=generation.stall_s), then)
    if generation.result.interrupted or not (usable or suspects or returning or generation.flying):
        for job in (*generation.fresh, *generation.waiting):
            _give(job, None)
        generation.fresh.clear()
        generation.waiting.clear()
    for job in [job for job in generation.waiting if usable and job.not_before <= now]:
        home = least_loaded([replica for replica in usable if replica is not job.asked] or usable, now)
        if home is not None:
            generation.waiting.remove(job)
            _give(job, home, now)
    while usable and generation.fresh and (home := least_loaded(usable, now)) is not None:
        prompt = generation.fresh[0].request.key[0]
        last = generation.homes.get(prompt, home)
        if last in usable and (last.near or not home.near) and last.has_room(now):
            home = last if last.in_flight <= home.in_flight + _AFFINITY_SLACK else home
        generation.homes[prompt] = home
        _give(generation.fresh.popleft(), home, now)


def _serving(generation: _Generation, *states: State) -> list[Replica]:
    """Return the servers in these states whose weights may be sampled from."""
    version, mixed = generation.version, generation.mixed_versions
    return [one for one in generation.replicas if one.state in states and one.holds(version, mixed_versions=mixed)]


def _failed(generation: _Generation, job: _Job, replica: Replica, failure: RequestFailure, *, retries: int) -> bool:
    """Record a failed try and set its alarm; return whether it was the sample's last one."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    job.last = failure.message
    generation.result.failed_tries[failure.kind] += 1
    if failure.charge == "sample":
        job.bad_answers += 1
    else:
        job.disruptions += 1
    wait_s = backoff_s(job.request, job.bad_answers + job.disruptions)
    replica.failed(now, failure, wait_s=wait_s)
    loop.call_later(wait_s, _dispatch, generation)  # then a busy server's pause ends, too
    elsewhere = any(other is not replica for other in _serving(generation, State.READY))
    job.not_before = now if elsewhere and failure.charge != "sample" else now + wait_s
    # Dying servers must not use up a sample's tries, and a sample that kills servers must not be retried for ever.
    spent = job.bad_answers > retries or job.disruptions > retries + len(generation.replicas)
    last = spent or failure.kind in NOT_RETRIED or now >= job.expires
    return last and not generation.result.interrupted and not job.partial.is_whole(job.request, generation.sampling)


async def _watch(generation: _Generation) -> None:
    """Check servers that have requests in flight and gave no sign of life for a while."""
    loop, stall_s = asyncio.get_running_loop(), generation.stall_s

    async def check(replica: Replica) -> None:
        if (failure := await replica.check(timeout_s=stall_s)) is not None:
            _evict(generation, replica, failure)
            _dispatch(generation)

    while True:
        await asyncio.sleep(stall_s / 4)
        for replica in _serving(generation, State.READY):
            if replica.in_flight and loop.time() - replica.last_sign_of_life >= stall_s:
                _help(generation, f"check {replica.client.endpoint.index}", partial(check, replica))


def _give(job: _Job, replica: Replica | None, now: float = 0.0) -> None:
    """Give a waiting sample its turn."""
    assert job.turn is not None
    if not job.turn.done():  # else its task was cancelled
        job.turn.set_result(replica)
        if replica is not None:
            replica.sent(now)


def _evict(generation: _Generation, replica: Replica, failure: RequestFailure) -> None:
    """Cut short all requests in flight at a server."""
    for job in generation.flying:
        if job.asked is replica and job.evicted is None and job.attempt is not None:
            job.evicted = failure
            job.attempt.cancel()


async def _see_to_end(
    generation: _Generation,
    job: _Job,
    sample: Callable[[_Generation, _Job], Coroutine[Any, Any, Sample | RequestFailure | None]],
) -> None:
    """Give a sample its end: an answer, or a failure at its deadline."""
    outcome: Sample | RequestFailure | None
    try:
        async with asyncio.timeout_at(job.deadline):
            outcome = await sample(generation, job)
    except asyncio.CancelledError:
        if not job.dropped:
            raise
        outcome = None
    except TimeoutError:
        outcome = RequestFailure("deadline", f"the generation's deadline came first: {job.last}")
    _end(generation, job, outcome, asyncio.get_running_loop().time())
    _dispatch(generation)
    if not generation.jobs and not generation.is_open:
        _close(generation)


def _end(generation: _Generation, job: _Job, outcome: Sample | RequestFailure | None, now: float) -> None:
    """Answer a sample once; None: no server is left for it."""
    result = generation.result
    del generation.jobs[job]
    generation.ended += 1
    if not generation.jobs:
        result.seconds, generation.began = result.seconds + now - generation.began, now
    if isinstance(outcome, Sample):
        stopped = outcome.token_ids[-1] in generation.sampling.stop_token_ids
        outcome = replace(outcome, finish="stop" if stopped else "length")
    job.answer(outcome or replace(job.partial, finish="partial", routing=b""))
    if now - generation.reported >= _PROGRESS_S:
        generation.reported = now
        rate = result.tokens / max(result.seconds + now - generation.began, 1e-9)
        generation.phase.report(generation.ended, generation.ended + len(generation.jobs), note=f"{rate:.0f} tok/s")


def _close(generation: _Generation) -> None:
    """End the generation and what it waits for."""
    for task in (*generation.jobs.values(), *generation.helpers.values()):
        task.cancel()


def _close_open(generation: _Generation, interrupt: bool, grace_s: float) -> None:
    """Let no more requests come; interrupt: abort those that are out, which answer within `grace_s`."""
    generation.is_open = False
    if interrupt:
        generation.result.interrupted = True
        _dispatch(generation)
        _help(generation, "abort", partial(_abort, generation, grace_s))
    if not (generation.result.interrupted and generation.jobs):
        _close(generation)


def _help(
    generation: _Generation,
    name: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Start a task next to the samples, one of each name, and call `then` after it."""

    async def help_samples() -> None:
        await work()
        generation.helpers.pop(name)
        then()

    if generation.group is not None and name not in generation.helpers:
        generation.helpers[name] = generation.group.create_task(help_samples())


async def _abort(generation: _Generation, grace_s: float) -> None:
    """Abort all requests within `grace_s`, repeatedly: an abort misses one on its way."""
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_s
    while generation.flying and loop.time() < end:
        asked = {job.asked for job in generation.flying if job.asked is not None}
        await asyncio.gather(*(replica.client.abort(timeout_s=grace_s / 2) for replica in asked))
        await asyncio.sleep(0.05)
    for job in generation.flying:
        if job.attempt is not None:
            job.attempt.cancel()


def _on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], Result]) -> Result:
    """Run a short function on the event loop and return its result."""

    async def run() -> Result:
        return work()

    return asyncio.run_coroutine_threadsafe(run(), loop).result(timeout=_CALL_S)
