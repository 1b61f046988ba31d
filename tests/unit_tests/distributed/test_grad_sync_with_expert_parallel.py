"""Gradients of experts are added over the ranks that hold the same expert, those of everything else over dp x cp."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.grad_sync_cases import LAYOUTS, combinations, name_of, run

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launch

CASES = {name_of(layout, case): (layout, case) for layout in LAYOUTS for case in combinations(layout)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, by case."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="mixtral", num_hidden_layers=2)
    return run_ranks(4, run, str(checkpoint), timeout_s=240)


@pytest.mark.parametrize("name", list(CASES))
def test_every_gradient_is_the_sum_over_its_group(results: list[dict[str, Any]], name: str) -> None:
    """Exactly, in the part of each bucket that a rank keeps, twice in a row; or the average over dp x cp."""
    layout, case = CASES[name]
    settings, expert_ranks = LAYOUTS[layout]
    for rank in results:
        answer = rank[name]
        assert answer["wrong"] == 0.0
        assert answer["dense group"] == 4 // settings.get("tp", 1)
        assert answer["expert group"] == expert_ranks
        if case["overlap"]:
            assert answer["buckets"] >= 2
    # Two layers of 4 experts with 2 weights each.
    held = 16 // settings.get("ep", 1)
    assert {rank[name]["experts"] for rank in results} == {held}
    assert all(rank[name]["experts apart"] for rank in results)


def test_sharding_keeps_a_part(results: list[dict[str, Any]]) -> None:
    """What is compared is a quarter of the dense buckets with one instance of the optimizer, half with two."""

    def checked(**changes: Any) -> int:
        case = {"sharded": True, "overlap": False, "average": False, "instances": 1, **changes}
        return int(results[0][name_of("ep1-etp1", case)]["checked"])

    assert 2 * checked() == checked(instances=2)
    assert checked(sharded=False) > 3 * checked()


def test_overlap_cuts_buckets(results: list[dict[str, Any]]) -> None:
    """With overlap there are several, so that communication starts before the backward ends."""
    names = [name_of("ep1-etp1", case) for case in combinations("ep1-etp1") if case["overlap"]]
    assert all(results[0][name]["buckets"] > 3 for name in names)
