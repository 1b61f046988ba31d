"""From a Hugging Face checkpoint directory to an engine."""

from __future__ import annotations

import logging
from pathlib import Path

from mega_rl.config.needs import RequestedAttention, Role
from mega_rl.config.schema import MicrobatchConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.sharding import Head, Spec
from mega_rl.engines.base import EngineSettings, ModelEngine, ModelRequest
from mega_rl.engines.fsdp.build import build_fsdp_engine
from mega_rl.engines.megatron.build import build_megatron_engine
from mega_rl.engines.microbatches import Batching
from mega_rl.engines.models.attention_choice import choose_attention
from mega_rl.engines.models.specs import choose_transformer_impl
from mega_rl.parallel.accelerator import Accelerator
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
    """Return the model of checkpoint `path` in a role, with its layers and its attention on this machine decided.

    `head` is "lm" or "value"; a trainable model has gradients and an optimizer.

    Raises UserError: the settings ask for what cannot run here.
    """
    hf = read_hf_config(path)
    impl: Spec = "hf"
    if settings.engine.backend == "megatron":
        impl = choose_transformer_impl(settings.engine.megatron.transformer_impl, device_type=device_type)
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
    build = build_fsdp_engine if model.impl == "hf" else build_megatron_engine
    with progress.phase(f"{model.name}: building the model"):
        batching = _batching(settings.microbatch, groups)
        return build(model, settings=settings, groups=groups, accelerator=accelerator, batching=batching)


def _batching(microbatch: MicrobatchConfig, groups: Groups) -> Batching:
    """Return how rows become micro-batches on this rank: in lengths that tensor and context parallelism can cut."""
    layout = groups.layout
    return Batching(
        packing=microbatch.packing,
        max_tokens=microbatch.max_tokens,
        micro_batch_size=microbatch.size,
        pad_to_multiple=(layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1),
        count_multiple=layout.pp if layout.vpp > 1 else 1,
        same_shapes=layout.pp > 1,
        cp_rank=groups.coordinates.cp_rank,
        cp_size=layout.cp,
    )
