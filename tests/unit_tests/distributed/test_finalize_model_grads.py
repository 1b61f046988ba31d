"""After a backward, gradients of weights that ranks share are added up, each over its own group and no other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.finalize_cases import BIAS_RATE, CASES, ROUTERS, finalize_all

pytestmark = pytest.mark.timeout(300)  # the first test pays for the launch

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
SUM = 3.0  # of rank 0's gradient of ones and rank 1's of twos


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found."""
    root: Path = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(root / "tied", family="qwen3", tied=True)
    write_tiny_checkpoint(root / "untied", family="qwen3", tied=False)
    write_tiny_checkpoint(root / "routed", family="deepseek_v3", tied=False)
    return run_ranks(2, finalize_all, str(root), timeout_s=180)


def gradients(actual: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """By chunk and name."""
    return {name: value["gradient"] for name, value in actual.items()}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("tp2")])
def test_layer_norms_across_tensor_parallelism(ranks: list[dict[str, Any]], case: str) -> None:
    """Under sequence parallelism every norm is summed, without it those of queries and keys; no matrix ever is."""
    sequence_parallel = "sp" in case
    for rank, actual in enumerate(gradients(rank[case]) for rank in ranks):
        norms = {name for name in actual if "layernorm" in name}
        assert len(norms) == 4 * 4 + 1  # two of each layer and those of its queries and keys, and the final one
        for name, gradient in actual.items():
            if "frozen" in case and name in norms and name.endswith("layernorm.weight"):
                assert gradient is None, name
                continue
            shared = name in norms and (sequence_parallel or "q_layernorm" in name or "k_layernorm" in name)
            if name.endswith(OUTPUT) and "value" in case:
                shared = sequence_parallel  # the critic's head: each rank sees its slice of the tokens
            assert gradient == (SUM if shared else rank + 1), name


def test_marks_of_sequence_parallelism(ranks: list[dict[str, Any]]) -> None:
    """What is summed is what is marked, so that a norm added later is not forgotten."""
    for case, actual in ((case, rank[case]) for case in ("tp2-sp", "tp2-sp value") for rank in ranks):
        for name, value in actual.items():
            assert (value["gradient"] == SUM) == value["sequence_parallel"], (case, name)


def test_data_parallel_sums_are_not_divided(ranks: list[dict[str, Any]]) -> None:
    """Neither by the number of ranks nor by the count of tokens that the schedule hands over."""
    for actual in (gradients(rank["dp2"]) for rank in ranks):
        assert set(actual.values()) == {SUM}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("pp2")])
def test_word_embeddings_across_the_pipeline(ranks: list[dict[str, Any]], case: str) -> None:
    """Tied: the first stage's embedding and the last one's output layer hold one sum; all else stays."""
    tied = "untied" not in case and "value" not in case
    for rank, actual in enumerate(gradients(rank[case]) for rank in ranks):
        last_chunk = "1" if "chunks" in case else "0"
        ends = {f"0.{EMBEDDING}"} if rank == 0 else {f"{last_chunk}.{OUTPUT}"}
        assert ends <= actual.keys()
        assert len(actual) > 15
        for name, gradient in actual.items():
            frozen = "all frozen" in case or ("embedding frozen" in case and name in ends)
            expected = None if frozen else SUM if tied and name in ends else rank + 1
            assert gradient == expected, name


@pytest.mark.parametrize("layout", ROUTERS)
def test_expert_biases_move_against_the_load(ranks: list[dict[str, Any]], layout: str) -> None:
    """By the rate times the sign of (mean - load), loads over all ranks that saw tokens of the layer; then forgotten.

    In a pipeline every stage counts for its own layers.
    """
    actual = [rank[f"{layout} bias {BIAS_RATE}"] for rank in ranks]
    for rank in actual:
        assert len(rank["before"]) == (3 if layout != "pp2" else len(rank["before"]))
        for number, (before, after) in enumerate(zip(rank["before"], rank["after"], strict=True)):
            parts = [rank] if layout == "pp2" else actual
            load = [sum(counts) for counts in zip(*(part["counts"][number] for part in parts), strict=True)]
            mean = sum(load) / len(load)
            expected = [
                bias + BIAS_RATE * ((mean > tokens) - (mean < tokens))
                for bias, tokens in zip(before, load, strict=True)
            ]
            assert after == pytest.approx(expected, abs=1e-6)
            assert any(not math.isclose(a, b) for a, b in zip(before, after, strict=True))
        assert not any(rank["left"])


@pytest.mark.parametrize("layout", ROUTERS)
def test_expert_biases_stay_at_rate_zero(ranks: list[dict[str, Any]], layout: str) -> None:
    """Bit for bit: reinforcement learning trains on the routing it loaded."""
    for rank in ranks:
        actual = rank[f"{layout} bias 0.0"]
        assert actual["after"] == actual["before"]
        assert not any(actual["left"])
