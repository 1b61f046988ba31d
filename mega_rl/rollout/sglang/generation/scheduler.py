"""One generation over several replicas: each sample ends exactly once, in bounded time, whatever fails.

Everything here runs on one event loop and a sample has at most one try in flight, so an answer that comes late, twice
or to another's question has nobody to go to. Imports no torch.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from mega_rl.rollout.sglang.generation.failures import KINDS, BadAnswer, NoAnswer, RequestFailure
from mega_rl.rollout.sglang.generation.jobs import Job, Policy, closed, is_whole
from mega_rl.rollout.sglang.generation.replicas import Replica
from mega_rl.rollout.sglang.generation.results import FleetResult, Progress, State
from mega_rl.rollout.sglang.generation.samples import Failure, Key, Sample, Sampling

_PROGRESS_S = 0.2
# Samples of one prompt share its prefix where they meet, so they stay together up to this much imbalance.
_AFFINITY_SLACK = 8


class SampleScheduler:
    """State of one `ServerRouter.start`."""

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
        self.result = FleetResult()
        self._replicas = replicas
        self._sampling = sampling
        self._version = version
        self._deadline = deadline  # loop time
        self._policy = policy
        self._progress = progress
        self._total = len(jobs)
        self._fresh = deque(jobs)
        self._waiting: list[Job] = []  # for another try
        self._running: dict[asyncio.Task[Sample | RequestFailure], tuple[Job, Replica]] = {}
        self._over: list[asyncio.Task[Sample | RequestFailure]] = []  # of _running
        self._helpers: dict[str, asyncio.Task[None]] = {}  # probes and checks of replicas, and the abort of all
        self._homes: dict[int, Replica] = {}  # prompt -> replica that last got it
        self._wake = asyncio.Event()
        self._interrupted = False
        self._nonce = uuid.uuid4().hex[:12]
        self._loop = asyncio.get_running_loop()
        self._last_progress = 0.0

    async def run(self) -> FleetResult:
        """Until each sample has ended."""
        began = self._began = self._loop.time()
        for replica in self._replicas:
            replica.begin()
        for _ in range(len(self._fresh)):
            job = self._fresh.popleft()
            if is_whole(job.partial, self._sampling):
                self._end(job, closed(job.partial, self._sampling))
            else:
                self._fresh.append(job)
        try:
            while self._fresh or self._waiting or self._running:
                if self._loop.time() >= self._deadline:
                    await self._stop()
                    self._fail_all("deadline", "the generation's deadline came first")
                    break
                if self._interrupted:
                    self._start_helper("abort", self._abort_all)
                    if not self._running:
                        break
                else:
                    self._update_replica_health()
                    self._dispatch()
                    if not self._running and not self._can_recover():
                        break
                await self._sleep()
                self._collect()
        finally:
            await self._stop()
        for job in (*self._fresh, *self._waiting):
            assert self._is_open(job.request.key), f"sample {job.request.key} ended twice"
            self.result.unserved[job.request.key] = job.partial
        self.result.interrupted = self._interrupted
        self.result.stats.seconds = self._loop.time() - began
        self.result.stats.replicas = [replica.report() for replica in self._replicas]
        self._tell(last=True)
        return self.result

    def interrupt(self) -> None:
        """Send no more requests, end those in flight and keep what they have."""
        self._interrupted = True
        self._wake.set()

    def replica_changed(self, replica: Replica, failure: NoAnswer | None = None) -> None:
        """The caller changed its state; `failure` ends what is in flight there."""
        if failure is not None:
            self._evict(replica, failure)
        self._wake.set()

    # Routing.

    def _usable(self) -> list[Replica]:
        mixed = self._policy.mixed_versions
        return [replica for replica in self._replicas if replica.may_serve(self._version, mixed_versions=mixed)]

    def _can_recover(self) -> bool:
        """Whether some replica serves, or may again without the caller's help."""
        mixed = self._policy.mixed_versions
        return any(
            replica.state in (State.READY, State.SUSPECT) and replica.holds(self._version, mixed_versions=mixed)
            for replica in self._replicas
        )

    def _dispatch(self) -> None:
        """Send what may go now: those that were sent before first, and never more than the replicas' capacity."""
        now = self._loop.time()
        usable = self._usable()
        if not usable:
            return
        for job in [job for job in self._waiting if job.not_before <= now]:
            if now >= job.expires:
                self._waiting.remove(job)
                self._fail(job, "timeout", f"sample {job.request.key}: {self._policy.request_timeout_s:g} s are over")
                continue
            others = [replica for replica in usable if replica is not job.avoid] or usable
            home = _least_loaded(others, now)
            if home is not None:
                self._waiting.remove(job)
                self._send(job, home, now)
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
        job.evicted = None
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
        # A server that lost the request should not take all its time: the first try gets half, the next half of that.
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
        """Deal with the tries that are over, and raise what a helper died of."""
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
            else:  # the generation ends, and the sample with what it had
                self._waiting.append(job)
        for name, helper in list(self._helpers.items()):
            if helper.done() and name != "abort":  # which happens once
                del self._helpers[name]
            if helper.done() and not helper.cancelled():
                helper.result()

    def _answered(self, job: Job, replica: Replica, sample: Sample) -> None:
        new = len(sample.token_ids) - len(job.partial.token_ids)
        self.result.stats.tokens += new
        if sample.finish != "partial":
            replica.answered(self._loop.time(), new)
            self._end(job, sample)
            return
        job.partial = sample
        if is_whole(sample, self._sampling):  # aborted at its last token
            self._end(job, closed(sample, self._sampling))
        elif self._interrupted:
            self._waiting.append(job)
        else:
            where = f"server {replica.client.endpoint.index}, sample {job.request.key}"
            self._failed(job, replica, BadAnswer("aborted", f"{where}: given up after {new} tokens"))

    def _failed(self, job: Job, replica: Replica, failure: RequestFailure) -> None:
        now = self._loop.time()
        kind = KINDS[failure.kind]
        self.result.stats.failed_tries[failure.kind] += 1
        if failure.partial is not None:
            self.result.stats.tokens += len(failure.partial.token_ids) - len(job.partial.token_ids)
            job.partial = failure.partial
            if is_whole(job.partial, self._sampling):
                self._end(job, closed(job.partial, self._sampling))
                return
        if kind.charged == "sample":
            job.bad_answers += 1
        else:
            job.disruptions += 1
        wait_s = job.backoff_s()
        replica.failed(now, failure, wait_s=wait_s)
        # A server's death should not use up the tries of a sample, nor a sample that kills servers live for ever.
        spent = job.bad_answers > self._policy.retries or job.disruptions > self._policy.retries + len(self._replicas)
        if not self._interrupted and (spent or not kind.retried or now >= job.expires):
            self._fail(job, failure.kind, failure.what)
            return
        job.avoid = replica
        elsewhere = any(other is not replica for other in self._usable())
        job.not_before = now if elsewhere and kind.charged != "sample" else now + wait_s
        self._waiting.append(job)

    # The end of a sample.

    def _is_open(self, key: Key) -> bool:
        return not any(key in ended for ended in (self.result.samples, self.result.failures, self.result.unserved))

    def _end(self, job: Job, sample: Sample) -> None:
        assert self._is_open(job.request.key), f"sample {job.request.key} ended twice"
        self.result.samples[job.request.key] = sample
        self._tell()

    def _fail(self, job: Job, kind: str, message: str) -> None:
        assert self._is_open(job.request.key), f"sample {job.request.key} ended twice"
        self.result.failures[job.request.key] = Failure(kind, message, job.tries)
        self._tell()

    def _fail_all(self, kind: str, message: str) -> None:
        for job in (*self._fresh, *self._waiting):
            self._fail(job, kind, f"sample {job.request.key}: {message}")
        self._fresh.clear()
        self._waiting.clear()

    def _tell(self, *, last: bool = False) -> None:
        now = self._loop.time()
        if self._progress is None or not (last or now - self._last_progress >= _PROGRESS_S):
            return
        self._last_progress = now
        tokens, seconds = self.result.stats.tokens, max(now - self._began, 1e-9)
        done = len(self.result.samples) + len(self.result.failures)
        self._progress(Progress(done, self._total, tokens, tokens / seconds, ended=last))

    # Replicas.

    def _update_replica_health(self) -> None:
        now = self._loop.time()
        for replica in self._replicas:
            if replica.state is State.SUSPECT:
                self._start_helper(f"probe {replica.index}", self._probe, replica)
            silent = now - replica.last_sign_of_life >= self._policy.stall_timeout_s
            if replica.state is State.READY and replica.in_flight and silent:
                self._start_helper(f"check {replica.index}", self._check, replica)

    async def _probe(self, replica: Replica) -> None:
        await replica.probe(
            f"{self._nonce}-probe-{replica.index}",
            version=self._version,
            mixed_versions=self._policy.mixed_versions,
            timeout_s=self._policy.stall_timeout_s,
            changed=self._wake.set,
        )

    async def _check(self, replica: Replica) -> None:
        """Requests wait and no answer has come for a while: is anything generated there?"""
        asked = self._loop.time()
        try:
            await replica.client.check_alive(timeout_s=self._policy.stall_timeout_s)
        except NoAnswer as failure:
            if replica.state is not State.READY or replica.last_sign_of_life > asked:
                return
            replica.move(State.SUSPECT, failure.what)
            where = f"server {replica.client.endpoint.index}"
            self._evict(replica, NoAnswer("stalled", f"{where}: no sign of life with requests in flight: {failure}"))
        else:
            replica.last_sign_of_life = self._loop.time()

    def _evict(self, replica: Replica, failure: RequestFailure) -> None:
        for task, (job, where) in self._running.items():
            if where is replica and job.evicted is None:
                job.evicted = failure
                task.cancel()

    async def _abort_all(self) -> None:
        """Until nothing is in flight or time is up. Repeated, since a request on its way to the scheduler escapes."""
        end = self._loop.time() + self._policy.grace_s
        while self._running and self._loop.time() < end:
            asked = {replica for _, replica in self._running.values()}
            await asyncio.gather(*(replica.client.abort(timeout_s=self._policy.grace_s / 2) for replica in asked))
            await asyncio.sleep(0.05)
        for task in self._running:
            task.cancel()

    # Waiting and stopping.

    def _start_helper(self, name: str, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        if name not in self._helpers:
            task = self._helpers[name] = self._loop.create_task(work(*arguments))
            task.add_done_callback(lambda _: self._wake.set())

    async def _sleep(self) -> None:
        """Until something happens, a backoff ends, a stall is due or the deadline comes."""
        now = self._loop.time()
        moments = [self._deadline, now + self._policy.stall_timeout_s / 4]
        moments += [job.not_before for job in self._waiting if job.not_before > now]
        moments += [replica.busy_until for replica in self._replicas if replica.busy_until > now]
        waiter = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait({waiter}, timeout=max(0.001, min(moments) - now))
        waiter.cancel()
        self._wake.clear()

    async def _stop(self) -> None:
        """End all tries and helpers; the samples of the tries go back to the waiting."""
        tasks: list[asyncio.Task[Any]] = [*self._running, *self._helpers.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        self._collect()


def _least_loaded(replicas: Sequence[Replica], now: float) -> Replica | None:
    """With the fewest requests in flight, then the fewest ever; None when all are full."""
    free = [replica for replica in replicas if replica.has_room(now)]
    return min(free, key=lambda replica: (replica.in_flight, replica.dispatched, replica.index), default=None)
