"""Output heads besides the vocabulary projection."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor


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
        """([S, B, 1] float32, None) from hidden [S, B, H] (S sharded over TP under sequence parallelism)."""
        assert weight is None, "a value head is never tied to the embedding"
        values = torch.nn.functional.linear(hidden.float(), self.weight)
        if self.config.sequence_parallel:
            # Every rank goes on to compute the same loss of all tokens: the backward is a split, not a sum.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None
