"""The value head, logits in float32 of the vocabulary projection, and the hidden states before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.parallel.vocab import fp32_linear


class ValueHead(MegatronModule):
    """One scalar per token, replicated over tensor parallel; stands where a GPTModel keeps its `output_layer`.

    The weight [1, H] is float32 in a bf16 model too: a bf16 value has three digits. It starts at zero: a fresh critic
    predicts 0 everywhere, whatever the layout.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, device=device))
        # Under sequence parallelism each rank sees its slice of the tokens, so the gradient is a partial sum.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return (values [S, B, 1] float32, None) of hidden [S, B, H], sharded under sequence parallelism."""
        assert weight is None, "a value head is never tied to the embedding"
        values = torch.nn.functional.linear(hidden.float(), self.weight)
        if self.config.sequence_parallel:
            # Every rank then computes the same loss over all tokens: the backward is a split, not a sum.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


def use_fp32_logits(chunks: Sequence[GPTModel]) -> None:
    """Make the vocabulary projections of bf16 chunks, tied ones too, return float32 logits: `model.fp32_head`."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer._forward_impl = _fp32_logits


@contextmanager
def hidden_outputs(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Make chunks return last hidden states [b, S, H], whole on every rank, instead of logits."""
    heads = [chunk.output_layer for chunk in chunks if chunk.post_process]
    for head in heads:
        head.forward = partial(_hidden, head)
    try:
        yield
    finally:
        for head in heads:
            del head.forward


def projection(chunks: Sequence[GPTModel]) -> Tensor | None:
    """Return this rank's vocabulary projection rows, [V / tp, H]; None off the last pipeline stage."""
    for chunk in chunks:
        if chunk.post_process:
            tied = chunk.share_embeddings_and_output_weights
            weight: Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
            return weight.detach()
    return None


def _hidden(head: ColumnParallelLinear, hidden: Tensor, **of_product: object) -> tuple[Tensor, None]:
    """Return (the input of the projection [S, B, H], whole over tensor parallelism, None)."""
    if head.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=head.tp_group)
    return hidden, None


def _fp32_logits(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup,
    **others: object,
) -> Tensor:
    """Return [S, B, V / tp] float32 of `input` [S, B, H], sharded under sequence parallelism.

    Takes the arguments of Megatron-Core's own product in `ColumnParallelLinear`. Those in `others` are about adding to
    `main_grad` inside of the backward: here the weight's gradient is rounded to its dtype and added by DDP's hook.
    """
    assert bias is None, "heads have no bias"
    gather = reduce = None
    if sequence_parallel:
        gather = partial(gather_from_sequence_parallel_region, group=tp_group)
        reduce = partial(reduce_scatter_to_sequence_parallel_region, group=tp_group)
    elif allreduce_dgrad:
        reduce = partial(reduce_from_tensor_model_parallel_region, group=tp_group)
    return fp32_linear(input, weight, gather=gather, reduce=reduce)
