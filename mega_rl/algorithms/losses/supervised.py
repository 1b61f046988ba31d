"""Maximum likelihood on given responses."""

from __future__ import annotations

from torch import Tensor

from mega_rl.protocols import LossOutput


def nll_loss(logprobs: Tensor, *, loss_weights: Tensor) -> LossOutput:
    """Weighted negative log-likelihood, `-sum(w * logprob)`, of tokens in any shape; reports "sft/loss".

    logprobs, loss_weights: one shape, float32; the weights are those of algorithms.losses.aggregation, so the sum over
    micro-batches and ranks is the global mean. Tokens of weight 0 touch neither loss nor gradient.
    """
    loss = -(loss_weights * logprobs.where(loss_weights != 0, 0.0)).sum()
    return LossOutput(loss=loss, sums={"sft/loss": loss})
