"""One generation over several servers: each sample ends exactly once, in bounded time, whatever fails.

Everything runs on one event loop, and a sample has at most one try in flight: a late, duplicate or misdirected answer
matches no try and is dropped. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mega_rl.rollout.sglang.generation.replicas import Replica
from mega_rl.rollout.sglang.generation.samples import (
    NOT_RETRIED,
    Failure,
    GenerationResult,
    Progress,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
    State,
)

# Samples of one prompt share its prefix where they meet, so they stay together up to this imbalance.
_AFFINITY_SLACK = 8
_BACKOFF_S = 0.1  # before the second try; doubles
_MAX_BACKOFF_S = 5.0
_PROGRESS_S = 0.2


@dataclass(frozen=True)
class Policy:
    """Retry policy and timeouts of a generation."""

    retries: int  # further tries of a sample after a bad answer
    request_timeout_s: float  # from a sample's first try to its last
    stall_timeout_s: float  # without a token from a server that has requests, until it is checked; and of that check
    grace_s: float  # for an aborted request to answer with what it has
    mixed_versions: bool


@dataclass
class Job:
    """A sample in flight: its request, its tries and their outcomes."""

    request: SampleRequest
    partial: Sample = field(default_factory=Sample)
    tries: int = 0
    bad_answers: int = 0
    disruptions: int = 0  # tries that a server is to blame for
    expires: float = math.inf  # loop time
    not_before: float = 0.0  # loop time
    avoid: Replica | None = None
    evicted: RequestFailure | None = None  # why we cut its try short
    asked: Replica | None = None  # server of its last try
    last_failure: str = ""  # result of its last try; empty while that runs

    def unanswered(self) -> str:
        """Return in words where its tries went without a whole answer."""
        if self.asked is None:
            return "no server had room for it"
        endpoint = self.asked.client.endpoint
        return self.last_failure or f"server {endpoint.index} at {endpoint.url} had not answered try {self.tries}"

    def backoff_s(self) -> float:
        """Return the seconds until the next try: 0.1, 0.2, 0.4 ... with a jitter of 0.5 to 1.5, fixed by the sample."""
        failed = self.bad_answers + self.disruptions
        jitter = random.Random(f"{self.request.key} {self.request.seed} {failed}").uniform(0.5, 1.5)
        return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** (failed - 1)) * jitter


class SampleScheduler:
    """One generation of a `ServerRouter`. Create and call it on the router's event loop."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        jobs: Sequence[Job],
        *,
        sampling: Sampling,
        version: int,
        deadline: float,
        policy: Policy,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.result = GenerationResult()
        self.total = len(jobs)
        self._replicas = replicas
        self._sampling = sampling
        self._version = version
        self._deadline = deadline  # loop time
        self._policy = policy
        self._progress = progress
        self._fresh = deque(jobs)
        self._waiting: list[Job] = []  # for another try
        self._running: dict[asyncio.Task[Sample | RequestFailure], tuple[Job, Replica]] = {}
        self._helpers: dict[str, asyncio.Task[None]] = {}  # probes and checks of servers, and the abort of all requests
        self._homes: dict[int, Replica] = {}  # prompt -> server that last got it
        self._wake = asyncio.Event()
        self._nonce = uuid.uuid4().hex[:12]
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._last_progress = 0.0

    async def run(self) -> GenerationResult:
        """Run until each sample has a response, a failure, or is unserved; return the result."""
        self._began = self._loop.time()
        for job in [job for job in self._fresh if job.partial.is_whole(job.request, self._sampling)]:
            self._fresh.remove(job)
            self._end(job, job.partial)
        try:
            while self._fresh or self._waiting or self._running:
                if not await self._advance():
                    break
                await self._sleep()
                self._collect()
        finally:
            await self._stop()
        for job in (*self._fresh, *self._waiting):
            self._end(job, None)
        self.result.seconds = self._loop.time() - self._began
        if self._progress is not None:
            self._progress(self.result.progress(self.total, self.result.seconds, ended=True))
        return self.result

    def interrupt(self) -> None:
        """Send no more requests, abort those in flight and keep their tokens."""
        self.result.interrupted = True
        self._wake.set()

    def replica_changed(self, replica: Replica, failure: RequestFailure | None = None) -> None:
        """Note that a server's state changed; `failure` ends its requests in flight."""
        for task, (job, where) in self._running.items() if failure is not None else ():
            if where is replica and job.evicted is None:
                job.evicted = failure
                task.cancel()
        self._wake.set()

    async def _advance(self) -> bool:
        """Send requests and start helpers, or end the generation; return whether it continues."""
        now = self._loop.time()
        if now >= self._deadline:
            await self._stop()
            for job in (*self._fresh, *self._waiting):
                what = f"the generation's deadline came first: {job.unanswered()}"
                self._end(job, RequestFailure("deadline", what))
            self._fresh.clear()
            self._waiting.clear()
            return False
        if self.result.interrupted:
            self._help("abort", self._abort_all)
            return bool(self._running)
        for replica in self._replicas:
            if replica.state is State.SUSPECT:
                probe = partial(replica.probe, version=self._version, mixed_versions=self._policy.mixed_versions)
                rid = f"{self._nonce}-probe-{replica.index}"
                self._help(f"probe {replica.index}", partial(probe, rid, timeout_s=self._policy.stall_timeout_s))
            silent = now - replica.last_sign_of_life >= self._policy.stall_timeout_s
            if replica.state is State.READY and replica.in_flight and silent:
                check = partial(replica.check, timeout_s=self._policy.stall_timeout_s, evict=self.replica_changed)
                self._help(f"check {replica.index}", check)
        self._dispatch()
        return bool(self._running) or bool(self._serving(State.READY, State.SUSPECT))

    def _serving(self, *states: State) -> list[Replica]:
        """Return the servers in these states whose weights may be sampled from."""
        return [
            replica
            for replica in self._replicas
            if replica.state in states and replica.holds(self._version, mixed_versions=self._policy.mixed_versions)
        ]

    def _dispatch(self) -> None:
        """Send requests while servers have capacity: first retries whose backoff is over, then fresh jobs."""
        now = self._loop.time()
        usable = self._serving(State.READY)
        if not usable:
            return
        for job in [job for job in self._waiting if job.not_before <= now]:
            if now >= job.expires:
                self._waiting.remove(job)
                what = f"no answer in {self._policy.request_timeout_s:g} s: {job.unanswered()}"
                self._end(job, RequestFailure("timeout", what))
                continue
            home = _least_loaded([replica for replica in usable if replica is not job.avoid] or usable, now)
            if home is not None:
                self._waiting.remove(job)
                self._send(job, home, now)
        while self._fresh:
            home = _least_loaded(usable, now)
            if home is None:
                return
            prompt = self._fresh[0].request.key[0]
            last = self._homes.get(prompt, home)
            if last in usable and (last.near or not home.near) and last.has_room(now):
                home = last if last.in_flight <= home.in_flight + _AFFINITY_SLACK else home
            self._homes[prompt] = home
            self._send(self._fresh.popleft(), home, now)

    def _send(self, job: Job, replica: Replica, now: float) -> None:
        if job.tries == 0:
            job.expires = now + self._policy.request_timeout_s
        self.result.requests += 1
        self.result.retries += job.tries > 0
        job.tries += 1
        job.evicted, job.asked, job.last_failure = None, replica, ""
        replica.sent(now)
        remaining = job.expires - now
        # A server that lost the request must not use up its time: the first try gets half, the next half of the rest.
        timeout_s = remaining / 2 if job.disruptions < self._policy.retries else remaining

        async def attempt() -> Sample | RequestFailure:
            try:
                return await replica.client.generate(
                    job.request,
                    self._sampling,
                    rid=f"{self._nonce}-{job.request.key[0]}-{job.request.key[1]}-{job.tries}",
                    version=self._version,
                    timeout_s=timeout_s,
                    partial=job.partial,
                    mixed_versions=self._policy.mixed_versions,
                    grace_s=min(self._policy.grace_s, timeout_s / 4),
                )
            except RequestFailure as failure:
                return failure

        task = self._loop.create_task(attempt())
        task.add_done_callback(lambda _: self._wake.set())
        self._running[task] = job, replica

    def _collect(self) -> None:
        """Process the finished tries, and raise the error of a helper that failed."""
        for task in [task for task in self._running if task.done()]:
            job, replica = self._running.pop(task)
            replica.in_flight -= 1
            outcome = job.evicted if task.cancelled() else task.result()
            if isinstance(outcome, Sample):
                self._answered(job, replica, outcome)
            elif outcome is not None:
                self._failed(job, replica, outcome)
            else:  # cancelled by the end of the generation: the sample keeps its tokens
                self._waiting.append(job)
        for name, helper in list(self._helpers.items()):
            if helper.done():
                if name != "abort":  # which runs once
                    del self._helpers[name]
                if not helper.cancelled():
                    helper.result()

    def _answered(self, job: Job, replica: Replica, sample: Sample) -> None:
        new = len(sample.token_ids) - len(job.partial.token_ids)
        self.result.tokens += new
        job.partial = sample
        if sample.finish != "partial":
            replica.answered(self._loop.time())
        if sample.is_whole(job.request, self._sampling):  # maybe aborted at its last token
            self._end(job, sample)
        elif self.result.interrupted:
            self._waiting.append(job)
        else:
            where = f"server {replica.client.endpoint.index}, sample {job.request.key}"
            self._failed(job, replica, RequestFailure("aborted", f"{where}: given up after {new} tokens"))

    def _failed(self, job: Job, replica: Replica, failure: RequestFailure) -> None:
        now = self._loop.time()
        job.last_failure = failure.what
        self.result.failed_tries[failure.kind] += 1
        if failure.partial is not None:
            self.result.tokens += len(failure.partial.token_ids) - len(job.partial.token_ids)
            job.partial = failure.partial
            if job.partial.is_whole(job.request, self._sampling):
                self._end(job, job.partial)
                return
        if failure.charge == "sample":
            job.bad_answers += 1
        else:
            job.disruptions += 1
        wait_s = job.backoff_s()
        replica.failed(now, failure, wait_s=wait_s)
        # Dying servers must not use up a sample's tries, and a sample that kills servers must not be retried for ever.
        spent = job.bad_answers > self._policy.retries or job.disruptions > self._policy.retries + len(self._replicas)
        if not self.result.interrupted and (spent or failure.kind in NOT_RETRIED or now >= job.expires):
            self._end(job, failure)
            return
        job.avoid = replica
        elsewhere = any(other is not replica for other in self._serving(State.READY))
        job.not_before = now if elsewhere and failure.charge != "sample" else now + wait_s
        self._waiting.append(job)

    def _end(self, job: Job, outcome: Sample | RequestFailure | None) -> None:
        """Record the one end of a sample: a whole response, a failure after its last try, or None for unserved."""
        key, result = job.request.key, self.result
        assert not any(key in ended for ended in (result.samples, result.failures, result.unserved)), (
            f"{key} ends twice"
        )
        if outcome is None:
            result.unserved[key] = job.partial
        elif isinstance(outcome, Sample):
            stopped = outcome.token_ids[-1] in self._sampling.stop_token_ids
            result.samples[key] = replace(outcome, finish="stop" if stopped else "length")
        else:
            result.failures[key] = Failure(outcome.kind, outcome.what, job.tries)
        now = self._loop.time()
        if self._progress is not None and now - self._last_progress >= _PROGRESS_S:
            self._last_progress = now
            self._progress(result.progress(self.total, now - self._began))

    # -- helpers: tasks next to the tries, at most one of each name -------------------------------------------------

    def _help(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._helpers:
            self._helpers[name] = self._loop.create_task(work())
            self._helpers[name].add_done_callback(lambda _: self._wake.set())

    async def _abort_all(self) -> None:
        """Abort all requests within `grace_s`; repeatedly, since an abort misses one that is still on its way."""
        end = self._loop.time() + self._policy.grace_s
        while self._running and self._loop.time() < end:
            asked = {replica for _, replica in self._running.values()}
            await asyncio.gather(*(replica.client.abort(timeout_s=self._policy.grace_s / 2) for replica in asked))
            await asyncio.sleep(0.05)
        for task in self._running:
            task.cancel()

    async def _sleep(self) -> None:
        """Wait for an event, the end of a backoff, a stall check or the deadline, whichever comes first."""
        now = self._loop.time()
        moments = [self._deadline, now + self._policy.stall_timeout_s / 4]
        moments += [job.not_before for job in self._waiting if job.not_before > now]
        moments += [replica.busy_until for replica in self._replicas if replica.busy_until > now]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.001, min(moments) - now))
        self._wake.clear()

    async def _stop(self) -> None:
        """Cancel all tries and helpers; the jobs of the tries wait again."""
        tasks: list[asyncio.Task[Any]] = [*self._running, *self._helpers.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        self._collect()


def _least_loaded(replicas: Sequence[Replica], now: float) -> Replica | None:
    """Return the server with the fewest requests, one of this rank's host if there are any; None if all are full."""
    near = [replica for replica in replicas if replica.near] or replicas
    free = [replica for replica in near if replica.has_room(now)]
    return min(free, key=lambda replica: (replica.in_flight, replica.dispatched, replica.index), default=None)
