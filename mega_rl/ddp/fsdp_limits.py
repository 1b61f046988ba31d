"""What FSDP cannot do here, said before anything is built; the tests show what upstream would compute instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from mega_rl.config.schema import DdpConfig
from mega_rl.errors import UserErrors


def check_fsdp(ddp: DdpConfig, *, chunks: Sequence[torch.nn.Module], collection: ProcessGroupCollection) -> None:
    """Refuse layouts and settings under which sharded data parallelism of megatron-core 0.16.1 is wrong or undone.

    Raises:
        UserErrors: on all ranks alike.
    """
    problems = list(_both(ddp, chunks))
    if ddp.implementation == "megatron_fsdp":
        problems += _megatron(ddp, collection)
        if any(not p.requires_grad for chunk in chunks for p in chunk.parameters()):
            problems.append(
                "model.frozen with ddp.implementation=megatron_fsdp: Megatron-Core waits for a gradient of every "
                "parameter; use ddp.implementation=torch_fsdp2 or ddp"
            )
    elif ddp.optimizer_instances > 1:
        problems.append(
            f"ddp.implementation=torch_fsdp2 with ddp.optimizer_instances={ddp.optimizer_instances}: copies of the "
            "shards are not supported; set ddp.optimizer_instances=1 or ddp.implementation=megatron_fsdp"
        )
    if problems:
        raise UserErrors(problems)


def _both(ddp: DdpConfig, chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    if any(not getattr(p, "allreduce", True) for chunk in chunks for p in chunk.parameters()):
        yield (
            f"ddp.implementation={ddp.implementation} with experts that are not on every rank (parallel.ep, etp): "
            "gradients would be summed over ranks with other experts; use parallel.ep=1 and etp=0, or "
            "ddp.implementation=ddp"
        )
    if ddp.average_in_collective:
        yield (
            f"ddp.implementation={ddp.implementation} with ddp.average_in_collective=true: gradients are sums there; "
            "set ddp.average_in_collective=false"
        )


def _megatron(ddp: DdpConfig, collection: ProcessGroupCollection) -> Iterator[str]:
    plain = ddp.fsdp_sharding == "optim"
    if collection.pp.size() > 1:
        yield (
            f"ddp.implementation=megatron_fsdp with parallel.pp={collection.pp.size()}: Megatron-Core's sharding has "
            "no place for pipelines; use parallel.pp=1, or ddp.implementation=torch_fsdp2 or ddp"
        )
    if collection.dp_cp.size() == 1:
        yield (
            "ddp.implementation=megatron_fsdp with one data-parallel rank: there is nothing to shard, and "
            "Megatron-Core adds gradients up wrongly; use more ranks or ddp.implementation=ddp"
        )
    if plain and ddp.overlap_grad_reduce:
        # Each reduced shard is added to the local gradient, which the unsharded buffer still holds.
        yield (
            "ddp.fsdp_sharding=optim with ddp.overlap_grad_reduce=true: Megatron-Core counts a rank's own gradients "
            "twice; set ddp.overlap_grad_reduce=false or ddp.fsdp_sharding=optim_grads"
        )
    if plain and ddp.optimizer_instances > 1:
        yield (
            f"ddp.fsdp_sharding=optim with ddp.optimizer_instances={ddp.optimizer_instances}: Megatron-Core reduces "
            "gradients within an instance only; set ddp.optimizer_instances=1 or ddp.fsdp_sharding=optim_grads"
        )
