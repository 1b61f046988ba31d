"""Engines on the fake device: models, layouts, and the passes that are watched."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mega_rl.config.schema import Config, EngineConfig, MegatronConfig, MicrobatchConfig, ModelConfig, TrainerConfig
from mega_rl.parallel.layout import ParallelLayout
from tests.fake_gpu.device import use_device_kernels
from tests.fake_gpu.models import MODELS
from tests.fake_gpu.watch import HOST_GROUPS, DeviceTensors, Phase, Watch


@dataclass(frozen=True)
class Case:
    """An engine of one rank of a layout, and the batch that it gets."""

    model: str
    world: int = 1
    rank: int = 0
    layout: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    tokens: int = 1024  # of a micro-batch
    length: int = 256
    micros: int = 2
    head: str = "lm"
    entropy_coef: float = 0.0
    objective: str = "ppo"
    fp32_head: bool = False
    passes: tuple[str, ...] | list[str] = ("train", "forward", "export", "turn")


@dataclass
class Run:
    """An engine with the device that it is on."""

    engine: Any
    watch: Watch
    case: Case

    def batch(self) -> Any:
        """Return rows that make `micros` full micro-batches of sequences of several lengths."""
        from mega_rl.types import Experience

        case = self.case
        rows = case.tokens // case.length * case.micros
        lengths = torch.full((rows,), case.length)
        prompt = torch.full((rows,), case.length // 4)
        tokens = torch.arange(rows * case.length).remainder(1000).view(rows, case.length)
        weights = torch.full((rows, case.length), 1e-4)
        return Experience.from_rows(
            tokens, prompt_lengths=prompt, lengths=lengths, loss_weights=weights, token_weights=weights
        )

    def loss(self) -> Any:
        """Return the loss of the actor, as a run has it, or of the critic."""
        from mega_rl.algorithms.kl import k3
        from mega_rl.algorithms.policy_losses import LOSSES as OBJECTIVES
        from mega_rl.workers.models import PolicyLoss, ValueLoss

        if self.case.head == "value":
            return ValueLoss(value_clip=0.2)
        return PolicyLoss(
            OBJECTIVES[self.case.objective](),
            kl=None,
            kl_estimator=k3,
            entropy_coef=self.case.entropy_coef,
            on_policy=True,
        )


@contextlib.contextmanager
def engine_on_device(case: Case, folder: Path, watch: Watch) -> Iterator[Run]:
    """Yield the engine of a case on the fake device; weights are as memory leaves them."""
    from mega_rl.engines import build
    from mega_rl.engines import megatron as engine
    from mega_rl.parallel import groups as process_groups
    from mega_rl.parallel.accelerator import prepare
    from mega_rl.trainer.assemble import build_actor

    (folder / "config.json").write_text(json.dumps(MODELS[case.model]))
    config = Config(
        engine=EngineConfig(megatron=MegatronConfig(**case.layout, transformer_impl="local")),
        model=ModelConfig(path=str(folder), dtype="bf16", recompute=case.recompute, fp32_head=case.fp32_head),
        trainer=TrainerConfig(timeout_s=60.0, microbatch=MicrobatchConfig(max_tokens=case.tokens)),
    )
    engine.broadcast_json = lambda value, *_, **__: value  # type: ignore[assignment]  # nobody sends metrics
    build.load_hf = lambda *_, **__: "nothing"  # type: ignore[assignment]
    process_groups._on_host = _host_twin  # gloo has no world of one process
    layout = ParallelLayout.of_engine(config.engine, world_size=case.world)
    dist.init_process_group("fake", rank=case.rank, world_size=case.world, store=FakeStore())
    try:
        groups = process_groups.initialize(layout, accelerator=prepare(), timeout_s=60.0)
        process_groups.seed_model_parallel(0, groups)
        use_device_kernels(watch.host_wait)
        with DeviceTensors(allow_non_fake_inputs=True), watch:
            yield Run(build_actor(config, groups, prepare(), head=case.head), watch, case)
    finally:
        process_groups.destroy()


def _host_twin(group: Any, ranks: list[list[int]], *, timeout: Any) -> Any:
    """Return a group of the same ranks that may have tensors of the host."""
    twin, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
    HOST_GROUPS.add(twin.group_name)
    return twin


def report(phase: Phase) -> dict[str, Any]:
    """Return a phase as JSON."""
    return {**vars(phase), "waits": dict(sorted(phase.waits.items())), "kernels": dict(phase.kernels)}
