"""Inputs that runs and evaluations read before models: plan, tokenizer, rewards, a user's sources."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from mega_rl.config.choices import ROLLOUT, chosen
from mega_rl.config.schema import Config
from mega_rl.config.user_files import load_from_file
from mega_rl.data.tokenizer_identity import read_tokenizer
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.protocols import Ranks, RolloutSource
from mega_rl.rewards.build import RunRewards, build_rewards
from mega_rl.rewards.builtin import RewardFunction, final_answer
from mega_rl.rewards.model import TokenRows, token_rows
from mega_rl.rewards.role import UsersAnswers
from mega_rl.trainer.assemble.data import ReadSource, Tokens, load_data_source, load_tokenizer, read_tokens
from mega_rl.trainer.assemble.plan import RunPlan, plan_run
from mega_rl.trainer.validation import AnswersOf

MakeSource = Callable[[object], object]  # makes a user's rollout source from its `RolloutContext`


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run that are read before its models."""

    plan: RunPlan
    world: Ranks
    tokens: Tokens
    rewards: RunRewards
    answers_of: AnswersOf  # answers of responses, for evaluations
    rows_as: TokenRows | None  # reading of rollouts by a reward model
    rollouts: MakeSource | None = None  # the user's rollout source
    rows: ReadSource | None = None  # rows of the user's data source

    @property
    def vocab_size(self) -> int:
        """Return the size of the actor's vocabulary."""
        return self.plan.models["actor"].hf.vocab_size


def read_inputs(
    config: Config,
    accelerator: Accelerator,
    world: Ranks,
    resources: ExitStack,
    *,
    reward_function: RewardFunction | None = None,
    trains: bool = True,
) -> Inputs:
    """Return the inputs of a run. Raises UserError and UserErrors before any weight is loaded.

    resources: ends the workers of rewards. trains: an evaluation has no optimizer, and uses no source of the user.
    """
    plan = plan_run(config, accelerator)
    if not trains:
        plan = replace(plan, models={role: replace(model, trainable=False) for role, model in plan.models.items()})
    tokens = read_tokens(config, is_writer=world.rank == 0)
    own = load_rollout_source(config) if trains else None
    rows = load_data_source(config) if trains else None
    rewards = build_rewards(config.reward, reward_function, resources=resources)
    return Inputs(plan, world, tokens, rewards, load_answers(config, world), _read_rows_as(config, tokens), own, rows)


def load_rollout_source(config: Config) -> MakeSource | None:
    """Return the maker of the user's rollout source, None for the built-in one.

    Raises UserError as `Choice.own` does.
    """
    name = chosen(config, ROLLOUT)
    if name in ROLLOUT.builtin:
        return None
    made = ROLLOUT.own(config)
    if isinstance(made, type):
        setting = f"rollout.source={name!r}"
        missing = [method for method in ("generate", "metrics") if not hasattr(made, method)]
        if missing:
            raise UserError(f"{setting}: it has no method {missing[0]}; a rollout source has generate and metrics")
        check_draws(cast(type[RolloutSource], made).generate, config, setting)
    return partial(made, **config.rollout.source.settings)


def check_draws(generate: Callable[..., object], config: Config, setting: str) -> None:
    """Raise UserError if a source, or its class, cannot sample the evaluations that settings ask for."""
    val, parameters = config.validation, inspect.signature(generate).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if (val.temperature or val.max_new_tokens) and "draws" not in parameters and not takes_any:
        raise UserError(
            f"{setting}: its generate takes no draws, which validation.temperature={val.temperature:g} and "
            f"validation.max_new_tokens={val.max_new_tokens} need; add the parameter draws=None and pass it on to "
            "sample and extend, or set both to 0 for greedy validations"
        )


def _read_rows_as(config: Config, tokens: Tokens) -> TokenRows | None:
    """Return how a reward model reads rollouts.

    It reads the actor's tokens under the same tokenizer, else its own. None without a reward model. Raises UserError
    for a tokenizer that cannot be loaded.
    """
    if config.reward.source.name != "model":
        return None
    path = Path(config.reward.model_path)
    own = load_tokenizer(path)
    identities = [read_tokenizer(folder) for folder in (path, Path(config.model.path))]
    digests = {None if identity is None else identity.digest for identity in identities}
    return token_rows(
        own,
        template=own.chat_template,
        same_tokenizer=len(digests) == 1 and None not in digests,
        rollout_template=tokens.tokenizer.chat_template if config.data.chat.template == "true" else None,
        reader=tokens.reader,
    )


def load_answers(config: Config, world: Ranks) -> AnswersOf:
    """Return the function that reads answers of responses. Raises UserError for a user's own."""
    spec = config.validation.answer_of
    if not spec:
        return lambda responses: [last_answer(response) for response in responses]
    function = load_from_file(spec, key="validation.answer_of", kind="function")
    setting = f"validation.answer_of={spec!r}"
    if not callable(function):
        raise UserError(f"{setting}: is of type {type(function).__name__}, not a function")
    return UsersAnswers(function, setting=setting, everyone=world, timeout_s=config.trainer.timeout_s)


def last_answer(response: str) -> str | None:
    """Return a response's final answer, else all of it, with single spaces; None if blank."""
    answer = final_answer(response)
    return " ".join((response if answer is None else answer).split()) or None
