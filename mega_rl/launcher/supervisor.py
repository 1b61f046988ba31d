"""The run as a whole: generations of ranks on its nodes, decided by the launcher of node 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from mega_rl.errors import UserError, name_of_signal
from mega_rl.launcher.health import RankHealth
from mega_rl.launcher.nodes.fleet import Fleet
from mega_rl.launcher.outcome import Conclusion, RunFailure, stop_code
from mega_rl.launcher.ranks import Assignment
from mega_rl.launcher.restarts import RestartPolicy
from mega_rl.launcher.signals import STOPPED, StopSignals
from mega_rl.launcher.steps import RunProgress
from mega_rl.launcher.watch import Due, GenerationWatch

log = logging.getLogger(__name__)

POLL_S = 0.05
OVERDUE_EVERY_S = 2.0


@dataclass
class Generation:
    """One start of the ranks: its watch, and the nodes whose launchers were lost in it, each with the cause."""

    number: int
    watch: GenerationWatch
    lost: dict[int, str]


class Supervisor:
    """Supervisor of a run on its nodes, from the first start of its ranks to the last end."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        nproc: int,
        master_addr: str,
        health: RankHealth,
        progress: RunProgress,
        restarts: RestartPolicy,
        stop: StopSignals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nproc: ranks of each node. master_addr: at which ranks find their store."""
        self._fleet, self._nproc, self._master_addr = fleet, nproc, master_addr
        self._health, self._progress, self._restarts = health, progress, restarts
        self._stop, self._clock = stop, clock
        self._stopped_by = 0  # the first signal to any launcher

    def run(self) -> Conclusion:
        """Run until the ranks have ended and are not to be started again."""
        number, resume = 0, ""
        while True:
            if self._hand_on(None):
                return Conclusion(128 + self._stopped_by)
            generation = self._run_generation(number, resume)
            conclusion = self._conclude(generation)
            if conclusion is not None:
                return conclusion
            number, resume = number + 1, "auto" if self._progress.is_saved else ""

    def _run_generation(self, number: int, resume: str) -> Generation:
        """Start the ranks and return when all have ended."""
        nodes = self._fleet.nodes
        self._health.clear()
        port = self._fleet.local.open_store(self._master_addr)
        for place, node in enumerate(nodes):
            node.start(Assignment(number, place, len(nodes), self._nproc, self._master_addr, port, resume))
        generation = Generation(number, GenerationWatch(len(nodes) * self._nproc, self._clock), {})
        watch, next_look = generation.watch, self._clock() + OVERDUE_EVERY_S
        while not watch.over:
            self._hand_on(watch)
            self._take_news(generation)
            if watch.running and self._clock() >= next_look:
                next_look = self._clock() + OVERDUE_EVERY_S
                if (cause := self._health.overdue()) is not None:
                    watch.fail(cause)
            self._carry_out(watch)
            self._fleet.welcome()
            time.sleep(POLL_S)
        self._fleet.local.close_store()
        return generation

    def _take_news(self, generation: Generation) -> None:
        for place, node in enumerate(self._fleet.nodes):
            news = node.poll()
            for end in news.ends:
                generation.watch.add(end)
            if news.stopped_by:
                self._stopped_by = self._stopped_by or news.stopped_by
                generation.watch.stop()
            if news.lost:
                generation.lost[node.number] = news.lost
                generation.watch.lose(range(place * self._nproc, (place + 1) * self._nproc), news.lost)

    def _carry_out(self, watch: GenerationWatch) -> None:
        due, failure = watch.due(), watch.failure
        may_go_on = failure is not None and failure.may_go_on and not self._stopped_by
        # This node, which may take ten seconds to write stacks, comes after the others.
        for node in reversed(self._fleet.nodes):
            if due is Due.KILL:
                node.kill()
            elif due is Due.END:
                node.end(collect=may_go_on)

    def _hand_on(self, watch: GenerationWatch | None) -> bool:
        """Hand signals of the user on to the ranks, if they run; return whether any signal has come so far."""
        for number in self._stop.take():
            self._stopped_by = self._stopped_by or number
            if watch is not None:
                watch.stop()
                for node in self._fleet.nodes:
                    node.signal(number)
        return self._stopped_by != 0

    def _conclude(self, generation: Generation) -> Conclusion | None:
        """Return how the run has ended, None when its ranks are to be started again, which is logged."""
        watch = generation.watch
        failure = watch.failure
        if self._hand_on(None):
            code = stop_code(watch.ends, self._stopped_by)
            if code in STOPPED and not any(end.code in (0, UserError.exit_code, *STOPPED) for end in watch.ends):
                return Conclusion(code, f"stopped by {name_of_signal(code - 128)} before the ranks could save")
            is_said = code in (0, UserError.exit_code, 128 + self._stopped_by, *STOPPED)
            return Conclusion(code, "" if failure is None or is_said else failure.cause)
        if failure is None:
            return Conclusion(0)
        world_size = len(self._fleet.nodes) * self._nproc
        diagnosis = self._health.diagnose(watch.ends, world_size=world_size)
        cause = diagnosis or failure.cause
        if not failure.may_go_on:
            return Conclusion(failure.code)
        refusal = self._change_nodes(generation, failure)
        if refusal is None:
            refusal = self._restarts.refusal(failure, step=self._progress.step, progressed=self._progress.is_made)
        if refusal == "" and diagnosis == "":
            return Conclusion(failure.code)  # the rank's own line is the last one
        if refusal is not None:
            return Conclusion(failure.code, "; ".join(filter(None, (cause, refusal))))
        log.warning(
            "%s; after step %d: restart %d of at most %d, from %s",
            *(cause, self._progress.step, self._restarts.restarts, self._restarts.max_restarts),
            self._progress.next_start,
        )
        return None

    def _change_nodes(self, generation: Generation, failure: RunFailure) -> str | None:
        """Replace nodes that are lost or fail again; return why the run cannot go on, None if it can."""
        if generation.watch.left:
            ranks = ", ".join(map(str, generation.watch.left))
            return f"rank {ranks} does not end though it was killed, which is the kernel's to do; look at that node"
        if not self._restarts.left:
            return None  # for the policy to say
        for number, cause in generation.lost.items():
            if not self._fleet.replace(number, cause):
                return "no spare is there to take its place"
            self._restarts.forgive()
        if not generation.lost and failure.rank is not None:
            node = self._fleet.nodes[failure.rank // self._nproc]
            if self._fleet.blame(node.number):
                self._restarts.forgive()
        return None
