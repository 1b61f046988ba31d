"""Recorder of a run's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path

from torch import Tensor

import mega_rl
from mega_rl.checkpoint.identity import model_identity
from mega_rl.config.keys import as_record
from mega_rl.config.needs import is_on_policy
from mega_rl.config.schema import Config
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.engines.models.build import DTYPES
from mega_rl.parallel.agreement import all_succeed
from mega_rl.tracking.metrics.trackers import without_secrets
from mega_rl.tracking.records.reader import FOLDER, RecordDescription
from mega_rl.tracking.records.writer import RecordWriter, clear_records
from mega_rl.trainer.assemble.algorithms import build_correction, build_reward_kl
from mega_rl.trainer.assemble.load import LoadedRun
from mega_rl.trainer.assemble.plan import TRAINED_ROLES, Roles, checkpoint_of
from mega_rl.trainer.events import StepColumns, StepRecorder
from mega_rl.trainer.loop import Stages
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.types import JsonObject
from mega_rl.workers.residency import PARAMETERS

PACKAGES = ("torch", "transformers", "megatron-core")


def build_recorder(run: LoadedRun, stage: Stages, *, done: int) -> StepRecorder | None:
    """Return the recorder that the config asks for, and remove records of steps after `done`; collective."""
    config, roles, world = run.config, run.roles, run.world
    settings = config.metrics.records
    if not settings.interval:
        return None
    root = Path(config.trainer.run_dir) / FOLDER
    all_succeed(lambda: clear_records(root, after=done) if world.rank == 0 else None, world)
    engine = roles.actor_engine
    first = engine.replica.rank == 0
    writer = RecordWriter(root, settings.max_mib << 20, world, engine.data_parallel.rank, is_first=first)
    changing = [role for role in TRAINED_ROLES if role in roles.engines]
    changing += [] if roles.average is None else ["reference"]

    if settings.weights:
        shardings = [roles.engines[role].sharding for role in changing]
        tensors = [tensor for one in shardings for tensor in hf_tensors(one.hf, head=one.head).values()]
        nbytes = DTYPES[config.model.dtype].itemsize * sum(prod(tensor.shape) for tensor in tensors)

        def save(folder: Path) -> None:
            stage.hold("save")
            for role in changing:
                roles.models.take_turn(role, PARAMETERS)
                roles.engines[role].save_hf(folder / role, source=checkpoint_of(config, role))

        writer = replace(writer, save_weights=save, weights_bytes=nbytes)

    def write(step: int, evaluated: Evaluated, columns: Mapping[str, Tensor], rows: Sequence[JsonObject]) -> None:
        description = _describe(run, step, evaluated)
        writer(replace(description, weights=tuple(changing) if settings.weights else ()), columns, rows)

    return StepRecorder(
        interval=settings.interval,
        columns=step_columns(config, roles),
        read=run.tokens.reader.written,
        render=run.tokens.render,
        write=write,
        stage=stage,
        writes_texts=writer.is_first,
    )


def _describe(run: LoadedRun, step: int, evaluated: Evaluated) -> RecordDescription:
    config, roles, samples = run.config, run.roles, evaluated.batch.samples
    engine, parts = roles.actor_engine, samples.rewards.parts
    models = roles.engines if run.world.rank == 0 else ()
    return RecordDescription(
        step=step + 1,
        prompts=len(samples.prompts),
        kl_coef=roles.kl.value,
        reward_parts=() if parts is None else parts.names,
        reward_weights=() if parts is None else parts.weights,
        config=without_secrets(as_record(config)),
        model={role: model_identity(checkpoint_of(config, role)) for role in models},
        weights=(),
        layout=str(engine.groups.layout),
        world_size=run.world.size,
        device=engine.device.type,
        dtype=config.model.dtype,
        versions={"mega_rl": mega_rl.__version__, **{name: version(name) for name in PACKAGES}},
    )


def step_columns(config: Config, roles: Roles) -> StepColumns:
    """Return the columns of a run's steps."""
    on_policy, engine = is_on_policy(config), roles.actor_engine
    from_sampler = on_policy or config.algorithm.old_logprobs == "rollout"
    evaluates = from_sampler or config.metrics.records.entropy
    return StepColumns(
        engine.data_parallel,
        policy=partial(engine.forward, with_entropy=True) if evaluates else None,
        from_sampler=from_sampler,
        reward_kl=build_reward_kl(config.algorithm.kl, roles.kl),
        correction=build_correction(config),
        on_policy=on_policy,
    )
