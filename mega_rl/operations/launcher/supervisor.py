"""Supervise a run from node 0: start ranks, find why they ended, decide on restarts."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from mega_rl.errors import RunError, UserError, name_of_signal
from mega_rl.operations.launcher.nodes import END, KILL, POLL_S, SIGNAL, START, LocalNode, RunNode
from mega_rl.operations.launcher.ranks import INNOCENT, SIGNALS, STOPPED, Assignment, RankEnd, StopSignals, rank_store
from mega_rl.operations.launcher.run_health import RunHealth, RunProgress
from mega_rl.operations.observations import in_words
from mega_rl.tracking.health.records import LOST_PEER_CODE, SAVE_S, UNSAID, ending

log = logging.getLogger(__name__)

# Long runs mostly end by hardware, drivers and networks: restarting from the newest checkpoint is what their owner
# would do, hours later. A fault of the program comes back at the same step and is not tried a third time.
DEFAULT_RESTARTS = 3
SETTLE_S = 0.5  # after a first failure: others that end in this time may explain it
INNOCENT_S = 10.0  # after a rank lost another: that rank may still close its files, or let rank 0 speak first
KILL_S = 60.0  # after the order to end, which nodes enforce themselves once they have written stacks
GIVE_UP_S = 60.0  # after the kill: the kernel may not end a process in a file system that does not answer
OVERDUE_EVERY_S = 2.0


@dataclass(frozen=True)
class Conclusion:
    """End of a launch: exit code and reason, empty if already said."""

    code: int
    line: str = ""


@dataclass(frozen=True)
class RunFailure:
    """Cause of a run's failure in one line."""

    cause: str
    code: int  # exit code of the run
    said: bool = False  # the rank has reported it on standard error

    @property
    def may_go_on(self) -> bool:
        """Return whether the run may be tried again: not after a mistake or a stop."""
        return self.code not in (UserError.exit_code, *STOPPED)


def failure_of(ends: Sequence[RankEnd], *, world_size: int) -> RunFailure | None:
    """Return why a run has failed, from its ranks' ends in their order; None without failure."""
    failures = [end for end in ends if end.code]
    mistakes = [end for end in failures if end.code == UserError.exit_code]
    own = [end for end in failures if end.code not in INNOCENT]
    first = next(iter((*mistakes, *own, *failures)), None)
    if first is None:
        return None
    who = f"rank {first.rank} (process {first.pid})"
    if first.code in INNOCENT:
        missing = sorted({*range(world_size)} - {end.rank for end in ends})
        others = f"{in_words(missing)}, which had not ended" if missing else "another rank, which says no more"
        lost = first.code == LOST_PEER_CODE
        what = "lost the connection to" if lost else "waited trainer.timeout_s in a collective for"
        return RunFailure(f"{who} {what} {others}", RunError.exit_code)
    perhaps = ": perhaps the machine is out of memory" if first.code == -signal.SIGKILL else ""
    return RunFailure(f"{who} {ending(first.code)}{perhaps}", _exit_code(first), said=0 < first.code < UNSAID)


def stop_code(ends: Sequence[RankEnd], number: int) -> int:
    """Return a stopped run's exit code: 128 + signal, unless a rank failed otherwise."""
    codes = [_exit_code(end) for end in ends]
    others = [code for code in codes if code not in (0, 128 + number, 128 + signal.SIGKILL, *STOPPED, *INNOCENT)]
    return 0 if ends and not any(codes) else next(iter(others), 128 + number)


def _exit_code(end: RankEnd) -> int:
    """Return the exit code of a run that ends as this rank has."""
    return RunError.exit_code if end.code >= UNSAID else end.code if end.code >= 0 else 128 - end.code


class GenerationState:
    """State machine of one set of ranks: who has ended, and when to end the others."""

    def __init__(self, world_size: int, clock: Callable[[], float]) -> None:
        self.has_lost_node = False
        self._world_size, self._clock = world_size, clock
        self._ends: list[RankEnd] = []
        self._gone: set[int] = set()  # ranks that have ended, or whose node is lost
        self._counted: int | None = None  # number of ends before the order to end; later ends are its effect
        self._failure: RunFailure | None = None  # not told by the end of a rank
        self._end_at = self._kill_at = self._give_up_at = math.inf
        self._is_stopped = False

    @property
    def ends(self) -> Sequence[RankEnd]:
        """Return the ends that were not ordered."""
        return self._ends[: self._counted]

    @property
    def over(self) -> bool:
        """Return whether every rank has ended, or does not end though it was killed."""
        return len(self._gone) == self._world_size or self._clock() >= self._give_up_at

    @property
    def left(self) -> Sequence[int]:
        """Return the ranks that have not ended."""
        return sorted({*range(self._world_size)} - self._gone)

    @property
    def running(self) -> bool:
        """Return whether nothing has happened that ends the run."""
        return self._end_at == self._kill_at == math.inf

    @property
    def failure(self) -> RunFailure | None:
        """Return why the run has failed; None if it has not."""
        return self._failure or failure_of(self.ends, world_size=self._world_size)

    def add(self, end: RankEnd) -> None:
        """Record a rank's end."""
        self._ends.append(end)
        self._gone.add(end.rank)
        if end.code in STOPPED:  # all ranks stop after the same step, even if only one got the signal
            self.stop()
        elif end.code:
            # Ranks that are stopped while they start die of the signal, and others then of their absence.
            innocent = (0, *INNOCENT, *((-number for number in SIGNALS) if self._is_stopped else ()))
            settle_s = INNOCENT_S if all(one.code in innocent for one in self._ends) else SETTLE_S
            self._end_within(0.0 if end.code == UserError.exit_code else settle_s)

    def lose(self, ranks: Sequence[int], cause: str) -> None:
        """Record that the launcher of these ranks is gone."""
        self.has_lost_node = True
        if len(self._gone.union(ranks)) > len(self._gone):
            self._gone.update(ranks)
            self.fail(cause)

    def fail(self, cause: str) -> None:
        """Record a failure that is not the end of a rank."""
        if self._counted is None and self._failure is None and self.failure is None:
            self._failure = RunFailure(cause, RunError.exit_code)
        self._end_within(0.0)

    def stop(self) -> None:
        """Record that ranks were asked to end their step and save: they have SAVE_S seconds."""
        self._is_stopped = True
        self._kill_at = min(self._kill_at, self._clock() + SAVE_S)

    def due(self) -> str:
        """Return the order that is due for the ranks, END or KILL, each once; else empty."""
        now = self._clock()
        due = KILL if now >= self._kill_at else END if now >= self._end_at else ""
        if due and self._counted is None:
            self._counted = len(self._ends)
        if due == KILL:
            self._kill_at, self._give_up_at = math.inf, now + GIVE_UP_S
        elif due == END:
            self._end_at, self._kill_at = math.inf, now + KILL_S
        return due

    def _end_within(self, seconds: float) -> None:
        if self._counted is None:
            self._end_at = min(self._end_at, self._clock() + seconds)


@dataclass
class RestartPolicy:
    """Decides whether a failed run starts again. max_restarts: as the user allows."""

    max_restarts: int
    restarts: int = 0
    last_step: int | None = None  # steps done at the fault before

    def refusal(self, failure: RunFailure, *, step: int, progressed: bool) -> str | None:
        """Return why the run does not start again, in words; None counts a restart.

        step: steps done when it failed, as far as known. progressed: this launch has done some.
        """
        if not failure.may_go_on or not self.max_restarts:
            return ""
        if failure.said and not progressed:
            return ""  # a program that says why it cannot begin would say so again
        if self.last_step == step:
            return f"again after step {step}, where it failed before the restart: given up"
        if self.restarts == self.max_restarts:
            return f"after step {step}: --max-restarts={self.max_restarts} are used up"
        self.last_step = step
        self.restarts += 1
        return None


@dataclass
class Supervisor:
    """Supervisor of a run, from the first start of its ranks to the last end."""

    local: LocalNode
    nodes: Sequence[RunNode]  # all, in their order
    nproc: int  # ranks of each node
    master_addr: str  # address of the ranks' store
    health: RunHealth
    progress: RunProgress
    restarts: RestartPolicy
    stop: StopSignals
    stopped_by: int = 0  # the first signal to any launcher

    def run(self) -> Conclusion:
        """Run until the ranks have ended and do not start again."""
        number, resume = 0, ""
        while True:
            if self._pass_on(None):
                return Conclusion(128 + self.stopped_by)
            conclusion = self._conclude(self._run_generation(number, resume))
            if conclusion is not None:
                return conclusion
            number, resume = number + 1, "auto" if self.progress.is_saved else ""

    def _run_generation(self, number: int, resume: str) -> GenerationState:
        """Start the ranks and return when all have ended."""
        size = len(self.nodes)
        self.health.clear()
        with rank_store(self.master_addr) as (port, self.local.lifeline):
            for place, node in enumerate(self.nodes):
                assignment = Assignment(number, place, size, self.nproc, self.master_addr, port, resume)
                node.order(START, **asdict(assignment))
            state = GenerationState(size * self.nproc, time.monotonic)
            self._watch(state)
        return state

    def _watch(self, state: GenerationState) -> None:
        """Pass on signals, news and orders until all ranks have ended."""
        next_look = time.monotonic() + OVERDUE_EVERY_S
        while not state.over:
            self._pass_on(state)
            self._take_news(state)
            if state.running and time.monotonic() >= next_look:
                next_look = time.monotonic() + OVERDUE_EVERY_S
                if (cause := self.health.overdue()) is not None:
                    state.fail(cause)
            self._carry_out(state)
            time.sleep(POLL_S)

    def _take_news(self, state: GenerationState) -> None:
        for place, node in enumerate(self.nodes):
            ends, stopped_by, lost = node.poll()
            for end in ends:
                state.add(end)
            if stopped_by:
                self.stopped_by = self.stopped_by or stopped_by
                state.stop()
            if lost:
                state.lose(range(place * self.nproc, (place + 1) * self.nproc), lost)

    def _carry_out(self, state: GenerationState) -> None:
        due, failure = state.due(), state.failure
        may_go_on = failure is not None and failure.may_go_on and not self.stopped_by
        # This node comes last: it may take ten seconds to write stacks.
        for node in reversed(self.nodes if due else ()):
            node.order(due, collect=may_go_on)

    def _pass_on(self, state: GenerationState | None) -> bool:
        """Pass the user's signals on to running ranks; return whether any has come so far."""
        for number in self.stop.take():
            self.stopped_by = self.stopped_by or number
            if state is not None:
                state.stop()
                for node in self.nodes:
                    node.order(SIGNAL, number=number)
        return self.stopped_by != 0

    def _conclude(self, state: GenerationState) -> Conclusion | None:
        """Return how the run has ended; None if its ranks start again, which it logs."""
        failure = state.failure
        if self._pass_on(None):
            code = stop_code(state.ends, self.stopped_by)
            if code in STOPPED and not any(end.code in (0, UserError.exit_code, *STOPPED) for end in state.ends):
                return Conclusion(code, f"stopped by {name_of_signal(code - 128)} before the ranks could save")
            is_said = code in (0, UserError.exit_code, 128 + self.stopped_by, *STOPPED)
            return Conclusion(code, "" if failure is None or is_said else failure.cause)
        if failure is None:
            return Conclusion(0)
        diagnosis = self.health.diagnose(state.ends, world_size=len(self.nodes) * self.nproc)
        cause = diagnosis or failure.cause
        if not failure.may_go_on:
            return Conclusion(failure.code)
        if state.has_lost_node:
            refusal: str | None = "start the run again, on other nodes if this one is broken"
        elif state.left:
            refusal = f"{in_words(state.left)} did not end when killed; look at that node"
        else:
            refusal = self.restarts.refusal(failure, step=self.progress.step, progressed=self.progress.is_made)
        if refusal == "" and diagnosis == "":
            return Conclusion(failure.code)  # the rank's line is the last one
        if refusal is not None:
            return Conclusion(failure.code, "; ".join(filter(None, (cause, refusal))))
        log.warning(
            "%s; after step %d: restart %d of at most %d, from %s",
            *(cause, self.progress.step, self.restarts.restarts, self.restarts.max_restarts),
            self.progress.next_start,
        )
        return None
