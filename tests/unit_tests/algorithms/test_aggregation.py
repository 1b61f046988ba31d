"""Loss weights: numbers by hand, and the sum does not depend on how rows are spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.algorithms.losses.aggregation import AGGREGATIONS, Aggregation, loss_weights, token_and_sequence_counts

# Rows of 3, 1 and 0 response tokens; token losses 1, 2, 3 and 10.
MASK = torch.tensor([[False, True, True, True], [False, True, False, False], [False, False, False, False]])
LOSSES = torch.tensor([[7.0, 1.0, 2.0, 3.0], [7.0, 10.0, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0]])


def test_counts() -> None:
    assert token_and_sequence_counts(MASK).tolist() == [4.0, 2.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-mean", (6 / 3 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
    ],
)
def test_by_hand(name: str, expected: float) -> None:
    weights = loss_weights(MASK, AGGREGATIONS[name], global_tokens=4, global_sequences=2, max_response_tokens=8)
    assert weights.dtype == torch.float32
    assert (weights * LOSSES).sum().item() == pytest.approx(expected)
    assert not weights[~MASK].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS.values())
def test_a_batch_without_tokens_weighs_nothing(aggregation: Aggregation) -> None:
    empty = torch.zeros(2, 3, dtype=torch.bool)
    weights = loss_weights(empty, aggregation, global_tokens=0, global_sequences=0, max_response_tokens=4)
    assert torch.equal(weights, torch.zeros(2, 3))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 12), ranks=st.integers(1, 4), micro=st.integers(1, 4))
@pytest.mark.parametrize("aggregation", AGGREGATIONS.values())
def test_spreading_rows_never_changes_the_loss(
    aggregation: Aggregation, seed: int, rows: int, ranks: int, micro: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, 7, generator=g) < torch.rand(rows, 1, generator=g)
    losses = torch.randn(rows, 7, generator=g)
    order = torch.randperm(rows, generator=g)
    shards = [order[rank::ranks] for rank in range(ranks)]
    counts = torch.stack([token_and_sequence_counts(mask[shard]) for shard in shards]).sum(0)

    def total(parts: list[torch.Tensor]) -> float:
        weighted = [
            loss_weights(
                mask[part],
                aggregation,
                global_tokens=counts[0].item(),
                global_sequences=counts[1].item(),
                max_response_tokens=7,
            ).double()
            * losses[part]
            for part in parts
        ]
        return sum(w.sum().item() for w in weighted)

    one = total([torch.arange(rows)])
    many = total([piece for shard in shards for piece in shard.split(micro)])
    assert many == pytest.approx(one, rel=1e-12, abs=1e-12)  # the weights are the same float32 numbers
