"""The experts' router of the local layer spec."""

from __future__ import annotations

import torch
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
