"""Rewards of a run from its settings: a function, a service, a model, or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mega_rl.config.schema import RewardConfig, RewardFunctionConfig, RewardHttpConfig
from mega_rl.config.schema.rollout import CODE_TESTS, runs_code
from mega_rl.cores import own_cores
from mega_rl.data.columns import RewardColumns
from mega_rl.errors import UserError, UserErrors
from mega_rl.protocols import Ranks, Scorer
from mega_rl.rewards.builtin import CHEAP, RewardFunction
from mega_rl.rewards.call import RewardCall, load_call
from mega_rl.rewards.code import AssertCase, read_cases, specification, unfit_tests
from mega_rl.rewards.components import OnFailure, RewardComponents
from mega_rl.rewards.pool import RewardPool
from mega_rl.rewards.role import AbsentScorer, CalledRewards, TextScorer
from mega_rl.rewards.sandbox.suites import UnknownTestsError
from mega_rl.rewards.score import ResponseReader
from mega_rl.rewards.service import HttpRewards, Poster, find_service
from mega_rl.tracking import progress
from mega_rl.types import Prompt, PromptSet

MAX_WORKERS = 8  # most workers of a rank, unless the config says how many


@dataclass(frozen=True)
class RunRewards:
    """Source of a run's rewards, with what it asks of the data."""

    settings: RewardConfig
    source: CalledRewards | RewardPool | HttpRewards | None  # None: a reward model scores, or no reward

    @property
    def call(self) -> RewardCall | None:
        """Return the call of the reward functions; None of other sources."""
        return self.source.call if isinstance(self.source, CalledRewards | RewardPool) else None

    def columns(self, answer_key: str) -> RewardColumns:
        """Return the columns of the data that are read.

        Raises:
            UserError: a reward function takes an answer, and no column has it.
        """
        if self.call is None:
            return RewardColumns(answer=bool(answer_key) and self.settings.source.name == "http", structured=True)
        columns = self.call.columns
        taker = "functions" if self.settings.functions else f"function={self.settings.function!r}"
        if columns.answer and not answer_key:
            raise UserError(
                f"data.answer_key is empty, but reward.{taker} takes an answer: name the column, or give that "
                "parameter a default"
            )
        return columns

    def check(self, train: Sequence[Prompt], held_out: Sequence[PromptSet], *, source_key: str) -> None:
        """Check that tests of programs judge something, and that data sources are those of reward.sources.

        train: empty of an evaluation, whose rows need not have every source. source_key: column of a row's source.
        Raises UserError.
        """
        others = [prompt for one in held_out for prompt in one.prompts]
        if runs_code(self.settings):
            with progress.phase("trying the tests of the data", announce=True):
                check_tests(self.settings, [*train, *others])
        if self.call is not None and (problems := source_problems(self.call, train, others, key=source_key)):
            raise UserErrors(problems)

    def scorer(
        self,
        reader: ResponseReader,
        *,
        replica: Ranks,
        everyone: Ranks,
        timeout_s: float,
        reads_parts: str = "",
        max_failed_share: float | None = None,
    ) -> Scorer:
        """Return the reward role of a run without a reward model.

        timeout_s: as of `TextScorer`. reads_parts: the setting that reads named parts; empty without one.
        max_failed_share: in place of reward.source.max_failed_share.
        """
        if self.source is None:
            return AbsentScorer()
        pool, reward = self.settings.calls, self.settings
        share = pool.max_failed_share if max_failed_share is None else max_failed_share
        score = pool.failure_score if pool.on_failure == "score" else None
        return TextScorer(
            self.source,
            reader=reader,
            replica=replica,
            everyone=everyone,
            timeout_s=timeout_s,
            components=RewardComponents(reward.weights, reader=reads_parts, sources=tuple(reward.sources)),
            on_failure=None if self.call is None else OnFailure(score, share),
        )


def build_rewards(reward: RewardConfig, function: RewardFunction | None = None, *, resources: ExitStack) -> RunRewards:
    """Return the rewards of a run; finds every mistake in a function or a service.

    function: from a Python program, in place of the one that the settings name. resources: ends worker processes.

    Raises:
        UserError: a function that cannot be called, an address or key that cannot be used.
    """
    if reward.source.name == "function":
        return RunRewards(reward, _function_source(reward, function, resources))
    http = reward.source
    if not isinstance(http, RewardHttpConfig):
        return RunRewards(reward, None)
    service = find_service(http.url, http.key_file)
    poster = Poster(service, section="reward.source", timeout_s=http.timeout_s, retries=http.retries)
    return RunRewards(reward, HttpRewards(poster, batch_size=http.batch_size, concurrency=http.concurrency))


def _function_source(
    reward: RewardConfig, function: RewardFunction | None, resources: ExitStack
) -> CalledRewards | RewardPool:
    """Return the reward functions, called in this process or in workers. Raises UserError."""
    if function is not None and reward.functions:
        raise UserError("reward.functions names functions, but a Python program has given one; leave one of them out")
    # The name of a reward function with its settings, as any process reads it.
    specified = {CODE_TESTS: specification(reward.sandbox)} if runs_code(reward) else {}
    named = {name: specified.get(spec, spec) for name, spec in reward.functions.items()}
    functions = named or specified.get(reward.function, reward.function)
    pool, num_workers = reward.calls, reward.calls.workers
    call = load_call(
        functions, reward.sources, given=function, concurrency=pool.concurrency, batch_size=pool.batch_size
    )
    if not call.batched and pool.batch_size != RewardFunctionConfig().batch_size:
        raise UserError(
            f"reward.source.batch_size={pool.batch_size} has no effect: no function takes several responses at a time; "
            "give it the parameter responses in the place of response, or leave the setting out"
        )
    if num_workers > 0 and function is not None:
        raise UserError(
            f"reward.source.workers={num_workers}: workers load a function by its name, and this one was given by a "
            "Python program; name it as reward.function=FILE.py:NAME, or set reward.source.workers=0"
        )
    if num_workers < 0:  # comparing two strings needs no process
        names = {*reward.functions.values()} or {reward.function}
        in_process = function is not None or names <= CHEAP
        num_workers = 0 if in_process else min(MAX_WORKERS, own_cores() - 1)
    if num_workers == 0:
        return CalledRewards(call)
    workers = RewardPool(
        call, functions, num_workers=num_workers, timeout_s=pool.timeout_s, memory_bytes=pool.memory_mib << 20
    )
    resources.callback(workers.close)
    return workers


def check_tests(reward: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Try the rows' tests over a stub. Raises UserError for unfit tests."""
    if not runs_code(reward):
        return
    rows: dict[AssertCase, list[int]] = {}
    for prompt in prompts:
        names = reward.sources.get(prompt.source, ()) if reward.sources else reward.functions
        if reward.functions and CODE_TESTS not in (reward.functions[name] for name in names):
            continue
        try:
            asserts = [case for case in read_cases(prompt.answer, prompt.row) if isinstance(case, AssertCase)]
        except UnknownTestsError as error:
            problem = f"row {prompt.index}: the reward function {CODE_TESTS} cannot read its tests: {error}"
            raise UserError(problem) from None
        for case in asserts:
            rows.setdefault(case, []).append(prompt.index)
    unfit: dict[str, set[int]] = {}
    for numbers, why in zip(rows.values(), unfit_tests(reward.sandbox, [*rows]), strict=True):
        if why:
            unfit.setdefault(why, set()).update(numbers)
    problems = [f"they {why} (rows {', '.join(map(str, sorted(numbers)))})"[:400] for why, numbers in unfit.items()]
    if problems:
        raise UserError(f"the reward function {CODE_TESTS} cannot judge by some tests: {'; '.join(problems)}")


def source_problems(call: RewardCall, train: Sequence[Prompt], held_out: Sequence[Prompt], *, key: str) -> list[str]:
    """Return the mismatches between the rows' data sources and reward.sources, one line each.

    key: column of a row's source. A source that no row has is a problem only where there are rows to train on.
    """
    if not call.sources:
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
    if missing := sorted(sources - call.sources.keys() - {""}):
        problems.append(
            f"reward.sources has no entry for {_listed(missing)}, which rows have as {key!r}; add which of "
            "reward.functions score them"
        )
    if train and sources - {""} and (unused := [name for name in call.sources if name not in sources]):
        problems.append(
            f"reward.sources has an entry for {_listed(unused)}, which no row has as {key!r}; rows have "
            f"{_listed(sorted(sources - {''}))}"
        )
    without = {prompt.source: prompt for prompt in reversed(rows) if prompt.answer is None}
    for source in sorted(without.keys() & call.sources.keys()):
        if call.takes_answer(source):
            problems.append(
                f"row {without[source].index} of the source {source!r} has no answer, which a function of "
                f"reward.sources takes; add one, or give that parameter a default"
            )
    return problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
