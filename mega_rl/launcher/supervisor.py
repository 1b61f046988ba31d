"""The run as a whole: generations of ranks on its nodes, decided by the launcher of node 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.checkpoint.folders import complete, step_of
from mega_rl.checkpoint.previous import CHECKPOINTS
from mega_rl.errors import UserError
from mega_rl.launcher.health import RankHealth
from mega_rl.launcher.nodes import LocalNode, RunNode
from mega_rl.launcher.outcome import RunFailure, stop_code
from mega_rl.launcher.ranks import Assignment
from mega_rl.launcher.restarts import RestartPolicy
from mega_rl.launcher.signals import STOPPED, StopSignals
from mega_rl.launcher.watch import Due, GenerationWatch

log = logging.getLogger(__name__)

POLL_S = 0.05
OVERDUE_EVERY_S = 2.0


@dataclass(frozen=True)
class Conclusion:
    """End of a launch: its exit code, and the line that says why, empty where all is said or well."""

    code: int
    line: str = ""


class SavedRuns:
    """Checkpoints of a run folder, and which of them this launch has saved."""

    def __init__(self, run_dir: Path | None) -> None:
        self._root = None if run_dir is None else run_dir / CHECKPOINTS
        self._earlier = self._newest()

    def saved(self) -> str:
        """Return the name of the newest checkpoint if this launch has saved it, else an empty text."""
        newest = self._newest()
        return newest.partition("@")[0] if newest != self._earlier else ""

    def step(self) -> int:
        """Return the step of the newest checkpoint, 0 without any."""
        name = self._newest().partition("@")[0]
        return step_of(Path(name)) if name else 0

    def _newest(self) -> str:
        """Return name and time of the newest complete checkpoint: one of the same step may replace it."""
        if self._root is None:
            return ""
        try:
            folders = complete(self._root)
            return f"{folders[-1].name}@{folders[-1].stat().st_mtime_ns}" if folders else ""
        except (OSError, UserError):  # the ranks say what is wrong with the folder
            return ""


class Supervisor:
    """A run on its nodes, from the first start of its ranks to the last end."""

    def __init__(
        self,
        local: LocalNode,
        *,
        nproc: int,
        master_addr: str,
        health: RankHealth,
        saved: SavedRuns,
        restarts: RestartPolicy,
        stop: StopSignals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nproc: ranks of each node. master_addr: at which ranks find their store."""
        self._local, self._nproc, self._master_addr = local, nproc, master_addr
        self._health, self._saved, self._restarts = health, saved, restarts
        self._stop, self._clock = stop, clock
        self._nodes: Sequence[RunNode] = [local]
        self._stopped_by = 0  # the first signal to any launcher

    def run(self) -> Conclusion:
        """Run until the ranks have ended and are not to be started again."""
        generation = 0
        resume = ""
        while True:
            if self._hand_on(None):
                return Conclusion(128 + self._stopped_by)
            watch = self._run_generation(generation, resume)
            if self._hand_on(None):
                return self._stopped(watch)
            failure = watch.failure
            if failure is None:
                return Conclusion(0)
            cause = self._health.diagnose(watch.ends, world_size=self._world_size) or failure.cause
            refusal = self._refusal(failure)
            if refusal is not None:
                line = (
                    "" if failure.code in (UserError.exit_code, *STOPPED) else "; ".join(filter(None, (cause, refusal)))
                )
                return Conclusion(failure.code, line)
            name = self._saved.saved()
            resume = "auto" if name else ""
            log.warning(
                "%s; after step %d: restart %d of at most %d, from %s",
                *(cause, self._step(), self._restarts.restarts, self._restarts.max_restarts, name or "where it began"),
            )
            generation += 1

    @property
    def _world_size(self) -> int:
        return len(self._nodes) * self._nproc

    def _run_generation(self, generation: int, resume: str) -> GenerationWatch:
        """Start the ranks and return when all have ended."""
        self._health.clear()
        port = self._local.open_store(self._master_addr)
        for place, node in enumerate(self._nodes):
            node.start(
                Assignment(generation, place, len(self._nodes), self._nproc, self._master_addr, port, resume=resume)
            )
        watch = GenerationWatch(self._world_size, self._clock)
        next_look = self._clock() + OVERDUE_EVERY_S
        while not watch.over:
            self._hand_on(watch)
            self._take_news(watch)
            if watch.running and self._clock() >= next_look:
                next_look = self._clock() + OVERDUE_EVERY_S
                if (cause := self._health.overdue()) is not None:
                    watch.fail(cause)
            self._carry_out(watch.due())
            time.sleep(POLL_S)
        self._local.close_store()
        return watch

    def _take_news(self, watch: GenerationWatch) -> None:
        for node in self._nodes:
            news = node.poll()
            for end in news.ends:
                watch.add(end)

    def _carry_out(self, due: Due) -> None:
        for node in self._nodes:
            if due is Due.KILL:
                node.kill()
            elif due is Due.END:
                node.end(collect=True)

    def _hand_on(self, watch: GenerationWatch | None) -> bool:
        """Hand signals of the user on to the ranks, if they run; return whether any signal has come so far."""
        for number in self._stop.take():
            self._stopped_by = self._stopped_by or number
            if watch is not None:
                watch.stop()
                for node in self._nodes:
                    node.signal(number)
        return self._stopped_by != 0

    def _stopped(self, watch: GenerationWatch) -> Conclusion:
        code = stop_code(watch.ends, self._stopped_by)
        failure = watch.failure
        is_said = code in (0, UserError.exit_code, 128 + self._stopped_by, *STOPPED)
        return Conclusion(code, "" if failure is None or is_said else failure.cause)

    def _refusal(self, failure: RunFailure) -> str | None:
        step = self._step()
        return self._restarts.refusal(failure, step=step, progressed=self._progressed(step))

    def _step(self) -> int:
        recorded = self._health.step()
        return self._saved.step() if recorded is None else recorded

    def _progressed(self, step: int) -> bool:
        return bool(self._saved.saved())
