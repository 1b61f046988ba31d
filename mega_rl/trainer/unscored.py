"""Samples that the reward leaves out: None in the place of a number.

They take the road of failed samples: without a token on the loss mask a row is in no group, in no statistic of the
batch, in no target of the critic and in no denominator of a loss, as if it had not been drawn.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mega_rl.types import Rewards, Rollout


def scored_rows(rollout: Rollout, rewards: Rewards) -> Tensor:
    """Return [B] bool: rows that have an answer and a reward."""
    answered = torch.ones_like(rollout.finished) if rollout.failed is None else ~rollout.failed
    return answered & ~rewards.totals.isnan().to(answered.device)


def leave_unscored_out(rollout: Rollout, rewards: Rewards) -> tuple[Rollout, Rewards]:
    """Return both with the rows that have no reward marked as failed: off the loss mask, with a reward of 0.

    A rollout all of whose answers have a reward comes back itself. Rewards are equal on all ranks of a replica, and so
    is what is left out.
    """
    left_out = rewards.totals.isnan()
    if not left_out.any():
        return rollout, rewards
    scored = scored_rows(rollout, rewards)
    fields: dict[str, Tensor] = {name: getattr(rollout, name) for name in Rollout.__annotations__}
    mask = rollout.loss_mask & scored[:, None]
    fields |= {"failed": ~scored, "loss_mask": mask, "rollout_logprobs": rollout.rollout_logprobs * mask}
    if rollout.token_versions is not None:
        fields["token_versions"] = rollout.token_versions * mask
    parts = rewards.parts
    if parts is not None:
        parts = replace(parts, values=parts.values.masked_fill(left_out[:, None], 0.0))
    return Rollout.from_rows(**fields), replace(rewards, totals=rewards.totals.masked_fill(left_out, 0.0), parts=parts)
