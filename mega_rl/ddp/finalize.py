"""The last step of a backward: gradients added up over every group of ranks that shares a weight."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection


def finalize_sums(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Run Megatron-Core's `finalize_model_grads` without division by a token count: loss weights are global already."""
    kwargs: dict[str, Any] = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    finalize_model_grads(model, None, **kwargs)
