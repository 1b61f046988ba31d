"""Gradient norms that let an optimizer step be made, and those that do not."""

from __future__ import annotations

import pytest

from mega_rl.engines.outcome import check_norm
from mega_rl.errors import NonFiniteGradientError


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), float("-inf")])
def test_a_norm_that_is_not_finite_is_an_error_with_the_updates_metrics(norm: float) -> None:
    with pytest.raises(NonFiniteGradientError, match=f"actor: the gradient norm is {norm}") as raised:
        check_norm("actor", norm, {"loss": 0.5})
    assert raised.value.norm is norm
    assert raised.value.metrics == {"loss": 0.5}


@pytest.mark.parametrize("norm", [0.0, 1e30])
def test_any_other_norm_passes(norm: float) -> None:
    check_norm("actor", norm, {})
