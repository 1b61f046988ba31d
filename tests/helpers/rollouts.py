"""Small rollouts for tests of what the trainer does with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mega_rl.types import Rollout, ends_of, response_mask


def make_rollout(
    response_lengths: Sequence[int], *, samples: int = 2, prompt_tokens: int = 2, version: int = 3, seed: int = 0
) -> Rollout:
    """Rows of prompts of `prompt_tokens` and random responses, `samples` to a prompt, all of one weight version."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(response_lengths)
    lengths = prompt_tokens + torch.tensor(response_lengths, dtype=torch.int64)
    prompt_lengths = torch.full((rows,), prompt_tokens)
    width = int(lengths.max()) if rows else prompt_tokens
    mask = response_mask(prompt_lengths, lengths, width=width)
    tokens = torch.randint(2, 50, mask.shape, generator=generator) * (torch.arange(width) < lengths[:, None])
    return Rollout.from_rows(
        tokens,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        rollout_logprobs=(-torch.rand(mask.shape, generator=generator) - 1) * mask,
        end=ends_of(lengths > prompt_tokens),
        prompt_index=torch.arange(rows) // samples,
        sample_index=torch.arange(rows) % samples,
        weight_version=torch.full((rows,), version),
    )
