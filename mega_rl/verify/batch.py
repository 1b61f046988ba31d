"""The batch that every layout computes: random tokens of several lengths, the same for a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.types import Experience, response_mask

ROWS, LONGEST, SHORTEST = 16, 32, 6
TOKENS_PER_MICROBATCH = 2 * LONGEST
# Distances of the old log-probs: well inside the clip range of the loss, and well beyond it. At its edges the gradient
# jumps, and rounding would decide on which side a token falls.
INSIDE, BEYOND = 0.05, 0.6


def random_batch(vocab_size: int, *, seed: int) -> Experience:
    """`ROWS` rows of random tokens and advantages on the host, with old and reference log-probs still 0."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = integers(SHORTEST, LONGEST + 1, ROWS)
    lengths[0] = LONGEST
    prompt_lengths = integers(2, SHORTEST - 1, ROWS)
    mask = response_mask(prompt_lengths, lengths, width=LONGEST)
    weights = mask.float() / mask.sum()
    return Experience.from_rows(
        integers(0, vocab_size, ROWS, LONGEST) * (torch.arange(LONGEST) < lengths[:, None]),
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        # Of mean 1: a loss whose terms cancel would be known to fewer digits than its gradient.
        advantages=(1 + torch.randn(ROWS, LONGEST, generator=generator)) * mask,
        loss_weights=weights,
        token_weights=weights,
    )


def with_old_logprobs(batch: Experience, logprobs: Tensor, *, seed: int) -> Experience:
    """The batch with old and reference log-probs around `logprobs` [B, S], those of one rank."""
    generator = torch.Generator().manual_seed(seed + 1)

    def distances() -> Tensor:
        far = torch.rand(logprobs.shape, generator=generator) < 0.3
        sign = torch.randint(0, 2, logprobs.shape, generator=generator) * 2 - 1
        return sign * torch.where(far, BEYOND, INSIDE)

    changed: Experience = batch.clone()  # type: ignore[attr-defined]
    changed.old_logprobs = (logprobs + distances()) * batch.loss_mask
    changed.ref_logprobs = (logprobs + distances()) * batch.loss_mask
    return changed


def own_rows(batch: Experience, rank: int, size: int) -> Experience:
    """The contiguous share of the rows that data-parallel rank `rank` of `size` gets."""
    rows = len(batch.tokens)
    mine: Experience = batch[rows * rank // size : rows * (rank + 1) // size]  # type: ignore[index]
    return mine
