"""Loss weights: numbers by hand, and the sum does not depend on how rows are spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.algorithms.losses import AGGREGATIONS, Aggregation, loss_weights, token_and_sequence_counts

# Rows of 3, 1 and 0 response tokens; token losses 1, 2, 3 and 10.
MASK = torch.tensor([[False, True, True, True], [False, True, False, False], [False, False, False, False]])
PROMPTS = torch.tensor([2, 0, 1])
LOSSES = torch.tensor([[7.0, 1.0, 2.0, 3.0], [7.0, 10.0, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0]])


def counts_of(mask: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Response tokens of each of five prompts."""
    return torch.tensor([mask[prompts == prompt].sum() for prompt in range(5)], dtype=torch.float64)


def test_counts() -> None:
    assert token_and_sequence_counts(MASK).tolist() == [4.0, 2.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-mean", (6 / 3 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
        ("prompt-mean", (6 / 3 + 10) / 2),  # the third prompt has no token
    ],
)
def test_by_hand(name: str, expected: float) -> None:
    sizes = {"global_tokens": 4, "global_sequences": 2, "max_response_tokens": 8}
    weights = loss_weights(
        MASK, AGGREGATIONS[name], **sizes, prompt_index=PROMPTS, prompt_tokens=counts_of(MASK, PROMPTS)
    )
    assert weights.dtype == torch.float32
    assert (weights * LOSSES).sum().item() == pytest.approx(expected)
    assert not weights[~MASK].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS.values())
def test_a_batch_without_tokens_weighs_nothing(aggregation: Aggregation) -> None:
    empty = torch.zeros(2, 3, dtype=torch.bool)
    sizes = {"global_tokens": 0, "global_sequences": 0, "max_response_tokens": 4}
    prompts = {"prompt_index": torch.tensor([0, 1]), "prompt_tokens": torch.zeros(2)}
    weights = loss_weights(empty, aggregation, **sizes, **prompts)
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
    order, prompts = torch.randperm(rows, generator=g), torch.randint(4, (rows,), generator=g)
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
                prompt_index=prompts[part],
                prompt_tokens=counts_of(mask, prompts),
            ).double()
            * losses[part]
            for part in parts
        ]
        return sum(w.sum().item() for w in weighted)

    one = total([torch.arange(rows)])
    many = total([piece for shard in shards for piece in shard.split(micro)])
    assert many == pytest.approx(one, rel=1e-12, abs=1e-12)  # the weights are the same float32 numbers


@pytest.mark.parametrize("seed", range(3))
def test_a_mean_over_prompts_is_its_definition(seed: int) -> None:
    """The mean over each prompt's tokens, then over prompts, by loops in float64, with its gradient."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 6, generator=g) < torch.rand(9, 1, generator=g)
    prompts = torch.tensor([0, 0, 0, 1, 3, 3, 4, 4, 4])[torch.randperm(9, generator=g)]
    mask[prompts == 3] = False  # a prompt whose samples have no token, as failed ones
    losses = torch.randn(9, 6, generator=g, dtype=torch.float64, requires_grad=True)
    means = [losses[(prompts == prompt)[:, None] & mask] for prompt in range(5)]
    expected = torch.stack([tokens.mean() for tokens in means if len(tokens)]).mean()
    weights = loss_weights(
        mask,
        AGGREGATIONS["prompt-mean"],
        global_tokens=float(mask.sum()),
        global_sequences=float(mask.any(dim=1).sum()),
        max_response_tokens=6,
        prompt_index=prompts,
        prompt_tokens=counts_of(mask, prompts),
    ).double()
    assert (weights * losses).sum().item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
    torch.testing.assert_close(weights, torch.autograd.grad(expected, losses)[0], rtol=1e-7, atol=0.0)
    assert not torch.allclose(weights[mask], torch.full_like(weights[mask], 1.0 / float(mask.sum())))
