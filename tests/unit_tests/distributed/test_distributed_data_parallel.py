"""DDP over the groups it is given: default ones or the caller's, and whole engines against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL, covering
from tests.unit_tests.distributed.ddp_cases import CONFIGS, RESUMED, run_world

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
GATHER = {**OVERLAP, "overlap_param_gather": True}
AVERAGE = {"average_in_collective": True}
WIRE = {"grad_reduce_in_fp32": False, "reduce_scatter_fp32_accumulation": True}
INSTANCES = {"optimizer_instances": 2}
# (name, world size, model, parallel sizes, ddp settings, dtype)
ENGINES: list[tuple[str, int, str, dict[str, Any], dict[str, Any], str]] = [
    ("dense", 1, "dense", {}, {}, "fp32"),
    ("experts", 1, "experts", {}, {}, "fp32"),
    ("dense bf16", 1, "dense", {}, {}, "bf16"),
    ("one rank, everything on", 1, "dense", {}, {**GATHER, **AVERAGE}, "fp32"),
    ("one rank, bf16 messages", 1, "dense", {}, {**OVERLAP, **WIRE}, "bf16"),
    *[
        (f"dp{size} {name}", size, "dense", {}, settings, dtype)
        for size in (2, 4)
        for name, settings, dtype in (
            ("overlap", OVERLAP, "fp32"),
            ("gather", GATHER, "fp32"),
            ("average", AVERAGE, "fp32"),
            ("average overlap", {**AVERAGE, **OVERLAP}, "fp32"),
            ("instances", INSTANCES, "fp32"),
            ("instances gather", {**INSTANCES, **GATHER}, "fp32"),
            ("bf16 messages", WIRE, "bf16"),
            ("bf16 messages overlap", {**WIRE, **GATHER}, "bf16"),
        )
    ],
    ("ep2 average gather", 2, "experts", {"ep": 2}, {**AVERAGE, **GATHER}, "fp32"),
    ("cp2 average", 2, "dense", {"cp": 2}, AVERAGE, "fp32"),
    ("ep2 x2 average", 4, "experts", {"ep": 2}, AVERAGE, "fp32"),
    ("ep2 x2 average gather", 4, "experts", {"ep": 2}, {**AVERAGE, **GATHER}, "fp32"),
    ("ep2 x2 instances", 4, "experts", {"ep": 2}, {**INSTANCES, **OVERLAP}, "fp32"),
    ("ep2 x2 instances average", 4, "experts", {"ep": 2}, {**INSTANCES, **AVERAGE}, "fp32"),
    ("pp2 x2 gather", 4, "dense", {"pp": 2}, GATHER, "fp32"),
    ("pp2 vpp2 x2 gather", 4, "dense", {"pp": 2, "vpp": 2, "overlap_p2p": True}, GATHER, "fp32"),
    ("pp2 vpp2 x2 average gather", 4, "dense", {"pp": 2, "vpp": 2, "overlap_p2p": True}, {**AVERAGE, **GATHER}, "fp32"),
]
# What two ranks or a neighbour in the list show as well: in `make test-full`.
FULL_ONLY = ("dp4 overlap", "dp4 average", "dp4 average overlap", "dp4 instances", "dp4 bf16 messages", "dp2 overlap")
FULL_ONLY += ("dp2 average", "dp2 instances", "dp2 bf16 messages overlap", "ep2 average gather", "ep2 x2 average")
FULL_ONLY += ("ep2 x2 instances", "pp2 x2 gather", "pp2 vpp2 x2 gather")
assert {case[0] for case in ENGINES} >= set(FULL_ONLY)
ENGINES = [case for case in ENGINES if FULL or case[0] not in FULL_ONLY]
RESUMES = covering([(size, settings) for size in (2, 4) for settings in RESUMED])
# Sums in another order, as in test_engine_parity. Three steps of Adam divide gradients by their own size, so a weight
# whose gradient is little more than rounding moves by a share of the learning rate: hence the norm of whole tensors.
GRAD_NORM = 1e-5
WEIGHTS = 1e-4
# bf16: weights have 8 bits, and gradients too where they travel as bf16.
GRAD_NORM_BF16 = 2e-2
WEIGHTS_BF16 = 2e-2


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by world size."""
    models = {
        "dense": write_tiny_checkpoint(tmp_path_factory.mktemp("dense"), family="qwen3"),
        "experts": write_tiny_checkpoint(tmp_path_factory.mktemp("experts"), family="qwen3_moe"),
    }
    actual = {}
    for size in (1, 2, 4):
        cases = [
            {"name": name, "checkpoint": str(models[model]), "parallel": parallel, "ddp": ddp, "dtype": dtype}
            for name, world_size, model, parallel, ddp, dtype in ENGINES
            if world_size == size
        ]
        folder = str(tmp_path_factory.mktemp("checkpoints"))
        resumed = [settings for ranks, settings in RESUMES if ranks == size]
        actual[size] = run_ranks(size, run_world, size, cases, resumed, folder, timeout_s=240)
    return actual


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_explicit_groups_change_nothing(worlds: dict[int, list[dict[str, Any]]], size: int, config: str) -> None:
    """Groups that the caller built give the outputs and gradients of the default groups, bit for bit."""
    for rank in worlds[size]:
        actual = rank["groups"][config]
        assert actual["same_outputs"]
        assert actual["same_gradients"]
        assert actual["buckets"] == (3 if CONFIGS[config][0].bucket_size else 1)  # 6 layers of 600; two exceed 700


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_are_those_of_one_process(worlds: dict[int, list[dict[str, Any]]], size: int, config: str) -> None:
    """Within 1e-6 of float64 over all ranks' inputs: sums of a few dozen terms in fp32."""
    assert max(rank["groups"][config]["error"] for rank in worlds[size]) < 1e-6


@pytest.mark.parametrize("case", [case for case in ENGINES if case[1] > 1 or "," in case[0]], ids=lambda case: case[0])
def test_engine_matches_one_rank(worlds: dict[int, list[dict[str, Any]]], case: tuple[Any, ...]) -> None:
    """Gradient norms, log-probs after each but the last step and weights after three steps."""
    name, size, model, _, ddp, dtype = case
    bf16 = dtype == "bf16"
    actual = worlds[size][0]["engines"][name]
    expected = worlds[1][0]["engines"][f"{model} bf16" if bf16 else model]
    for step, wanted in zip(actual["steps"], expected["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=GRAD_NORM_BF16 if bf16 else GRAD_NORM)
    if ddp.get("bucket_size"):
        assert actual["buckets"] > 1
    worst, tensor = worst_difference(actual["weights"], expected["weights"])
    assert worst < (WEIGHTS_BF16 if bf16 else WEIGHTS), tensor
    if not bf16:
        torch.testing.assert_close(actual["logprobs"], expected["logprobs"], rtol=0, atol=1e-3)
    moved, _ = worst_difference(actual["weights"], actual["start"])
    assert moved > 1e-3  # three steps did something


@pytest.mark.parametrize(("size", "settings"), RESUMES)
def test_checkpoint_of_several_buckets(worlds: dict[int, list[dict[str, Any]]], size: int, settings: str) -> None:
    """Saved with several buckets, loaded with those and with one: the same weights, and the same next step."""
    for rank in worlds[size]:
        assert all(rank["resume"][settings].values()), rank["resume"][settings]
