"""Inputs that runs and evaluations read before models, and their loaded models: roles, rollouts, rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mega_rl.config.choices import ADVANTAGE, ROLLOUT
from mega_rl.config.schema import Config
from mega_rl.config.user_files import load_from_file
from mega_rl.data.tokenizer_identity import read_tokenizer
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Ranks, Scorer
from mega_rl.rewards.build import RunRewards, build_rewards
from mega_rl.rewards.builtin import RewardFunction, final_answer
from mega_rl.rewards.model import ModelScorer, RowLimits, TokenRows, token_rows
from mega_rl.rewards.role import answers_together
from mega_rl.rollout.sglang.build import start_servers
from mega_rl.tracking import progress
from mega_rl.trainer.assemble.data import ReadSource, Tokens, load_data_source, load_tokenizer, read_tokens
from mega_rl.trainer.assemble.plan import Roles, RunPlan, build_roles, plan_run
from mega_rl.trainer.assemble.rollouts import Rollouts, build_rollouts
from mega_rl.trainer.validation import AnswersOf, Evaluation, EvaluationPlan
from mega_rl.types import Draws, Prompt, PromptSet


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run that are read before its models."""

    plan: RunPlan
    world: Ranks
    tokens: Tokens
    rewards: RunRewards
    answers_of: AnswersOf  # answers of responses, for evaluations
    rows_as: TokenRows | None  # reading of rollouts by a reward model
    rollouts: Callable[[object], object] | None = None  # makes the user's rollout source from its `RolloutContext`
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
    """Return the inputs of a run. Raises UserError and UserErrors before any weight is loaded."""
    plan = plan_run(config, accelerator)
    if not trains:
        plan = replace(plan, models={role: replace(model, trainable=False) for role, model in plan.models.items()})
    tokens = read_tokens(config, is_writer=world.rank == 0)
    own = ROLLOUT.maker(config) if trains else None
    rows = load_data_source(config) if trains else None
    rewards = build_rewards(config.reward, reward_function, resources=resources)
    return Inputs(plan, world, tokens, rewards, load_answers(config, world), _read_rows_as(config, tokens), own, rows)


def _read_rows_as(config: Config, tokens: Tokens) -> TokenRows | None:
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
    return lambda responses: answers_together(function, responses, setting=setting, everyone=world)


def last_answer(response: str) -> str | None:
    """Return a response's final answer, else all of it, with single spaces; None if blank."""
    answer = final_answer(response)
    return " ".join((response if answer is None else answer).split()) or None


@dataclass(frozen=True)
class LoadedRun:
    """Parts of a run when its models are loaded."""

    config: Config
    world: Ranks
    tokens: Tokens
    roles: Roles
    rollouts: Rollouts
    scorer: Scorer  # reward role

    @property
    def replicas(self) -> Ranks:
        """Return the data-parallel replicas of the actor."""
        return self.roles.actor_engine.data_parallel


def load_run(
    inputs: Inputs,
    accelerator: Accelerator,
    groups: Groups,
    resources: ExitStack,
    *,
    prompts: Callable[[int], Sequence[Prompt]] = lambda step: [],
) -> LoadedRun:
    """Return the loaded run; collective. prompts: of a step, for generation ahead. resources: ends the servers."""
    plan, world = inputs.plan, inputs.world
    config, hf = plan.config, plan.models["actor"].hf
    # Servers with devices of their own come up while the models are built; those that share the trainer's have
    # released their memory before.
    servers = start_servers(config.rollout, config.trainer, plan.engine, hf, accelerator, world, resources)
    roles = build_roles(plan, accelerator, groups, colocated=servers is not None and servers.colocated)
    with progress.phase("preparing the rollout engine"):
        rollouts = build_rollouts(inputs, accelerator, servers, roles, resources, prompts=prompts)
    return LoadedRun(config, world, inputs.tokens, roles, rollouts, _build_scorer(inputs, roles))


def build_evaluation(
    inputs: Inputs, run: LoadedRun, sets: Sequence[PromptSet], hold: Callable[[str], None]
) -> Evaluation:
    """Return the evaluation of sets of prompts; hold: brings a stage's state to the devices."""
    val = run.config.validation
    draws = None
    if val.temperature or val.max_new_tokens:
        draws = Draws(val.n, val.temperature, val.top_p, val.top_k, max_new_tokens=val.max_new_tokens)
    plan = EvaluationPlan(draws, val.counted, val.right_above, val.right_part, val.chunk)
    read, source = run.tokens.reader.written, run.rollouts.source
    return Evaluation(sets, plan, source, run.scorer, run.replicas, read, inputs.answers_of, hold)


def _build_scorer(inputs: Inputs, roles: Roles) -> Scorer:
    config, rows_as = inputs.plan.config, inputs.rows_as
    trainer = config.trainer
    if rows_as is None:
        advantage = f"algorithm.advantage={config.algorithm.advantage}"
        return inputs.rewards.scorer(
            inputs.tokens.reader,
            replica=roles.actor_engine.replica,
            everyone=inputs.world,
            timeout_s=trainer.timeout_s,
            reads_parts=advantage if ADVANTAGE.needs(config, "needs_parts") else "",
        )
    engine, cp = roles.engines["reward"], config.engine.megatron.cp
    limits = RowLimits(
        vocab_size=engine.sharding.hf.vocab_size,
        positions=engine.sharding.hf.max_position_embeddings,
        microbatch_tokens=trainer.microbatch.max_tokens if trainer.microbatch.packing else None,
        multiple=2 * cp if cp > 1 else 1,
    )
    return ModelScorer(engine, rows_as, limits=limits, everyone=inputs.world)
