"""Compute a recorded step again with the trainer's own algorithm: models compute, everything else is given.

What a model computes goes into the replay's own record; what stands behind it gets the recorded number, so that each
tensor is compared for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.algorithms.kl import KLController
from mega_rl.config.loader import load
from mega_rl.config.needs import Role
from mega_rl.config.schema import Config
from mega_rl.engines.base import ModelRequest
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of, share
from mega_rl.parallel.groups import Groups
from mega_rl.protocols import Inspect, Ranks, TokenModel
from mega_rl.tracking.metrics.sinks import NullSink
from mega_rl.tracking.metrics.steps import PhaseTimer
from mega_rl.tracking.records.reader import MODEL_OUTPUTS, Record
from mega_rl.tracking.records.reader import read_record as read_step
from mega_rl.tracking.records.writer import RecordWriter
from mega_rl.trainer.assemble.algorithms import build_policy_gradient
from mega_rl.trainer.assemble.plan import Roles, build_roles, plan_run
from mega_rl.trainer.assemble.records import step_columns
from mega_rl.trainer.assemble.run import session
from mega_rl.trainer.collect import Batch
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.rows import Samples, check_rows, leave_unscored_out, shaped_rewards
from mega_rl.types import Experience, Metrics, Prompt, RewardParts, Rewards, Rollout, TokenOutputs
from mega_rl.untrusted import read_record
from mega_rl.verify.replay import ReplayPlan, replay_config

NO_LIMIT = 1 << 62
SAMPLED = (
    *("loss_mask", "rollout_logprobs", "end", "prompt_index", "sample_index", "weight_version"),
    *("routing", "token_versions", "kept", "failed", "branch", "turn", "turn_scores"),
)


def run_task(arguments: object, accelerator: Accelerator) -> None:
    """Replay a plan in JSON."""
    replay(read_record(ReplayPlan, arguments), accelerator)


def replay(plan: ReplayPlan, accelerator: Accelerator) -> None:
    """Compute the plan's step and write it as a record below `plan.target`; collective over the world."""
    record = read_step(plan.record)
    config = replay_config(load(None, record.description.config), plan)
    with session(config, accelerator) as groups:
        run, steps = plan_run(config, accelerator), config.trainer.steps
        models: dict[Role, ModelRequest] = {
            role: replace(model, trainable=False) for role, model in run.models.items() if role != "reward"
        }
        roles = build_roles(replace(run, models=models), accelerator, groups, steps=steps, colocated=False)
        roles = replace(roles, kl=KLController(record.description.kl_coef))
        _replay_step(record, config, roles, groups, Path(plan.target))


def _replay_step(record: Record, config: Config, roles: Roles, groups: Groups, target: Path) -> None:
    """Evaluate the recorded samples again, and write the record of it; collective."""
    ranks, limit, overlong = roles.actor_engine.data_parallel, config.rollout.max_new_tokens, config.reward.overlong
    rows, computed = RecordedRows(record, ranks), dict[str, Tensor]()

    def policy(rollout: Rollout) -> TokenOutputs:
        outputs = roles.actor_engine.forward(rollout, with_entropy=True)
        return TokenOutputs(
            logprobs=rows.recorded("policy_logprobs", outputs.logprobs, computed),
            entropy=rows.recorded("entropy", outputs.entropy, computed),
        )

    has_policy = {"policy_logprobs", "entropy"} & record.tensors.keys()
    columns = replace(step_columns(roles, entropy=False), policy=policy if has_policy else None)
    timer = PhaseTimer()

    def computing(model: TokenModel | None, name: str) -> _Computed | None:
        return None if model is None or name not in record.tensors else _Computed(model, rows, name, computed)

    roles = replace(
        roles,
        actor=_Computed(roles.actor, rows, "old_logprobs", computed),
        critic=computing(roles.critic, "values"),
        reference=computing(roles.reference, "ref_logprobs"),
    )
    log = StepLog(NullSink(), timer)
    algorithm = build_policy_gradient(
        roles, config.trainer, lambda rollout, old: {}, Stages(timer), log,
        max_response_tokens=limit, filter_truncated=overlong.filter,
    )  # fmt: skip
    samples = rows.samples()
    check_rows(samples.rollout, samples.prompts, ranks)
    rollout, rewards = leave_unscored_out(samples.rollout, samples.rewards)
    shaped, _ = shaped_rewards(rollout, rewards, ranks, overlong, max_response_tokens=limit)
    greedy = rows.greedy_rewards() if "greedy_rewards" in record.tensors else None
    evaluated = algorithm.evaluate(Batch(samples, rollout, shaped, greedy), record.description.steps_before)
    written = columns(evaluated)
    outputs = {name: computed[name] for name in MODEL_OUTPUTS if name in written and name in computed}
    written |= {name: values.detach().to("cpu") for name, values in outputs.items()}
    engine, world = roles.actor_engine, ranks_of(groups.host_world)
    writer = RecordWriter(target, NO_LIMIT, world, engine.data_parallel.rank, is_first=engine.replica.rank == 0)
    writer(record.description, written, [])


@dataclass
class _Computed:
    """Model that computes on the recorded rows, keeps its outputs, and returns the recorded ones."""

    model: TokenModel
    rows: RecordedRows
    name: str  # the recorded tensor
    computed: dict[str, Tensor]  # outputs by tensor name

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        outputs = self.model.evaluate(batch)
        if self.name == "values":
            return TokenOutputs(values=self.rows.recorded(self.name, outputs.values, self.computed))
        return TokenOutputs(logprobs=self.rows.recorded(self.name, outputs.logprobs, self.computed))

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        return {}


@dataclass(frozen=True)
class RecordedRows:
    """The recorded rows of this replica's prompts, as the trainer gets them from sampling and rewards."""

    record: Record
    ranks: Ranks

    def recorded(self, name: str, values: Tensor | None, computed: dict[str, Tensor]) -> Tensor:
        """Keep computed values under a name; return the recorded ones if the record has them."""
        assert values is not None
        computed[name] = values
        return self.column(name) if name in self.record.tensors else values

    def samples(self) -> Samples:
        """Return the recorded samples with their rewards; of prompts only the tokens count."""
        description, parts = self.record.description, None
        rollout = Rollout.from_rows(
            self.column("tokens").long(),
            prompt_lengths=self.column("prompt_lengths"),
            lengths=self.column("lengths"),
            **{name: self.column(name) for name in SAMPLED if name in self.record.tensors},
        )
        if description.reward_parts:
            values = self.column("reward_parts")
            parts = RewardParts(description.reward_parts, description.reward_weights, values)
        scored = description.config["reward"]["source"] != "none"
        index, ends, tokens = (self.record.tensors[name] for name in ("prompt_index", "prompt_lengths", "tokens"))
        first = self.record.tensors.get("branch", 0 * index) == 0
        starts = zip(index[first], tokens[first], ends[first], strict=True)
        own = {int(number): tuple(ids[:end].tolist()) for number, ids, end in starts}
        prompts = [Prompt(number, own[number], text="", answer=None) for number in range(description.prompts)]
        rewards = Rewards(self.column("rewards"), parts, scored=scored)
        return Samples(prompts, rollout, rewards, torch.arange(len(prompts)))

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
