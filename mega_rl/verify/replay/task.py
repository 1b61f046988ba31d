"""Compute a recorded step again with the trainer's own algorithm: models compute, everything else is given.

What a model computes goes into the replay's own record; what stands behind it gets the recorded number, so that each
tensor is compared for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.algorithms.kl import FixedKL
from mega_rl.config.attention import Role
from mega_rl.engines.base import ModelRequest
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of, share
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Inspect, ModelPasses, Ranks, TokenModel
from mega_rl.tracking.metrics.sinks import NullSink
from mega_rl.tracking.metrics.steps import PhaseTimer
from mega_rl.tracking.records.reader import MODEL_OUTPUTS, Record, read_record
from mega_rl.trainer.assemble.algorithms import build_overlong, build_policy_gradient
from mega_rl.trainer.assemble.plan import Roles, RunPlan, build_roles, plan_run
from mega_rl.trainer.assemble.records import record_writer, step_columns
from mega_rl.trainer.assemble.run import session
from mega_rl.trainer.collect import Batch
from mega_rl.trainer.filters import leave_unscored_out
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.rows import Samples, check_rows
from mega_rl.types import Experience, Metrics, Prompt, RewardParts, Rewards, Rollout, TokenOutputs
from mega_rl.verify.plan import ReplayPlan
from mega_rl.verify.replay.inputs import recorded_config, replay_config

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
        _replay_step(record, run, roles, groups, Path(plan.target))


def _replay_step(record: Record, run: RunPlan, roles: Roles, groups: Groups, target: Path) -> None:
    """Evaluate the recorded samples again, and write the record of it; collective."""
    config, ranks = run.config, roles.actor_engine.data_parallel
    rows, computed = _OwnRows(record, ranks), dict[str, Tensor]()
    columns = step_columns(config, roles)
    has_policy = {"policy_logprobs", "entropy"} & record.tensors.keys()
    policy = _ComputedPolicy(roles.actor_engine, rows, computed) if has_policy else None
    columns = replace(columns, policy=policy)
    timer = PhaseTimer()
    stage = Stages(timer)
    computing = replace(
        roles,
        actor=_Computed(roles.actor, rows, "old_logprobs", computed),
        critic=_recorded(roles.critic, rows, "values", computed),
        reference=_recorded(roles.reference, rows, "ref_logprobs", computed),
    )
    algorithm = build_policy_gradient(config, computing, lambda rollout, old: {}, stage, StepLog(NullSink(), timer))
    samples = rows.samples()
    check_rows(samples.rollout, samples.prompts, ranks)
    rollout, rewards = leave_unscored_out(samples.rollout, samples.rewards)
    shaped, _ = build_overlong(config).shape(rollout, rewards, ranks)
    greedy = rows.greedy_rewards() if "greedy_rewards" in record.tensors else None
    evaluated = algorithm.evaluate(Batch(samples, rollout, shaped, greedy), record.description.steps_before)
    written = columns(evaluated)
    outputs = {name: computed[name] for name in MODEL_OUTPUTS if name in written and name in computed}
    written |= {name: values.detach().to("cpu") for name, values in outputs.items()}
    writer = record_writer(target, roles, everyone=ranks_of(groups.host_world), limit=NO_LIMIT)
    writer(record.description, written, [])


def _recorded(model: TokenModel | None, rows: _OwnRows, name: str, computed: dict[str, Tensor]) -> _Computed | None:
    """Return a role that computes but returns the record's outputs; None without such outputs."""
    return None if model is None or name not in rows.record.tensors else _Computed(model, rows, name, computed)


@dataclass
class _Computed:
    """Model that computes on the recorded rows, keeps its outputs, and returns the recorded ones."""

    model: TokenModel
    rows: _OwnRows
    name: str  # the recorded tensor
    computed: dict[str, Tensor]  # outputs by tensor name

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
    """Policy that computes and keeps log-probs and entropies, and returns the recorded ones."""

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

    def samples(self) -> Samples:
        """Return the recorded samples with their rewards; of prompts only the tokens count."""
        names = (
            *("loss_mask", "rollout_logprobs", "finished", "prompt_index", "sample_index", "weight_version"),
            *("routing", "token_versions", "failed"),
        )
        rollout = Rollout.from_rows(
            self.column("tokens").long(),
            prompt_lengths=self.column("prompt_lengths"),
            lengths=self.column("lengths"),
            **{name: self.column(name) for name in names if name in self.record.tensors},
        )
        description, parts = self.record.description, None
        if description.reward_parts:
            values = self.column("reward_parts")
            parts = RewardParts(description.reward_parts, description.reward_weights, values)
        scored = description.config["reward"]["source"] != "none"
        return Samples(self._prompts(), rollout, Rewards(self.column("rewards"), parts, scored=scored))

    def _prompts(self) -> list[Prompt]:
        index, ends, tokens = (self.record.tensors[name] for name in ("prompt_index", "prompt_lengths", "tokens"))
        own = {int(number): tuple(ids[:end].tolist()) for number, ids, end in zip(index, tokens, ends, strict=True)}
        return [Prompt(number, own[number], text="", answer=None) for number in range(self.record.description.prompts)]

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
