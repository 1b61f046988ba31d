"""One generation over several replicas: each sample ends exactly once, in bounded time, whatever fails.

All of it runs on one event loop, and a sample has at most one try in flight: a late, duplicate or misdirected answer
matches no try and is dropped. Imports no torch.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mega_rl.rollout.sglang.generation.failures import KINDS, BadAnswer, NoAnswer, RequestFailure
from mega_rl.rollout.sglang.generation.health import Helpers, ReplicaHealth
from mega_rl.rollout.sglang.generation.jobs import Job, Policy, closed, is_whole
from mega_rl.rollout.sglang.generation.outcomes import Outcomes
from mega_rl.rollout.sglang.generation.replicas import Replica
from mega_rl.rollout.sglang.generation.results import FleetResult, Progress
from mega_rl.rollout.sglang.generation.samples import Sample, Sampling

# Samples of one prompt share its prefix where they meet, so they stay together up to this much imbalance.
_AFFINITY_SLACK = 8


class SampleScheduler:
    """Scheduler of one generation, that of one `ServerRouter.start`."""

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
        self._outcomes = Outcomes(len(jobs), progress)
        self.result = self._outcomes.result
        self._replicas = replicas
        self._sampling = sampling
        self._version = version
        self._deadline = deadline  # loop time
        self._policy = policy
        self._fresh = deque(jobs)
        self._waiting: list[Job] = []  # for another try
        self._running: dict[asyncio.Task[Sample | RequestFailure], tuple[Job, Replica]] = {}
        self._over: list[asyncio.Task[Sample | RequestFailure]] = []  # of _running
        self._homes: dict[int, Replica] = {}  # prompt -> replica that last got it
        self._wake = asyncio.Event()
        self._interrupted = False
        self._nonce = uuid.uuid4().hex[:12]
        self._loop = asyncio.get_running_loop()
        self._helpers = Helpers(self._wake.set)  # probes and checks of replicas, and the abort of all requests
        self._health = ReplicaHealth(
            replicas,
            version=version,
            policy=policy,
            helpers=self._helpers,
            nonce=self._nonce,
            changed=self._wake.set,
            evict=self._evict,
        )

    async def run(self) -> FleetResult:
        """Run until each sample has a response, a failure, or is unserved; return the result."""
        self._outcomes.begin()
        for replica in self._replicas:
            replica.begin()
        for _ in range(len(self._fresh)):
            job = self._fresh.popleft()
            if is_whole(job.partial, job.request, self._sampling):
                self._outcomes.end(job, closed(job.partial, self._sampling))
            else:
                self._fresh.append(job)
        try:
            while self._fresh or self._waiting or self._running:
                if not await self._advance():
                    break
                await self._sleep()
                self._collect()
        finally:
            await self._stop()
        for job in (*self._fresh, *self._waiting):
            self._outcomes.leave(job)
        self.result.stats.replicas = [replica.report() for replica in self._replicas]
        self._outcomes.finish(interrupted=self._interrupted)
        return self.result

    def interrupt(self) -> None:
        """Send no more requests, abort those in flight and keep their tokens."""
        self._interrupted = True
        self._wake.set()

    def replica_changed(self, replica: Replica, failure: NoAnswer | None = None) -> None:
        """Note that the caller changed a replica's state; `failure` ends its requests in flight."""
        if failure is not None:
            self._evict(replica, failure)
        self._wake.set()

    async def _advance(self) -> bool:
        """Send requests and start helpers, or end what must end; return whether the generation goes on."""
        if self._loop.time() >= self._deadline:
            await self._stop()
            for job in (*self._fresh, *self._waiting):
                self._outcomes.fail(job, "deadline", f"the generation's deadline came first: {job.unanswered()}")
            self._fresh.clear()
            self._waiting.clear()
            return False
        if self._interrupted:
            self._helpers.start("abort", self._abort_all, once=True)
            return bool(self._running)
        self._health.update()
        self._dispatch()
        return bool(self._running) or self._health.can_recover()

    # Routing.

    def _dispatch(self) -> None:
        """Send what the replicas have capacity for: retries whose backoff is over first, then fresh jobs."""
        now = self._loop.time()
        usable = self._health.usable()
        if not usable:
            return
        for job in [job for job in self._waiting if job.not_before <= now]:
            if now >= job.expires:
                self._waiting.remove(job)
                seconds = f"{self._policy.request_timeout_s:g} s"
                self._outcomes.fail(job, "timeout", f"no answer in {seconds}: {job.unanswered()}")
                continue
            others = _nearest([replica for replica in usable if replica is not job.avoid] or usable)
            home = _least_loaded(others, now)
            if home is not None:
                self._waiting.remove(job)
                self._send(job, home, now)
        usable = _nearest(usable)
        while self._fresh:
            home = _least_loaded(usable, now)
            if home is None:
                return
            prompt = self._fresh[0].request.key[0]
            last = self._homes.get(prompt)
            if last in usable and last.has_room(now) and last.in_flight <= home.in_flight + _AFFINITY_SLACK:
                home = last
            self._homes[prompt] = home
            self._send(self._fresh.popleft(), home, now)

    def _send(self, job: Job, replica: Replica, now: float) -> None:
        if job.tries == 0:
            job.expires = now + self._policy.request_timeout_s
        self.result.stats.requests += 1
        self.result.stats.retries += job.tries > 0
        job.tries += 1
        job.evicted, job.asked, job.last_failure = None, replica, ""
        replica.sent(now)
        task = self._loop.create_task(self._try(job, replica))
        self._running[task] = job, replica
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Sample | RequestFailure]) -> None:
        self._over.append(task)
        self._wake.set()

    # One try.

    async def _try(self, job: Job, replica: Replica) -> Sample | RequestFailure:
        now = self._loop.time()
        remaining = job.expires - now
        # A server that lost the request must not use up its time: the first try gets half, the next half of the rest.
        timeout_s = remaining / 2 if job.disruptions < self._policy.retries else remaining
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

    def _collect(self) -> None:
        """Process the finished tries, and raise the error of a helper that failed."""
        over, self._over = self._over, []
        for task in over:
            job, replica = self._running.pop(task)
            replica.in_flight -= 1
            if not task.cancelled():
                outcome: Sample | RequestFailure | None = task.result()
            else:
                outcome = job.evicted
            if isinstance(outcome, Sample):
                self._answered(job, replica, outcome)
            elif outcome is not None:
                self._failed(job, replica, outcome)
            else:  # cancelled by the end of the generation: the sample keeps its tokens
                self._waiting.append(job)
        self._helpers.collect()

    def _answered(self, job: Job, replica: Replica, sample: Sample) -> None:
        new = len(sample.token_ids) - len(job.partial.token_ids)
        self.result.stats.tokens += new
        if sample.finish != "partial":
            replica.answered(self._loop.time(), new)
            self._outcomes.end(job, sample)
            return
        job.partial = sample
        if is_whole(sample, job.request, self._sampling):  # aborted at its last token
            self._outcomes.end(job, closed(sample, self._sampling))
        elif self._interrupted:
            self._waiting.append(job)
        else:
            where = f"server {replica.client.endpoint.index}, sample {job.request.key}"
            self._failed(job, replica, BadAnswer("aborted", f"{where}: given up after {new} tokens"))

    def _failed(self, job: Job, replica: Replica, failure: RequestFailure) -> None:
        now = self._loop.time()
        kind = KINDS[failure.kind]
        job.last_failure = failure.what
        self.result.stats.failed_tries[failure.kind] += 1
        if failure.partial is not None:
            self.result.stats.tokens += len(failure.partial.token_ids) - len(job.partial.token_ids)
            job.partial = failure.partial
            if is_whole(job.partial, job.request, self._sampling):
                self._outcomes.end(job, closed(job.partial, self._sampling))
                return
        if kind.charged == "sample":
            job.bad_answers += 1
        else:
            job.disruptions += 1
        wait_s = job.backoff_s()
        replica.failed(now, failure, wait_s=wait_s)
        # Dying servers must not use up a sample's tries, and a sample that kills servers must not be retried for ever.
        spent = job.bad_answers > self._policy.retries or job.disruptions > self._policy.retries + len(self._replicas)
        if not self._interrupted and (spent or not kind.retried or now >= job.expires):
            self._outcomes.fail(job, failure.kind, failure.what)
            return
        job.avoid = replica
        elsewhere = any(other is not replica for other in self._health.usable())
        job.not_before = now if elsewhere and kind.charged != "sample" else now + wait_s
        self._waiting.append(job)

    def _evict(self, replica: Replica, failure: RequestFailure) -> None:
        for task, (job, where) in self._running.items():
            if where is replica and job.evicted is None:
                job.evicted = failure
                task.cancel()

    async def _abort_all(self) -> None:
        """Abort all requests within `grace_s`; repeatedly, since an abort misses one that is still on its way."""
        end = self._loop.time() + self._policy.grace_s
        while self._running and self._loop.time() < end:
            asked = {replica for _, replica in self._running.values()}
            await asyncio.gather(*(replica.client.abort(timeout_s=self._policy.grace_s / 2) for replica in asked))
            await asyncio.sleep(0.05)
        for task in self._running:
            task.cancel()

    # Waiting and stopping.

    async def _sleep(self) -> None:
        """Wait for an event, the end of a backoff, a stall check or the deadline, whichever comes first."""
        now = self._loop.time()
        moments = [self._deadline, now + self._policy.stall_timeout_s / 4]
        moments += [job.not_before for job in self._waiting if job.not_before > now]
        moments += [replica.busy_until for replica in self._replicas if replica.busy_until > now]
        waiter = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait({waiter}, timeout=max(0.001, min(moments) - now))
        waiter.cancel()
        self._wake.clear()

    async def _stop(self) -> None:
        """Cancel all tries and helpers; the jobs of the tries wait again."""
        tasks: list[asyncio.Task[Any]] = [*self._running, *self._helpers.tasks()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        self._collect()


def _nearest(replicas: list[Replica]) -> list[Replica]:
    """Return the replicas on this rank's host, all where none is there."""
    return [replica for replica in replicas if replica.near] or replicas


def _least_loaded(replicas: Sequence[Replica], now: float) -> Replica | None:
    """Return the replica with the fewest requests in flight, then the fewest ever; None when all are full."""
    free = [replica for replica in replicas if replica.has_room(now)]
    return min(free, key=lambda replica: (replica.in_flight, replica.dispatched, replica.index), default=None)
