"""Supervise a run on all nodes from node 0: start generations of ranks, watch them, decide on restarts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from mega_rl.errors import UserError, name_of_signal
from mega_rl.operations.launcher.nodes import POLL_S, SIGNAL, START, Fleet
from mega_rl.operations.launcher.outcome import Conclusion, GenerationState, RestartPolicy, RunFailure, stop_code
from mega_rl.operations.launcher.ranks import Assignment
from mega_rl.operations.launcher.run_health import RunHealth, RunProgress
from mega_rl.operations.launcher.signals import STOPPED, StopSignals

log = logging.getLogger(__name__)

OVERDUE_EVERY_S = 2.0


class Supervisor:
    """Supervisor of a run, from the first start of its ranks to the last end."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        nproc: int,
        master_addr: str,
        health: RunHealth,
        progress: RunProgress,
        restarts: RestartPolicy,
        stop: StopSignals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nproc: ranks of each node. master_addr: address of the ranks' store."""
        self._fleet, self._nproc, self._master_addr = fleet, nproc, master_addr
        self._health, self._progress, self._restarts = health, progress, restarts
        self._stop, self._clock = stop, clock
        self._stopped_by = 0  # the first signal to any launcher

    def run(self) -> Conclusion:
        """Run until the ranks have ended and do not start again."""
        number, resume = 0, ""
        while True:
            if self._pass_on(None):
                return Conclusion(128 + self._stopped_by)
            conclusion = self._conclude(self._run_generation(number, resume))
            if conclusion is not None:
                return conclusion
            number, resume = number + 1, "auto" if self._progress.is_saved else ""

    def _run_generation(self, number: int, resume: str) -> GenerationState:
        """Start the ranks and return when all have ended."""
        nodes = self._fleet.nodes
        self._health.clear()
        port = self._fleet.local.open_store(self._master_addr)
        for place, node in enumerate(nodes):
            assignment = Assignment(number, place, len(nodes), self._nproc, self._master_addr, port, resume)
            node.order(START, **asdict(assignment))
        state, next_look = GenerationState(len(nodes) * self._nproc, self._clock), self._clock() + OVERDUE_EVERY_S
        while not state.over:
            self._pass_on(state)
            self._take_news(state)
            if state.running and self._clock() >= next_look:
                next_look = self._clock() + OVERDUE_EVERY_S
                if (cause := self._health.overdue()) is not None:
                    state.fail(cause)
            self._carry_out(state)
            self._fleet.welcome()
            time.sleep(POLL_S)
        self._fleet.local.close_store()
        return state

    def _take_news(self, state: GenerationState) -> None:
        for place, node in enumerate(self._fleet.nodes):
            news = node.poll()
            for end in news.ends:
                state.add(end)
            if news.stopped_by:
                self._stopped_by = self._stopped_by or news.stopped_by
                state.stop()
            if news.lost:
                state.lost[node.number] = news.lost
                state.lose(range(place * self._nproc, (place + 1) * self._nproc), news.lost)

    def _carry_out(self, state: GenerationState) -> None:
        due, failure = state.due(), state.failure
        may_go_on = failure is not None and failure.may_go_on and not self._stopped_by
        # This node comes last: it may take ten seconds to write stacks.
        for node in reversed(self._fleet.nodes if due else ()):
            node.order(due, collect=may_go_on)

    def _pass_on(self, state: GenerationState | None) -> bool:
        """Pass the user's signals on to the ranks, if they run; return whether any signal has come so far."""
        for number in self._stop.take():
            self._stopped_by = self._stopped_by or number
            if state is not None:
                state.stop()
                for node in self._fleet.nodes:
                    node.order(SIGNAL, number=number)
        return self._stopped_by != 0

    def _conclude(self, state: GenerationState) -> Conclusion | None:
        """Return how the run has ended; None if its ranks start again, which it logs."""
        failure = state.failure
        if self._pass_on(None):
            code = stop_code(state.ends, self._stopped_by)
            if code in STOPPED and not any(end.code in (0, UserError.exit_code, *STOPPED) for end in state.ends):
                return Conclusion(code, f"stopped by {name_of_signal(code - 128)} before the ranks could save")
            is_said = code in (0, UserError.exit_code, 128 + self._stopped_by, *STOPPED)
            return Conclusion(code, "" if failure is None or is_said else failure.cause)
        if failure is None:
            return Conclusion(0)
        world_size = len(self._fleet.nodes) * self._nproc
        diagnosis = self._health.diagnose(state.ends, world_size=world_size)
        cause = diagnosis or failure.cause
        if not failure.may_go_on:
            return Conclusion(failure.code)
        refusal = self._change_nodes(state, failure)
        if refusal is None:
            refusal = self._restarts.refusal(failure, step=self._progress.step, progressed=self._progress.is_made)
        if refusal == "" and diagnosis == "":
            return Conclusion(failure.code)  # the rank's line is the last one
        if refusal is not None:
            return Conclusion(failure.code, "; ".join(filter(None, (cause, refusal))))
        log.warning(
            "%s; after step %d: restart %d of at most %d, from %s",
            *(cause, self._progress.step, self._restarts.restarts, self._restarts.max_restarts),
            self._progress.next_start,
        )
        return None

    def _change_nodes(self, state: GenerationState, failure: RunFailure) -> str | None:
        """Replace nodes that are lost or fail again; return why the run cannot continue, None if it can."""
        if state.left:
            ranks = ", ".join(map(str, state.left))
            return f"rank {ranks} does not end though it was killed, which is the kernel's to do; look at that node"
        if not self._restarts.left:
            return None  # the policy gives the reason
        for number, cause in state.lost.items():
            if not self._fleet.replace(number, cause):
                return "no spare is there to take its place"
            self._restarts.last_step = None
        if not state.lost and failure.rank is not None:
            node = self._fleet.nodes[failure.rank // self._nproc]
            if self._fleet.blame(node.number):
                self._restarts.last_step = None
        return None
