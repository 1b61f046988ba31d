"""Building of an FSDPEngine from a Hugging Face checkpoint directory."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mega_rl.converters.plan.sharding import Sharding
from mega_rl.engines.base import EngineSettings, ModelRequest
from mega_rl.engines.fsdp.engine import FSDPEngine, build_adam
from mega_rl.engines.fsdp.model import freeze, shard, sharded_parameters, skeleton, use_fp32_logits
from mega_rl.engines.fsdp.weights import load
from mega_rl.engines.microbatches import Batching
from mega_rl.engines.models.build import DTYPES
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.groups import Groups
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


def build_fsdp_engine(
    request: ModelRequest, *, settings: EngineSettings, groups: Groups, accelerator: Accelerator, batching: Batching
) -> FSDPEngine:
    """Return this rank's share of the model, with its weights loaded; collective."""
    fsdp = settings.engine.fsdp
    device, dtype = accelerator.device, DTYPES[settings.model.dtype]
    model, transformers_model = skeleton(request.path, head=request.head, attention=request.attention)
    if request.trainable:
        freeze(model, settings.model.frozen)
    else:
        model.requires_grad_(False)
    scratch = shard(
        model,
        transformers_model,
        mesh=_mesh(groups, fsdp.shard_ranks, device.type, timeout_s=settings.timeout_s),
        device=device,
        dtype=dtype,
        settings=fsdp,
        recompute=request.trainable and settings.model.recompute == "full",
    )
    if settings.model.fp32_head and request.head == "lm":
        use_fp32_logits(transformers_model)
    sharding = Sharding(request.hf, groups.layout, spec="hf", head=request.head)
    with progress.phase(f"{request.name}: reading the weights"):
        report = load(model, request.path, sharding=sharding)
    log.info("%s: read %s", request.name, report)
    return FSDPEngine(
        name=request.name,
        model=model,
        optimizer=build_adam(sharded_parameters(model).values(), settings.optim) if request.trainable else None,
        sharding=sharding,
        groups=groups,
        batching=batching,
        device=device,
        dtype=dtype,
        attention=request.attention,
        scratch=scratch,
        clip_grad=settings.optim.clip_grad,
        reduce_every_microbatch=fsdp.reduce_every_microbatch,
        keep_gathered=not fsdp.reshard_after_forward,
        temperature=settings.temperature,
        hidden_tokens=settings.hidden_tokens,
        export_bucket_bytes=settings.export_bucket_bytes,
    )


def _mesh(groups: Groups, shard_ranks: int, device_type: str, *, timeout_s: float) -> DeviceMesh:
    """Return all ranks as a mesh; with `shard_ranks` (0: all) replicas of that many ranks."""
    world = groups.dp.size()
    if shard_ranks in (0, world):
        return DeviceMesh.from_group(groups.dp, device_type)
    mesh = init_device_mesh(device_type, (world // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():  # made with torch's own deadline
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh
