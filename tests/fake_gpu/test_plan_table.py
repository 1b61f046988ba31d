"""The plan's peaks of training passes are those counted on the fake device."""

from __future__ import annotations

import pytest

from tests.fake_gpu import guard
from tests.fake_gpu.plan_table import CASES, Peak, peaks
from tests.helpers.selection import FULL

# Three other cases are in test_fake_gpu.py, whose program runs them anyway.
pytestmark = [
    pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing())),
    pytest.mark.skipif(not FULL, reason="make test-full counts ten cases"),
]
TOLERANCE = 0.05  # working memory of kernels is an estimate


@pytest.fixture(scope="module")
def counted() -> dict[str, Peak]:
    """Peaks of the cases, from one program."""
    return peaks(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_needs_what_the_plan_says(name: str, counted: dict[str, Peak]) -> None:
    """Activations, logits and working memory; the state is exact but for counters and tables."""
    peak = counted[name]
    assert peak.planned == pytest.approx(peak.counted, rel=TOLERANCE)
    assert peak.planned_state == pytest.approx(peak.state, rel=0.01)
