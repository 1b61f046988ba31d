"""`model.fp32_head` in bf16 models on both engines: log-probs and gradients against float64 of the same hidden states.

Tolerances: bf16 rounds logits of size 1 by up to 2^-8, 1e-3 on average; float32 logits and sums over 50 entries round
at some 1e-7. Weights' gradients are rounded to bf16 once for each of at most three micro-batches: by up to 2^-8 of an
element, by 2^-9 of a tensor's norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import LAYOUTS, worst_difference
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.fp32_head_on_ranks import run_cases

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches of all

# name -> (engine, layout, tied embeddings)
CASES = {
    "1": ("megatron", "1", False),
    "1, tied": ("megatron", "1", True),
    "tp2": ("megatron", "tp2", False),
    "tp2-sp": ("megatron", "tp2-sp", False),
    "tp2-sp, tied": ("megatron", "tp2-sp", True),
    "cp2": ("megatron", "cp2", False),
    "pp2, tied": ("megatron", "pp2", True),
    "fsdp, tied": ("fsdp", "dp2", True),
    "fsdp": ("fsdp", "dp2", False),
}
WITH_GRADIENT = ("1", "tp2", "tp2-sp", "fsdp")  # no copies to sum over, or FSDP's own sum
Results = dict[str, list[dict[str, Any]]]  # by name: what each rank returned


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("models")
    paths = {tied: str(write_tiny_checkpoint(root / str(tied), tied=tied)) for tied in (True, False)}
    collected: Results = {}
    for world_size in (1, 2):
        cases = []
        for name, (engine, layout, tied) in CASES.items():
            case = {"name": name, "checkpoint": paths[tied], "layout": layout, "engine": engine}
            if LAYOUTS[layout][0] == world_size:
                cases.append({**case, "gradient": name in WITH_GRADIENT, "fp32_head": True})
                cases += [{**case, "name": f"{name}, bf16"}] * (name in ("1", "fsdp"))
        ranks = run_ranks(world_size, run_cases, world_size, cases, timeout_s=200)
        collected |= {case["name"]: [rank[case["name"]] for rank in ranks] for case in cases}
    return collected


def last(results: Results, name: str) -> dict[str, Any]:
    """What the last rank returned, which has the head in every layout."""
    return results[name][-1]


@pytest.mark.parametrize("name", CASES)
def test_log_probs_lose_nothing_to_rounded_logits(name: str, results: Results) -> None:
    exact = last(results, name)
    assert exact["dtypes"] == {torch.float32}
    assert exact["errors"].max() < 2e-6


@pytest.mark.parametrize("name", ["1", "fsdp"])
def test_bf16_logits_lose_a_thousand_times_as_much(name: str, results: Results) -> None:
    rounded, exact = last(results, f"{name}, bf16"), last(results, name)
    assert rounded["dtypes"] == {torch.bfloat16}
    assert rounded["errors"].mean() > 1000 * exact["errors"].mean()


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_the_gradient_of_the_head_is_that_of_its_logits(name: str, results: Results) -> None:
    """That of float64 products of the logits' gradient, on every rank's columns."""
    for rank in results[name]:
        gradient, expected = rank["head"]
        assert float((gradient.double() - expected).norm() / expected.norm()) < 2**-9


@pytest.mark.parametrize("name", ["tp2", "tp2-sp", "tp2-sp, tied", "cp2", "pp2, tied"])
def test_layouts_agree(name: str, results: Results) -> None:
    """As bf16 models do: layers round on both sides."""
    tied = CASES[name][2]
    one, many = last(results, "1, tied" if tied else "1"), results[name][0]
    assert (many["logprobs"] - one["logprobs"]).abs().mean() <= 0.02
    assert many["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=0.05)
    distance, tensor = worst_difference(many["gradients"], one["gradients"])
    assert distance <= 0.2, tensor
