"""Building the Megatron-Core model of one rank from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig

from mega_rl.config.schema import ModelConfig, ParallelConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.model_config import gpt_model_kwargs, transformer_config_kwargs
from mega_rl.converters.plan import Head, Spec
from mega_rl.models.heads import ValueHead
from mega_rl.models.specs import decoder_spec
from mega_rl.parallel.groups import Groups

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    hf: HFConfig,
    *,
    model: ModelConfig,
    parallel: ParallelConfig,
    device_overrides: Mapping[str, Any],
) -> TransformerConfig:
    """Megatron-Core's config of this model, layout and device.

    `calculate_per_token_loss` gives the schedules and DDP sum semantics: nothing is divided by the number of
    micro-batches or of data-parallel ranks, because every token's loss already carries its global weight.
    """
    dtype = DTYPES[model.dtype]
    kwargs: dict[str, Any] = {
        **transformer_config_kwargs(hf),
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "sequence_parallel": parallel.sequence_parallel,
        "overlap_p2p_comm": parallel.overlap_p2p,
        "batch_p2p_comm": not parallel.overlap_p2p,
        "variable_seq_lengths": parallel.pp > 1,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths, in dense models too
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,
        "perform_initialization": False,  # every parameter is loaded, or set by its own module
        **RECOMPUTE[model.recompute],
        **device_overrides,
    }
    return TransformerConfig(**kwargs)


def build_chunks(
    hf: HFConfig,
    *,
    config: TransformerConfig,
    groups: Groups,
    head: Head,
    impl: Spec,
    padded_vocab: int,
    device: torch.device,
) -> list[GPTModel]:
    """This rank's model chunks (one per virtual pipeline stage), uninitialised, on `device`.

    `head` is "lm" (vocabulary projection, sharded over TP) or "value" (one scalar per token, replicated).
    """
    layout = groups.layout
    chunks = []
    for stage in range(layout.vpp):
        first = groups.coordinates.pp_rank == 0 and stage == 0
        last = groups.coordinates.pp_rank == layout.pp - 1 and stage == layout.vpp - 1
        kwargs = gpt_model_kwargs(hf, padded_vocab)
        if head == "value":
            kwargs["share_embeddings_and_output_weights"] = False
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec(
                impl, num_layers=len(layout.layers_of(0, hf.num_layers)), qk_norm=hf.qk_norm
            ),
            pre_process=first,
            post_process=last,
            parallel_output=True,
            pg_collection=groups.collection,
            vp_stage=stage if layout.vpp > 1 else None,
            **kwargs,
        )
        if head == "value" and last:
            chunk.output_layer = ValueHead(config, groups.collection)
        mark_tensor_parallel(chunk)
        chunks.append(chunk.to(device=device))
    return chunks


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Say of each sharded weight that it is, and along which dimension.

    Megatron-Core sets these marks only while it initialises a weight, on CPU and GPU alike. Without them the gradient
    norm takes the shards of ranks above 0 for copies and leaves them out: no error, and too weak a clipping.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        dim = dims.get(type(module))
        if dim is not None and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)
