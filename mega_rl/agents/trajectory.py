"""Trajectories of agents: tokens that were sampled, tokens that were read, and their rows.

No token id is ever made from text that the policy wrote. A trajectory is one sample of a prompt. It has a branch for
each context that the policy read: one, unless the environment shortens the history, asks another agent, or forks.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    def routing(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the experts that turns have, and the position behind their last input."""
        place = len(self.opening)
        for part in self.parts:
            place += len(_ids(part))
            if isinstance(part, Turn) and part.routing is not None:
                yield place - 1, part.routing

    def add(self, turn: Turn) -> None:
        """Append a turn whose experts, if it has some, are those of all inputs."""
        if turn.routing is not None:
            known = max((end for end, _ in self.routing()), default=0)
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


class _BranchRow(NamedTuple):
    trajectory: Trajectory
    branch: int  # number of the row within its trajectory
    prompt: int  # tokens before the first part
    token_ids: tuple[int, ...]
    own: list[bool]  # of each token after the prompt: it trains
    turns: list[int]  # of each token after the prompt the number of its turn, from 1; 0: it was read
    logprobs: list[float]  # of the tokens that train, as the next two
    versions: list[int]  # of the weights; not of turns that do not say theirs
    kept: list[bool]  # as of `Turn`
    scores: list[tuple[int, float]]  # (position of a turn's last token, its score)
    routing: list[tuple[int, torch.Tensor]]  # as of `Branch.routing`

    def of_tokens(self, version: int) -> list[int]:
        """Return the version of each token that trains: the oldest, if a turn does not say its own."""
        count = len(self.logprobs)
        return self.versions if len(self.versions) == count else [min(self.versions, default=version)] * count


def _row(trajectory: Trajectory, branch: Branch, number: int, numbers: Mapping[int, int]) -> _BranchRow:
    """Return a branch as a row, up to its last turn that trains; numbers: of turns, by identity."""
    row, end = _BranchRow(trajectory, number, len(branch.opening), (), [], [], [], [], [], [], [*branch.routing()]), 0
    for place, part in enumerate(branch.parts):
        trains = isinstance(part, Turn) and place >= branch.shared
        row.own.extend([trains] * len(_ids(part)))
        row.turns.extend([numbers.get(id(part), 0)] * len(_ids(part)))
        if isinstance(part, Turn) and trains:
            row.logprobs.extend(part.logprobs)
            row.versions.extend(part.versions)
            row.kept.extend(part.kept or [False] * len(part.token_ids))
            end = len(row.own)
            if part.score is not None:
                row.scores.append((len(branch.opening) + end - 1, float(part.score)))
    ids = branch.token_ids[: len(branch.opening) + end]
    return row._replace(token_ids=ids, own=row.own[:end], turns=row.turns[:end])


def _rows(trajectory: Trajectory) -> list[_BranchRow]:
    """Return the rows of a trajectory; a failed one has its prompt only."""
    trained = [one for one in trajectory.branches if any(isinstance(part, Turn) for part in one.parts[one.shared :])]
    if trajectory.ended() == "error":
        trained = [Branch(trajectory.prompt.token_ids, most=0)]
    numbers = {id(turn): place for place, turn in enumerate(trajectory.turns, 1)}
    return [_row(trajectory, branch, number, numbers) for number, branch in enumerate(trained)]


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
    width = max((len(row.token_ids) for row in rows), default=0)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, turn = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.int16)
    of_turns = torch.zeros_like(tokens, dtype=torch.float32)
    routing = torch.full((len(rows), width, *routed), -1, dtype=torch.int16)
    for number, row in enumerate(rows):
        after_prompt = slice(row.prompt, len(row.token_ids))
        tokens[number, : len(row.token_ids)] = torch.tensor(row.token_ids)
        mask[number, after_prompt] = torch.tensor(row.own, dtype=torch.bool)
        turn[number, after_prompt] = torch.tensor(row.turns, dtype=torch.int16)
        for place, score in row.scores:
            of_turns[number, place] = score
        for end, experts in row.routing:
            if end < len(row.token_ids):  # else of a turn after the last one that trains
                routing[number, end - len(experts) : end] = experts

    def column(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64)

    def trained(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        """Return [B, S] of the values of all tokens that train, else 0."""
        return torch.zeros_like(tokens, dtype=dtype).masked_scatter(mask, torch.tensor(list(values), dtype=dtype))

    scores = torch.tensor([sum(row.trajectory.scores) if row.trajectory.scores else math.nan for row in rows])
    ends = column(ENDS.index(row.trajectory.ended()) for row in rows)
    return Rollout.from_rows(
        tokens,
        prompt_lengths=column(row.prompt for row in rows),
        lengths=column(len(row.token_ids) for row in rows),
        loss_mask=mask,
        rollout_logprobs=trained((one for row in rows for one in row.logprobs), torch.float32),
        end=ends.to(torch.int8),
        prompt_index=column(row.trajectory.prompt_index for row in rows),
        sample_index=column(row.trajectory.sample_index for row in rows),
        weight_version=column(min(row.versions, default=version) for row in rows),
        failed=ends == ENDS.index("error") if with_failed else None,
        branch=column(row.branch for row in rows) if with_branches else None,
        scores=scores.where(ends != ENDS.index("error"), 0.0) if with_scores else None,
        turn_scores=of_turns if with_scores else None,
        turn=turn,
        token_versions=(
            trained((one for row in rows for one in row.of_tokens(version)), torch.int64) if with_versions else None
        ),
        kept=trained((one for row in rows for one in row.kept), torch.bool) if with_versions else None,
        routing=routing if all(routed) else None,
    )
