"""The FSDP engine computes what the Megatron engine computes, however it is run, and shares what it holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import release_problems
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import without
from tests.unit_tests.engines.fsdp_cases import WAYS, run_all, write_checkpoints

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launch

# fp32 on both sides: sums of a few hundred terms in another order differ by some 1e-6 of their size.
LOGPROB_TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-5
FP32_BYTES = 4
# Those that differ from one of the others by a size or a norm alone, and llama, the critic's: in `make test-full`.
LIKE_OTHERS = (
    *("deepseek_v2", "glm4_moe", "llama", "mistral", "olmoe", "qwen2", "qwen3_moe"),
    *("dots1", "ernie4_5", "glm4_moe_lite", "kimi_k2", "minimax_m2", "seed_oss"),
    *("granite", "ministral3", "olmo2", "phi3", "smollm3"),
)
# transformers before 5.13 rotates its indexer otherwise.
WRONG = ("glm_moe_dsa",)
TRAINED = tuple(
    name
    for name in without(dict.fromkeys(FAMILIES), *LIKE_OTHERS)
    if name not in WRONG and not list(release_problems(name))
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder, list(TRAINED))
    return run_ranks(2, run_all, str(folder), list(TRAINED), timeout_s=400)


def agrees(actual: dict[str, float]) -> None:
    """Log-probs and entropy, loss and its metrics, gradient norms and the weights after two steps."""
    assert actual["start"] == 0.0  # both have loaded the same
    assert actual["outputs"] <= LOGPROB_TOLERANCE
    assert actual["metrics"] <= LOGPROB_TOLERANCE
    assert actual["grad_norm"] <= RELATIVE_TOLERANCE
    # Of the way that a tensor has gone. Steps of 1e-4 on weights of about 1: each engine rounds them to 6e-8 of that.
    assert actual["weights"] <= 2e-3


@pytest.mark.parametrize("family", TRAINED)
def test_both_engines_agree(family: str, ranks: list[dict[str, Any]]) -> None:
    agrees(ranks[0]["families"][family])
    assert ranks[0]["families"][family]["moved"] > 0.0


@pytest.mark.parametrize("way", [name for name in WAYS if "Megatron" not in name])
def test_no_way_to_run_changes_a_number(way: str, ranks: list[dict[str, Any]]) -> None:
    agrees(ranks[0]["ways"][way])


def test_values_agree(ranks: list[dict[str, Any]]) -> None:
    agrees(ranks[0]["value"])
    assert ranks[0]["fresh value head"] == 0.0


def test_a_rank_without_rows_takes_part(ranks: list[dict[str, Any]]) -> None:
    agrees(ranks[0]["one row"])


def test_bf16(ranks: list[dict[str, Any]]) -> None:
    """Layers compute in bf16 what float32 shards hold; log-probs move by what 8 bits leave, and they do move."""
    actual = ranks[0]["bf16"]
    assert actual["pieces"] == ["torch.float32"]
    assert actual["exported"] == ["torch.bfloat16"]
    assert 1e-4 < actual["outputs"] < 0.3


@pytest.mark.parametrize("family", TRAINED)
def test_buffers_outside_checkpoints(family: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["families"][family]["same buffers"]


def test_a_gradient_that_is_not_finite_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    for actual in (rank["spoiled"] for rank in ranks):
        assert actual["of the engine"] == "actor: the gradient norm is nan; weights and optimizer state are unchanged"
        assert actual["message"].startswith("actor, step 9: the gradient norm is nan in 2 optimizer steps in a row;")
        assert actual["of nothing"] == {"actor/trained_tokens": 0.0, "actor/skipped_steps": 1.0}
        assert actual["still"]
        assert actual["metrics"]["actor/skipped_steps"] == 1.0
        assert all(map(math.isfinite, actual["metrics"].values()))
        assert actual["skipped"]
        assert actual["unchanged"]
        assert actual["usable"]


def test_inspect_sees_the_forward_and_may_stop_the_update(ranks: list[dict[str, Any]]) -> None:
    for actual in (rank["inspected"] for rank in ranks):
        assert actual["message"] == "stopped"
        assert max(actual["seen"]) <= 1e-6
        assert actual["unchanged"]
        assert actual["metric"] == 3.0
        assert actual["moved"]


@pytest.mark.parametrize(("name", "parts"), [("trains", 4), ("frozen", 1)])
def test_offload_gives_everything_back(name: str, parts: int, ranks: list[dict[str, Any]]) -> None:
    """Weights, gradients and two moments; bit for bit the same afterwards."""
    for actual in (rank["offload"][name] for rank in ranks):
        assert actual["left"] == 0
        # A shard's memory is padded to that of the largest.
        assert parts * FP32_BYTES * actual["elements"] <= actual["given back"]
        assert actual["given back"] <= 1.1 * parts * FP32_BYTES * actual["elements"] + 4096
        assert "onload before state()" in actual["state"]
        assert actual["same state"]
        assert actual["same outputs"]


def test_ranks_share_weights_and_moments(ranks: list[dict[str, Any]]) -> None:
    """Each element of weights and both moments is on one of the two ranks, and each read its own rows only."""
    shares = [rank["shares"] for rank in ranks]
    model = shares[0]["model"]
    assert sum(actual["weights"] for actual in shares) == model
    assert sum(actual["all"] for actual in shares) == 3 * model
    assert sum(actual["bytes read"] for actual in shares) == FP32_BYTES * model
    assert max(actual["weights"] for actual in shares) < 0.51 * model


def test_the_host_waits_once_for_all_norms_and_for_no_micro_batch(ranks: list[dict[str, Any]]) -> None:
    """A number that is asked of a GPU keeps the host from queueing work for it."""
    for waits in (rank["waits"] for rank in ranks):
        assert waits["micro-batches"] > 0
        assert (waits["positions"], waits["norms"]) == (0, 1)
