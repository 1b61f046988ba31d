"""Ranks that share every sequence compute what one rank computes: attention alone, and whole engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.unit_tests.distributed.context_parallel_cases import MODELS, PAIRS, run_rank, write_models
from tests.unit_tests.distributed.shared_attention_cases import chunk_differences
from tests.unit_tests.engines.models.attention_cases import VARIANTS

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

SIZES = (2, 4)
# Both sides compute in fp64: sums of up to 130 terms in another order.
FP64_TOLERANCE = 1e-12
# Attention alone in training dtypes, as on one rank: some units of fp32's last place, some of bf16's 8 bits.
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 5e-2}
# Engines compute in fp32: sums of a few hundred terms in another order, through four layers.
LOGPROB_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5
MOVE_TOLERANCE = 1e-4  # gradients as above, and weights near 1 that move by some 1e-3 and are rounded at 1e-7
CASES = [(name, layout) for layout, (size, _, models) in PAIRS.items() if size > 1 for name in models]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What the ranks found, by world size."""
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    # On the CPU also where there are GPUs: fp64 attention is what most of this is about.
    return {size: run_ranks(size, run_rank, size, str(root), timeout_s=300, device="cpu") for size in (1, *SIZES)}


@pytest.mark.parametrize("size", SIZES)
def test_attention_on_slices_is_explicit_softmax(ranks: dict[int, list[dict[str, Any]]], size: int) -> None:
    """Context and gradients of every rank, packed and padded, for odd lengths; padding neither gets nor gives."""
    for actual in ranks[size]:
        for mix, differences in actual["attention"]["mixes"].items():
            assert len(differences) == 8
            assert max(differences.values()) <= FP64_TOLERANCE, (mix, differences)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("size", SIZES)
def test_windows_sinks_and_value_heads(ranks: dict[int, list[dict[str, Any]]], size: int, variant: str) -> None:
    """With the gradient of the sinks, added over ranks."""
    for actual in ranks[size]:
        chosen = {k: v for k, v in actual["attention"]["variants"].items() if k.startswith(f"{variant}, ")}
        assert chosen
        for name, differences in chosen.items():
            assert len(differences) == (10 if VARIANTS[variant].sinks else 8)
            assert max(differences.values()) <= FP64_TOLERANCE, (name, differences)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_training_dtypes(ranks: dict[int, list[dict[str, Any]]], size: int, dtype: torch.dtype) -> None:
    """As close as on one rank."""
    for actual in ranks[size]:
        differences = actual["attention"]["dtypes"][str(dtype)]
        assert max(differences.values()) <= DTYPES[dtype], differences


@pytest.mark.parametrize("size", SIZES)
def test_packed_sequences_never_see_each_other(ranks: dict[int, list[dict[str, Any]]], size: int) -> None:
    """One sequence overwritten, with NaN too: context and gradients of all others keep every bit on every rank."""
    for actual in ranks[size]:
        assert actual["attention"]["leaks"] == {name: [] for name in actual["attention"]["leaks"]}
        assert len(actual["attention"]["leaks"]) == 4


def test_gradients_of_keys_are_added_in_float32(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16 additions, and 260 when it is rounded once."""
    assert [actual["attention"]["bf16 sum"] for actual in ranks[4]] == [260.0] * 4


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize(("name", "layout"), [*CASES, ("gemma3", "cp2 recomputed")])
def test_engines_agree_with_one_rank(ranks: dict[int, list[dict[str, Any]]], name: str, layout: str, form: str) -> None:
    """Log-probs, entropy, loss, gradient norm and every gradient; all ranks have the whole outputs."""
    one = ranks[1][0][f"{name} 1"][form]
    actual = ranks[PAIRS[layout.split()[0]][0]]
    for rank in (0, -1):
        many = actual[rank][f"{name} {layout}"][form]
        assert (many["logprobs"] - one["logprobs"]).abs().max() <= LOGPROB_TOLERANCE
        assert (many["entropy"] - one["entropy"]).abs().max() <= LOGPROB_TOLERANCE
        assert (many["inspected"] - one["logprobs"]).abs().max() <= LOGPROB_TOLERANCE
        assert many["metrics"]["inspected"] == 1.0
        for metric in ("actor/loss", "grad_norm", "actor/entropy", "actor/ratio_max"):
            assert many["metrics"][metric] == pytest.approx(one["metrics"][metric], rel=NORM_TOLERANCE), metric
        distance, weight = worst_difference(many["gradients"], one["gradients"])
        assert distance <= GRADIENT_TOLERANCE, weight


@pytest.mark.parametrize(("name", "layout"), [*CASES, ("gemma3", "cp2 recomputed")])
def test_engines_learn_what_one_rank_learns(ranks: dict[int, list[dict[str, Any]]], name: str, layout: str) -> None:
    """The way that each weight has gone in a step of Adam, relative to its length."""
    one = ranks[1][0][f"{name} 1"]
    many = ranks[PAIRS[layout.split()[0]][0]][0][f"{name} {layout}"]
    assert all(torch.equal(many["start"][n], one["start"][n]) for n in one["start"])
    moved = [{n: r["weights"][n] - r["start"][n] for n in r["start"]} for r in (many, one)]
    moved = [{n: way for n, way in ways.items() if float(moved[1][n].norm()) > 0} for ways in moved]
    assert len(moved[0]) > 0.9 * len(one["weights"])  # the experts' corrections stay
    distance, weight = worst_difference(*moved)
    assert distance <= MOVE_TOLERANCE, weight


@pytest.mark.parametrize("name", list(MODELS))
def test_the_cases_could_fail(ranks: dict[int, list[dict[str, Any]]], name: str) -> None:
    """Log-probs vary by far more than the tolerance, and packed and padded agree on one rank."""
    packed, padded = (ranks[1][0][f"{name} 1"][form] for form in ("packed", "padded"))
    inside = packed["logprobs"] != 0
    assert packed["logprobs"][inside].std() > 0.3
    assert (packed["logprobs"] - padded["logprobs"]).abs().max() <= LOGPROB_TOLERANCE


@pytest.mark.gpu
def test_chunks_on_a_gpu() -> None:
    """The kernels that know lower-right causality: bf16 inputs and outputs against fp32, 1 % of the norm."""
    differences = run_ranks(1, chunk_differences)[0]
    assert len(differences) == 3 * (1 + 2 + 4)
    assert max(differences.values()) <= 1e-2, differences
