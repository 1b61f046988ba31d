"""Recorder of a run's steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path

from torch import Tensor

import mega_rl
from mega_rl.checkpoint.identity import model_identity
from mega_rl.config.attention import Role
from mega_rl.config.needs import is_on_policy
from mega_rl.config.origins import as_record
from mega_rl.config.schema import Config
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.engines.models.build import DTYPES
from mega_rl.parallel.agreement import all_succeed
from mega_rl.protocols import Ranks
from mega_rl.tracking.metrics.trackers import without_secrets
from mega_rl.tracking.records.format import FOLDER, RecordDescription
from mega_rl.tracking.records.writer import RecordWriter, Weights, clear_records
from mega_rl.trainer.assemble.algorithms import build_correction, build_reward_kl
from mega_rl.trainer.assemble.data import Tokens
from mega_rl.trainer.assemble.plan import TRAINED_ROLES, checkpoint_of
from mega_rl.trainer.assemble.roles import Roles
from mega_rl.trainer.loop import Stages
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.trainer.recording import StepColumns, StepRecorder
from mega_rl.types import JsonObject
from mega_rl.workers.residency import PARAMETERS

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "megatron-core")


@dataclass(frozen=True)
class StepWriter:
    """Writer of the records of a run, with what they say of it."""

    config: Config
    roles: Roles
    writer: RecordWriter

    def __call__(
        self, step: int, evaluated: Evaluated, columns: Mapping[str, Tensor], rows: Sequence[JsonObject]
    ) -> None:
        """Write the record of a step; collective."""
        engine, samples = self.roles.actor_engine, evaluated.batch.samples
        parts = samples.rewards.parts
        roles = [] if self.writer.weights is None else _saved(self.roles)
        description = RecordDescription(
            step=step + 1,
            prompts=len(samples.prompts),
            kl_coef=self.roles.kl.value,
            reward_parts=() if parts is None else parts.names,
            reward_weights=() if parts is None else parts.weights,
            config=without_secrets(as_record(self.config)),
            model=_identities(self.config, self.roles) if self.writer.everyone.rank == 0 else {},
            weights=tuple(roles),
            layout=str(engine.groups.layout),
            world_size=self.writer.everyone.size,
            device=engine.device.type,
            dtype=self.config.model.dtype,
            versions={"mega_rl": mega_rl.__version__, **{name: version(name) for name in PACKAGES}},
        )
        self.writer(description, columns, rows)


def build_recorder(
    config: Config,
    roles: Roles,
    tokens: Tokens,
    *,
    everyone: Ranks,
    done: int,
    stage: Stages,
) -> StepRecorder | None:
    """Return the recorder that the config asks for; records of steps after `done` are removed; collective."""
    settings = config.metrics.records
    if not settings.interval:
        return None
    root = Path(config.trainer.run_dir) / FOLDER
    all_succeed(lambda: clear_records(root, after=done) if everyone.rank == 0 else None, everyone)
    writer = record_writer(root, roles, everyone=everyone, limit=settings.max_mib << 20)
    if settings.weights:

        def save(folder: Path) -> None:
            stage.hold("save")
            for role in _saved(roles):
                roles.models.take_turn(role, PARAMETERS)
                roles.engines[role].save_hf(folder / role, source=checkpoint_of(config, role))

        writer = replace(writer, weights=Weights(_nbytes(config, roles), save))
    return StepRecorder(
        interval=settings.interval,
        columns=step_columns(config, roles),
        read=tokens.reader.written,
        render=tokens.render,
        write=StepWriter(config, roles, writer),
        stage=stage,
        writes_texts=writer.is_first,
    )


def record_writer(root: Path, roles: Roles, *, everyone: Ranks, limit: int) -> RecordWriter:
    """Return the writer of records under `root`, without weights."""
    engine = roles.actor_engine
    return RecordWriter(root, limit, everyone, engine.data_parallel.rank, is_first=engine.replica.rank == 0)


def step_columns(config: Config, roles: Roles) -> StepColumns:
    """Return the columns of a run's steps."""
    on_policy = is_on_policy(config)
    from_sampler = on_policy or config.algorithm.old_logprobs == "rollout"
    return StepColumns(
        roles.actor_engine.data_parallel,
        policy=partial(roles.actor_engine.forward, with_entropy=True)
        if from_sampler or config.metrics.records.entropy
        else None,
        from_sampler=from_sampler,
        reward_kl=build_reward_kl(config, roles.kl),
        correction=build_correction(config),
        on_policy=on_policy,
    )


def _saved(roles: Roles) -> list[Role]:
    """Return the roles whose weights change in a run."""
    changing = (*TRAINED_ROLES, *(() if roles.average is None else ("reference",)))
    return [role for role in roles.engines if role in changing]


def _nbytes(config: Config, roles: Roles) -> int:
    """Return the bytes of the weights that change."""
    item = DTYPES[config.model.dtype].itemsize
    shardings = [roles.engines[role].sharding for role in _saved(roles)]
    return item * sum(prod(t.shape) for s in shardings for t in hf_tensors(s.hf, head=s.head).values())


def _identities(config: Config, roles: Roles) -> dict[str, str]:
    """Return the identity by content of the checkpoint that each role began with."""
    return {role: model_identity(checkpoint_of(config, role)) for role in roles.engines}
