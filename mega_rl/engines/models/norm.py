"""RMSNorms of the local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension whose weight is marked for sequence parallelism.

    Megatron-Core's own torch wrapper (`megatron.core.transformer.torch_norm.WrappedTorchNorm`) refuses
    `sequence_parallel`. Under it each tensor-parallel rank normalises its slice of the sequence, so the weight's
    gradient is a partial sum; the `sequence_parallel` mark makes `finalize_model_grads` add the parts.
    The constructor takes the arguments that Megatron-Core's layers pass to a norm. With
    `config.layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] of the dtype of `x` [..., H]."""
        if not self.zero_centered:
            return super().forward(x)
        return rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class LatentRMSNorm(RMSNorm):
    """RMSNorm of a compressed query, key or value in latent attention: its epsilon is not that of other norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, latent_eps: float) -> None:
        super().__init__(config, hidden_size, latent_eps)


class JointRMSNorm(torch.nn.Module):
    """RMSNorm over all `heads` of a query or key together, which tensor parallelism cuts by heads.

    The weight is this rank's part, [heads / tp * D].
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        heads: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.tp_group = pg_collection.tp
        self.width, self.eps = heads * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.tp_group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads / tp, D] of the dtype of `x`; the mean square is over the heads of all ranks."""
        heads = x.flatten(-2).float()
        squares = heads.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            # Every rank goes on with the sum for its own heads, so its gradient is a sum over ranks too.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = heads * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight for a distributed checkpoint, cut over tensor parallelism."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
