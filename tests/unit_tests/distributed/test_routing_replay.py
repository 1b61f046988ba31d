"""The experts of every token, recorded on any layout, replayed after the routers have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.selection import without
from tests.unit_tests.distributed.expert_cases import LAYOUTS, write_family
from tests.unit_tests.distributed.routing_cases import loads_of, real_tokens, run_cases, same

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

FULL = {"recompute": "full"}
MOE = {"recompute": "selective", "modules": ("moe",)}
# name -> family and how it runs; every one is held against one rank of its family
CASES: dict[str, dict[str, Any]] = {
    "1": {"family": "deepseek_v3", "layout": "1"},
    "1 padded": {"family": "deepseek_v3", "layout": "1", "padded": True},
    "1 moe": {"family": "deepseek_v3", "layout": "1", **MOE},
    "1 mixtral": {"family": "mixtral", "layout": "1"},
    "tp2-sp": {"family": "deepseek_v3", "layout": "tp2-sp"},
    "tp2-sp padded": {"family": "deepseek_v3", "layout": "tp2-sp", "padded": True, **FULL},
    "ep2": {"family": "deepseek_v3", "layout": "ep2"},
    "ep2 mixtral": {"family": "mixtral", "layout": "ep2", **MOE},
    "pp2": {"family": "deepseek_v3", "layout": "pp2"},
    "pp2 full": {"family": "mixtral", "layout": "pp2", **FULL},
    "cp2-ep2": {"family": "deepseek_v3", "layout": "cp2-ep2"},
    "cp2-ep2 padded": {"family": "mixtral", "layout": "cp2-ep2", "padded": True},
    "ep2-pp2-vpp2": {"family": "mixtral", "layout": "ep2-pp2-vpp2", **FULL},
}
# Each part of them stands in another case, too.
CASES = without(CASES, "1 padded", "1 moe", "ep2", "pp2", "cp2-ep2 padded")
ONE = {"deepseek_v3": "1", "mixtral": "1 mixtral"}
EXPERTS = {"deepseek_v3": 8, "mixtral": 4}
# As in test_expert_parallel: another order of sums in float32.
GRADIENT_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found, by case."""
    root = tmp_path_factory.mktemp("families")
    paths = {family: str(write_family(root, family, layers=4)) for family in EXPERTS}
    answers: dict[str, Any] = {}
    for size in (1, 2, 4):
        cases = {
            name: {"checkpoint": paths[case["family"]], **{k: v for k, v in case.items() if k != "family"}}
            for name, case in CASES.items()
            if LAYOUTS[case["layout"]][0] == size
        }
        answers |= run_ranks(size, run_cases, size, cases, paths["deepseek_v3"], timeout_s=240)[0]
    return answers


@pytest.mark.parametrize("name", list(CASES))
def test_recorded_experts_do_not_depend_on_the_layout(results: dict[str, Any], name: str) -> None:
    """Equal numbers for every real token and mixture, prompts included; -1 on padding; int16."""
    one, many = results[ONE[CASES[name]["family"]]], results[name]
    layers = 3 if CASES[name]["family"] == "deepseek_v3" else 4  # the first layer of DeepSeek's is dense
    assert many["routing"].shape[:3] == (8, 24, layers)
    assert torch.equal(many["routing"], one["routing"])
    assert many["dtype"] == "torch.int16"
    assert (many["routing"][~real_tokens()] == -1).all()
    chosen = many["routing"][real_tokens()]
    assert chosen.min() == 0
    assert chosen.max() == EXPERTS[CASES[name]["family"]] - 1
    assert (chosen.sort(-1).values.diff(dim=-1) > 0).all()  # no expert twice


@pytest.mark.parametrize("name", list(CASES))
def test_replay_of_unchanged_weights_changes_no_bit(results: dict[str, Any], name: str) -> None:
    """Gradients and norm."""
    free, replayed = results[name]["free"], results[name]["replayed"]
    assert same(free["gradients"], replayed["gradients"]) == []
    assert free["norm"] == replayed["norm"]


@pytest.mark.parametrize("name", list(CASES))
def test_changed_routers_take_the_recorded_experts(results: dict[str, Any], name: str) -> None:
    """In a forward and in training, where the counts of the experts say so; free, the routers would choose others."""
    many, experts = results[name], EXPERTS[CASES[name]["family"]]
    assert torch.equal(many["again"], many["routing"])
    changed = (many["moved"] != many["routing"]).any(-1)[real_tokens()]
    assert changed.float().mean() > 0.3
    assert torch.equal(many["moved replayed"]["loads"], loads_of(many["routing"], experts))
    assert torch.equal(many["moved free"]["loads"], loads_of(many["moved"], experts))
    assert not torch.equal(many["moved free"]["loads"], many["moved replayed"]["loads"])


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_flow_through_the_replayed_experts(results: dict[str, Any], name: str) -> None:
    """Those of one rank that replays, recomputing or not; the routers have some of their own."""
    one = results[ONE[CASES[name]["family"]]]["moved replayed"]["gradients"]
    many = results[name]["moved replayed"]["gradients"]
    distance, worst = worst_difference(many, one)
    assert distance <= GRADIENT_TOLERANCE, worst
    routers = [n for n in one if n.endswith(".gate.weight")]
    assert routers
    for router in routers:
        assert one[router].abs().max() > 0
        free = results[name]["moved free"]["gradients"][router]
        assert worst_difference({router: one[router]}, {router: free})[0] > 1e-2


@pytest.mark.parametrize("name", ["1", "tp2-sp", "cp2-ep2"])
def test_tokens_without_a_record_choose_for_themselves(results: dict[str, Any], name: str) -> None:
    """Of a record of every second token these keep theirs; in the first mixture the others choose as if alone."""
    many = results[name]
    kept, inside = many["half"][:, 1::2], real_tokens()
    assert torch.equal(kept[inside[:, 1::2]], many["routing"][:, 1::2][inside[:, 1::2]])
    # Deeper mixtures see hidden states that the replay of the other tokens has changed.
    assert torch.equal(many["half"][:, ::2, 0], many["moved"][:, ::2, 0])


def test_records_that_cannot_be_the_models_are_refused(results: dict[str, Any]) -> None:
    """Another number of experts per token or of mixtures, and experts that there are not."""
    first, second, third = results["refusals"]
    assert "RunError: routing has (3, 1) choices per token, the model (3, 4)" in first
    assert "RunError: routing has (1, 4) choices per token, the model (3, 4)" in second
    assert third == "RunError: routing names experts outside 0..7"


def test_nothing_is_recorded_unless_asked(results: dict[str, Any]) -> None:
    assert results["unused"]


@pytest.mark.parametrize("size", [2, 4])
def test_routing_travels_with_its_row(results: dict[str, Any], size: int) -> None:
    """Rows i of all ranks meet on rank i modulo their number."""
    expected = [1000 * rank + row for to in range(size) for rank in range(size) for row in range(to, 8, size)]
    assert results[f"travelling {size}"] == expected
