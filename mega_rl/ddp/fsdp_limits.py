"""Checks that refuse FSDP's unsupported settings before a model is built; tests show upstream's wrong results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from mega_rl.config.schema import DataParallelConfig
from mega_rl.errors import UserErrors


def check_fsdp(
    ddp: DataParallelConfig, *, chunks: Sequence[torch.nn.Module], collection: ProcessGroupCollection
) -> None:
    """Refuse layouts and settings under which sharded data parallelism of megatron-core 0.16.1 is wrong or undone.

    Raises:
        UserErrors: on all ranks alike.
    """
    problems = list(_both(ddp, chunks))
    if ddp.name == "megatron_fsdp":
        problems += _megatron(ddp, collection)
        if any(not p.requires_grad for chunk in chunks for p in chunk.parameters()):
            problems.append(
                "model.frozen with engine.megatron.ddp=megatron_fsdp: Megatron-Core waits for a "
                "gradient of every parameter; use engine.megatron.ddp=torch_fsdp2 or ddp"
            )
    if problems:
        raise UserErrors(problems)


def _both(ddp: DataParallelConfig, chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    if any(not getattr(p, "allreduce", True) for chunk in chunks for p in chunk.parameters()):
        yield (
            f"engine.megatron.ddp={ddp.name} with experts that are not on every rank "
            "(engine.megatron.ep, etp): gradients would be summed over ranks with other experts; use "
            "engine.megatron.ep=1 and etp=0, or engine.megatron.ddp=ddp"
        )


def _megatron(ddp: DataParallelConfig, collection: ProcessGroupCollection) -> Iterator[str]:
    plain = ddp.fsdp_sharding == "optim"
    if collection.pp.size() > 1:
        yield (
            f"engine.megatron.ddp=megatron_fsdp with engine.megatron.pp={collection.pp.size()}: "
            "Megatron-Core's sharding has no place for pipelines; use engine.megatron.pp=1, or "
            "engine.megatron.ddp=torch_fsdp2 or ddp"
        )
    if collection.dp_cp.size() == 1:
        yield (
            "engine.megatron.ddp=megatron_fsdp with one data-parallel rank: there is nothing to shard, "
            "and Megatron-Core adds gradients up wrongly; use more ranks or engine.megatron.ddp=ddp"
        )
    if plain and ddp.overlap_grad_reduce:
        # Each reduced shard is added to the local gradient, which the unsharded buffer still holds.
        yield (
            "engine.megatron.ddp.fsdp_sharding=optim with engine.megatron.ddp.overlap_grad_reduce=true: Megatron-Core "
            "counts a rank's own gradients twice; set engine.megatron.ddp.overlap_grad_reduce=false or "
            "engine.megatron.ddp.fsdp_sharding=optim_grads"
        )
    if plain and ddp.optimizer_instances > 1:
        yield (
            "engine.megatron.ddp.fsdp_sharding=optim with "
            f"engine.megatron.ddp.optimizer_instances={ddp.optimizer_instances}: Megatron-Core reduces gradients "
            "within an instance only; set engine.megatron.ddp.optimizer_instances=1 or "
            "engine.megatron.ddp.fsdp_sharding=optim_grads"
        )
