"""Loss weights of a mini-batch whose rows are on several ranks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import Experience
from tests.helpers.threads import on_simulated_ranks

LENGTHS, PROMPTS = torch.tensor([5, 1, 3, 7, 2, 4]), torch.tensor([0, 0, 2, 2, 3, 3])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_ranks_share_every_denominator(name: str) -> None:
    """The two samples of each prompt are on different ranks; prompt 1 is in another mini-batch."""
    mask = torch.arange(8) < LENGTHS[:, None]

    def weights(rows: list[int], total: Any) -> Tensor:
        ranks: Any = SimpleNamespace(sum=total)
        plan = MinibatchPlan(4, epochs=1, aggregation=AGGREGATIONS[name], max_response_tokens=8, seed=0, ranks=ranks)
        zeros = torch.zeros(len(rows), dtype=torch.int64)
        part = Experience.from_rows(
            mask[rows].long(), loss_mask=mask[rows], prompt_lengths=zeros, lengths=LENGTHS[rows],
            prompt_index=PROMPTS[rows],
        )  # fmt: skip
        return plan._weigh(part, 4).loss_weights

    (alone,) = on_simulated_ranks([partial(weights, list(range(6)))])
    even, odd = on_simulated_ranks([partial(weights, [0, 2, 4]), partial(weights, [1, 3, 5])])
    assert torch.equal(torch.stack([even, odd], dim=1).flatten(0, 1), alone)
    expected = {"prompt-mean": [1 / 18, 1 / 18, 1 / 30, 1 / 30, 1 / 18, 1 / 18], "token-mean": [1 / 22] * 6}
    if name in expected:
        torch.testing.assert_close(alone[:, 0], torch.tensor(expected[name]))
