"""Models of runs and evaluations: roles, rollouts and the reward role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mega_rl.config.choices import ADVANTAGE
from mega_rl.config.schema import Config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Ranks, Scorer
from mega_rl.rewards.model import ModelScorer, RowLimits
from mega_rl.rollout.sglang.build import start_servers
from mega_rl.tracking import progress
from mega_rl.trainer.assemble.data import Tokens
from mega_rl.trainer.assemble.inputs import Inputs
from mega_rl.trainer.assemble.plan import RunPlan
from mega_rl.trainer.assemble.roles import Roles, build_roles
from mega_rl.trainer.assemble.rollouts import Rollouts, build_rollouts
from mega_rl.trainer.validation import Evaluation, EvaluationPlan
from mega_rl.types import Draws, Prompt, PromptSet


@dataclass(frozen=True)
class LoadedRun:
    """Parts of a run when its models are loaded."""

    plan: RunPlan
    world: Ranks
    tokens: Tokens
    roles: Roles
    rollouts: Rollouts
    scorer: Scorer  # reward role

    @property
    def config(self) -> Config:
        """Return the settings of the run."""
        return self.plan.config

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
    return LoadedRun(plan, world, inputs.tokens, roles, rollouts, _build_scorer(inputs, roles))


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
    """Return the reward role."""
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
