"""Trajectories of agents: tokens that were sampled, tokens that were read, and their rows.

No token id is ever made from text that the policy wrote. A trajectory is one sample of a prompt. It has a branch for
each context that the policy read: one, unless the environment shortens the history, asks another agent, or forks.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mega_rl.types import ENDS, End, Prompt, Rollout


@dataclass(slots=True)
class Turn:
    """Tokens that the policy sampled in one go."""

    token_ids: tuple[int, ...]  # with the stop token that ended it
    logprobs: tuple[float, ...]  # at the sampling temperature
    versions: tuple[int, ...]  # the weights that sampled each token; empty: those of the step
    stopped: bool  # a stop token ended it
    score: float | None = None  # the environment's, a part of its trajectory's reward
    # [T, L, K] int16, experts of L mixtures for the last T inputs before its last token; those before them are in
    # earlier turns of the branch. None: unknown.
    routing: torch.Tensor | None = field(default=None, compare=False, repr=False)
    kept: tuple[bool, ...] = ()  # one for each token, as in `Rollout`; empty: none


Part = Turn | tuple[int, ...]  # a turn, or tokens that the policy only read: a tool's answer, text of the template


class LimitReached(BaseException):
    """A trajectory's tokens or turns are used up; like a cancellation, this ends `run`."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.end = end


@dataclass(eq=False)
class Branch:
    """A row of a rollout: an opening, then turns and tokens that were read."""

    opening: tuple[int, ...]  # tokens before the first part: those of the prompt, in the first branch
    most: int  # tokens of the whole row
    number: int = 0  # within its trajectory
    parts: list[Part] = field(default_factory=list)
    shared: int = 0  # leading parts that another branch trains

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens so far."""
        return (*self.opening, *(token for part in self.parts for token in _ids(part)))

    @property
    def room(self) -> int:
        """Return the tokens that may still come."""
        return self.most - len(self.opening) - sum(len(_ids(part)) for part in self.parts)

    def add(self, turn: Turn) -> None:
        """Append a turn whose experts, if it has some, are those of all inputs."""
        if turn.routing is not None:
            known, place = 0, len(self.opening)
            for part in self.parts:
                place += len(_ids(part))
                known = place - 1 if isinstance(part, Turn) and part.routing is not None else known
            turn.routing = turn.routing[known:].clone()
        self.parts.append(turn)


def _ids(part: Part) -> tuple[int, ...]:
    return part.token_ids if isinstance(part, Turn) else part


@dataclass(eq=False)
class Trajectory:
    """One sample of a prompt."""

    prompt: Prompt
    prompt_index: int  # position in the step's prompts
    sample_index: int  # number of the sample of its prompt
    limit: int  # most tokens of a branch after the prompt, those that were read included
    branches: list[Branch] = field(default_factory=list)
    # How it ended. None: done if a stop token ended the last turn, else cut off by length.
    end: End | None = None
    # The environment's. With reward.source=environment the reward is this plus the scores of the turns.
    score: float | None = None
    drifted: int = 0  # branches that opened because a program sent another history than what was sampled
    tool_calls: int = 0
    tool_s: float = 0.0  # seconds that tools took

    def __post_init__(self) -> None:
        if not self.branches:
            self.open(self.prompt.token_ids)

    @property
    def branch(self) -> Branch:
        """Return the newest branch."""
        return self.branches[-1]

    @property
    def turns(self) -> list[Turn]:
        """Return the turns of all branches, shared ones once."""
        return [part for one in self.branches for part in one.parts[one.shared :] if isinstance(part, Turn)]

    def open(self, opening: Sequence[int]) -> Branch:
        """Open a branch with other tokens before its first turn, none of which train."""
        most = min(len(self.prompt.token_ids), len(opening)) + self.limit
        self.branches.append(Branch(tuple(opening), most, number=len(self.branches)))
        return self.branch

    def fork(self, branch: Branch, parts: int) -> Branch:
        """Open a branch with another one's first `parts` parts, which train only there."""
        fork = self.open(branch.opening)
        fork.parts, fork.shared = branch.parts[:parts], parts
        return fork

    def give(self, token_ids: Sequence[int], branch: Branch | None = None) -> None:
        """Append tokens that the policy reads to a branch (the newest); they do not train.

        Raises LimitReached if they leave no room for a turn after them.
        """
        branch = branch or self.branch
        if len(token_ids) >= branch.room:
            self.end = "length"
            raise LimitReached(self.end)
        given = tuple(token_ids)
        if not all(type(token) is int and token >= 0 for token in given):
            raise TypeError("give() takes token ids, integers from 0 on")
        branch.parts.append(given)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, stopped: bool) -> None:
        """Append a turn that something else sampled to the newest branch."""
        assert len(token_ids) == len(logprobs) <= self.branch.room, f"{len(token_ids)} tokens do not fit"
        self.branch.parts.append(Turn(tuple(token_ids), tuple(logprobs), (), stopped))

    @property
    def scores(self) -> list[float]:
        """Return the scores of trajectory and turns that are set; none of a failed trajectory."""
        every = () if self.ended() == "error" else (self.score, *(turn.score for turn in self.turns))
        return [one for one in every if one is not None]

    def ended(self) -> End:
        """Return how it ended."""
        turns = self.turns
        return self.end or ("error" if not turns else "done" if turns[-1].stopped else "length")


def score_fault(trajectory: Trajectory, *, is_read: bool) -> str:
    """Describe why a trajectory's scores cannot be its reward; is_read: they are to be."""
    scores: list[object] = [*trajectory.scores]
    if not is_read:
        return "set a score, which needs reward.source=environment" if scores else ""
    if not scores:
        return "set neither trajectory.score nor a turn's, which are the reward with reward.source=environment"
    wrong = [one for one in scores if not (isinstance(one, numbers.Real) and math.isfinite(one))]
    if not wrong and abs(sum(trajectory.scores)) > torch.finfo(torch.float32).max:
        wrong = [sum(trajectory.scores)]
    return f"set the score {wrong[0]!r}; legal: a finite number" if wrong else ""


class _Row(NamedTuple):
    """A branch as a row of a rollout."""

    trajectory: Trajectory
    number: int  # of the row within its trajectory
    opening: tuple[int, ...]
    parts: Sequence[tuple[Part, int, bool]] = ()  # with the number of a turn from 1, 0: read, and whether it trains

    @property
    def length(self) -> int:
        """Return the number of its tokens."""
        return len(self.opening) + sum(len(_ids(part)) for part, _, _ in self.parts)

    def oldest(self, version: int) -> int:
        """Return the version of its oldest token that trains; `version` where no turn says its own."""
        of_turns = [part.versions for part, _, trains in self.parts if isinstance(part, Turn) and trains]
        return min((min(versions) for versions in of_turns if versions), default=version)


def _rows(trajectory: Trajectory) -> Iterator[_Row]:
    """Yield a trajectory's rows, each up to its last trained turn; a failed one's is its prompt."""
    if trajectory.ended() == "error":
        yield _Row(trajectory, 0, trajectory.prompt.token_ids)
        return
    numbers = {id(turn): number for number, turn in enumerate(trajectory.turns, 1)}
    count = 0
    for branch in trajectory.branches:
        trained = [isinstance(part, Turn) and place >= branch.shared for place, part in enumerate(branch.parts)]
        while trained and not trained[-1]:
            trained.pop()
        if trained:
            of_turns = [numbers.get(id(part), 0) for part in branch.parts]
            yield _Row(trajectory, count, branch.opening, [*zip(branch.parts, of_turns, trained, strict=False)])
            count += 1


def rows_of(
    trajectories: Sequence[Trajectory], *,
    version: int, with_failed: bool = False, with_branches: bool = False, with_scores: bool = False,
    with_versions: bool = False, routed: tuple[int, int] = (0, 0),
) -> Rollout:  # fmt: skip
    """Return the branches of trajectories as rows, right-padded, in their order.

    Tokens after a branch's last turn are left out. version: weights of turns that do not say theirs. with_failed,
    with_branches, with_scores, with_versions: the rollout has these columns, which all ranks have or none. routed:
    mixtures and experts of a token, where it has `routing`.
    """
    rows = [row for trajectory in trajectories for row in _rows(trajectory)]

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    lengths, oldest = column([row.length for row in rows]), column([row.oldest(version) for row in rows])
    width = int(lengths.max()) if len(rows) else 0
    tokens, versions = torch.zeros(2, len(rows), width, dtype=torch.int64)
    mask, kept = torch.zeros(2, len(rows), width, dtype=torch.bool)
    logprobs, of_turns = torch.zeros(2, len(rows), width, dtype=torch.float32)
    turn = torch.zeros(len(rows), width, dtype=torch.int16)
    routing = torch.full((len(rows), width, *routed), -1, dtype=torch.int16)
    for number, row in enumerate(rows):
        end = len(row.opening)
        tokens[number, :end] = column(row.opening)
        for part, of_turn, trains in row.parts:
            begin, end = end, end + len(_ids(part))
            here = (number, slice(begin, end))
            tokens[here], turn[here], mask[here] = column(_ids(part)), of_turn, trains
            if not isinstance(part, Turn):
                continue
            if part.routing is not None:
                routing[number, end - 1 - len(part.routing) : end - 1] = part.routing
            if trains:
                logprobs[here] = torch.tensor(part.logprobs, dtype=torch.float32)
                versions[here] = column(part.versions) if part.versions and with_versions else oldest[number]
                kept[here] = torch.tensor(part.kept or False)
                of_turns[number, end - 1] = float(part.score or 0.0)
    scores = torch.tensor([sum(row.trajectory.scores) if row.trajectory.scores else math.nan for row in rows])
    ends = column([ENDS.index(row.trajectory.ended()) for row in rows])
    return Rollout.from_rows(
        tokens,
        prompt_lengths=column([len(row.opening) for row in rows]),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        end=ends.to(torch.int8),
        prompt_index=column([row.trajectory.prompt_index for row in rows]),
        sample_index=column([row.trajectory.sample_index for row in rows]),
        weight_version=oldest,
        failed=ends == ENDS.index("error") if with_failed else None,
        branch=column([row.number for row in rows]) if with_branches else None,
        scores=scores.where(ends != ENDS.index("error"), 0.0) if with_scores else None,
        turn_scores=of_turns if with_scores else None,
        turn=turn,
        token_versions=versions if with_versions else None,
        kept=kept if with_versions else None,
        routing=routing if all(routed) else None,
    )


def response_rows(
    responses: Iterable[tuple[Sequence[int], tuple[int, int], Turn | None]], *,
    version: int, with_failed: bool = False, with_versions: bool = False, routed: tuple[int, int] = (0, 0),
) -> Rollout:  # fmt: skip
    """Return a row for each (prompt's tokens, (prompt, sample), response), in their order; None: it failed.

    The other arguments are those of `rows_of`.
    """
    trajectories = []
    for token_ids, (prompt, sample), turn in responses:
        one = Trajectory(Prompt(prompt, tuple(token_ids), "", None), prompt, sample, limit=0)
        one.branch.parts += [] if turn is None else [turn]
        trajectories.append(one)
    rows = rows_of(trajectories, version=version, with_failed=with_failed, with_versions=with_versions, routed=routed)
    rows.turn = None  # each response is one turn
    return rows
