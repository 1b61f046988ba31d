"""Rewards of a run from its settings: a function, a service, a model, or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from mega_rl.config.schema import RewardConfig, RewardFunctionConfig, RewardHttpConfig
from mega_rl.config.schema.rollout import CODE_TESTS, runs_code
from mega_rl.data.columns import RewardColumns
from mega_rl.environment import own_cores
from mega_rl.errors import UserError, UserErrors
from mega_rl.protocols import Ranks, Scorer
from mega_rl.rewards.builtin import CHEAP, RewardFunction
from mega_rl.rewards.call import load_functions, plan
from mega_rl.rewards.code import AssertCase, read_cases, specification, usable_sandbox
from mega_rl.rewards.pool import FunctionRewards, WorkerPool
from mega_rl.rewards.role import AbsentScorer, EnvironmentScorer, RewardComponents, TextScorer
from mega_rl.rewards.sandbox.suites import UnknownTestsError, unfit
from mega_rl.rewards.score import ResponseReader
from mega_rl.rewards.service import Poster, find_service, service_scores
from mega_rl.tracking import progress
from mega_rl.types import Prompt, PromptSet

MAX_WORKERS = 8  # most workers of a rank, unless the config says how many


@dataclass(frozen=True)
class RunRewards:
    """Source of a run's rewards, with what it asks of the data."""

    settings: RewardConfig
    source: FunctionRewards | None  # functions or a service; None: a reward model or the environment scores, or nobody

    def columns(self, answer_key: str, source_key: str) -> RewardColumns:
        """Return the columns of the data that are read. Raises UserError where an answer is missing."""
        kind, source = self.settings.source.name, source_key if self.settings.sources else ""
        if self.source is None or kind != "function":
            needs_answer, reads_all = bool(answer_key) and kind == "http", kind == "environment"
            return RewardColumns(answer=needs_answer, structured=True, every=reads_all, source=source)
        columns = self.source.columns
        taker = "functions" if self.settings.functions else f"function={self.settings.function!r}"
        if columns.answer and not answer_key:
            raise UserError(
                f"data.answer_key is empty, but reward.{taker} takes an answer: name the column, or give that "
                "parameter a default"
            )
        return replace(columns, source=source)

    def check(self, train: Sequence[Prompt], held_out: Sequence[PromptSet], *, source_key: str) -> None:
        """Check that tests of programs judge something, and that data sources are those of reward.sources.

        train: empty of an evaluation, whose rows need not have every source. source_key: column of a row's source.
        Raises UserError.
        """
        others = [prompt for one in held_out for prompt in one.prompts]
        if runs_code(self.settings):
            with progress.phase("trying the tests of the data", announce=True):
                check_tests(self.settings, [*train, *others])
        if self.source is not None:
            problems = source_problems(self.source, train, others, key=source_key)
            if problems:
                raise UserErrors(problems)

    def scorer(
        self,
        reader: ResponseReader,
        *,
        replica: Ranks,
        everyone: Ranks,
        timeout_s: float,
        reads_parts: str = "",
    ) -> Scorer:
        """Return the reward role of a run without a reward model.

        timeout_s: as of `TextScorer`. reads_parts: the setting that reads named parts; empty without one.
        """
        if self.source is None:
            return EnvironmentScorer() if self.settings.source.name == "environment" else AbsentScorer()
        reward, calls = self.settings, self.settings.calls
        return TextScorer(
            self.source,
            reader=reader,
            replica=replica,
            everyone=everyone,
            timeout_s=timeout_s,
            components=RewardComponents(reward.weights, reader=reads_parts, sources=tuple(reward.sources)),
            failure_score=calls.failure_score if calls.on_failure == "score" else None,
            max_failed_share=calls.max_failed_share if reward.source.name == "function" else 0.0,
        )


def build_rewards(reward: RewardConfig, function: RewardFunction | None = None, *, resources: ExitStack) -> RunRewards:
    """Return the rewards of a run. Raises UserError: a function, address or key is unusable.

    function: from a Python program, in place of the one that the settings name. resources: ends worker processes.
    """
    http = reward.source
    if http.name == "function":
        return RunRewards(reward, _function_source(reward, function, resources))
    if not isinstance(http, RewardHttpConfig):
        return RunRewards(reward, None)
    service = find_service(http.url, http.key_file)
    poster = Poster(service, section="reward.source", timeout_s=http.timeout_s, retries=http.retries)
    service_function = plan(service_scores(poster), batch_size=http.batch_size, concurrency=http.concurrency)
    return RunRewards(reward, FunctionRewards([service_function]))


def _function_source(reward: RewardConfig, given: RewardFunction | None, resources: ExitStack) -> FunctionRewards:
    """Return the reward functions, called in this process or in workers. Raises UserError."""
    if given is not None and reward.functions:
        raise UserError("reward.functions names functions, but a Python program has given one; leave one of them out")
    # The name of a reward function with its settings, as any process reads it.
    specified = {CODE_TESTS: specification(reward.sandbox)} if runs_code(reward) else {}
    named = {name: specified.get(spec, spec) for name, spec in reward.functions.items()}
    names = named or specified.get(reward.function, reward.function)
    calls = reward.calls
    settings = {"concurrency": calls.concurrency, "batch_size": calls.batch_size}
    functions = load_functions(names, given=given, **settings)
    if calls.batch_size != RewardFunctionConfig().batch_size and not any(one.batched for one in functions):
        raise UserError(
            f"reward.source.batch_size={calls.batch_size} has no effect: no function takes several responses at a "
            "time; give it the parameter responses in the place of response, or leave the setting out"
        )
    if calls.workers > 0 and given is not None:
        raise UserError(
            f"reward.source.workers={calls.workers}: workers load a function by its name, and this one was given by a "
            "Python program; name it as reward.function=FILE.py:NAME, or set reward.source.workers=0"
        )
    num_workers = calls.workers
    if num_workers < 0:  # comparing two strings needs no process
        cheap = {*(reward.functions.values() or [reward.function])} <= CHEAP
        num_workers = 0 if given is not None or cheap else max(1, min(MAX_WORKERS, own_cores() - 1))
    pool = None
    if num_workers:
        memory_bytes = calls.memory_mib << 20
        pool = WorkerPool(
            names, num_workers=num_workers, timeout_s=calls.timeout_s, memory_bytes=memory_bytes, **settings
        )
        resources.callback(pool.close)
    return FunctionRewards(functions, reward.sources, pool)


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
            cases = read_cases(prompt.answer, prompt.row)
        except UnknownTestsError as error:
            problem = f"row {prompt.index}: the reward function {CODE_TESTS} cannot read its tests: {error}"
            raise UserError(problem) from None
        for case in cases:
            if isinstance(case, AssertCase):
                rows.setdefault(case, []).append(prompt.index)
    refused: dict[str, set[int]] = {}
    if rows:
        with usable_sandbox(reward.sandbox) as sandbox:
            reasons = unfit(sandbox, [case.suite for case in rows], reward.sandbox.timeout_s)
            for numbers, why in zip(rows.values(), reasons, strict=True):
                refused.setdefault(why, set()).update(numbers)
    refused.pop("", None)
    problems = [f"they {why} (rows {', '.join(map(str, sorted(numbers)))})"[:400] for why, numbers in refused.items()]
    if problems:
        raise UserError(f"the reward function {CODE_TESTS} cannot judge by some tests: {'; '.join(problems)}")


def source_problems(
    rewards: FunctionRewards, train: Sequence[Prompt], held_out: Sequence[Prompt], *, key: str
) -> list[str]:
    """Return the mismatches between the rows' data sources and reward.sources, one line each.

    key: column of a row's source. A source that no row has is a problem only where there are rows to train on.
    """
    known, rows = rewards.sources, [*train, *held_out]
    sources, problems = {prompt.source for prompt in rows}, []
    if not known:
        return []
    if missing := sorted(sources - known.keys()):
        problems.append(
            f"rows have the sources {', '.join(map(repr, missing))} in the column {key!r} (data.source_key; '' where "
            "it is missing), which reward.sources has no entry for"
        )
    if train and (unused := sorted(known.keys() - sources)):
        problems.append(f"reward.sources has entries for {', '.join(unused)}, which no row has as {key!r}")
    for source in sorted(known):
        row = next((one.index for one in rows if one.source == source and one.answer is None), None)
        if row is not None and rewards.takes_answer(source):
            problems.append(
                f"row {row} of the source {source!r} has no answer, which a function of reward.sources takes; add one, "
                "or give that parameter a default"
            )
    return problems
