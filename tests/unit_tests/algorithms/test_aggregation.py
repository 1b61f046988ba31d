"""Loss weights: numbers by hand, and the sum does not depend on how rows are spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.algorithms.aggregation import loss_weights, token_and_sequence_counts
from mega_rl.errors import UserError

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# Rows of 3, 1 and 0 response tokens; token losses 1, 2, 3 and 10.
MASK = torch.tensor([[False, True, True, True], [False, True, False, False], [False, False, False, False]])
LOSSES = torch.tensor([[7.0, 1.0, 2.0, 3.0], [7.0, 10.0, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0]])


def test_counts() -> None:
    assert token_and_sequence_counts(MASK).tolist() == [4.0, 2.0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-mean", (6 / 3 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
    ],
)
def test_by_hand(mode: str, expected: float) -> None:
    weights = loss_weights(MASK, mode, global_tokens=4, global_sequences=2, max_response_tokens=8)
    assert weights.dtype == torch.float32
    assert (weights * LOSSES).sum().item() == pytest.approx(expected)
    assert not weights[~MASK].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_weighs_nothing(mode: str) -> None:
    empty = torch.zeros(2, 3, dtype=torch.bool)
    weights = loss_weights(empty, mode, global_tokens=0, global_sequences=0, max_response_tokens=4)
    assert torch.equal(weights, torch.zeros(2, 3))


def test_unknown_mode() -> None:
    with pytest.raises(UserError, match=r"loss_aggregation='mean'.*token-mean"):
        loss_weights(MASK, "mean", global_tokens=1, global_sequences=1, max_response_tokens=1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 12), ranks=st.integers(1, 4), micro=st.integers(1, 4))
@pytest.mark.parametrize("mode", MODES)
def test_spreading_rows_never_changes_the_loss(mode: str, seed: int, rows: int, ranks: int, micro: int) -> None:
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
                mode,
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
