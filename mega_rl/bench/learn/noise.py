"""Noise in the rollout engine, given from outside the trainer: the sampler is then not the policy that trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_rl.errors import UserError
from mega_rl.protocols import RolloutSource
from mega_rl.rollout.embedded.engine import HFRolloutEngine
from mega_rl.workers.rollout import RolloutWorker


def mix_with_uniform(source: RolloutSource, *, share: float) -> None:
    """Make the embedded engine draw this share of its tokens uniformly; its log-probs are those of the mixture.

    Raises UserError for rollouts of another engine.
    """
    engine = source.engine if isinstance(source, RolloutWorker) else None
    if not isinstance(engine, HFRolloutEngine):
        raise UserError("rollout.backend: only the embedded engine can be given noise; set rollout.backend=hf")

    def mix(module: nn.Module, inputs: object, logits: Tensor) -> Tensor:
        probabilities = logits.float().softmax(-1)
        return torch.log((1.0 - share) * probabilities + share / logits.size(-1))

    head = engine.model.get_output_embeddings()
    assert head is not None
    head.register_forward_hook(mix)
