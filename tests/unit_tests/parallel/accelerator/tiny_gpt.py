"""A tiny GPT with Megatron-Core's own DDP, optimizer, schedules and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.layout import ParallelLayout

VOCAB, SEQUENCE, LAYERS, HIDDEN = 64, 16, 4, 32
BATCH = 4  # sequences of one step over all ranks


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient is summed over the tensor-parallel group under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


@dataclass
class Training:
    """One model and its optimizer on this rank."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    config: TransformerConfig
    groups: Groups

    def state(self, *, loading: bool) -> dict[str, Any]:
        """Sharded state of model and optimizer."""
        model = {
            f"model{number}": chunk.module.sharded_state_dict(metadata={"dp_cp_group": self.groups.collection.dp_cp})
            for number, chunk in enumerate(self.chunks)
        }
        flat = {key: value for part in model.values() for key, value in part.items()} if len(model) == 1 else model
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        optimizer = self.optimizer.sharded_state_dict(flat, is_loading=loading, metadata=metadata)
        return {**model, "optimizer": optimizer}


def build(
    groups: Groups, accelerator: Accelerator, *, dtype: torch.dtype, recompute: str = "none", tied: bool = False
) -> Training:
    """Model, DDP and distributed optimizer of a layout."""
    layout = groups.layout
    overrides = accelerator.transformer_config_overrides()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        finalize_model_grads_func=finalize_model_grads,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        **overrides,
    )
    chunks = [_chunk(config, groups, vp_stage=stage, tied=tied) for stage in range(layout.vpp)]
    for chunk in chunks:
        chunk.to(device=accelerator.device, dtype=dtype)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = [
        DistributedDataParallel(
            config, ddp_config, chunk, pg_collection=groups.collection, disable_bucketing=number > 0
        )
        for number, chunk in enumerate(chunks)
    ]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        adam_eps=1e-3,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(
        optimizer_config, wrapped, use_gloo_process_groups=False, pg_collection=groups.collection
    )
    return Training(wrapped, optimizer, config, groups)


def _chunk(config: TransformerConfig, groups: Groups, *, vp_stage: int, tied: bool) -> GPTModel:
    layout, pp_rank = groups.layout, groups.coordinates.pp_rank
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = Norm
    layers = len(layout.layers_of(pp_rank, LAYERS, vp_stage))
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=Norm),
        VOCAB,
        SEQUENCE,
        pre_process=pp_rank == 0 and vp_stage == 0,
        post_process=pp_rank == layout.pp - 1 and vp_stage == layout.vpp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        pg_collection=groups.collection,
        vp_stage=vp_stage if layout.vpp > 1 else None,
    )


def _batches(layout: ParallelLayout, dp_rank: int, device: torch.device) -> list[Tensor]:
    """This replica's micro-batches of one sequence, [1, S + 1]."""
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    return [row[None].to(device) for row in tokens[dp_rank :: layout.dp]]


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _forward_step(batches: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    tokens = next(batches)
    positions = torch.arange(SEQUENCE, device=tokens.device)[None]
    output = model(tokens[:, :-1], positions, attention_mask=None, labels=tokens[:, 1:].contiguous())
    return output, partial(_loss)


def step(training: Training) -> dict[str, float]:
    """Loss of this replica (nan off the last stage) and global gradient norm of one optimizer step."""
    layout, groups = training.groups.layout, training.groups
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    device = next(training.chunks[0].parameters()).device
    batches = _batches(layout, groups.coordinates.dp_rank, device)
    run = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp if layout.vpp > 1 else None)
    reports = run(
        forward_step_func=_forward_step,
        data_iterator=[iter(batches) for _ in training.chunks],
        model=training.chunks,
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        p2p_communicator=P2PCommunicator(groups.pp, training.config),
        pg_collection=groups.collection,
    )
    succeeded, norm, _ = training.optimizer.step()
    assert succeeded
    total = torch.stack([report["loss"] for report in reports]).mean() if reports else torch.zeros((), device=device)
    torch.distributed.all_reduce(total, group=groups.world)
    return {"loss": total.item() / (layout.dp * layout.tp), "grad_norm": float(norm)}


def save(training: Training, directory: Path) -> None:
    """Write model and optimizer; collective."""
    if training.groups.world.rank() == 0:
        directory.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(training.state(loading=False), str(directory))


def load(training: Training, directory: Path) -> None:
    """Read what `save` wrote under any layout; collective."""
    state = dist_checkpointing.load(training.state(loading=True), str(directory))
    for number, chunk in enumerate(training.chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    training.optimizer.load_state_dict(state["optimizer"])
    for part in getattr(training.optimizer, "chained_optimizers", [training.optimizer]):
        for counted in part.optimizer.state.values():
            counted["step"] = counted["step"].clone()  # upstream loads one tensor as the counter of all
