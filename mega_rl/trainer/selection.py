"""Groups of samples that wait for their step, and which of them a step takes.

A group is the samples of one prompt. Its ticket is the number of the prompt's draw since the run began. Every rank
makes the same choice, from numbers that are equal on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_rl.protocols import Flow, RankState, RolloutSource
from mega_rl.tracking.records.reader import REDRAWN
from mega_rl.trainer.rows import Dropped, Samples, columns_of
from mega_rl.types import Arrived, Draw, JsonObject, Prompt, RewardParts, Rewards, Rollout


@dataclass
class AtOnce:
    """Flow over a source that generates a whole draw while training waits."""

    source: RolloutSource
    _draws: list[tuple[Draw, Mapping[int, Prompt]]] = field(default_factory=list, init=False)

    @property
    def waiting(self) -> Mapping[int, int]:
        return {ticket: 0 for _, prompts in self._draws for ticket in prompts}

    def add(self, draw: Draw, prompts: Mapping[int, Prompt]) -> None:
        self._draws.append((draw, prompts))

    def arrived(self, *, wait: bool) -> Arrived | None:
        if not wait:
            return None
        draw, prompts = self._draws.pop(0)
        rollout = self.source.generate(list(prompts.values()), step=draw.word)
        return Arrived(list(prompts), [0] * len(prompts), rollout, None)

    def go_on(self) -> None:
        """Do nothing: nothing is in progress while a step trains."""


@dataclass
class StepVersions:
    """Versions of the weights with which steps began, which turn a version into an age in steps.

    Versions count publishes. A step may publish several times; weights that it published before its last update are as
    old as those it began with.
    """

    limit: int = 0  # largest age of a token: the steps that generation runs ahead
    current: Callable[[], int] = lambda: 0  # version last published
    begun: list[int] = field(default_factory=list)  # of the last limit + 1 steps; 0: unknown, or before the run

    def begin(self) -> None:
        """Begin a step with the weights last published."""
        self.restore([*self.begun, self.current()])

    def restore(self, begun: Sequence[int]) -> None:
        """Take over the versions with which steps began, in order."""
        self.begun = [*([0] * self.limit), *begun][-self.limit - 1 :]

    def first(self, later: int = 0) -> int:
        """Return the oldest version that a step may train, `later` steps after the present one."""
        return [*self.begun, self.begun[-1] + 1][later]

    def ages(self, versions: Tensor) -> Tensor:
        """Return the ages of versions in steps, int64 in their shape; below 0: newer than the step's weights."""
        begun = torch.tensor(self.begun or [self.current()])
        ages = len(begun) - torch.bucketize(versions.contiguous(), begun, right=True)
        return torch.where(versions > begun[-1], begun[-1] - versions, ages)


def choose(tickets: Tensor, oldest: Tensor, *, waiting: Tensor, count: int, versions: StepVersions) -> Tensor | None:
    """Return [count] places of the groups that a step takes, by ticket; None: it waits.

    It takes those that will be too old first, and by ticket among them. It waits for groups in progress where, without
    them, more groups would be left than the steps until they are too old can take: else short responses would win.

    Args:
        tickets: [G] int64, complete groups that may train.
        oldest: [G] int64, version of each one's oldest token.
        waiting: [W] int64, the same of the groups in progress.
    """
    if len(tickets) < count:
        return None
    for later in range(versions.limit + 1):  # steps after this one
        first = versions.first(later + 1)
        complete, alive = int((oldest < first).sum()), int((oldest < first).sum() + (waiting < first).sum())
        if complete < min(count, alive - later * count):
            return None
    by_ticket = tickets.argsort()
    chosen = by_ticket[oldest[by_ticket].argsort(stable=True)][:count]
    return chosen[tickets[chosen].argsort()]


def _split(mask: Tensor) -> tuple[Tensor, Tensor]:
    return mask.nonzero().flatten(), (~mask).nonzero().flatten()


@dataclass
class Pool:
    """Complete groups that no step has taken; the rows are this replica's, all else is equal on all ranks."""

    samples: Samples | None = None
    oldest: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # [G]
    usable: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # [G] they may train
    means: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))  # of `group_means`

    def add(self, samples: Samples, oldest: Sequence[int], usable: Tensor, means: Tensor, *, count: int) -> None:
        """Add scored groups; count: of a step. Rows that cannot train in any case are dropped."""
        self.oldest = torch.cat([self.oldest, torch.tensor(oldest, dtype=torch.int64)])
        self.usable, self.means = torch.cat([self.usable, usable]), torch.cat([self.means, means])
        self.samples = samples if self.samples is None else self.samples.join(samples)
        needed = self.usable.index_fill(0, self.filled(count), True)
        self.samples = self.samples.select(needed[self.samples.rollout.prompt_index].nonzero().flatten())

    def choose(self, waiting: Sequence[int], count: int, versions: StepVersions) -> Tensor | None:
        """Return the places of the groups that a step takes, or None, as `choose`."""
        if self.samples is None:
            return None
        usable, others = self.usable.nonzero().flatten(), torch.tensor(waiting, dtype=torch.int64)
        tickets = self.samples.tickets[usable]
        chosen = choose(tickets, self.oldest[usable], waiting=others, count=count, versions=versions)
        return None if chosen is None else usable[chosen]

    def filled(self, count: int) -> Tensor:
        """Return the places of the usable groups, filled with the first others; by ticket."""
        assert self.samples is not None
        by_ticket = self.samples.tickets.argsort()
        chosen = torch.cat([by_ticket[part] for part in _split(self.usable[by_ticket])])[:count]
        return chosen[self.samples.tickets[chosen].argsort()]

    def take(self, chosen: Tensor, versions: StepVersions) -> tuple[Samples, list[Dropped]]:
        """Remove and return the chosen groups, and drop those that no later step may take."""
        assert self.samples is not None
        taken, left = self.samples.only(chosen), torch.ones(len(self.oldest), dtype=torch.bool)
        left[chosen] = False
        return taken, self.keep(left & self.usable & (self.oldest >= versions.first(1)), left, limit=versions.limit)

    def keep(self, kept: Tensor, left: Tensor, *, limit: int) -> list[Dropped]:
        """Remove all groups but `kept`, [G] bool; return those of them that are `left`, [G] bool, as dropped."""
        if self.samples is None:
            return []
        dropped = [
            Dropped(int(self.samples.tickets[place]), reason, *self.means[place].tolist())
            for place in (left & ~kept).nonzero().flatten().tolist()
            for reason in ["equal" if not self.usable[place] else "expired" if limit else "surplus"]
        ]
        places = kept.nonzero().flatten()
        self.samples = self.samples.only(places) if len(places) else None
        self.oldest, self.usable, self.means = self.oldest[places], self.usable[places], self.means[places]
        return dropped

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return the groups as tensors, without their prompts; empty without a group."""
        if self.samples is None:
            return {}
        rewards = self.samples.rewards
        parts = None if rewards.parts is None else [rewards.parts.names, rewards.parts.weights]
        tables = {"oldest": self.oldest, "usable": self.usable, "means": self.means, "tickets": self.samples.tickets}
        words = torch.frombuffer(bytearray(json.dumps([rewards.scored, parts]).encode()), dtype=torch.uint8)
        rows = {f"rows/{name}": column for name, column in columns_of(self.samples.rollout).items()}
        return {**tables, **rows, "rewards": rewards.columns(), "parts": words}

    def restore(self, tensors: Mapping[str, Tensor], prompts: Mapping[int, Prompt]) -> None:
        """Restore the groups of `state`; prompts: by ticket."""
        if not tensors:
            return
        rows = {name.removeprefix("rows/"): column for name, column in tensors.items() if name.startswith("rows/")}
        scored, parts = json.loads(bytes(tensors["parts"].numpy()))
        columns = tensors["rewards"]
        known = None if parts is None else RewardParts(tuple(parts[0]), tuple(parts[1]), columns[:, 1:])
        tickets = tensors["tickets"]
        of_tickets = [prompts[ticket] for ticket in tickets.tolist()]
        rewards = Rewards(columns[:, 0], known, scored)
        self.samples = Samples(of_tickets, Rollout.from_rows(**rows), rewards, tickets)
        self.oldest, self.usable, self.means = tensors["oldest"], tensors["usable"], tensors["means"]


@dataclass
class Stock:
    """Groups that no step has trained, in progress or complete, with their state for checkpoints.

    flow: also a `RankState`, where groups are in progress while a step trains.
    """

    flow: Flow
    versions: StepVersions = field(default_factory=StepVersions)
    state_of_flow: RankState | None = None
    redraws: bool = False  # prompts of groups that are too old are sampled again
    pool: Pool = field(default_factory=Pool, init=False)
    begun: dict[int, tuple[Draw, Prompt]] = field(default_factory=dict, init=False)  # by ticket
    drawn: int = field(default=0, init=False)  # prompts since the run began
    depth: int = field(default=2, init=False)  # steps whose groups are begun, complete or not, when a step chooses
    _again: list[int] = field(default_factory=list, init=False)  # tickets to redraw
    _complete: dict[str, Tensor] = field(default_factory=dict, init=False)  # state of the pool in the checkpoint

    def begin(self, draw: Draw, prompts: Sequence[Prompt]) -> None:
        """Begin the groups of a draw."""
        of_tickets = dict(enumerate(prompts, draw.first))
        self.begun |= {ticket: (draw, prompt) for ticket, prompt in of_tickets.items()}
        self.drawn += draw.size
        self.flow.add(draw, of_tickets)

    def redraw(self) -> None:
        """Begin the groups again that were too old, between two rounds of the flow."""
        for ticket in self._again:
            draw, prompt = self.begun[ticket]
            self.flow.add(draw, {ticket: prompt})
        self._again = []

    def choose(self, count: int) -> Tensor | None:
        """Return the places in the pool that a step takes, or None, as `choose`."""
        return self.pool.choose(list(self.flow.waiting.values()), count, self.versions)

    def expire(self) -> list[Dropped]:
        """Drop the groups that are too old for a step, as after a resume with a lower limit."""
        over = self.pool.oldest < self.versions.first()
        left = torch.ones_like(over)
        return self._forget(self.pool.keep(~over, left, limit=self.versions.limit) if over.any() else [])

    def take(self, chosen: Tensor) -> tuple[Samples, list[Dropped]]:
        """Remove and return the chosen groups, and drop those that no later step may take."""
        samples, dropped = self.pool.take(chosen, self.versions)
        for ticket in samples.tickets.tolist():
            del self.begun[ticket]
        return samples, self._forget(dropped)

    def adapt(self, count: int, *, lacked: bool) -> None:
        """Adapt `depth` after a step took `count` groups, so that tokens are no older than needed.

        lacked: the step waited for complete groups. The depth falls where two steps' groups are left, so that one is.
        """
        spare = int(self.pool.usable.sum()) >= 2 * count
        self.depth = min(self.depth + 1, self.versions.limit + 1) if lacked else max(self.depth - spare, 2)

    def _forget(self, dropped: list[Dropped]) -> list[Dropped]:
        """Forget dropped groups but those to redraw; returns them with what becomes of them."""
        if self.redraws:
            dropped = [one._replace(reason=REDRAWN) if one.reason == "expired" else one for one in dropped]
        for one in dropped:
            if one.reason == REDRAWN:
                self._again.append(one.ticket)
            else:
                del self.begun[one.ticket]
        return dropped

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def numbers(self) -> JsonObject:
        """Return a checkpoint's numbers; `in_flight`: ticket, row of the data and draw of each group."""
        in_flight = [[ticket, prompt.index, *draw] for ticket, (draw, prompt) in self.begun.items()]
        return {"prompts_drawn": self.drawn, "in_flight": in_flight, "depth": self.depth, "begun": self.versions.begun}

    def resume(self, numbers: JsonObject, prompt_of: Callable[[int, int], Prompt]) -> None:
        """Resume from `numbers`, after `restore`; prompt_of: given ticket and row.

        Groups that the checkpoint lacks, since it is of another layout, are generated again.
        """
        self.drawn = int(numbers["prompts_drawn"])
        self.depth = int(numbers.get("depth", self.depth))
        self.versions.restore(numbers.get("begun", []))
        for ticket, row, *draw in numbers.get("in_flight", ()):
            self.begun[ticket] = (Draw(*draw), prompt_of(ticket, row))
        self.pool.restore(self._complete, {ticket: prompt for ticket, (_, prompt) in self.begun.items()})
        complete = [] if self.pool.samples is None else self.pool.samples.tickets.tolist()
        rest: dict[Draw, dict[int, Prompt]] = {}
        for ticket, (own, prompt) in self.begun.items():
            if ticket not in complete:
                rest.setdefault(own, {})[ticket] = prompt
        for own, prompts in rest.items():
            self.flow.add(own, prompts)

    def state(self) -> dict[str, Tensor]:
        own = {} if self.state_of_flow is None else {"flow": self.state_of_flow.state(), "pool": self.pool.state()}
        return {f"{part}/{name}": tensor for part, tensors in own.items() for name, tensor in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Restore the tensors of `state`, for `resume`."""
        parts: dict[str, dict[str, Tensor]] = {"flow": {}, "pool": {}}
        for name, tensor in (tensors or {}).items():
            part, _, own = name.partition("/")
            parts.get(part, {})[own] = tensor
        self._complete = parts["pool"]
        if self.state_of_flow is not None:
            self.state_of_flow.restore(parts["flow"])
