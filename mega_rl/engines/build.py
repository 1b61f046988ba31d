"""From a Hugging Face checkpoint directory to an engine."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from mega_rl import progress
from mega_rl.accelerator import Accelerator
from mega_rl.config.attention import Role, requested_attention
from mega_rl.config.schema import Config, MoeConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.ddp.frozen import freeze
from mega_rl.ddp.optimizer import build_optimizer
from mega_rl.ddp.wrap import wrap_chunks
from mega_rl.engines.base import ModelEngine
from mega_rl.engines.fsdp.build import build_fsdp_engine
from mega_rl.engines.megatron import MegatronEngine
from mega_rl.engines.microbatches import Batching
from mega_rl.models.attention_choice import Attention, choose_attention
from mega_rl.models.build import build_chunks, transformer_config
from mega_rl.models.routing import Routing
from mega_rl.models.specs import check_experts, choose_transformer_impl
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.groups import Groups

log = logging.getLogger(__name__)


def implementation(name: Role, *, path: Path, config: Config, device_type: str) -> tuple[Spec, Attention]:
    """(whose layers, which attention) the model of a role will run.

    Raises:
        UserError: what the config asks for cannot run here.
    """
    impl: Spec = "hf"
    if config.engine == "megatron":
        impl = choose_transformer_impl(config.model.transformer_impl, device_type=device_type)
    asked = requested_attention(config, name)
    attention = choose_attention(
        asked.word,
        key=asked.key,
        hf=read_hf_config(path),
        impl=impl,
        device_type=device_type,
        dtype=config.model.dtype,
    )
    return impl, attention


def build_engine(
    name: Role,
    *,
    path: Path,
    head: Head,
    trainable: bool,
    config: Config,
    groups: Groups,
    accelerator: Accelerator,
) -> ModelEngine:
    """The model of checkpoint `path` on the engine that `config` names, with its weights loaded; collective.

    `name` is the role, for which the config may ask for an attention of its own; `head` is "lm" or "value"; a
    trainable engine has gradients and an optimizer.

    Raises:
        UserError: the model cannot run as the config asks.
    """
    impl, attention = implementation(name, path=path, config=config, device_type=accelerator.device.type)
    log.info("%s: building the model of %s", name, path)
    build = build_fsdp_engine if impl == "hf" else partial(_build_megatron_engine, impl=impl)
    with progress.phase(f"{name}: building the model"):
        return build(
            name,
            path=path,
            head=head,
            trainable=trainable,
            config=config,
            groups=groups,
            accelerator=accelerator,
            attention=attention,
            batching=_batching(config, groups),
        )


def _build_megatron_engine(
    name: Role,
    *,
    path: Path,
    head: Head,
    trainable: bool,
    config: Config,
    groups: Groups,
    accelerator: Accelerator,
    attention: Attention,
    batching: Batching,
    impl: Spec,
) -> MegatronEngine:
    """The model on this rank's part of the layout."""
    hf = read_hf_config(path)
    layout = groups.layout
    check_experts(impl, hf, config)
    model_config = transformer_config(
        hf,
        layout=layout,
        settings=config,
        attention=attention,
        device_overrides=accelerator.transformer_config_overrides(),
    )
    sharding = Sharding(hf, layout, spec=impl, head=head)
    chunks = build_chunks(
        hf,
        config=model_config,
        groups=groups,
        head=head,
        impl=impl,
        padded_vocab=sharding.vocab,
        device=accelerator.device,
        experts_apart=config.ddp.implementation == "ddp",
    )
    with progress.phase(f"{name}: reading the weights"):
        report = load_hf(chunks, path, sharding=sharding, coordinates=groups.coordinates)
    log.info("%s: read %s", name, report)
    routing: Routing | None = None
    if hf.moe is not None:
        # Choices are the actor's: a critic has other weights, and of a reference nothing is learnt.
        record = config.moe.routing_replay and trainable and head == "lm"
        settings = config.moe if trainable else MoeConfig()
        routing = Routing(chunks, hf.moe, settings=settings, record=record, groups=groups)
    optimizer: MegatronOptimizer | None = None
    if trainable:
        chunks, optimizer = _trainable(chunks, model_config=model_config, config=config, groups=groups)
    return MegatronEngine(
        name=name,
        chunks=chunks,
        optimizer=optimizer,
        config=model_config,
        sharding=sharding,
        groups=groups,
        batching=batching,
        device=accelerator.device,
        attention=attention,
        temperature=config.rollout.temperature,
        export_bucket_bytes=config.rollout.bucket_mib << 20,
        routing=routing,
    )


def _trainable(
    chunks: list[GPTModel], *, model_config: TransformerConfig, config: Config, groups: Groups
) -> tuple[list[Any], MegatronOptimizer]:
    """The chunks without what is frozen, wrapped for data parallelism, and their optimizer."""
    freeze(chunks, config.model.frozen, everyone=GroupRanks(groups.world))
    wrapped = wrap_chunks(
        chunks,
        config=model_config,
        ddp=config.ddp,
        distributed_optimizer=config.optim.distributed_optimizer,
        collection=groups.collection,
    )
    optimizer = build_optimizer(
        wrapped,
        optim=config.optim,
        bf16=config.model.dtype == "bf16",
        collection=groups.collection,
        implementation=config.ddp.implementation,
    )
    return wrapped, optimizer


def _batching(config: Config, groups: Groups) -> Batching:
    """How rows become micro-batches on this rank: in lengths that tensor and context parallelism can cut."""
    trainer, layout = config.trainer, groups.layout
    return Batching(
        packing=trainer.packing,
        max_tokens=trainer.max_tokens_per_microbatch,
        micro_batch_size=trainer.micro_batch_size,
        pad_to_multiple=(layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1),
        count_multiple=layout.pp if layout.vpp > 1 else 1,
        cp_rank=groups.coordinates.cp_rank,
        cp_size=layout.cp,
    )
