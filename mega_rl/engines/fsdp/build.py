"""From a Hugging Face checkpoint directory to an FSDPEngine."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mega_rl import progress
from mega_rl.accelerator import Accelerator
from mega_rl.config.attention import Role
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.engines.fsdp.engine import FSDPEngine
from mega_rl.engines.fsdp.model import freeze, shard, sharded_parameters, skeleton
from mega_rl.engines.fsdp.optimizer import build_adam
from mega_rl.engines.fsdp.weights import load
from mega_rl.engines.microbatches import Batching
from mega_rl.models.build import DTYPES
from mega_rl.parallel.groups import Groups

log = logging.getLogger(__name__)


def build_fsdp_engine(
    name: Role,
    *,
    path: Path,
    head: Head,
    trainable: bool,
    config: Config,
    groups: Groups,
    accelerator: Accelerator,
    attention: str,
    batching: Batching,
) -> FSDPEngine:
    """The model of checkpoint `path`, this rank's share of it, with its weights loaded; collective.

    `head` is "lm" or "value"; a trainable engine has an optimizer. `attention`: the kernel that runs.
    """
    hf = read_hf_config(path)
    device, dtype = accelerator.device, DTYPES[config.model.dtype]
    model, transformers_model = skeleton(path, head=head, attention=attention)
    if trainable:
        freeze(model, config.model.frozen)
    else:
        model.requires_grad_(False)
    scratch = shard(
        model,
        transformers_model,
        mesh=_mesh(groups, config.fsdp.shard_ranks, device.type, timeout_s=config.trainer.timeout_s),
        device=device,
        dtype=dtype,
        settings=config.fsdp,
        recompute=trainable and config.model.recompute == "full",
    )
    sharding = Sharding(hf, groups.layout, spec="hf", head=head)
    with progress.phase(f"{name}: reading the weights"):
        report = load(model, path, sharding=sharding)
    log.info("%s: read %s", name, report)
    return FSDPEngine(
        name=name,
        model=model,
        optimizer=build_adam(sharded_parameters(model).values(), config.optim) if trainable else None,
        sharding=sharding,
        groups=groups,
        batching=batching,
        device=device,
        dtype=dtype,
        attention=attention,
        scratch=scratch,
        clip_grad=config.optim.clip_grad,
        reduce_every_microbatch=config.fsdp.reduce_every_microbatch,
        keep_gathered=not config.fsdp.reshard_after_forward,
        temperature=config.rollout.temperature,
        export_bucket_bytes=config.rollout.bucket_mib << 20,
    )


def _mesh(groups: Groups, shard_ranks: int, device_type: str, *, timeout_s: float) -> DeviceMesh:
    """All ranks; with `shard_ranks` (0: all) replicas of that many ranks."""
    world = groups.dp.size()
    if shard_ranks in (0, world):
        return DeviceMesh.from_group(groups.dp, device_type)
    mesh = init_device_mesh(device_type, (world // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():  # made with torch's own deadline
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh
