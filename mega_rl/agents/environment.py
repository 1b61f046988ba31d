"""Environments: programs around a policy whose turns become trajectories.

An environment is a user's class with `async def run(policy, prompt, trajectory)`. All of a rank's trajectories run on
one event loop in a thread, each at its own pace, and the rollout engine takes the turns that they ask for. A
trajectory ends exactly once: its environment returns, a limit ends it, or it fails with a kind of `FAILURES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from mega_rl.agents.trajectory import Branch, LimitReached, Trajectory, Turn
from mega_rl.config.user_files import place_in_users_code
from mega_rl.errors import RunError
from mega_rl.processes import Running
from mega_rl.protocols import RolloutEngine
from mega_rl.tracking import progress
from mega_rl.types import ENDS, Draws, Prompt

log = logging.getLogger(__name__)

GATHER_S = 0.02  # wait for turns that are about to be asked for, so that they are sampled together
TICK_S = 0.2
GRACE_S = 5.0  # for an environment to end after its cancellation
NAMED = 5  # failures in the log of one generation
MOST_BLOCKED = 3  # environments of one generation that block the event loop
Failure = Literal["error", "timeout", "turn", "lost"]  # "turn": the engine gave no answer; "lost": its servers died
FAILURES: tuple[Failure, ...] = ("error", "timeout", "turn")


@dataclass(kw_only=True)
class Environment:
    """Base of a user's environment; its fields and those of the user's dataclass are settings."""

    timeout_s: float = 600.0  # seconds that a trajectory may take, without those in which the policy samples
    max_turns: int = 64  # turns that a trajectory may have; one more ends it, as "turns"
    max_failed_share: float = 0.1  # share of a generation's trajectories that may fail; more failures end the run

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        """Play one trajectory: await turns, give tokens to read, set `trajectory.end` if need be."""
        raise NotImplementedError


class TurnRequest(NamedTuple):
    """A turn to sample, a function of weights, tokens, the run's seed and step, and `key`."""

    token_ids: tuple[int, ...]
    key: tuple[int, int, int]  # prompt, sample, number of the turn: branch << 16 | turns of the branch before
    limit: int


Answer = Turn | Failure
Asked = tuple[TurnRequest, Future[Answer]]


class TurnSampling(NamedTuple):
    """Sampling of a generation's turns, as in `protocols.RolloutEngine.generate`."""

    seed: tuple[int, ...]
    greedy: bool = False
    draws: Draws | None = None


@dataclass(eq=False)
class TurnQueue:
    """Turns that trajectories ask for, from the thread that plays them to the one that samples."""

    first: int = 0  # the number of the first prompt, in keys
    is_alive: Callable[[], bool] = lambda: True  # False: no more will come
    playing: int = 0  # trajectories that have not ended
    ended: set[tuple[int, int]] = field(default_factory=set)  # prompt and sample of those that have
    _open: dict[Future[Answer], tuple[int, int]] = field(default_factory=dict)  # turns and their trajectories
    _queue: queue.SimpleQueue[Asked | None] = field(default_factory=queue.SimpleQueue)

    def put(self, request: TurnRequest) -> Future[Answer]:
        """Ask for a turn."""
        answer: Future[Answer] = Future()
        prompt, sample, number = request.key
        self._open[answer] = (self.first + prompt, sample)
        answer.add_done_callback(self._open.pop)
        self._queue.put((request._replace(key=(self.first + prompt, sample, number)), answer))
        return answer

    def end(self, trajectory: Trajectory) -> None:
        """Note that a trajectory asks for no more turns, and cancel those that it has left."""
        self.playing -= 1
        key = (self.first + trajectory.prompt_index, trajectory.sample_index)
        self.ended.add(key)
        for answer, own in [*self._open.items()]:  # a copy: the sampling thread takes some out
            if own == key:
                answer.cancel()

    def close(self) -> None:
        """Let `take` return None after the turns that were asked for."""
        self._queue.put(None)

    def take(self, wait_s: float = TICK_S, *, gather_s: float = 0.0) -> list[Asked] | None:
        """Return turns that were asked for, by key; None: no more will come.

        wait_s: longest wait for the first. gather_s: longest wait for more, while a trajectory may ask; without
        `wait_s` also for the first.
        """
        taken = list[Asked]()
        if not self.is_alive():
            return None
        end, gathers = time.monotonic() + (wait_s or gather_s), not wait_s
        while True:
            left = 0.0 if gathers and self.playing <= len(self._open) else end - time.monotonic()
            if left <= 0.0 and self._queue.empty():
                return sorted(taken, key=_key)
            with contextlib.suppress(queue.Empty):
                asked = self._queue.get(timeout=max(min(left, GATHER_S / 10) if gathers else left, 0.0))
                if asked is None:
                    self.close()  # for the next call
                    return sorted(taken, key=_key) or None
                if not asked[1].cancelled():
                    end, gathers = end if gathers else time.monotonic() + gather_s, True
                    taken.append(asked)


def _key(asked: Asked) -> tuple[int, int, int]:
    return asked[0].key


def give_answer(turn: Future[Answer], answer: Answer) -> None:
    """Answer a turn, unless nobody waits for it any more."""
    if turn.set_running_or_notify_cancel():
        turn.set_result(answer)


SampleTurns = Callable[[TurnQueue], None]  # returns once no more will come


def in_batches(asked: TurnQueue, sample: Callable[[Sequence[TurnRequest]], Sequence[Answer]]) -> None:
    """Answer turns in batches: those that are asked for during one batch are the next."""
    while (taken := asked.take(gather_s=GATHER_S)) is not None:
        answers = sample([request for request, _ in taken]) if taken else ()
        for (_, future), answer in zip(taken, answers, strict=True):
            give_answer(future, answer)


class Turns(Protocol):
    """Taker of the turns that trajectories ask for."""

    def put(self, request: TurnRequest) -> Future[Answer]:
        """Ask for a turn."""

    def end(self, trajectory: Trajectory) -> None:
        """Note that a trajectory asks for no more turns, and cancel those that it has left."""


class TurnEngine(RolloutEngine, Protocol):
    """A rollout engine that samples single turns with the weights last published to it."""

    def turns(self, asked: TurnQueue, how: TurnSampling) -> None:
        """Answer each turn as soon as it ends, until no more will come; no collective."""

    def settle(self, lost: Callable[[], int], again: Callable[[], None]) -> object:
        """Bring lost servers back and call `again` while any rank has `lost` turns; collective."""


@dataclass(eq=False)
class Policy:
    """The policy, as one trajectory's environment sees it."""

    trajectory: Trajectory
    max_turns: int
    vocab_size: int
    ask: Callable[[TurnRequest], Awaitable[Answer]]
    failure: Failure | None = None  # why a turn has no answer
    _began: float = field(default_factory=time.monotonic)
    _waited: float = 0.0  # in turns that have ended
    _waiting: int = 0  # turns that are sampled now
    _since: float = 0.0  # begin of that wait

    async def turn(self, branch: Branch | None = None, *, limit: int = 0) -> Turn:
        """Sample the next turn of a branch (the newest), append it and return it.

        limit: most tokens; 0 for as many as there is room for. Raises LimitReached if tokens or turns are used up.
        """
        branch = branch or self.trajectory.branch
        number = sum(isinstance(part, Turn) for part in branch.parts)
        trajectory = self.trajectory
        if trajectory.end is None and branch.room < 1:
            trajectory.end = "length"
        if trajectory.end is None and len(trajectory.turns) >= self.max_turns:
            trajectory.end = "turns"
        if trajectory.end is not None:
            raise LimitReached(trajectory.end)
        context = branch.token_ids
        if max(context) >= self.vocab_size:
            raise ValueError(f"token id {max(context)} is outside the model's vocabulary of {self.vocab_size}")
        key = (trajectory.prompt_index, trajectory.sample_index, branch.number << 16 | number)
        request = TurnRequest(context, key, min(limit or branch.room, branch.room))
        self._since = self._since if self._waiting else time.monotonic()
        self._waiting += 1
        try:
            answer = await self.ask(request)
        finally:
            self._waiting -= 1
            self._waited += 0.0 if self._waiting else time.monotonic() - self._since
        if not isinstance(answer, Turn):
            self.failure = answer
            raise LimitReached("error")
        branch.add(answer)
        if not answer.stopped and branch.room < 1:
            trajectory.end = "length"
        return answer

    def own_seconds(self) -> float:
        """Return the seconds of the environment's own work so far, without waits for turns."""
        now = time.monotonic()
        return now - self._began - self._waited - (now - self._since if self._waiting else 0.0)


class Played(NamedTuple):
    """A trajectory that has ended."""

    trajectory: Trajectory
    failure: Failure | None
    what: str  # the failure in words
    seconds: float  # the environment's own work took


@dataclass(eq=False)
class _Play:
    """Trajectories on one event loop, and the turns that they wait for."""

    environment: Any
    vocab_size: int
    asked: Turns
    outcomes: dict[int, Played | None]  # outcome by place; None: it has not ended
    ended: Callable[[Played], Played]  # see `Runner.run`
    tick: float = field(default_factory=time.monotonic)  # when the loop was last seen alive
    abandoned: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    thread: int = 0  # which runs the loop

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Play on this thread until all have ended, and their tasks, too."""
        self.thread = threading.get_ident()
        try:
            self.loop.run_until_complete(self._all(trajectories))
            self.tick = time.monotonic()
            if left := asyncio.all_tasks(self.loop):
                self.loop.run_until_complete(asyncio.wait(left, timeout=GRACE_S))
        finally:
            self.loop.close()

    @property
    def stalled(self) -> bool:
        """Return whether the loop is blocked for longer than a trajectory may take."""
        return time.monotonic() - self.tick > self.environment.timeout_s + GRACE_S

    def is_alive(self) -> bool:
        """Report progress; return whether the loop is not blocked."""
        ended = sum(one is not None for one in self.outcomes.values())
        progress.report(ended, len(self.outcomes), unit="trajectories")
        return not self.stalled

    async def _all(self, trajectories: Sequence[Trajectory]) -> None:
        tasks = [
            asyncio.create_task(self._one(place, one), name=str(place))
            for place, one in enumerate(trajectories)
            if self.outcomes[place] is None
        ]
        while tasks and not self.abandoned and not all(task.done() for task in tasks):
            self.tick = time.monotonic()
            await asyncio.wait(tasks, timeout=TICK_S)
        for task in tasks:
            task.cancel()

    async def _one(self, place: int, trajectory: Trajectory) -> None:
        environment = self.environment
        policy = Policy(trajectory, environment.max_turns, self.vocab_size, self._ask)
        run = asyncio.create_task(environment.run(policy, trajectory.prompt, trajectory), name=str(place))
        try:
            while not run.done() and (left := environment.timeout_s - policy.own_seconds()) > 0:
                await asyncio.wait({run}, timeout=max(left, 0.01))
            late = not run.done()
        finally:
            run.cancel()
        await asyncio.wait({run}, timeout=GRACE_S if late else None)
        self.asked.end(trajectory)
        if not self.abandoned:
            self.outcomes[place] = self.ended(self._outcome(policy, run, late=late))

    def _outcome(self, policy: Policy, run: asyncio.Task[None], *, late: bool) -> Played:
        trajectory, error = policy.trajectory, None
        if run.done() and not run.cancelled():
            error = run.exception()
        failure, what = policy.failure, "the rollout engine gave no answer to a turn"
        limits = isinstance(error, LimitReached) or (
            isinstance(error, BaseExceptionGroup) and error.split(LimitReached)[1] is None  # of a task group
        )
        if failure is None and late:
            failure, what = "timeout", f"took more than timeout_s={self.environment.timeout_s:g} s of its own"
        elif failure is None and run.cancelled():
            failure, what = "error", "was cancelled by what it awaited"
        elif failure is None and error is not None and not limits:
            place = place_in_users_code(error) or type(self.environment).__name__
            failure, what = "error", f"raised {type(error).__name__}: {str(error)[:300]} ({place})"
        elif failure is None and trajectory.end not in (None, *ENDS):
            failure, what = "error", f"set trajectory.end={trajectory.end!r}; legal: {', '.join(ENDS)}"
        elif failure is None and not trajectory.turns:
            failure, what = "error", "ended without a turn of the policy"
        trajectory.end = "error" if failure else trajectory.ended()
        return Played(trajectory, failure, what if failure else "", policy.own_seconds())

    async def _ask(self, request: TurnRequest) -> Answer:
        if self.abandoned:
            raise asyncio.CancelledError
        return await asyncio.wrap_future(self.asked.put(request))


@dataclass(eq=False)
class LivePlay(_Play):
    """Trajectories that come while others run, on a thread that ends when it is `abandoned`."""

    playing: dict[int, Trajectory] = field(default_factory=dict)  # trajectory by place
    _begun: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.running = Running(lambda: self(()), name="environments")

    def begin(self, trajectory: Trajectory) -> None:
        """Play a trajectory."""
        place, self._begun = self._begun, self._begun + 1
        self.playing[place], self.outcomes[place] = trajectory, None

        def begin() -> None:
            task = self.loop.create_task(self._one(place, trajectory), name=str(place))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.loop.call_soon_threadsafe(begin)

    async def _all(self, _: Sequence[Trajectory]) -> None:
        while not self.abandoned:
            self.tick = time.monotonic()
            await asyncio.sleep(TICK_S)
        for task in self._tasks:
            task.cancel()

    async def _one(self, place: int, trajectory: Trajectory) -> None:
        await super()._one(place, trajectory)
        del self.outcomes[place], self.playing[place]


@dataclass(frozen=True)
class Runner:
    """Runs the environments of a rank's trajectories; no collective."""

    environment: Any  # an `Environment`, or a class of the same attributes
    name: str  # the setting that chose it
    vocab_size: int

    def run(
        self, trajectories: Sequence[Trajectory], sample: SampleTurns, *,
        first: int = 0, ended: Callable[[Played], Played] = lambda played: played,
    ) -> list[Played]:  # fmt: skip
        """Return the outcome of each trajectory; `sample` is called on this thread. first: as of `TurnQueue`.

        ended: called on the event loop with each outcome, while others still run; returns the outcome that counts.

        An environment that blocks the loop longer than its deadline fails; the others then run again on another loop,
        from their start. Raises RunError if that does not help.
        """
        outcomes: dict[int, Played | None] = dict.fromkeys(range(len(trajectories)))
        for _ in range(MOST_BLOCKED + 1):
            fresh = [replace(one, branches=[], end=None) for one in trajectories]
            asked = TurnQueue(first, playing=[*outcomes.values()].count(None))
            play = _Play(self.environment, self.vocab_size, asked, outcomes, ended)
            asked.is_alive = play.is_alive
            if self._drive(play, fresh, asked, sample):
                return [one for one in outcomes.values() if one is not None]
            place, what = self.blocked(play)
            if place is None or outcomes[place] is not None:
                break
            outcomes = {**outcomes, place: self.failed(fresh[place], what)}  # the blocked thread keeps the old ones
        raise RunError(f"{self.name}: environments {what}")

    def live(self, asked: Turns, ended: Callable[[Played], Played]) -> LivePlay:
        """Return a loop for trajectories that come while others run. ended: as of `run`."""
        return LivePlay(self.environment, self.vocab_size, asked, {}, ended)

    def blocked(self, play: _Play) -> tuple[int | None, str]:
        """Return which trajectory blocks a stalled loop, if that is known, and the fault in words."""
        place, where = _blocked(play)
        what = f"blocked the event loop for more than timeout_s={self.environment.timeout_s:g} s{where}; use await"
        log.error("%s: %s", self.name, what)
        return place, what

    def failed(self, blocking: Trajectory, what: str) -> Played:
        """Return the outcome of a trajectory that blocks its loop, which ends it when it can."""
        blocking.end = "error"
        return Played(replace(blocking, branches=[]), "timeout", what, self.environment.timeout_s)

    def _drive(self, play: _Play, trajectories: Sequence[Trajectory], asked: TurnQueue, sample: SampleTurns) -> bool:
        """Sample turns until all trajectories have ended; return False if one blocks the loop."""

        def work() -> None:
            try:
                play(trajectories)
            finally:
                asked.close()

        thread = Running(work, name="environments")
        try:
            sample(asked)
            if play.stalled:
                return None not in play.outcomes.values()
            thread.wait(GRACE_S)
            thread.outcome()
            return True
        finally:
            play.abandoned = True


def _blocked(play: _Play) -> tuple[int | None, str]:
    """Return which trajectory holds the event loop, if that is known, and at which line."""
    task = asyncio.current_task(play.loop)
    name = "" if task is None else task.get_name()
    frame = sys._current_frames().get(play.thread)
    lines = [] if frame is None else traceback.extract_stack(frame)
    own = next((line for line in reversed(lines) if "/asyncio/" not in line.filename), None)
    where = "" if own is None else f" at {own.filename}:{own.lineno} in {own.name}"
    return (int(name) if name.isdigit() else None), where
