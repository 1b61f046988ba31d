"""Small rollouts for tests of what the trainer does with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mega_rl.types import Rollout


def make_rollout(
    response_lengths: Sequence[int], *, samples: int = 2, prompt_tokens: int = 2, version: int = 3, seed: int = 0
) -> Rollout:
    """Rows of prompts of `prompt_tokens` and random responses, `samples` to a prompt, all of one weight version."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(response_lengths)
    lengths = prompt_tokens + torch.tensor(response_lengths, dtype=torch.int64)
    columns = torch.arange(int(lengths.max()) if rows else prompt_tokens)
    inside = columns < lengths[:, None]
    mask = inside & (columns >= prompt_tokens)
    tokens = torch.randint(2, 50, mask.shape, generator=generator) * inside
    return Rollout(
        tokens=tokens,
        loss_mask=mask,
        prompt_lengths=torch.full((rows,), prompt_tokens),
        lengths=lengths,
        rollout_logprobs=(-torch.rand(mask.shape, generator=generator) - 1) * mask,
        finished=lengths > prompt_tokens,
        prompt_index=torch.arange(rows) // samples,
        sample_index=torch.arange(rows) % samples,
        weight_version=torch.full((rows,), version),
        batch_size=[rows],
    )
