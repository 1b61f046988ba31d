"""Several reward functions of a run, each for the part of the reward that has its name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_rl.data.columns import RewardColumns
from mega_rl.errors import UserError
from mega_rl.workers.reward_calls import (
    SUBJECT,
    Batch,
    NoScoreError,
    NotAScoreError,
    Response,
    Results,
    RewardCall,
    Score,
    as_score,
    evaluate,
    evaluate_batch,
    evaluate_later,
    plan_call,
)
from mega_rl.workers.reward_functions import resolve

if TYPE_CHECKING:
    from mega_rl.types import Prompt  # which imports torch

FUNCTIONS = "functions"  # among a response's arguments: the names of the functions that score it
RUNNING: ContextVar[str] = ContextVar("RUNNING", default="")  # name of the function of a set that is called


def ignore(name: str) -> None:
    """Take the name of a function that is of no interest."""


@dataclass(frozen=True)
class FunctionSet:
    """Reward functions that score a response together, all of them or those of its prompt's data source."""

    calls: Mapping[str, RewardCall]
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of functions; empty: all for every row
    note: Callable[[str], None] = ignore  # receives the name of each function before it is called

    @property
    def columns(self) -> RewardColumns:
        """Columns of the data that the functions read; an answer where every source needs one."""
        columns = [call.columns for call in self.calls.values()]
        return RewardColumns(
            answer=all(self.takes_answer(source) for source in self.sources or ("",)),
            structured=all(one.structured for one in columns),
            every=any(one.every for one in columns),
        )

    def takes_answer(self, source: str) -> bool:
        """Return whether a function that scores rows of a source needs their answers."""
        return any(self.calls[name].columns.answer for name in self._names(source))

    def arguments(self, prompt: Prompt, response: Response) -> dict[str, object]:
        """Return what the functions get for a response to a prompt, all together, and the names of the functions."""
        names = self._names(prompt.source)
        values: dict[str, object] = {FUNCTIONS: list(names)}
        for name in names:
            values |= self.calls[name].arguments(prompt, response)
        return values

    def evaluate(self, arguments: Mapping[str, object]) -> Score:
        """Return the parts of one response; None if a function leaves it out: those after it are not called.

        Raises NoScoreError, which names the function, where one raises or returns something else.
        """
        parts: dict[str, float] = {}
        for name, call in self._asked(arguments):
            self._begin(name)
            score = evaluate(call, arguments, subject=_subject(name))
            if score is None:
                return None
            _add(parts, name, score)
        return _checked(parts)

    @property
    def batched(self) -> bool:
        """Return whether a function takes several responses at a time."""
        return any(call.batched for call in self.calls.values())

    def evaluate_batch(self, batch: Batch) -> Results:
        """Return the parts of each response, or why it has none; a function is called before the next, for all.

        Raises NoScoreError where a function of several responses fails as a whole.
        """
        parts: list[dict[str, float]] = [{} for _ in batch]
        ended: dict[int, NoScoreError | None] = {}  # responses that have failed, or are left out
        for name, call in self.calls.items():
            rows = [row for row, one in enumerate(batch) if row not in ended and name in _names_in(one)]
            for row, score in zip(rows, self._results(name, call, [batch[row] for row in rows]), strict=True):
                ended |= _ended(row, parts[row], name, score)
        return [ended[row] if row in ended else _checked_or_error(own) for row, own in enumerate(parts)]

    @property
    def is_async(self) -> bool:
        """Return whether a function is a coroutine function, so that `evaluate_later` alone can call all of them."""
        return any(call.is_async for call in self.calls.values())

    async def evaluate_later(self, arguments: Mapping[str, object]) -> Score:
        """Return what `evaluate` does; the functions, of which some are asynchronous, run one after the other."""
        parts: dict[str, float] = {}
        for name, call in self._asked(arguments):
            self._begin(name)
            score = await evaluate_later(call, arguments, subject=_subject(name))
            if score is None:
                return None
            _add(parts, name, score)
        return _checked(parts)

    def _results(self, name: str, call: RewardCall, batch: Batch) -> Results:
        """Return what one function gives each of some responses. Raises NoScoreError."""
        results: Results = []
        for part in [batch] * bool(batch) if call.batched else [[one] for one in batch]:
            self._begin(name)
            results += evaluate_batch(call, part, subject=_subject(name))
        return results

    def _begin(self, name: str) -> None:
        RUNNING.set(name)
        self.note(name)

    def _asked(self, arguments: Mapping[str, object]) -> list[tuple[str, RewardCall]]:
        return [(name, self.calls[name]) for name in _names_in(arguments)]

    def _names(self, source: str) -> Sequence[str]:
        """Return the functions that score rows of a source, in the order of reward.functions."""
        return [name for name in self.calls if not self.sources or name in self.sources[source]]


def _names_in(arguments: Mapping[str, object]) -> list[str]:
    names = arguments[FUNCTIONS]
    assert isinstance(names, list)
    return names


def _ended(row: int, parts: dict[str, float], name: str, score: Score | NoScoreError) -> dict[int, NoScoreError | None]:
    """Add what a function gives a response to its parts; return the response where it is left out or fails."""
    if score is None or isinstance(score, NoScoreError):
        return {row: score}
    try:
        _add(parts, name, score)
    except NoScoreError as error:
        return {row: error}
    return {}


def _checked_or_error(parts: Mapping[str, float]) -> Score | NoScoreError:
    try:
        return _checked(parts)
    except NoScoreError as error:
        return error


def _subject(name: str) -> str:
    return f"the reward function {name!r}"


def subject_of(functions: str | Mapping[str, str], running: str) -> str:
    """Return how errors name a reward function, or that of a set which is running; "" where none is."""
    if isinstance(functions, str):
        return SUBJECT
    return _subject(running) if running else "the reward functions"


def _add(parts: dict[str, float], name: str, score: float | dict[str, float]) -> None:
    """Add the parts that a function gives. Raises NoScoreError for one that another has given."""
    own = {f"{name}_{part}": value for part, value in score.items()} if isinstance(score, dict) else {name: score}
    if twice := sorted(parts.keys() & own.keys()):
        raise NoScoreError(f"{_subject(name)} gives a part {twice[0]!r}, which another gives too")
    parts |= own


def _checked(parts: Mapping[str, float]) -> Score:
    """Return the parts in alphabetical order. Raises NoScoreError for one with the name of a metric."""
    try:
        return as_score(parts)
    except NotAScoreError as error:
        raise NoScoreError(f"the reward functions returned {error}") from None


def load_call(
    functions: str | Mapping[str, str], sources: Mapping[str, Sequence[str]] | None = None
) -> RewardCall | FunctionSet:
    """Return the reward function that a name stands for, or the set of them by name. Raises UserError."""
    if isinstance(functions, str):
        return plan_call(resolve(functions))
    calls = {name: plan_call(resolve(spec, key=f"reward.functions.{name}")) for name, spec in functions.items()}
    several, later = ([name for name, call in calls.items() if which(call)] for which in (_batched, _is_async))
    if several and later:
        raise UserError(
            f"reward.functions: {several[0]!r} takes several responses at a time and {later[0]!r} is asynchronous; of "
            "functions that score a response together either kind may be there, but not both: make one of them the "
            "other kind, or take one function (reward.function) that returns named parts"
        )
    return FunctionSet(calls, sources or {})


def _batched(call: RewardCall) -> bool:
    return call.batched


def _is_async(call: RewardCall) -> bool:
    return call.is_async


def source_problems(
    scorers: FunctionSet, train: Sequence[Prompt], held_out: Iterable[Prompt], *, key: str
) -> list[str]:
    """Return what does not fit between the data sources of the rows and those of `scorers`, one line each.

    key: column of a row's source. A source that no row has is a problem where there are rows to train on.
    """
    if not scorers.sources:
        return []
    rows = [*train, *held_out]
    sources = {prompt.source for prompt in rows}
    problems = []
    if "" in sources:
        number = sum(not prompt.source for prompt in rows)
        problems.append(
            f"reward.sources goes by the column {key!r}, which {number} of {len(rows)} rows have not; name the column "
            "in data.source_key, or leave reward.sources out"
        )
    if missing := sorted(sources - scorers.sources.keys() - {""}):
        problems.append(
            f"reward.sources has no entry for {_listed(missing)}, which rows have as {key!r}; add which of "
            "reward.functions score them"
        )
    if train and sources - {""} and (unused := [name for name in scorers.sources if name not in sources]):
        problems.append(
            f"reward.sources has an entry for {_listed(unused)}, which no row has as {key!r}; rows have "
            f"{_listed(sorted(sources - {''}))}"
        )
    without = {prompt.source: prompt for prompt in reversed(rows) if prompt.answer is None}
    for source in sorted(without.keys() & scorers.sources.keys()):
        if scorers.takes_answer(source):
            problems.append(
                f"row {without[source].index} of the source {source!r} has no answer, which a function of "
                f"reward.sources takes; add one, or give that parameter a default"
            )
    return problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
