"""Responses that reach the length limit: a punishment shortly before it, and a filter of those that it cut off.

Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_rl.protocols import Ranks
from mega_rl.types import Experience, Metrics, RewardParts, Rewards, Rollout, row_numbers

# Numbers of tokens that an experience has before mini-batches are cut; each is 0 off the loss mask.
PER_TOKEN = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")


def soft_punishment(response_tokens: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Return [B] float32 from 0 to -1, eq. 13: 0 up to `limit - buffer` tokens, then linear to -1 at `limit`.

    response_tokens: [B] int64, of everything that `limit` counts.
    """
    return ((limit - buffer - response_tokens).double() / buffer).clamp(-1.0, 0.0).float()


@dataclass(frozen=True)
class Overlong:
    """Treatment of responses that reach the limit; without effect unless a setting is on."""

    max_response_tokens: int = 0
    filter: bool = False
    buffer_tokens: int = 0  # 0: no punishment
    penalty: float = 1.0  # at the limit

    def shape(self, rollout: Rollout, rewards: Rewards, ranks: Ranks) -> tuple[Rewards, Metrics]:
        """Return rewards with the punishment, and the mean punishment and the share of filtered samples.

        Both numbers are of samples that have an answer, over all ranks. Rewards that have parts get one more,
        "overlong": the punishment from 0 to -1, with the penalty as its weight.
        """
        answered = torch.ones_like(rollout.finished) if rollout.failed is None else ~rollout.failed
        punishment = torch.zeros_like(rewards.totals)
        if self.buffer_tokens:
            tokens = rollout.lengths - rollout.prompt_lengths  # the limit counts what others wrote, too
            part = soft_punishment(tokens, limit=self.max_response_tokens, buffer=self.buffer_tokens)
            punishment = self.penalty * part
            parts = _with_part(rewards.parts, part, weight=self.penalty)
            rewards = replace(rewards, totals=rewards.totals + punishment, parts=parts)
        columns = (answered, punishment, answered & ~rollout.finished)
        count, punished, truncated = ranks.sum(torch.stack([column.double().sum() for column in columns])).tolist()
        metrics: Metrics = {}
        if self.buffer_tokens:
            metrics["reward/overlong_punishment_mean"] = punished / max(count, 1.0)
        if self.filter:
            metrics["rollout/filtered_fraction"] = truncated / max(count, 1.0)
        return rewards, metrics

    def leave_out(self, experience: Experience, rollout: Rollout) -> Experience:
        """Return the experience in which responses that length cut off have no token on the loss mask, if they filter.

        It comes after advantages: their rewards are part of the mean and deviation that the other samples of a prompt
        are compared with, as in the paper. Off the mask they are in no denominator of a loss, as failed samples are.
        """
        if not self.filter:
            return experience
        experience.loss_mask = experience.loss_mask & rollout.finished[:, None]
        experience.rows = row_numbers(experience.loss_mask)
        for name in PER_TOKEN:
            setattr(experience, name, getattr(experience, name) * experience.loss_mask)
        return experience


def _with_part(parts: RewardParts | None, part: Tensor, *, weight: float) -> RewardParts | None:
    """Return the parts and "overlong", a name that no other part may have; part: [B] float32."""
    if parts is None:
        return None
    values = torch.cat([parts.values, part[:, None]], dim=1)
    return RewardParts((*parts.names, "overlong"), (*parts.weights, weight), values)
