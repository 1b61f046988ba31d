"""Parts of a mixture of experts in the local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import linear

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):
    """Megatron-Core's top-k router with a plain linear layer.

    Upstream's goes through Transformer Engine's matrix product or, where that is not installed, through a name that
    nobody has defined.
    """

    def gating(self, input: Tensor) -> Tensor:
        """[..., experts] logits of `config.moe_router_dtype` from hidden states [..., H]."""
        dtype = DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(input.to(dtype), self.weight.to(dtype), bias)


class ExpertRowParallelLinear(RowParallelLinear):
    """An expert's second linear layer, whose partial sums the token dispatcher adds up, on any number of ranks.

    On a single rank upstream's passes its output through a reduction that does nothing but make it a view, to which
    the expert's bias can then not be added in place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True
