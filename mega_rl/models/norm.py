"""RMSNorm of the local layer spec."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension whose weight is marked for sequence parallelism.

    Megatron-Core's own torch wrapper (`megatron.core.transformer.torch_norm.WrappedTorchNorm`) refuses
    `sequence_parallel`. Under it each tensor-parallel rank normalises its slice of the sequence, so the weight's
    gradient is a partial sum; the `sequence_parallel` mark makes `finalize_model_grads` add the parts.
    The constructor takes the arguments that Megatron-Core's layers pass to a norm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
