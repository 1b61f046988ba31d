"""The experts of every token on their way from the pass that computed the old log-probs to the mini-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mega_rl.algorithms.advantages import GRPO
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.parallel.comm import SingleRank
from mega_rl.trainer.policy_gradient import MinibatchPlan, build_experience
from mega_rl.types import Rewards, Rollout, TokenOutputs
from tests.helpers.models import random_experience


def marked() -> torch.Tensor:
    """[8, 24, 3, 2] int16 that tell the row."""
    return torch.arange(8, dtype=torch.int16)[:, None, None, None].expand(8, 24, 3, 2).clone()


def experience_from(old: TokenOutputs, routing: torch.Tensor | None) -> Any:
    """The experience that a rollout with this routing and these old outputs make."""
    batch = random_experience()
    names = ("tokens", "loss_mask", "prompt_lengths", "lengths", "prompt_index", "sample_index", "rollout_logprobs")
    rollout = Rollout.from_rows(**{name: getattr(batch, name) for name in names}, routing=routing)
    return build_experience(
        rollout,
        Rewards(torch.randn(8)),
        outputs=(dataclasses.replace(old, logprobs=batch.old_logprobs), TokenOutputs(), TokenOutputs()),
        estimator=GRPO(),
        sum_over_ranks=SingleRank().sum,
    )


@pytest.mark.parametrize("source", ["trainer", "rollout engine"])
def test_routing_stays_with_its_row(source: str) -> None:
    """Through the cut into mini-batches of two prompts, whose rows are in another order."""
    by_trainer = source == "trainer"
    old = TokenOutputs(routing=marked() if by_trainer else None)
    experience = experience_from(old, None if by_trainer else marked())
    plan = MinibatchPlan(
        2, epochs=1, aggregation=AGGREGATIONS["token-mean"], max_response_tokens=24, seed=0, ranks=SingleRank()
    )
    rows = 0
    for minibatch in plan.cut(experience, num_prompts=4, step=0):
        numbers = 2 * minibatch.prompt_index + minibatch.sample_index
        assert minibatch.routing.dtype == torch.int16
        assert torch.equal(minibatch.routing, marked()[numbers])
        rows += len(minibatch.tokens)
    assert rows == 8
