"""Outcomes of a generation's samples, each recorded exactly once, and its progress. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mega_rl.rollout.sglang.generation.jobs import Job
from mega_rl.rollout.sglang.generation.results import FleetResult, Progress
from mega_rl.rollout.sglang.generation.samples import Failure, Sample

_PROGRESS_S = 0.2


class Outcomes:
    """Record of one generation's samples: ended, failed or unserved."""

    def __init__(self, total: int, progress: Callable[[Progress], None] | None) -> None:
        self.result = FleetResult()
        self._total = total
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._last_progress = 0.0

    def begin(self) -> None:
        """Start the clock of the generation."""
        self._began = self._loop.time()

    def end(self, job: Job, sample: Sample) -> None:
        """Record a whole response."""
        self._assert_open(job)
        self.result.samples[job.request.key] = sample
        self.report()

    def fail(self, job: Job, kind: str, message: str) -> None:
        """Record a failure after the last try."""
        self._assert_open(job)
        self.result.failures[job.request.key] = Failure(kind, message, job.tries)
        self.report()

    def leave(self, job: Job) -> None:
        """Record a sample as unserved, with its tokens so far."""
        self._assert_open(job)
        self.result.unserved[job.request.key] = job.partial

    def finish(self, *, interrupted: bool) -> None:
        """Record the end of the generation, and report it."""
        self.result.interrupted = interrupted
        self.result.stats.seconds = self._loop.time() - self._began
        self.report(last=True)

    def report(self, *, last: bool = False) -> None:
        """Report progress, at most every `_PROGRESS_S` seconds and at the end."""
        now = self._loop.time()
        if self._progress is None or not (last or now - self._last_progress >= _PROGRESS_S):
            return
        self._last_progress = now
        tokens, seconds = self.result.stats.tokens, max(now - self._began, 1e-9)
        done = len(self.result.samples) + len(self.result.failures)
        self._progress(Progress(done, self._total, tokens, tokens / seconds, ended=last))

    def _assert_open(self, job: Job) -> None:
        key = job.request.key
        ended = any(key in each for each in (self.result.samples, self.result.failures, self.result.unserved))
        assert not ended, f"sample {key} ended twice"
