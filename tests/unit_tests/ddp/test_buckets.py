"""What is said of buckets is what the buffers and the collectives are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.ddp.bucket_description_cases import run_cases

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches of all

SMALL = {"overlap_grad_reduce": True, "bucket_size": 3000}
WIRE = {"grad_reduce_in_fp32": False, "reduce_scatter_fp32_accumulation": True}
# (name, world size, model, parallel sizes, ddp settings, dtype, distributed optimizer)
CASES: list[tuple[str, int, str, dict[str, Any], dict[str, Any], str, bool]] = [
    ("all-reduce", 2, "dense", {}, {}, "fp32", False),
    ("sharded", 2, "dense", {}, SMALL, "fp32", True),
    ("sharded bf16", 2, "dense", {}, {**SMALL, "grad_reduce_in_fp32": False}, "bf16", True),
    ("wire", 2, "dense", {}, {**SMALL, **WIRE}, "bf16", True),
    ("pipeline", 2, "dense", {"pp": 2, "vpp": 2, "overlap_p2p": True}, SMALL, "fp32", True),
    ("experts", 4, "experts", {"ep": 2}, SMALL, "fp32", True),
    ("instances", 4, "dense", {}, {**SMALL, **WIRE, "optimizer_instances": 2}, "bf16", True),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every rank's answers, by case."""
    models = {
        "dense": write_tiny_checkpoint(tmp_path_factory.mktemp("dense"), family="qwen3"),
        "experts": write_tiny_checkpoint(tmp_path_factory.mktemp("experts"), family="qwen3_moe"),
    }
    answers: dict[str, list[dict[str, Any]]] = {}
    for size in (2, 4):
        chosen = [case for case in CASES if case[1] == size]
        cases = [
            {"checkpoint": str(models[model]), "parallel": parallel, "ddp": ddp, "dtype": dtype, "sharded": sharded}
            for _, _, model, parallel, ddp, dtype, sharded in chosen
        ]
        ranks = run_ranks(size, run_cases, cases)
        answers |= {case[0]: [rank[number] for rank in ranks] for number, case in enumerate(chosen)}
    return answers


@pytest.mark.parametrize("case", [case[0] for case in CASES])
def test_places_are_where_gradients_lie(results: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Every trained parameter is listed, and its gradient starts at the address that its offset says."""
    for rank in results[case]:
        assert rank["wrong"] == []
        assert rank["places"] == rank["parameters"] > 0


@pytest.mark.parametrize("case", [case[0] for case in CASES])
def test_collectives_are_those_that_run(results: dict[str, list[dict[str, Any]]], case: str) -> None:
    """The functions called in one step with their group sizes, and the bytes that leave all ranks together."""
    for rank in results[case]:
        assert rank["calls"] == rank["described"]
        assert rank["sent_by_all"] == rank["described_by_all"]
        assert (rank["sent_by_all"] > 0) == (case != "pipeline")  # its two ranks are two stages


def test_operations(results: dict[str, list[dict[str, Any]]]) -> None:
    """Experts are reduced over fewer ranks; what is not sharded is not gathered; instances add an all-reduce."""
    operations = {case: ranks[0]["operations"] for case, ranks in results.items()}
    assert operations["all-reduce"] == [("dense", "all_reduce", 2)]
    assert operations["sharded"] == [("dense", "all_gather", 2), ("dense", "reduce_scatter", 2)]
    assert operations["experts"] == [
        ("dense", "all_gather", 4),
        ("dense", "reduce_scatter", 4),
        ("expert", "all_gather", 2),
        ("expert", "reduce_scatter", 2),
    ]
    assert ("dense", "all_reduce", 2) in operations["instances"]
    assert results["all-reduce"][0]["buckets"] == 1
    assert results["sharded"][0]["buckets"] > 4


def test_table(results: dict[str, list[dict[str, Any]]]) -> None:
    """Names over the whole model, one line per parameter and per collective, and the total."""
    answer = results["pipeline"][1]
    lines = answer["text"].splitlines()
    assert lines[0].split() == ["chunk", "buffer", "bucket", "offset", "elements", "dtype", "parameter"]
    assert any(line.endswith("decoder.layers.3.mlp.linear_fc2.weight") for line in lines)  # the last stage's
    assert len(lines) == answer["places"] + answer["buckets"] + 4
    assert lines[-1].endswith("bytes per step and rank")
    assert "no trained parameter" in answer["missing"]
