"""Sources of a user's own, of rollouts and of rows of prompts: loaded before the models, made with their context."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from mega_rl.config.choices import DATA, ROLLOUT, Choice, chosen
from mega_rl.config.keys import value_of
from mega_rl.config.schema import Config
from mega_rl.config.user_files import users_code
from mega_rl.data.rows import DataContext, RowSource
from mega_rl.errors import UserError
from mega_rl.protocols import Ranks, RankState, RolloutEngine, RolloutSource, WeightSync
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.trainer.assemble.data import ReadSource, Split, Tokens
from mega_rl.trainer.assemble.plan import RunPlan
from mega_rl.trainer.assemble.roles import Roles
from mega_rl.workers.own_rollouts.checks import CheckedRollouts, RowRules
from mega_rl.workers.own_rollouts.context import RolloutContext
from mega_rl.workers.own_rollouts.weights import WeightReceiver


class Maker(Protocol):
    """A class or function that makes a source from its context and the recipe's settings."""

    def __call__(self, context: object, /) -> object: ...


@dataclass(frozen=True)
class OwnRollouts:
    """A user's rollout source before the engines are built, and the tokens that it is given."""

    make: Maker
    setting: str  # "rollout.source='agent.py:Agent'"
    tokens: Tokens


class MadeRollouts(NamedTuple):
    """A user's rollout source, and the parts of a run that it plays besides."""

    source: RolloutSource
    state: RankState | None  # the source, where it has state for checkpoints
    receiver: WeightReceiver | None  # the source, where it takes the actor's weights


def load_rollout_source(config: Config, tokens: Tokens) -> OwnRollouts | None:
    """Return the user's rollout source, None for the built-in one. Raises UserError: see `_maker`."""
    name = chosen(config, ROLLOUT)
    if name in ROLLOUT.builtin:
        return None
    made, make = _maker(config, ROLLOUT)
    setting = f"rollout.source={name!r}"
    missing = [method for method in ("generate", "metrics") if isinstance(made, type) and not hasattr(made, method)]
    if missing:
        raise UserError(f"{setting}: it has no method {missing[0]}; a rollout source has generate and metrics")
    if isinstance(made, type):
        _check_draws(cast(type[RolloutSource], made).generate, config, setting)
    return OwnRollouts(make, setting, tokens)


def make_rollout_source(
    own: OwnRollouts,
    plan: RunPlan,
    roles: Roles,
    *,
    everyone: Ranks,
    engine: RolloutEngine | None,
    sync: WeightSync,
) -> MadeRollouts:
    """Return a user's rollout source over an engine, or over none, with checks of its rows. Raises UserError."""
    config, actor = plan.config, roles.actor_engine
    rollout, name = config.rollout, own.setting
    context = RolloutContext(
        tokenizer=own.tokens.tokenizer,
        engine=engine,
        sampling=Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=own.tokens.stop_ids,
        ),
        n=rollout.n,
        seed=config.trainer.seed,
        data_parallel=actor.data_parallel,
        replica=actor.replica,
        weight_version=lambda: sync.weight_version,
    )
    with users_code(f"{name} cannot be made"):
        made = own.make(context)
    if not (hasattr(made, "generate") and hasattr(made, "metrics")):
        raise UserError(f"{name}: made {type(made).__name__}; a rollout source has the methods generate and metrics")
    _check_draws(cast(RolloutSource, made).generate, config, name)
    takes_weights = hasattr(made, "receive_weights")
    if takes_weights and engine is not None:
        raise UserError(
            f"{name}: its receive_weights has no effect with rollout.backend={rollout.backend}, whose engine takes the "
            "weights; set rollout.backend=none, or leave it out"
        )
    source = CheckedRollouts(
        cast(RolloutSource, made),
        name,
        RowRules(config.data.max_prompt_tokens, rollout.max_new_tokens, plan.models["actor"].hf.vocab_size, rollout.n),
        engine=engine,
        data_parallel=actor.data_parallel,
        replica=actor.replica,
        everyone=everyone,
    )
    has_state = hasattr(made, "state") and hasattr(made, "restore")
    return MadeRollouts(
        source,
        cast(RankState, made) if has_state else None,
        cast(WeightReceiver, made) if takes_weights else None,
    )


def _check_draws(generate: Callable[..., object], config: Config, setting: str) -> None:
    """Check that a source, or its class, can sample evaluations where the settings ask for it. Raises UserError."""
    val, parameters = config.validation, inspect.signature(generate).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if (val.temperature or val.max_new_tokens) and "draws" not in parameters and not takes_any:
        raise UserError(
            f"{setting}: its generate takes no draws, which validation.temperature={val.temperature:g} and "
            f"validation.max_new_tokens={val.max_new_tokens} need; add the parameter draws=None and pass it on to "
            "sample and extend, or set both to 0 for greedy validations"
        )


def load_data_source(config: Config) -> ReadSource | None:
    """Return the function that gives the user's rows of a split, None where prompts come from files alone.

    Raises UserError: see `_maker`; when rows are read, for code that raises.
    """
    name = chosen(config, DATA)
    if name in DATA.builtin:
        return None
    _, make = _maker(config, DATA)

    def rows(tokens: Tokens, split: Split) -> RowSource:
        setting = f"data.source={name!r}"
        with users_code(f"{setting} cannot be made"):
            made = make(DataContext(split, config.trainer.seed, tokens.tokenizer))
        if not isinstance(made, Iterable):
            raise UserError(f"{setting}: made {type(made).__name__}, which yields no rows; give it __iter__")
        return RowSource(f"{setting} ({split})", _iterated(made, setting))

    return rows


def _iterated(rows: Iterable[object], setting: str) -> Iterator[object]:
    """Yield the rows of a user's source. Raises UserError for code that raises."""
    with users_code(f"{setting} fails while it yields rows"):
        yield from rows


def _maker(config: Config, choice: Choice) -> tuple[object, Maker]:
    """Return the chosen class or function, and a function of the context that makes its source.

    Raises UserError: see `Choice.own`.
    """
    made, settings = choice.own(config), value_of(config, choice.key).settings
    return made, lambda context: made(context, **settings)
