"""Records that a run writes of itself: its config, start-up table and steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from math import isnan
from pathlib import Path

from torch import Tensor

import mega_rl
from mega_rl.checkpoint.identity import model_identity
from mega_rl.config.keys import recorded, short_commit
from mega_rl.config.needs import requested_models
from mega_rl.config.render import resolved_yaml
from mega_rl.config.rules import advice
from mega_rl.config.schema import Config, RewardHttpConfig
from mega_rl.config.schema.training import RecordsConfig
from mega_rl.converters.plan.parameters import num_elements
from mega_rl.data.build import source_lines
from mega_rl.engines.models.build import DTYPES
from mega_rl.parallel.agreement import all_succeed
from mega_rl.rollout.tokens import name_stop_tokens
from mega_rl.tracking.metrics.tables import RoleFacts, show_startup
from mega_rl.tracking.metrics.trackers import without_secrets
from mega_rl.tracking.records.reader import FOLDER, DroppedGroup, RecordDescription
from mega_rl.tracking.records.writer import RecordWriter, clear_records
from mega_rl.trainer.assemble.data import RunPrompts, prompt_line
from mega_rl.trainer.assemble.load import LoadedRun
from mega_rl.trainer.assemble.plan import TRAINED_ROLES, Roles
from mega_rl.trainer.events import StepColumns, StepRecorder
from mega_rl.trainer.loop import Stages
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.types import JsonObject
from mega_rl.workers.residency import PARAMETERS

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "megatron-core")


def show_run(config: Config, run: LoadedRun, prompts: RunPrompts) -> None:
    """Write the run's config, and log what is unusual and the start-up table."""
    run_dir, saves = Path(config.trainer.run_dir), config.checkpoint
    if not (saves.save_final or saves.save_interval or saves.hf_final or saves.hf_interval):
        log.warning("this run saves nothing: its weights are lost at its end; set checkpoint.save_final=true")
    for line in advice(config):
        log.warning("%s", line)
    for line in source_lines(prompts.train, prompts.order, steps=run.trainer.steps):
        log.info("%s", line)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(resolved_yaml(config))
    stop_tokens = name_stop_tokens(run.tokens.tokenizer, run.tokens.stop_ids)
    facts = role_facts(config, run.roles)
    show_startup(facts, prompts=prompt_line(run.tokens, prompts.train), stop_tokens=stop_tokens)


def role_facts(config: Config, roles: Roles) -> list[RoleFacts]:
    """Return the rows of the start-up table, one per role."""
    reward, facts, named = config.reward, list[RoleFacts](), requested_models(recorded(config))
    for engine in roles.engines.values():
        sharding = engine.sharding
        names = ("tp", "pp", "vpp", "cp", *(() if sharding.hf.moe is None else ("ep", "etp")), "dp")
        sizes = {name: getattr(sharding.layout, name) for name in names}
        facts.append(
            RoleFacts(
                role=engine.name,
                model=short_commit(str(named[engine.name].path)),
                family=sharding.hf.family,
                parameters=num_elements(sharding.hf, sharding.head),
                engine=config.engine.backend,
                layout=" ".join(f"{name}{size}" for name, size in sizes.items() if size > 1),
                attention=engine.attention,
                dtype=config.model.dtype,
                trains=engine.name in TRAINED_ROLES,
            )
        )
    if isinstance(reward.source, RewardHttpConfig):
        facts.append(RoleFacts("reward", model=reward.source.url))
    elif reward.source.name == "function":
        facts.append(RoleFacts("reward", model=", ".join(reward.functions.values()) or reward.function))
    return facts


def build_recorder(
    run: LoadedRun, settings: RecordsConfig, config: JsonObject, stage: Stages, *, done: int
) -> StepRecorder | None:
    """Return the recorder that the settings ask for, and remove records of steps after `done`; collective.

    config: the run's, as records keep it.
    """
    roles, world, dtype = run.roles, run.world, str(config["model"]["dtype"])
    if not settings.interval:
        return None
    root = Path(run.trainer.run_dir) / FOLDER
    all_succeed(lambda: clear_records(root, after=done) if world.rank == 0 else None, world)
    engine = roles.actor_engine
    first = engine.replica.rank == 0
    writer = RecordWriter(root, settings.max_mib << 20, world, engine.data_parallel.rank, is_first=first)
    changing = [role for role in TRAINED_ROLES if role in roles.engines]
    changing += [] if roles.average is None else ["reference"]

    if settings.weights:
        shardings = [roles.engines[role].sharding for role in changing]
        nbytes = DTYPES[dtype].itemsize * sum(num_elements(one.hf, one.head) for one in shardings)

        def save(folder: Path) -> None:
            stage.hold("save")
            for role in changing:
                roles.models.take_turn(role, PARAMETERS)
                roles.engines[role].save_hf(folder / role, source=roles.paths[role])

        writer = replace(writer, save_weights=save, weights_bytes=nbytes)

    kept = tuple(changing) if settings.weights else ()

    def write(step: int, evaluated: Evaluated, columns: Mapping[str, Tensor], rows: Sequence[JsonObject]) -> None:
        writer(_describe(run, config, step, evaluated, kept), columns, rows)

    return StepRecorder(
        interval=settings.interval,
        columns=step_columns(roles, entropy=settings.entropy),
        read=run.tokens.reader.written,
        render=run.tokens.render,
        write=write,
        stage=stage,
        writes_texts=writer.is_first,
    )


def _describe(
    run: LoadedRun, config: JsonObject, step: int, evaluated: Evaluated, weights: tuple[str, ...]
) -> RecordDescription:
    roles, samples = run.roles, evaluated.batch.samples
    engine, parts, stock = roles.actor_engine, samples.rewards.parts, run.rollouts.stock
    models = roles.engines if run.world.rank == 0 else ()
    return RecordDescription(
        step=step + 1,
        prompts=len(samples.prompts),
        kl_coef=roles.kl.value,
        reward_parts=() if parts is None else parts.names,
        reward_weights=() if parts is None else parts.weights,
        config=without_secrets(config),
        model={role: model_identity(roles.paths[role]) for role in models},
        weights=weights,
        layout=str(engine.groups.layout),
        world_size=run.world.size,
        device=engine.device.type,
        dtype=str(config["model"]["dtype"]),
        weight_version=run.rollouts.sync.weight_version,
        begun=(run.rollouts.sync.weight_version,) if stock is None else tuple(stock.versions.begun),
        tickets=tuple(samples.tickets.tolist()),
        data_rows=tuple(prompt.index for prompt in samples.prompts),
        dropped=tuple(
            DroppedGroup(one.ticket, one.reason, *(None if isnan(mean) else mean for mean in (one.tokens, one.reward)))
            for one in evaluated.batch.dropped
        ),
        versions={"mega_rl": mega_rl.__version__, **{name: version(name) for name in PACKAGES}},
    )


def step_columns(roles: Roles, *, entropy: bool) -> StepColumns:
    """Return the columns of a run's steps; entropy: with each token's."""
    method, engine = roles.method, roles.actor_engine
    from_sampler = method.on_policy or method.settings.old_logprobs == "rollout"
    return StepColumns(
        engine.data_parallel,
        policy=partial(engine.forward, with_entropy=True) if from_sampler or entropy else None,
        from_sampler=from_sampler,
        reward_kl=method.reward_kl(roles.kl),
        correction=method.correction,
        on_policy=method.on_policy,
    )
