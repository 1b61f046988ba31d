"""From a Hugging Face checkpoint directory to a MegatronEngine."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from mega_rl.config.schema import MoeConfig
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.ddp.frozen import freeze
from mega_rl.ddp.optimizer import build_optimizer
from mega_rl.ddp.wrap import wrap_chunks
from mega_rl.engines.base import EngineSettings, ModelRequest
from mega_rl.engines.megatron.engine import MegatronEngine
from mega_rl.engines.microbatches import Batching
from mega_rl.engines.models.build import ModelSettings, build_chunks, fuse_weight_gradients, transformer_config
from mega_rl.engines.models.heads import use_fp32_logits
from mega_rl.engines.models.routing import Routing
from mega_rl.engines.models.specs import check_experts
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


def build_megatron_engine(
    request: ModelRequest, *, settings: EngineSettings, groups: Groups, accelerator: Accelerator, batching: Batching
) -> MegatronEngine:
    """Return the model on this rank's part of the layout, with its weights loaded; collective."""
    hf, layout, megatron = request.hf, groups.layout, settings.engine.megatron
    check_experts(request.impl, hf, moe=megatron.moe, model=settings.model)
    model_config = transformer_config(
        hf,
        layout=layout,
        settings=ModelSettings(settings.model, megatron, deterministic=settings.deterministic),
        attention=request.attention,
        device_overrides=accelerator.transformer_config_overrides(),
    )
    sharding = Sharding(hf, layout, spec=request.impl, head=request.head)
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
    routing = _routing(request, chunks, sharding=sharding, settings=megatron.moe, groups=groups)
    optimizer: MegatronOptimizer | None = None
    if request.trainable:
        chunks, optimizer = _trainable(chunks, model_config=model_config, settings=settings, groups=groups)
    return MegatronEngine(
        name=request.name,
        chunks=chunks,
        optimizer=optimizer,
        config=model_config,
        sharding=sharding,
        groups=groups,
        batching=batching,
        device=accelerator.device,
        attention=request.attention,
        temperature=settings.temperature,
        hidden_tokens=settings.hidden_tokens,
        export_bucket_bytes=settings.export_bucket_bytes,
        routing=routing,
    )


def _routing(
    request: ModelRequest, chunks: list[GPTModel], *, sharding: Sharding, settings: MoeConfig, groups: Groups
) -> Routing | None:
    """Return what controls the routers of a mixture of experts; None without experts."""
    moe = sharding.hf.moe
    if moe is None:
        return None
    # Choices are the actor's: a critic has other weights, and nothing is learnt of a reference.
    record = settings.routing_replay and request.trainable and request.head == "lm"
    settings = settings if request.trainable else MoeConfig()
    return Routing(chunks, moe, settings=settings, record=record, groups=groups)


def _trainable(
    chunks: list[GPTModel], *, model_config: TransformerConfig, settings: EngineSettings, groups: Groups
) -> tuple[list[Any], MegatronOptimizer]:
    """Freeze what the config names, wrap the chunks for data parallelism, and return them with their optimizer."""
    megatron = settings.engine.megatron
    freeze(chunks, settings.model.frozen, everyone=ranks_of(groups.world))
    if megatron.ddp.name != "torch_fsdp2":  # which has no `main_grad`
        for chunk in chunks:
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
