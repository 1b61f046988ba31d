"""A recorded step computed again by the trainer's own loop, on this rank: models compute, everything else is given.

What a model computes goes into the replay's own record; what stands behind it gets the recorded number, so that each
tensor is compared for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mega_rl.accelerator import Accelerator
from mega_rl.algorithms.kl import FixedKL
from mega_rl.assemble.algorithms import build_estimator, build_reward_kl
from mega_rl.assemble.plan import RunPlan, plan_run
from mega_rl.assemble.records import record_writer, step_columns
from mega_rl.assemble.roles import Roles, build_roles
from mega_rl.assemble.run import session
from mega_rl.assemble.trainer import build_overlong, minibatch_plan
from mega_rl.config.attention import Role
from mega_rl.engines.base import ModelRequest
from mega_rl.parallel.comm import ranks_of, share
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Inspect, ModelPasses, Ranks, TokenModel
from mega_rl.tracking.records.format import MODEL_OUTPUTS
from mega_rl.tracking.records.reader import Record, read_record
from mega_rl.tracking.records.writer import RecordWriter
from mega_rl.trainer import PPOTrainer, RunSettings
from mega_rl.trainer.greedy import WithGreedyRewards
from mega_rl.trainer.recording import RecordedStep, StepColumns
from mega_rl.trainer.validation import Evaluation
from mega_rl.types import Draws, Experience, Metrics, Prompt, RewardParts, Rewards, Rollout, TokenOutputs
from mega_rl.verify.replay.plan import ReplayPlan, recorded_config, replay_config
from mega_rl.workers.models import AbsentWorker

NO_LIMIT = 1 << 62


def replay(plan: ReplayPlan, accelerator: Accelerator) -> None:
    """Compute the plan's step and write it as a record below `plan.target`; collective over the world."""
    record = read_record(plan.record)
    config = replay_config(recorded_config(record.description), plan)
    with session(config, accelerator) as groups:
        run = plan_run(config, accelerator)
        models: dict[Role, ModelRequest] = {
            role: replace(model, trainable=False) for role, model in run.models.items() if role != "reward"
        }
        roles = build_roles(replace(run, models=models), accelerator, groups, colocated=False)
        roles = replace(roles, kl=FixedKL(record.description.kl_coef))
        _trainer(record, run, roles, groups, Path(plan.target)).step(record.description.steps_before)


def _trainer(record: Record, run: RunPlan, roles: Roles, groups: Groups, target: Path) -> PPOTrainer:
    """Return the trainer's loop around the recorded step."""
    config = run.config
    ranks = roles.actor_engine.data_parallel
    rows = _OwnRows(record, ranks)
    columns = step_columns(config, roles)
    computed: dict[str, Tensor] = {}
    old = _Computed(roles.actor, rows, "old_logprobs", computed)
    reference = _Computed(roles.reference, rows, "ref_logprobs", computed)
    critic = _Computed(roles.critic, rows, "values", computed)
    has_policy = {"policy_logprobs", "entropy"} & record.tensors.keys()
    policy = _ComputedPolicy(roles.models.in_turn("actor"), rows, computed) if has_policy else None
    columns = replace(columns, policy=policy)
    writer = record_writer(target, roles, everyone=ranks_of(groups.host_world), limit=NO_LIMIT)
    estimator = build_estimator(config)
    if "greedy_rewards" in record.tensors:
        estimator = WithGreedyRewards(estimator, rows.greedy_rewards())
    idle = _Idle()
    return PPOTrainer(
        settings=RunSettings(steps=record.description.step),
        prompts=_Prompts(record),
        validation=Evaluation(),
        rollout=rows,
        reward=rows,
        actor=idle,
        critic=critic if "values" in record.tensors else AbsentWorker(),
        reference=reference if "ref_logprobs" in record.tensors else AbsentWorker(),
        estimator=estimator,
        reward_kl=build_reward_kl(config, roles.kl),
        minibatches=minibatch_plan(config),
        recorder=_ReplayRecorder(columns, computed, rows, writer),
        overlong=build_overlong(config),
        kl=roles.kl,
        update_reference=lambda done: {},
        staleness=lambda rollout: {},
        old_logprobs=_OldLogprobs(None if columns.from_sampler else old),
        sync=idle,
        ranks=ranks,
        timer=idle,
        metrics=cast(Any, idle),
        checkpoints=cast(Any, idle),
        export=lambda done: None,
        read=lambda rollout, row: ("", ""),
        render=lambda ids: "",
        stop_requested=lambda: False,
    )


@dataclass
class _Computed:
    """Model that computes on the recorded rows, keeps its outputs, and returns the recorded ones."""

    model: TokenModel
    rows: _OwnRows
    name: str  # of the recorded tensor
    computed: dict[str, Tensor]  # by that name

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        outputs = self.model.evaluate(batch)
        is_critic = self.name == "values"
        values = outputs.values if is_critic else outputs.logprobs
        assert values is not None
        self.computed[self.name] = values
        recorded = self.rows.column(self.name)
        return TokenOutputs(values=recorded) if is_critic else TokenOutputs(logprobs=recorded)

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        return {}


@dataclass(frozen=True)
class _ComputedPolicy:
    """Policy whose log-probs and entropies are computed on the recorded rows and kept; it returns the recorded ones."""

    model: ModelPasses
    rows: _OwnRows
    computed: dict[str, Tensor]

    def __call__(self, rollout: Rollout) -> TokenOutputs:
        outputs = self.model.forward(rollout, with_entropy=True)
        assert outputs.logprobs is not None
        assert outputs.entropy is not None
        own = {"policy_logprobs": outputs.logprobs, "entropy": outputs.entropy}
        self.computed.update(own)
        recorded = {name: self.rows.column(name) for name in own if name in self.rows.record.tensors}
        given = own | recorded
        return TokenOutputs(logprobs=given["policy_logprobs"], entropy=given["entropy"])


@dataclass(frozen=True)
class _OwnRows:
    """The recorded rows of this replica's prompts, as the trainer gets them from sampling and rewards."""

    record: Record
    ranks: Ranks

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        names = (
            *("loss_mask", "rollout_logprobs", "finished", "prompt_index", "sample_index", "weight_version"),
            *("routing", "token_versions", "failed"),
        )
        return Rollout.from_rows(
            self.column("tokens").long(),
            prompt_lengths=self.column("prompt_lengths"),
            lengths=self.column("lengths"),
            **{name: self.column(name) for name in names if name in self.record.tensors},
        )

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        description = self.record.description
        parts = None
        if description.reward_parts:
            values = self.column("reward_parts")
            parts = RewardParts(description.reward_parts, description.reward_weights, values)
        scored = description.config["reward"]["source"] != "none"
        return Rewards(self.column("rewards"), parts, scored=scored)

    def metrics(self) -> Metrics:
        return {}

    def column(self, name: str) -> Tensor:
        """Return a recorded tensor of this replica's rows."""
        own = share(self.record.description.prompts, self.ranks)
        index = self.record.tensors["prompt_index"]
        rows = (index >= own.start) & (index < own.stop)
        return torch.from_numpy(self.record.tensors[name][rows].copy())

    def greedy_rewards(self) -> Tensor:
        """Return [P] float32, by prompt; NaN where it is not known."""
        table = torch.full((self.record.description.prompts,), torch.nan)
        index = torch.from_numpy(self.record.tensors["prompt_index"].copy())
        table[index] = torch.from_numpy(self.record.tensors["greedy_rewards"].copy())
        return table


@dataclass(frozen=True)
class _OldLogprobs:
    """Source of old log-probs: the recorded ones of the trainer, else those of the sampler."""

    model: _Computed | None
    inspect: Inspect | None = None

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        if self.model is None:
            return TokenOutputs(logprobs=rollout.rollout_logprobs), {}
        return self.model.evaluate(rollout), {}


@dataclass(frozen=True)
class _ReplayRecorder:
    """Recorder of the replayed step, with what the models computed in place of what they returned."""

    columns: StepColumns
    computed: Mapping[str, Tensor]  # outputs of models by the names of their tensors
    rows: _OwnRows
    writer: RecordWriter

    def is_due(self, step: int) -> bool:
        return True

    def __call__(self, step: RecordedStep) -> None:
        columns = self.columns(step)
        outputs = {name: self.computed[name] for name in MODEL_OUTPUTS if name in columns and name in self.computed}
        columns |= {name: values.detach().to("cpu") for name, values in outputs.items()}
        self.writer(self.rows.record.description, columns, [])


@dataclass(frozen=True)
class _Prompts:
    """Prompts of the recorded step, of which only the tokens count."""

    record: Record

    def batch(self, step: int) -> list[Prompt]:
        index, ends, tokens = (self.record.tensors[name] for name in ("prompt_index", "prompt_lengths", "tokens"))
        own = {int(number): tuple(ids[:end].tolist()) for number, ids, end in zip(index, tokens, ends, strict=True)}
        return [Prompt(number, own[number], text="", answer=None) for number in range(self.record.description.prompts)]

    def drawn_after(self, done: int) -> int:
        return 0


class _Idle:
    """Parts of a run that a replay does without: updates, published weights, timers."""

    weight_version = 0

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        return TokenOutputs()

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        return {}

    def publish(self) -> Metrics:
        return {}

    def resume_at(self, version: int) -> None:
        return

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def reset(self) -> None:
        return

    def metrics(self) -> Metrics:
        return {}
