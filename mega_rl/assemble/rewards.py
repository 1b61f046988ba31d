"""Rewards of a run: a function, a service, a model, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mega_rl.assemble.data import load_tokenizer
from mega_rl.assemble.roles import Roles
from mega_rl.config.plugins.choices import ADVANTAGE
from mega_rl.config.schema import Config, RewardConfig, RewardPoolConfig
from mega_rl.config.schema.sandbox import CODE_TESTS, runs_code
from mega_rl.cores import own_cores
from mega_rl.data.columns import RewardColumns
from mega_rl.data.tokenizer_identity import read_tokenizer
from mega_rl.errors import UserError, UserErrors
from mega_rl.protocols import Ranks, SampleListener, Scorer
from mega_rl.tracking import progress
from mega_rl.types import Prompt, PromptSet
from mega_rl.workers.code.cases import AssertCase, read_cases
from mega_rl.workers.code.reward import specification
from mega_rl.workers.code.sandboxes import unfit_tests
from mega_rl.workers.code.suites import UnknownTestsError
from mega_rl.workers.reward import AbsentScorer, FunctionRewards, RewardWorker, TextScorer
from mega_rl.workers.reward_functions import CHEAP, RewardFunction, resolve
from mega_rl.workers.reward_http import HttpRewards
from mega_rl.workers.reward_model import RewardModelWorker, RowLimits, TokenRows, token_rows
from mega_rl.workers.reward_pool.pool import RewardPool
from mega_rl.workers.reward_pool.process import WorkerOrder
from mega_rl.workers.reward_pool.scorer import PooledRewards
from mega_rl.workers.reward_service import RewardService
from mega_rl.workers.scoring.failures import FailureRule
from mega_rl.workers.scoring.parts import PartRule
from mega_rl.workers.scoring.responses import ResponseReader
from mega_rl.workers.scoring.sets import FunctionSet, load_call, source_problems
from mega_rl.workers.turns import ScorerOnDevice

MAX_WORKERS = 8  # of a rank, unless the config says how many


def prepare_reward(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    reader: ResponseReader,
    function: RewardFunction | None = None,
    *,
    resources: ExitStack,
) -> TextScorer | TokenRows | None:
    """The function or service that scores, or how a reward model gets to read rollouts; None of a run without rewards.

    All that can be wrong with the source of rewards is found here, before any model is loaded. `tokenizer` and `reader`
    are the actor's. function: of a Python program, in place of the one that the config names. resources: ends the
    processes of a reward function.

    Raises:
        UserError: a function that cannot be called, an address or key that cannot be used.
    """
    reward = config.reward
    if reward.source == "none":
        return None
    if reward.source == "model":
        return _token_rows(config, tokenizer, reader)
    if reward.source == "function":
        return _function_rewards(reward, function, resources)
    return HttpRewards(
        RewardService.find(reward.http.url, reward.http.key_file),
        batch_size=reward.http.batch_size,
        concurrency=reward.http.concurrency,
        timeout_s=reward.http.timeout_s,
        retries=reward.http.retries,
    )


def reward_columns(config: Config, prepared: TextScorer | TokenRows | None) -> RewardColumns:
    """Return the columns of the data that the source of rewards reads.

    Raises:
        UserError: a reward function takes an answer, and no column has it.
    """
    key = config.data.answer_key
    if isinstance(prepared, HttpRewards):
        return RewardColumns(answer=bool(key), structured=True)
    if not isinstance(prepared, FunctionRewards | PooledRewards):
        return RewardColumns(answer=False, structured=True)
    reward = config.reward
    taker = "functions" if reward.functions else f"function={reward.function!r}"
    if prepared.columns.answer and not key:
        raise UserError(
            f"data.answer_key is empty, but reward.{taker} takes an answer: name the "
            "column, or give that parameter a default"
        )
    return prepared.columns


def check_sources(
    config: Config,
    prepared: TextScorer | TokenRows | None,
    train: Sequence[Prompt],
    held_out: Sequence[PromptSet],
) -> None:
    """Raise UserErrors where the data sources of the rows are not those of reward.sources, or tests judge nothing.

    train: empty of an evaluation, whose rows need not have every source.
    """
    if runs_code(config.reward):
        with progress.phase("trying the tests of the data", announce=True):
            check_tests(config.reward, [*train, *(prompt for one in held_out for prompt in one.prompts)])
    if not isinstance(prepared, FunctionRewards | PooledRewards) or not isinstance(prepared.call, FunctionSet):
        return
    others = [prompt for one in held_out for prompt in one.prompts]
    if problems := source_problems(prepared.call, train, others, key=config.data.source_key):
        raise UserErrors(problems)


def check_tests(reward: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Raise UserError where the tests of some rows cannot judge a program. Tries the tests over a stub."""
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


def build_reward(
    config: Config,
    prepared: TextScorer | TokenRows | None,
    roles: Roles,
    *,
    reader: ResponseReader,
    everyone: Ranks,
    on_device: Callable[[], AbstractContextManager[None]],
    listen: Callable[[SampleListener], None],
) -> Scorer:
    """The reward role over what `prepare_reward` gave.

    In `on_device` a reward model finds room on its device; `listen` adds a listener of samples as they end.
    """
    if prepared is None:
        return AbsentScorer()
    if isinstance(prepared, FunctionRewards | PooledRewards | HttpRewards):
        arrives = config.rollout.backend == "sglang" and config.rollout.source == "single_turn"  # sample by sample
        scorer = RewardWorker(
            prepared,
            reader=reader,
            replica=roles.actor_engine.replica,
            everyone=everyone,
            timeout_s=config.trainer.timeout_s,
            early=None if isinstance(prepared, HttpRewards) or not arrives else prepared.begin,
            parts=PartRule(config.reward.weights, _reader_of_parts(config), tuple(config.reward.sources)),
            failed=None if isinstance(prepared, HttpRewards) else _failure_rule(config.reward),
        )
        if isinstance(prepared, PooledRewards) and arrives:
            listen(scorer.begin)
        return scorer
    assert callable(prepared)
    hf, trainer = roles.engines["reward"].sharding.hf, config.trainer
    limits = RowLimits(
        vocab_size=hf.vocab_size,
        positions=hf.max_position_embeddings,
        microbatch_tokens=trainer.microbatch.max_tokens if trainer.microbatch.packing else None,
        multiple=2 * config.engine.megatron.cp if config.engine.megatron.cp > 1 else 1,
    )
    worker = RewardModelWorker(roles.models.in_turn("reward"), prepared, limits=limits, everyone=everyone)
    return ScorerOnDevice(worker, on_device)


def _reader_of_parts(config: Config) -> str:
    """Return the setting that reads named parts of the reward; empty without one."""
    return f"algorithm.advantage={config.algorithm.advantage}" if ADVANTAGE.needs(config, "needs_parts") else ""


def _failure_rule(reward: RewardConfig) -> FailureRule:
    pool = reward.pool
    return FailureRule(pool.failure_score if pool.on_failure == "score" else None, max_share=pool.max_failed_share)


def _function_rewards(
    reward: RewardConfig, function: RewardFunction | None, resources: ExitStack
) -> FunctionRewards | PooledRewards:
    """Return the reward function, called in this process or in workers. Raises UserError."""
    if function is not None and reward.functions:
        raise UserError("reward.functions names functions, but a Python program has given one; leave one of them out")
    functions = {name: _specified(spec, reward) for name, spec in reward.functions.items()}
    named = load_call(functions, reward.sources) if functions else None
    scoring = named if isinstance(named, FunctionSet) else resolve(_specified(reward.function, reward), function)
    pool, num_workers = reward.pool, reward.pool.workers
    rewards = FunctionRewards(scoring, concurrency=pool.concurrency, batch_size=pool.batch_size)
    if not rewards.call.batched and pool.batch_size != RewardPoolConfig().batch_size:
        raise UserError(
            f"reward.pool.batch_size={pool.batch_size} has no effect: no function takes several responses at a time; "
            "give it the parameter responses in the place of response, or leave the setting out"
        )
    if num_workers > 0 and function is not None:
        raise UserError(
            f"reward.pool.workers={num_workers}: workers load a function by its name, and this one was given by a "
            "Python program; name it as reward.function=FILE.py:NAME, or set reward.pool.workers=0"
        )
    if num_workers < 0:  # comparing two strings needs no process
        names = {*reward.functions.values()} or {reward.function}
        in_process = function is not None or names <= CHEAP
        num_workers = 0 if in_process else min(MAX_WORKERS, own_cores() - 1)
    if num_workers == 0:
        return rewards
    workers = RewardPool(
        WorkerOrder(
            functions or _specified(reward.function, reward),
            memory_bytes=pool.memory_mib << 20,
            concurrency=pool.concurrency if rewards.call.is_async else 0,
            batch_size=pool.batch_size if rewards.call.batched else 0,
        ),
        num_workers=num_workers,
        timeout_s=pool.timeout_s,
    )
    resources.callback(workers.close)
    return PooledRewards(rewards.call, workers)


def _specified(function: str, reward: RewardConfig) -> str:
    """Return the name of a reward function as any process reads it: with its settings, if it has some."""
    return specification(reward.sandbox) if function == CODE_TESTS else function


def _token_rows(config: Config, tokenizer: PreTrainedTokenizerBase, reader: ResponseReader) -> TokenRows:
    """Return how a reward model reads rollouts: the actor's tokens under the same tokenizer, else its own."""
    path = Path(config.reward.model.path)
    own = load_tokenizer(path)
    identities = [read_tokenizer(folder) for folder in (path, Path(config.model.path))]
    digests = {None if identity is None else identity.digest for identity in identities}
    return token_rows(
        own,
        template=own.chat_template,
        same_tokenizer=len(digests) == 1 and None not in digests,
        rollout_template=tokenizer.chat_template if config.data.chat.template == "true" else None,
        reader=reader,
    )
