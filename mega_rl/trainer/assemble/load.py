"""Inputs that runs and evaluations read before models, and their loaded models: roles, rollouts, rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mega_rl.config.choices import DATA, ROLLOUT
from mega_rl.config.schema import ChatConfig, Config, RolloutConfig, TrainerConfig
from mega_rl.config.schema.data import ValidationConfig
from mega_rl.data.tokenizer_identity import read_tokenizer
from mega_rl.engines.models.build import DTYPES
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Ranks, Scorer
from mega_rl.rewards.build import RunRewards, build_rewards
from mega_rl.rewards.builtin import RewardFunction, final_answer
from mega_rl.rewards.model import ModelScorer, RowLimits, TokenRows, token_rows
from mega_rl.rewards.role import TextScorer
from mega_rl.rollout.sglang.build import start_servers
from mega_rl.tracking import progress
from mega_rl.trainer.assemble.data import OwnRows, Tokens, load_tokenizer, read_tokens
from mega_rl.trainer.assemble.plan import Roles, RunPlan, build_roles, plan_run
from mega_rl.trainer.assemble.rollouts import OwnRollouts, Rollouts, build_rollouts
from mega_rl.trainer.validation import Evaluation
from mega_rl.types import PromptSet
from mega_rl.workers.tenants import Base


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run that are read before its models."""

    plan: RunPlan
    world: Ranks
    tokens: Tokens
    rewards: RunRewards
    rows_as: TokenRows | None  # reading of rollouts by a reward model
    rollouts: OwnRollouts | None = None  # the user's rollout source
    rows: OwnRows | None = None  # the user's data source


def read_inputs(
    config: Config,
    accelerator: Accelerator,
    world: Ranks,
    resources: ExitStack,
    *,
    reward_function: RewardFunction | None = None,
    base: Base | None = None,
    trains: bool = True,
) -> Inputs:
    """Take a Config apart for a run or an evaluation, before any weight is loaded."""
    plan, reward = plan_run(config, accelerator, base), config.reward
    model, chat = Path(config.model.path), config.data.chat
    if not trains:
        plan = replace(plan, models={role: replace(one, trainable=False) for role, one in plan.models.items()})
    skips = reward.skip_special_tokens
    tokens = read_tokens(model, chat, config.rollout, skip_special_tokens=skips, is_writer=world.rank == 0)
    make, make_rows = ROLLOUT.maker(config), DATA.maker(config) if trains else None
    longest, draws = config.data.max_prompt_tokens, not config.validation.greedy
    own = make and OwnRollouts(make, config.rollout.source.name, longest, draws)
    validates = config.trainer.val_interval > 0 and DATA.needs(config, "has_validation")
    rows = make_rows and OwnRows(make_rows, config.data.source.name, config.trainer.seed, validates)
    rewards = build_rewards(reward, reward_function, resources=resources)
    rows_as = _read_rows_as(Path(reward.model_path), model, chat, tokens) if reward.model_path else None
    return Inputs(plan, world, tokens, rewards, rows_as, own, rows)


def _read_rows_as(path: Path, actor: Path, chat: ChatConfig, tokens: Tokens) -> TokenRows:
    """Return the reading of rollouts by a reward model. path: its checkpoint."""
    own = load_tokenizer(path)
    identities = [read_tokenizer(folder) for folder in (path, actor)]
    digests = {None if identity is None else identity.digest for identity in identities}
    return token_rows(
        own,
        template=own.chat_template,
        same_tokenizer=len(digests) == 1 and None not in digests,
        rollout_template=tokens.tokenizer.chat_template if chat.template == "true" else None,
        reader=tokens.reader,
    )


def last_answer(response: str) -> str | None:
    """Return a response's final answer, else all of it, with single spaces; None if blank."""
    answer = final_answer(response)
    return " ".join((response if answer is None else answer).split()) or None


@dataclass(frozen=True)
class LoadedRun:
    """Parts of a run when its models are loaded."""

    trainer: TrainerConfig
    world: Ranks
    tokens: Tokens
    roles: Roles
    rollouts: Rollouts
    scorer: Scorer  # reward role
    in_fp32: bool  # trainer and rollouts compute in fp32

    @property
    def replicas(self) -> Ranks:
        """Return the data-parallel replicas of the actor."""
        return self.roles.actor_engine.data_parallel


def load_run(
    inputs: Inputs, rollout: RolloutConfig, trainer: TrainerConfig, accelerator: Accelerator, groups: Groups,
    resources: ExitStack,
) -> LoadedRun:  # fmt: skip
    """Return the loaded run; collective. resources: ends the servers."""
    plan, world = inputs.plan, inputs.world
    # Servers with devices of their own come up while the models are built; those that share the trainer's have
    # released their memory before.
    hf = plan.models["actor"].hf
    servers = start_servers(rollout, trainer, plan.engine, hf, accelerator, world, resources)
    colocated = servers is not None and servers.colocated
    roles = build_roles(plan, accelerator, groups, steps=trainer.steps, colocated=colocated)
    scorer = _build_scorer(inputs, roles)
    early = scorer if isinstance(scorer, TextScorer) and scorer.source.can_begin_early else None
    if early is not None:
        resources.callback(early.forget)
    with progress.phase("preparing the rollout engine"):
        rollouts = build_rollouts(inputs, rollout, trainer, accelerator, servers, roles, resources, early)
    in_fp32 = {DTYPES[plan.engine.model.dtype], plan.rollout_dtype} == {torch.float32}
    return LoadedRun(trainer, world, inputs.tokens, roles, rollouts, scorer, in_fp32)


def build_evaluation(
    run: LoadedRun, val: ValidationConfig, sets: Sequence[PromptSet], hold: Callable[[str], None]
) -> Evaluation:
    """Return the evaluation of sets of prompts; hold: brings a stage's state to the devices."""
    read, source = run.tokens.reader.written, run.rollouts.source
    return Evaluation(sets, val, source, run.scorer, run.replicas, read, last_answer, hold)


def _build_scorer(inputs: Inputs, roles: Roles) -> Scorer:
    rows_as, settings, method = inputs.rows_as, inputs.plan.engine, roles.method
    if rows_as is None:
        return inputs.rewards.scorer(
            inputs.tokens.reader,
            replica=roles.actor_engine.replica,
            everyone=inputs.world,
            timeout_s=settings.timeout_s,
            reads_parts=f"algorithm.advantage={method.settings.advantage}" if method.needs_parts else "",
        )
    engine, cp = roles.engines["reward"], settings.engine.megatron.cp
    limits = RowLimits(
        vocab_size=engine.sharding.hf.vocab_size,
        positions=engine.sharding.hf.max_position_embeddings,
        microbatch_tokens=settings.microbatch.max_tokens if settings.microbatch.packing else None,
        multiple=2 * cp if cp > 1 else 1,
    )
    return ModelScorer(engine, rows_as, limits=limits, everyone=inputs.world)
