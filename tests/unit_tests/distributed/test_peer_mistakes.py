"""What other converters get wrong changes logits by far more than the gate, and is right here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.unit_tests.distributed.peer_mistakes import MISTAKES, measure_mistakes

GATE = 1e-4
EFFECT = 100 * GATE


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float]]:
    """By mistake the largest logit difference (without it, with it)."""
    root: Path = tmp_path_factory.mktemp("mistakes")
    (answer,) = run_ranks(1, measure_mistakes, str(root), device="cpu")
    return answer


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_is_not_made_and_would_show(results: dict[str, tuple[float, float]], name: str) -> None:
    """Within the gate as loaded, far beyond it with the mistake put in."""
    right, wrong = results[name]
    assert right <= GATE
    assert wrong > EFFECT
