"""How what a step sends grows with ranks, micro-batches and model: counted in simulated worlds of up to 4096 ranks.

Real engines run on torch's fake process group, one rank of a world at a time; sizes follow laws that are derived from
the algorithms, so they are compared exactly where the law is exact, and by the slope of logarithms where it is a power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.parallel.counting_cases import LENGTH, RAW, everything, write_models

pytestmark = [
    pytest.mark.timeout(600),  # the first test pays for all
    pytest.mark.skipif(not FULL, reason="make test-full: collectives counted on many layouts"),
]

SLOPE_TOLERANCE = 0.05
HIDDEN = RAW["hidden_size"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All numbers, from one process."""
    root: Path = tmp_path_factory.mktemp("growth")
    write_models(root)
    answers: dict[str, Any] = run_ranks(1, everything, str(root), timeout_s=400, device="cpu")[0]
    return answers


def slope(points: Mapping[int, float]) -> float:
    """Exponent of the power law that fits best: least squares on logarithms."""
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def test_slope_can_tell_laws_apart() -> None:
    assert slope({d: 7 / d for d in (1, 4, 64)}) == pytest.approx(-1)
    assert abs(slope({d: 7 * d**0.1 for d in (1, 4, 64)})) > SLOPE_TOLERANCE


def test_gradients_and_parameters_over_data_parallelism(results: dict[str, Any]) -> None:
    """(d - 1) / d * N * (gradient bytes + parameter bytes), flat in d; N with padding of tensors and buckets."""
    for d, case in results["dp"].items():
        assert case["bytes"] == case["padded"] * (case["grad_bytes"] + case["param_bytes"]) * (d - 1) // d
        padding = 64 * case["tensors"] + case["buckets"] * math.lcm(d, 128)
        assert case["padded"] - case["parameters"] <= padding, d
    flat = {d: case["bytes"] / case["padded"] / (1 - 1 / d) for d, case in results["dp"].items()}
    assert abs(slope(flat)) <= SLOPE_TOLERANCE
    assert results["dp last"]["bytes"] == results["dp"][512]["bytes"]


def test_bf16_gathers_half_of_what_it_scatters(results: dict[str, Any]) -> None:
    """Gradients travel in FP32, parameters in their own type."""
    case = results["dp bf16"]
    assert (case["grad_bytes"], case["param_bytes"]) == (4, 2)
    assert case["scattered"] == 2 * case["gathered"]
    assert case["bytes"] == case["padded"] * 6 * 63 // 64


def test_collectives_do_not_depend_on_ranks_or_micro_batches(results: dict[str, Any]) -> None:
    """One reduce-scatter and one all-gather per bucket, and as many others in a step of 16 micro-batches as of one."""
    for case in (*results["dp"].values(), *results["micro-batches"].values(), *results["model"].values()):
        assert case["collectives"] == 2 * case["buckets"]
    assert len({case["all"] for case in results["micro-batches"].values()}) == 1
    assert len({case["all"] for case in results["dp"].values()}) == 1
    assert len({case["bytes"] for case in results["micro-batches"].values()}) == 1


def test_collectives_grow_with_buckets(results: dict[str, Any]) -> None:
    """Four times smaller buckets: about four times as many, each reduced and gathered once; the bytes stay."""
    small, large = (results["buckets"][size] for size in (60_000, 240_000))
    for case in (small, large):
        assert case["collectives"] == 2 * case["buckets"]
    assert 3 <= small["buckets"] / large["buckets"] <= 5
    assert small["bytes"] == pytest.approx(large["bytes"], rel=0.01)
    model = results["model"]
    ratio = model["16 layers"]["bytes"] / model["2 layers"]["bytes"]
    assert ratio == pytest.approx(model["16 layers"]["parameters"] / model["2 layers"]["parameters"], rel=0.01)


def test_optimizer_state_is_shared_out(results: dict[str, Any]) -> None:
    """8 bytes of moments for each parameter of the rank's share, whose size falls as 1 / d."""
    for d, case in results["dp"].items():
        assert case["state"] <= 8 * case["padded"] / d
    assert slope({d: case["state"] for d, case in results["dp"].items()}) == pytest.approx(-1, abs=SLOPE_TOLERANCE)


def test_fully_sharded_layers(results: dict[str, Any]) -> None:
    """For each of 4 micro-batches: two gathers of bf16 layers, one of the root, and FP32 gradients once.

    (d - 1) / d of each, so flat in d; a rank holds 1 / d of the parameters.
    """
    for d, case in results["fsdp"].items():
        numel, rest = case["parameters"], case["of the root"]
        assert case["gathered"] == 4 * 2 * (2 * (numel - rest) + rest) * (d - 1) // d
        assert case["scattered"] == 4 * 4 * numel * (d - 1) // d
        assert case["held"] * d == numel
        assert case["summed"] == 0


def test_fully_sharded_layers_the_other_ways(results: dict[str, Any]) -> None:
    """Gradients once for a step; layers gathered once for all its micro-batches; copies that add gradients up."""
    usual, kept, copies = results["fsdp"][8], results["fsdp kept"], results["fsdp copies"]
    for case in results["fsdp once"].values():
        assert (case["scatters"], case["scattered"]) == (usual["scatters"] // 4, usual["scattered"] // 4)
    assert kept["gathered"] == 2 * kept["parameters"] * 7 // 8
    # 8 copies over 8 ranks each: the same within one, and an all-reduce of each share over the copies.
    assert (copies["gathered"], copies["scattered"]) == (usual["gathered"], usual["scattered"])
    assert copies["summed"] == 4 * 2 * 4 * copies["held"] * 7 // 8


def test_layers_under_tensor_parallelism(results: dict[str, Any]) -> None:
    """Attention and MLP gather and scatter T x H once each way, and gather their inputs again for weight gradients."""
    tokens = 4 * LENGTH
    for t, (two, four) in results["tp"].items():
        assert (four - two) / 2 == 10 * tokens * HIDDEN * 4 * (t - 1) / t


def test_pipeline_boundaries(results: dict[str, Any]) -> None:
    """T x H each way for every boundary and micro-batch, wherever the stage and however many there are."""
    one_way = LENGTH * HIDDEN * 4
    for (stages, stage), case in results["pp"].items():
        neighbours = 1 if stage in (0, stages - 1) else 2
        assert case == {"sends": 16 * neighbours, "bytes": 16 * neighbours * one_way}, (stages, stage)
    assert slope({m: case["bytes"] for m, case in results["pp micro-batches"].items()}) == pytest.approx(1, abs=1e-9)


def test_tokens_to_experts(results: dict[str, Any]) -> None:
    """T x k x H x (e - 1) / e of a layer's tokens leave a rank, as far as the router is even."""
    tokens, chosen = 16 * LENGTH, 4
    for e, sent in results["ep"].items():
        assert sent == pytest.approx(tokens * chosen * HIDDEN * 4 * (e - 1) / e, rel=0.15), e


def test_parameters_of_mixtures_are_gathered_once(results: dict[str, Any]) -> None:
    """Upstream's optimizers of dense weights and of experts each start the gathering of all buckets."""
    assert results["mixtures"] == {"dense upstream": 2, "expert upstream": 2, "dense here": 1, "expert here": 1}


def test_joining_a_large_world(results: dict[str, Any]) -> None:
    """The number of a rank's groups does not grow; the time grows no faster than the world, and stays below 2 s."""
    worlds = results["groups"]
    assert len({case["groups"] for case in worlds.values()}) == 1
    assert worlds[4096]["seconds"] < 2.0
    assert slope({ranks: case["seconds"] for ranks, case in worlds.items()}) <= 1.25
