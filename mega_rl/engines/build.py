"""From a Hugging Face checkpoint directory to an engine."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mega_rl.config.needs import RequestedAttention, Role
from mega_rl.config.schema import MoeConfig
from mega_rl.converters.hf.config import needs_proof, read_hf_config
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.plan.parameters import adapted, rules_of
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.ddp.access import freeze, let_gradients_through, named_parameters
from mega_rl.ddp.optimizer import apply_settings, build_optimizer
from mega_rl.ddp.wrap import wrap_chunks
from mega_rl.engines.base import EngineSettings, ModelEngine, ModelRequest
from mega_rl.engines.fsdp import FSDPEngine, build_adam, set_optim
from mega_rl.engines.fsdp_model import add_adapters, shard, sharded_parameters, skeleton, use_fp32_head
from mega_rl.engines.fsdp_proof import prove_rows
from mega_rl.engines.fsdp_weights import load_rows
from mega_rl.engines.megatron import MegatronEngine
from mega_rl.engines.microbatches import Batching
from mega_rl.engines.models.build import DTYPES, build_chunks, fuse_weight_gradients, transformer_config
from mega_rl.engines.models.heads import use_fp32_logits
from mega_rl.engines.models.routing import Routing
from mega_rl.engines.models.specs import check_recompute, choose_attention, choose_transformer_impl
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import SingleRank, ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


def resolve_model(
    name: Role,
    path: Path,
    *,
    head: Head,
    trainable: bool,
    settings: EngineSettings,
    attention: RequestedAttention,
    device_type: str,
) -> ModelRequest:
    """Return a role's model of checkpoint `path`, its layers and attention here decided.

    `head` is "lm" or "value"; a trainable model has gradients and an optimizer.

    Raises UserError: the settings ask for what cannot run here.
    """
    hf = read_hf_config(path, any_model=settings.engine.backend == "fsdp")
    hf = adapted(hf, settings.model.adapter, head) if trainable else hf
    if settings.engine.backend == "fsdp" and needs_proof(hf.raw):
        proven = prove_rows(name, path, attention, packing=settings.microbatch.packing, device_type=device_type)
        return ModelRequest(name, path, hf, head, trainable, impl="hf", attention=proven[0], packs=proven[1])
    impl: Spec = "hf"
    if settings.engine.backend == "megatron":
        # Transformer Engine's linear layers norm their input themselves, so adapters would not see the normed one.
        wanted = "local" if settings.model.adapter.rank else settings.engine.megatron.transformer_impl
        impl = choose_transformer_impl(wanted, device_type=device_type)
    chosen = choose_attention(
        attention.word,
        key=attention.key,
        hf=hf,
        impl=impl,
        device_type=device_type,
        dtype=settings.model.dtype,
    )
    return ModelRequest(name, path, hf, head=head, trainable=trainable, impl=impl, attention=chosen)


def build_engine(
    model: ModelRequest, *, settings: EngineSettings, groups: Groups, accelerator: Accelerator
) -> ModelEngine:
    """Return a model on the engine that `settings` name, with its weights loaded; collective.

    Raises UserError: the model cannot run as the settings ask.
    """
    log.info("%s: building the model of %s", model.name, model.path)
    build = _build_fsdp if model.impl == "hf" else _build_megatron
    layout, microbatch = groups.layout, settings.microbatch
    common: dict[str, Any] = {
        "name": model.name,
        "sharding": Sharding(model.hf, layout, spec=model.impl, head=model.head),
        "groups": groups,
        "batching": Batching(
            packing=microbatch.packing and model.packs,
            max_tokens=microbatch.max_tokens,
            micro_batch_size=microbatch.size,
            # Tensor and context parallelism cut sequences.
            pad_to_multiple=(layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1),
            count_multiple=layout.pp if layout.vpp > 1 else 1,
            same_shapes=layout.pp > 1,
            cp_rank=groups.coordinates.cp_rank,
            cp_size=layout.cp,
        ),
        "device": accelerator.device,
        "attention": model.attention,
        "by_muon": settings.optim.name == "muon",
    }
    with progress.phase(f"{model.name}: building the model"):
        engine = build(model, settings, accelerator, common)
    adopt(engine, settings)
    return engine


def adopt(engine: ModelEngine, settings: EngineSettings) -> None:
    """Let an engine follow the settings that its runs may each have for themselves."""
    engine.temperature, engine.hidden_tokens = settings.temperature, settings.hidden_tokens
    engine.export_bucket_bytes, engine.clip_grad = settings.export_bucket_bytes, settings.optim.clip_grad
    if isinstance(engine, FSDPEngine) and engine.optimizer is not None:
        set_optim(engine.optimizer, settings.optim)
    if isinstance(engine, MegatronEngine) and engine.optimizer is not None:
        apply_settings(engine.optimizer, settings.optim)


def _build_megatron(
    request: ModelRequest, settings: EngineSettings, accelerator: Accelerator, common: dict[str, Any]
) -> MegatronEngine:
    """Return the model on this rank's part of the layout; common: fields of every engine."""
    hf, megatron, groups, sharding = request.hf, settings.engine.megatron, common["groups"], common["sharding"]
    check_recompute(request.impl, hf, settings.model)
    model_config = transformer_config(
        hf,
        layout=groups.layout,
        model=settings.model,
        megatron=megatron,
        deterministic=settings.deterministic,
        attention=request.attention,
        device_overrides=accelerator.transformer_config_overrides(),
    )
    chunks = build_chunks(
        hf,
        config=model_config,
        groups=groups,
        head=request.head,
        impl=request.impl,
        padded_vocab=sharding.vocab,
        device=accelerator.device,
        experts_apart=megatron.ddp.name == "ddp",
    )
    if settings.model.fp32_head and request.head == "lm":
        use_fp32_logits(chunks)
    with progress.phase(f"{request.name}: reading the weights"):
        report = load_hf(chunks, request.path, sharding=sharding, coordinates=groups.coordinates)
    log.info("%s: read %s", request.name, report)
    routing: Routing | None = None
    if hf.moe is not None:
        # Choices are the actor's: a critic has other weights, and nothing is learnt of a reference.
        record = megatron.moe.routing_replay and request.trainable and request.head == "lm"
        moe = megatron.moe if request.trainable else MoeConfig()
        routing = Routing(chunks, hf, settings=moe, record=record, groups=groups)
    optimizer: MegatronOptimizer | None = None
    if request.trainable:
        chunks, optimizer = _trainable(chunks, model_config=model_config, settings=settings, groups=groups)
    return MegatronEngine(chunks=chunks, optimizer=optimizer, config=model_config, routing=routing, **common)


def _trainable(
    chunks: list[GPTModel], *, model_config: TransformerConfig, settings: EngineSettings, groups: Groups
) -> tuple[list[Any], MegatronOptimizer]:
    """Freeze what the config names, wrap the chunks, and return them with their optimizer."""
    megatron = settings.engine.megatron
    freeze(named_parameters(chunks), settings.model.frozen, everyone=ranks_of(groups.world))
    for chunk in chunks:
        let_gradients_through(chunk)
        if megatron.ddp.name != "torch_fsdp2":  # torch's FSDP2 has no `main_grad`
            fuse_weight_gradients(chunk)
    wrapped = wrap_chunks(
        chunks,
        config=model_config,
        ddp=megatron.ddp,
        distributed_optimizer=megatron.optimizer.distributed,
        collection=groups.collection,
    )
    optimizer = build_optimizer(
        wrapped,
        optim=settings.optim,
        placement=megatron.optimizer,
        bf16=settings.model.dtype == "bf16",
        collection=groups.collection,
        implementation=megatron.ddp.name,
    )
    return wrapped, optimizer


def _build_fsdp(
    request: ModelRequest, settings: EngineSettings, accelerator: Accelerator, common: dict[str, Any]
) -> FSDPEngine:
    """Return this rank's share of the model; common: fields of every engine."""
    fsdp, device, dtype = settings.engine.fsdp, accelerator.device, DTYPES[settings.model.dtype]
    model, transformers_model = skeleton(request.path, head=request.head, attention=request.attention)
    if request.hf.adapter is not None:
        add_adapters(model, request.hf, head=request.head)
    if request.trainable:
        rules = rules_of(common["sharding"].merged.hf, request.head)
        constant = {one.name.format(layer="*", expert="*") for rule in rules if rule.frozen for one in rule.sources}
        freeze(model.named_parameters(), [*settings.model.frozen, *constant], everyone=SingleRank())
    else:
        model.requires_grad_(False)
    scratch = shard(
        model,
        transformers_model,
        mesh=_mesh(common["groups"], fsdp.shard_ranks, device.type, timeout_s=settings.timeout_s),
        device=device,
        dtype=dtype,
        settings=fsdp,
        recompute=request.trainable and settings.model.recompute == "full",
    )
    if settings.model.fp32_head and request.head == "lm":
        use_fp32_head(transformers_model)
    with progress.phase(f"{request.name}: reading the weights"):
        report = load_rows(model, request.path, sharding=common["sharding"])
    log.info("%s: read %s", request.name, report)
    return FSDPEngine(
        model=model,
        optimizer=build_adam(sharded_parameters(model), settings.optim) if request.trainable else None,
        dtype=dtype,
        scratch=scratch,
        reduce_every_microbatch=fsdp.reduce_every_microbatch,
        keep_gathered=not fsdp.reshard_after_forward,
        **common,
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
