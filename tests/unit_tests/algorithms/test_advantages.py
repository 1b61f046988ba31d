"""Advantages against numbers computed by hand and against plain float64 definitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mega_rl.algorithms.advantages import GAE
from mega_rl.algorithms.inputs import (
    AdvantageInputs,
    gae,
    last_response_token,
    length_adaptive_lambda,
    response_order,
    token_rewards,
)
from tests.helpers.advantages import inputs_of


def mask_of(rows: list[str]) -> Tensor:
    """ "..xx." -> [False, False, True, True, False]."""
    return torch.tensor([[cell == "x" for cell in row] for row in rows])


def gae_by_definition(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, term by term in float64: O(S^2)."""
    out = torch.zeros_like(rewards, dtype=torch.float64)
    for b in range(mask.shape[0]):
        run = mask[b].nonzero().flatten().tolist()
        deltas = []
        for k, t in enumerate(run):
            following = values[b, run[k + 1]].double() if k + 1 < len(run) else 0.0
            deltas.append(rewards[b, t].double() + gamma * following - values[b, t].double())
        for k, t in enumerate(run):
            out[b, t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(run)))
    return out


def test_gae_by_hand() -> None:
    # One prompt token, three response tokens, one of padding; garbage off the mask must not matter.
    mask = mask_of([".xxx."])
    rewards = torch.tensor([[9.0, 0.0, 0.0, 1.0, 9.0]])
    values = torch.tensor([[7.0, 0.5, 0.25, 0.75, 7.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # delta_3 = 1 - 0.75 = 0.25;  delta_2 = 0.5 * 0.75 - 0.25 = 0.125;  delta_1 = 0.5 * 0.25 - 0.5 = -0.375
    # A_3 = 0.25;  A_2 = 0.125 + 0.25 * 0.25 = 0.1875;  A_1 = -0.375 + 0.25 * 0.1875 = -0.328125
    torch.testing.assert_close(advantages, torch.tensor([[0.0, -0.328125, 0.1875, 0.25, 0.0]]), rtol=0, atol=0)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.171875, 0.4375, 1.0, 0.0]]), rtol=0, atol=0)


def test_gae_does_not_depend_on_padding() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 11, generator=g)
    mask = mask_of(["..xxxxxx...", "xxxxxxxxxxx", "...........".replace(".", "x", 1)])
    short = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    wide = [torch.nn.functional.pad(x, (0, 30)) for x in (rewards, values, mask)]
    long = gae(*wide, gamma=0.9, lam=0.8)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a, b[:, :11])
        assert not b[:, 11:].any()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    length=st.integers(1, 37),
    density=st.sampled_from([0.2, 0.6, 0.95, 1.0]),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 0.95, 1.0]),
)
def test_gae_of_masks_with_holes(seed: int, length: int, density: float, gamma: float, lam: float) -> None:
    """Equal to the definition, and to the bit to the rows without what is between their response tokens."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, length, generator=g) < density
    rewards, values = torch.randn(2, 4, length, generator=g)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected = gae_by_definition(rewards, values, mask, gamma, lam)
    # Up to 37 float32 terms of size about 1 are added pairwise: errors stay well below 1e-5.
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns.double(), torch.where(mask, expected + values, 0.0), rtol=1e-5, atol=1e-5)
    for row in range(4):
        kept = mask[row]
        run = torch.ones(1, int(kept.sum()), dtype=torch.bool)
        own = gae(rewards[row, kept][None], values[row, kept][None], run, gamma=gamma, lam=lam)
        assert torch.equal(own[0][0], advantages[row, kept])
        assert torch.equal(own[1][0], returns[row, kept])
        assert not advantages[row, ~kept].any()
        assert not returns[row, ~kept].any()


def test_length_adaptive_lambda_by_hand() -> None:
    # alpha * l = 0.5 * 4 = 2: 1 - 1/2. 0.5 * 1 < 1, where the formula is negative: 0. Without a response: 0, not -inf.
    mask = mask_of(["xx.xx", "..x..", "....."])
    assert length_adaptive_lambda(mask, alpha=0.5).tolist() == [[0.5], [0.0], [0.0]]
    lam = length_adaptive_lambda(torch.ones(1, 1000, dtype=torch.bool), alpha=0.05)
    assert float((lam ** torch.arange(100_000)).sum()) == pytest.approx(0.05 * 1000)


def test_every_row_has_its_own_lambda() -> None:
    g = torch.Generator().manual_seed(4)
    mask = mask_of([".xx.x.xxxx", "xxxxxxxxxx", "....xx...."])
    rewards, values = torch.randn(2, 3, 10, generator=g)
    lam = length_adaptive_lambda(mask, alpha=0.3)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=lam)
    for row in range(3):
        own = slice(row, row + 1)
        alone = gae(rewards[own], values[own], mask[own], gamma=0.9, lam=float(lam[row]))
        # Powers of a tensor's number and of a Python number may differ in their last bit.
        torch.testing.assert_close((advantages[own], returns[own]), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("chosen", "policy"), [({"policy_lambda": 0.5}, 0.5), ({"length_alpha": 0.5}, torch.tensor([[1 / 3], [0.0]]))]
)
def test_the_policys_lambda_may_differ_from_that_of_the_critics_targets(
    chosen: dict[str, float], policy: float | Tensor
) -> None:
    """0.5 * 3 tokens: 1 - 1 / 1.5; 0.5 * 2: 0. The critic's targets stay as without."""
    mask = mask_of([".xx.x", "..xx."])
    values = torch.randn(2, 5, generator=torch.Generator().manual_seed(2))
    inputs = inputs_of(torch.tensor([1.0, -1.0]), torch.zeros(2, dtype=torch.int64), mask, values=values)
    advantages, returns = GAE(gamma=0.9, gae_lambda=1.0, whiten=False, **chosen)(inputs)
    scores = token_rewards(inputs.rewards, mask)
    lam = policy if isinstance(policy, float) else policy.double()
    torch.testing.assert_close(advantages, gae(scores, values, mask, gamma=0.9, lam=lam)[0])
    assert torch.equal(returns, gae(scores, values, mask, gamma=0.9, lam=1.0)[1])
    assert not torch.equal(advantages, gae(scores, values, mask, gamma=0.9, lam=1.0)[0])


def test_the_last_response_token_is_that_of_the_row() -> None:
    mask = mask_of([".xx.x.", "x.....", ".....x", "......"])
    assert torch.equal(last_response_token(mask), mask_of(["....x.", "x.....", ".....x", "......"]))
    assert response_order(mask)[0].tolist() == [1, 2, 4, 0, 3, 5]


def test_token_rewards_by_hand() -> None:
    mask = mask_of([".xx.", ".xxx", "....", "x.x."])
    kl = torch.tensor([[5.0, 0.5, 1.0, 5.0], [5.0, -1.0, 0.0, 2.0], [5.0, 5.0, 5.0, 5.0], [1.0, 5.0, 2.0, 5.0]])
    rewards = torch.tensor([1.0, -2.0, 3.0, 4.0])
    plain = token_rewards(rewards, mask)
    torch.testing.assert_close(plain, torch.tensor([[0, 0, 1.0, 0], [0, 0, 0, -2.0], [0, 0, 0, 0], [0, 0, 4.0, 0]]))
    penalised = token_rewards(rewards, mask, 0.1 * kl)
    expected = torch.tensor([[0, -0.05, 0.9, 0], [0, 0.1, 0, -2.2], [0, 0, 0, 0], [-0.1, 0, 3.8, 0]])
    torch.testing.assert_close(penalised, expected)


def test_a_rank_without_rows() -> None:
    empty, mask = torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)
    assert gae(empty, empty, mask, gamma=1.0, lam=1.0)[0].shape == (0, 4)
    assert token_rewards(torch.zeros(0), mask).shape == (0, 4)


def test_whitening_is_over_the_tokens_of_all_ranks() -> None:
    estimator = GAE(gamma=0.9, gae_lambda=0.8, whiten=True)

    def rows(part: slice) -> Any:
        mask = mask_of([".xxx", "..xx"])
        return SimpleNamespace(loss_mask=mask[part], values=torch.tensor([[0.0, 1, 2, 3], [0, 0, 8, 5]])[part])

    rewards = torch.tensor([1.0, -4.0])
    sums: list[Tensor] = []

    def recorded(own: Tensor) -> Tensor:
        sums.append(own)
        return own

    whole, _ = estimator(AdvantageInputs(rows(slice(2)), rewards, None, recorded))
    of_all = iter(sums)
    first, _ = estimator(AdvantageInputs(rows(slice(1)), rewards[:1], None, lambda own: next(of_all)))
    assert torch.equal(first, whole[:1])
