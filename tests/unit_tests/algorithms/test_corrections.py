"""Every correction against its definition, row by row in float64, and on packed tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.algorithms.losses import SampledTokens
from mega_rl.algorithms.statistics import Sequences
from mega_rl.types import row_numbers

ROWS, COLUMNS = 6, 9
# (ratios of the response's tokens, distance of each token to the policy now, advantage) -> weight of each token
Definition = Callable[[list[float], list[float], float], list[float]]
DEFINITIONS: dict[str, tuple[dict[str, Any], Definition]] = {
    "tis": ({"cap": 1.2}, lambda r, d, a: [min(ratio, 1.2) for ratio in r]),
    "tis of sequences": (
        {"level": "sequence", "cap": 1.1},
        lambda r, d, a: [min(math.prod(r), 1.1)] * len(r),
    ),
    "icepop": ({"low": 0.9, "high": 1.1}, lambda r, d, a: [ratio if 0.9 <= ratio <= 1.1 else 0.0 for ratio in r]),
    "geometric_rejection": (
        {"low": 0.95, "high": 1.05},
        lambda r, d, a: [float(0.95 <= math.prod(r) ** (1 / len(r)) <= 1.05)] * len(r),
    ),
    "sequence_rejection": (
        {"low": 0.7, "high": 1.5},
        lambda r, d, a: [float(0.7 <= math.prod(r) <= 1.5)] * len(r),
    ),
    "opsm": ({"delta": 0.05}, lambda r, d, a: [float(a >= 0 or sum(d) / len(d) <= 0.05)] * len(r)),
}


def fields(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(mask, per-token fields in float64): responses with holes; off the mask stands what must not matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, COLUMNS, generator=generator) < 0.7
    mask[:, 0], mask[-1] = False, False  # a prompt each, and a response that failed
    old = normal(0.5) - 2
    tokens = {
        "logprobs": old + normal(0.1),
        "old_logprobs": old,
        "rollout_logprobs": old + normal(0.15),
        "advantages": (normal(1.0)[:, :1]).expand(ROWS, COLUMNS).clone(),
        "token_weights": mask / mask.sum(),
    }
    for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages"):
        tokens[name][~mask] = torch.nan
    return mask, tokens


def weights(name: str, tokens: dict[str, Tensor], rows: Tensor) -> Tensor:
    settings, _ = DEFINITIONS[name]
    correction = CORRECTIONS[name.split()[0]](**settings)
    actual, metrics = correction(SampledTokens(**tokens, sequences=Sequences(rows, ROWS)))
    assert all(math.isfinite(value) for value in metrics.values())
    return actual


def test_every_correction_is_here() -> None:
    assert {name.split()[0] for name in DEFINITIONS} == CORRECTIONS.keys()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_weights_are_those_of_the_definition(name: str) -> None:
    """float64: 1e-12 is its rounding. Some tokens are weighted down or left out, and some are not."""
    seen: set[float] = set()
    for seed in range(4):
        mask, tokens = fields(seed)
        actual = weights(name, tokens, row_numbers(mask))
        assert torch.isfinite(actual).all()
        for row in range(ROWS - 1):
            own = mask[row]
            ratio = (tokens["old_logprobs"] - tokens["rollout_logprobs"])[row, own].exp().tolist()
            distance = (tokens["rollout_logprobs"] - tokens["logprobs"])[row, own].tolist()
            expected = DEFINITIONS[name][1](ratio, distance, float(tokens["advantages"][row, own][0]))
            assert actual[row, own].tolist() == pytest.approx(expected, rel=1e-12, abs=0)
            seen.update(round(weight, 6) for weight in expected)
    assert len(seen) > 1


@pytest.mark.parametrize("name", DEFINITIONS)
def test_packing_changes_nothing(name: str) -> None:
    mask, tokens = fields(7)
    padded = weights(name, tokens, row_numbers(mask))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    packed = {key: field[order].reshape(1, -1) for key, field in tokens.items()}
    actual = weights(name, packed, row_numbers(mask)[order].reshape(1, -1)).view(ROWS, COLUMNS)
    assert torch.equal(actual[mask[order]], padded[order][mask[order]])


@pytest.mark.parametrize("name", DEFINITIONS)
def test_where_the_policies_agree_every_token_counts_fully(name: str) -> None:
    mask, tokens = fields(8)
    agreed = {key: tokens["old_logprobs"] if key.endswith("logprobs") else field for key, field in tokens.items()}
    assert weights(name, agreed, row_numbers(mask))[mask].tolist() == [1.0] * int(mask.sum())


def test_a_band_that_leaves_out_agreement_is_refused() -> None:
    area = CORRECTIONS["icepop"]
    assert list(area(low=1.1).problems()) == ["low=1.1, high=5: legal: low at most 1, high at least 1"]
    assert not list(area().problems())


def test_extreme_ratios_stay_finite() -> None:
    """A token that the sampler thought impossible, or that the old policy does."""
    old, sampler = torch.tensor([0.0, -500.0, -torch.inf]), torch.tensor([-500.0, 0.0, 0.0])
    tokens = SampledTokens(old, old, sampler, old, torch.ones(3), Sequences(torch.arange(1, 4), 3))
    assert CORRECTIONS["tis"](cap=2.0)(tokens)[0].tolist() == pytest.approx([2.0, 0.0, 0.0], abs=1e-8)
