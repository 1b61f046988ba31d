"""Metrics of a run: sinks, start-up table, and meter of steps."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path

from mega_rl.config.keys import as_record, recorded, short_commit
from mega_rl.config.render import resolved_yaml
from mega_rl.config.rules import advice
from mega_rl.config.schema import Config, RewardHttpConfig
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.data.build import source_lines
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.accelerator.base import resident_bytes
from mega_rl.protocols import MetricsSink
from mega_rl.rollout.tokens import name_stop_tokens
from mega_rl.tracking.metrics.flops import peak_flops
from mega_rl.tracking.metrics.sinks import make_sink
from mega_rl.tracking.metrics.steps import PhaseTimer, StepMeter, StepTraces
from mega_rl.tracking.metrics.tables import RoleFacts, show_startup
from mega_rl.trainer.assemble.data import RunPrompts, prompt_line
from mega_rl.trainer.assemble.load import LoadedRun
from mega_rl.trainer.assemble.plan import TRAINED_ROLES, Roles, checkpoint_of

log = logging.getLogger(__name__)


def open_sink(run: LoadedRun, prompts: RunPrompts, *, done: int) -> MetricsSink:
    """Write the run's config, show its start-up table, and return the sinks of its metrics."""
    config, is_writer = run.config, run.world.rank == 0
    run_dir, steps, saves = Path(config.trainer.run_dir), config.trainer.steps, config.checkpoint
    if is_writer:
        if not (saves.save_final or saves.save_interval or saves.hf_final or saves.hf_interval):
            log.warning("this run saves nothing: its weights are lost at its end; set checkpoint.save_final=true")
        for line in advice(config):
            log.warning("%s", line)
        for line in source_lines(prompts.train, prompts.order, steps=steps):
            log.info("%s", line)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(resolved_yaml(config))
        stop_tokens = name_stop_tokens(run.tokens.tokenizer, run.tokens.stop_ids)
        facts = role_facts(config, run.roles)
        show_startup(facts, prompts=prompt_line(run.tokens, prompts.train), stop_tokens=stop_tokens)
    return make_sink(
        config.metrics, run_dir,
        is_writer=is_writer, resume_step=done + 1, total_steps=steps, settings=as_record(config),
    )  # fmt: skip


def role_facts(config: Config, roles: Roles) -> list[RoleFacts]:
    """Return the rows of the start-up table, one per role."""
    reward, facts = config.reward, []
    for engine in roles.engines.values():
        sharding = engine.sharding
        names = ("tp", "pp", "vpp", "cp", *(() if sharding.hf.moe is None else ("ep", "etp")), "dp")
        sizes = {name: getattr(sharding.layout, name) for name in names}
        facts.append(
            RoleFacts(
                role=engine.name,
                model=short_commit(str(checkpoint_of(recorded(config), engine.name))),
                family=sharding.hf.family,
                parameters=sum(prod(tensor.shape) for tensor in hf_tensors(sharding.hf, head=sharding.head).values()),
                engine=config.engine.backend,
                layout=" ".join(f"{name}{size}" for name, size in sizes.items() if size > 1),
                attention=engine.attention,
                dtype=config.model.dtype,
                trains=engine.name in TRAINED_ROLES,
            )
        )
    if isinstance(reward.source, RewardHttpConfig):
        facts.append(RoleFacts("reward", reward.source.url))
    elif reward.source.name == "function":
        facts.append(RoleFacts("reward", ", ".join(reward.functions.values()) or reward.function))
    return facts


def build_meter(run: LoadedRun, accelerator: Accelerator, *, done: int) -> StepMeter:
    """Return the meter of steps; it has traces if this rank writes them."""
    config, rank = run.config, run.world.rank
    profile = config.trainer.profile
    if profile.memory and accelerator.name != "cuda":
        raise UserError(
            "trainer.profile.memory=true: there is no GPU, whose allocator has the history; set it to false"
        )
    traces = None
    if profile.steps and rank in profile.ranks:
        folder = Path(config.trainer.run_dir) / "profile"
        traces = StepTraces(folder, steps=profile.steps, rank=rank, memory=profile.memory)
    in_bf16 = config.model.dtype == "bf16"
    return StepMeter(
        PhaseTimer(synchronize=accelerator.synchronize),
        run.roles.work,
        ranks=run.world,
        peak_flops=1e12 * profile.peak_tflops or (peak_flops(accelerator.model) if in_bf16 else None),
        peak_memory=lambda: {**accelerator.take_peak_memory(), "host": resident_bytes()},
        traces=traces,
        step=done,
        scores=config.reward.source.name != "none",
    )
