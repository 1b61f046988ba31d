"""A reference that follows the policy is the average that one makes by hand, on every layout and both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.unit_tests.engines.weight_average_on_ranks import UPDATES, Way, refused, run_all

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches

WAYS = {
    1: {"copy": Way(rate=1.0), "bf16": Way(dtype="bf16", rate=0.01), "turns in bf16": Way(dtype="bf16", turns=True)},
    2: {
        "tp2": Way("tp2"),
        "dp2 with the distributed optimizer": Way("dp2"),
        "fsdp": Way(engine="fsdp", layout="dp2"),
    },
}
if FULL:
    WAYS[2] |= {
        "fsdp in turns": Way(engine="fsdp", layout="dp2", turns=True, rate=1.0),
        "tp2 of a mixture, in turns": Way("tp2-sp", turns=True, family="qwen3_moe"),
        "pp2": Way("pp2"),
        "dp2 in bf16": Way("dp2", dtype="bf16"),
        "fsdp in bf16": Way(engine="fsdp", layout="dp2", dtype="bf16"),
    }
NAMES = {name: way for ways in WAYS.values() for name, way in ways.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe"):
        write_tiny_checkpoint(root / family, family=family)
        write_tiny_checkpoint(root / f"{family} reference", family=family, seed=1)
    write_tiny_checkpoint(root / "wider", hidden_size=64)
    return root


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for world_size, ways in WAYS.items():
        results |= run_ranks(world_size, run_all, str(folder), ways, timeout_s=120)[0]
    return results


def by_hand(run: dict[str, Any], rate: float) -> list[dict[str, torch.Tensor]]:
    """The reference at the start and after each update, in float64 without a rounding."""
    averages = [run["references"][0]]
    for actor in run["actors"]:
        averages.append({name: rate * actor[name] + (1 - rate) * old for name, old in averages[-1].items()})
    return averages


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_average_made_by_hand(runs: dict[str, Any], name: str) -> None:
    """Of fp32 models to 4 roundings of weights below 4 (2^-22 each); of bf16 ones to one rounding to bf16 (2^-8),
    however many updates there were; a copy to the bit.
    """
    run, way = runs[name], NAMES[name]
    precision = 2**-8 if way.dtype == "bf16" and way.engine == "megatron" else 2**-22
    for actual, expected in zip(run["references"], by_hand(run, way.rate), strict=True):
        for weight, value in expected.items():
            if way.rate == 1.0:
                assert torch.equal(actual[weight], value), weight
            torch.testing.assert_close(actual[weight], value, rtol=1.01 * precision, atol=4 * 2**-24)
    moved = max(float((run["actors"][0][name] - run["actors"][-1][name]).abs().max()) for name in run["actors"][0])
    assert moved > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_distance_is_that_before_the_update(runs: dict[str, Any], name: str) -> None:
    """Relative to the reference, over all weights once; 1e-5 since norms of differences are of float32 ones, and 1e-3
    of bf16 models, whose reference is known here by its rounded weights.
    """
    run, way = runs[name], NAMES[name]
    for index in range(UPDATES):
        old, actor = run["references"][index], run["actors"][index]
        square = sum(float((actor[name] - old[name]).square().sum()) for name in old)
        size = sum(float(old[name].square().sum()) for name in old)
        tolerance = 1e-3 if way.dtype == "bf16" else 1e-5
        assert run["distances"][index] == pytest.approx((square / size) ** 0.5, rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_is_that_of_the_new_weights(runs: dict[str, Any], name: str) -> None:
    run = runs[name]
    assert float((run["before"] - run["after"]).abs().max()) > 1e-3
    if NAMES[name].rate == 1.0:
        assert torch.equal(run["after"], run["policy"])


def test_only_averages_finer_than_their_weights_are_kept(runs: dict[str, Any]) -> None:
    assert {name: run["pieces"] for name, run in runs.items() if "average" in run["pieces"]}.keys() == {
        name for name, way in NAMES.items() if way.dtype == "bf16" and way.engine == "megatron"
    }


def test_a_reference_of_another_shape_is_refused(folder: Path) -> None:
    (message,) = run_ranks(1, refused, str(folder), ["qwen3", "wider"])
    assert "of the reference has no equal part in the actor on this rank" in message
