"""Building engines on many layouts inside one launch, and reading them in Hugging Face's names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import (
    CheckpointConfig,
    Config,
    EngineConfig,
    MegatronConfig,
    MicrobatchConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    TrainerConfig,
)
from mega_rl.config.schema.engine import FsdpConfig
from mega_rl.types import Experience

# name -> (world size, parallel settings)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-sp-pp2": (4, {"tp": 2, "sequence_parallel": True, "pp": 2}),
    "tp2-dp2": (4, {"tp": 2}),
}


def make_config(
    checkpoint: Path,
    *,
    layout: str = "1",
    dtype: str = "fp32",
    optim: OptimConfig | None = None,
    trainer: TrainerConfig | None = None,
    rollout: RolloutConfig | None = None,
    engine: str = "megatron",
    megatron: MegatronConfig | None = None,
    fsdp: FsdpConfig | None = None,
    **areas: Any,
) -> Config:
    """A config of small numbers for a tiny checkpoint on a layout of `LAYOUTS`, or on that of `megatron`.

    areas: sections of the config, and ddp, moe and optimizer, which are sections of `engine.megatron`.
    """
    sections = {name: areas.pop(name) for name in ("ddp", "moe", "optimizer") if name in areas}
    megatron = dataclasses.replace(megatron or MegatronConfig(**LAYOUTS[layout][1]), **sections)
    return Config(
        engine=EngineConfig(backend=engine, megatron=megatron, fsdp=fsdp or FsdpConfig()),
        model=ModelConfig(path=str(checkpoint), dtype=dtype),
        optim=optim or OptimConfig(lr=1e-3, critic_lr=1e-3),
        trainer=trainer or TrainerConfig(timeout_s=60.0, microbatch=MicrobatchConfig(max_tokens=64)),
        rollout=rollout or RolloutConfig(),
        **areas,
    )


@contextmanager
def running_engine(config: Config, *, head: Literal["lm", "value"] = "lm", trainable: bool = True) -> Iterator[Any]:
    """A MegatronEngine of `config.model.path` on this rank, with its groups taken down afterwards."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_actor, session

    with session(config, accelerator) as groups:
        yield build_actor(config, groups, accelerator, head=head, trainable=trainable)


def own_rows(batch: Experience, engine: Any) -> Experience:
    """This data-parallel rank's contiguous share of the rows."""
    rank, size, rows = engine.data_parallel.rank, engine.data_parallel.size, batch.tokens.size(0)
    return batch[rows * rank // size : rows * (rank + 1) // size]


def exported(engine: Any) -> dict[str, torch.Tensor]:
    """The weights under Hugging Face's names, as copies."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.export_weights()}


def parts(engine: Any) -> dict[str, torch.Tensor]:
    """The weights, with adapters apart, under Hugging Face's names, as copies."""
    from mega_rl.converters.live.export import export_hf

    tensors = export_hf(engine.whole_chunks(), engine.place, dtype=engine.export_dtype)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors}


def exported_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The main gradients under Hugging Face's names, without weights that are frozen.

    The exporter reads whatever the parameters hold.

    Needs gradients that are whole on every rank: `engine.megatron.optimizer.distributed=False`.
    """
    kept = []
    for chunk in engine.models:
        for parameter in chunk.parameters():
            kept.append((parameter, parameter.data))
            missing = torch.full_like(parameter, torch.nan)
            parameter.data = getattr(parameter, "main_grad", missing).to(parameter.dtype).clone()
    gradients = parts(engine)
    for parameter, data in kept:
        parameter.data = data
    return {name: gradient for name, gradient in gradients.items() if not gradient.isnan().all()}


def worst_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest distance of two tensors of one name, relative to the norm, and that name."""
    assert left.keys() == right.keys()
    return max(
        (float((left[n].double() - right[n].double()).norm() / right[n].double().norm().clamp(min=1e-12)), n)
        for n in left
    )


def replaced(config: Config, area: str, **changes: Any) -> Config:
    """The config with some settings of one section changed, as "engine.megatron.ddp"."""
    return with_settings(config, {f"{area}.{name}": value for name, value in changes.items()})


def save_state(engine: Any, folder: Path, *, role: str = "actor", config: Config | None = None) -> None:
    """The engine's state as a checkpoint of step 1, with a run's config; collective."""
    _checkpoints(engine, folder, role, {} if config is None else dataclasses.asdict(config.model)).save(1, {})


def load_state(engine: Any, folder: Path, *, role: str = "actor") -> None:
    """Load into the engine what `save_state` wrote; collective."""
    assert _checkpoints(engine, folder, role).restore() is not None


def _checkpoints(engine: Any, folder: Path, role: str, model: dict[str, Any] | None = None) -> Any:
    from mega_rl.checkpoint.run_state import RunState
    from mega_rl.checkpoint.store import RunCheckpoints
    from mega_rl.parallel.comm import GroupRanks

    ranks, layout = GroupRanks(engine.groups.world), str(engine.groups.layout)
    identity = {"engine": "fsdp" if type(engine).__name__ == "FSDPEngine" else "megatron"}
    run = RunState({role: engine}, {}, ranks, identity, layout, {"model": model} if model else {})
    return RunCheckpoints(folder, run, CheckpointConfig(on_error="stop"))


def world_size() -> int:
    """Ranks of this launch."""
    return int(os.environ["WORLD_SIZE"])
