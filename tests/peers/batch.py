"""Random inputs, the same for the peers and for the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SEEDS = (0, 1, 2)
PROMPTS, SAMPLES, WIDTH = 3, 4, 14
ROWS = PROMPTS * SAMPLES
VOCABULARY = 23


@dataclass(frozen=True)
class Batch:
    """Twelve responses to three prompts.

    Per token [ROWS, WIDTH], float64 with numbers of float32, so that either precision starts from the same; 0 off the
    mask.
    """

    mask: Tensor  # bool; lengths from 1 to WIDTH, three rows with a hole, as between two turns
    prompts: Tensor  # [ROWS] int64, samples of a prompt one after the other
    rewards: Tensor  # [ROWS]
    parts: Tensor  # [ROWS, 2], named parts of rewards, the second nearly always 1
    greedy: Tensor  # [ROWS], the reward of the prompt's greedy response
    values: Tensor
    old_values: Tensor
    returns: Tensor
    kl: Tensor  # to be taken off token rewards
    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    advantages: Tensor  # of tokens
    response_advantages: Tensor  # [ROWS]

    @property
    def token_rewards(self) -> Tensor:
        """Return the reward on each response's last token, less the KL."""
        rewards = -self.kl
        for row, tokens in enumerate(self.mask):
            rewards[row, int(tokens.nonzero().max())] += self.rewards[row]
        return rewards

    @property
    def near_reference(self) -> Tensor:
        """Return reference log-probs at which no bound of an estimator acts."""
        return self.logprobs + 0.3 * (self.reference - self.logprobs)

    @property
    def row(self) -> Tensor:
        """Return [WIDTH, 3] log-probs, old ones and centred advantages of one full response."""
        full = int(self.mask.sum(dim=1).argmax())
        advantages = self.advantages[full] - self.advantages[full].mean()
        return torch.stack([self.logprobs[full], self.old[full], advantages], dim=1)


def batch(seed: int) -> Batch:
    """Return the batch of a seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    lengths = torch.randint(2, WIDTH, (ROWS,), generator=generator)
    lengths[:2] = torch.tensor([1, WIDTH])
    mask = torch.arange(WIDTH) < lengths[:, None]
    for row in lengths.argsort(descending=True)[1:4].tolist():
        mask[row, int(lengths[row]) // 2] = False
    shape = (ROWS, WIDTH)

    def tokens(x: Tensor) -> Tensor:
        return torch.where(mask, x.float().double(), 0.0)

    logprobs = tokens(-(0.02 + normal(*shape).abs()))
    # ratios around 1, whose mean differs by response; every eighth token is far off
    far = 1.0 + 4.0 * (torch.rand(shape, generator=generator) < 0.125)
    log_ratio = (0.1 * normal(ROWS, 1) + 0.3 * far * normal(*shape)).clamp(-2.2, 2.2)
    old = tokens((logprobs - log_ratio).clamp(max=-5e-3))
    reference = tokens((logprobs + 1.2 * normal(*shape)).clamp(max=-5e-3))
    reference[1, 0] = logprobs[1, 0] - 15.0  # where k3 is at its bound
    prompts = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    parts = torch.stack([normal(ROWS), (torch.arange(ROWS) % 5 > 0).double()], dim=1)
    return Batch(
        mask=mask,
        prompts=prompts,
        rewards=normal(ROWS),
        parts=parts,
        greedy=normal(PROMPTS)[prompts],
        values=tokens(normal(*shape)),
        old_values=tokens(normal(*shape)),
        returns=tokens(normal(*shape)),
        kl=tokens(0.1 * normal(*shape)),
        logprobs=logprobs,
        old=old,
        rollout=tokens((old - 0.05 * normal(ROWS, 1) - 0.2 * normal(*shape)).clamp(max=-5e-3)),
        reference=reference,
        advantages=tokens(normal(*shape)),
        response_advantages=normal(ROWS),
    )


def vocabulary(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a student's logits [T, V], a teacher's hidden states [T, H] and its projection [V, H]; float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return 2 * normal(9, VOCABULARY), normal(9, 8), normal(VOCABULARY, 8)
