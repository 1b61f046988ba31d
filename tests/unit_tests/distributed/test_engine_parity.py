"""N ranks compute what one rank computes, and one rank computes what the Hugging Face model computes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import LAYOUTS, worst_difference
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import covering
from tests.unit_tests.distributed.engine_cases import run_cases

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

# fp32 on both sides: sums of a few hundred terms in another order differ by some 1e-6 of their size.
LOGPROB_TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-5
# Between micro-batches only the order of sums over rows differs. Measured 0.3e-6 to 1.02e-6, depending on the CPU.
CUT_TOLERANCE = 2e-6
KINDS = ("", " value", " untied", " bf16")
# Every layout with one of the kinds; `make test-full` has all.
COMPARED = covering(product([name for name in LAYOUTS if name != "1"], KINDS))
# The batch has 8 rows of at most 24 tokens.
CUTS: dict[str, dict[str, Any]] = {
    "packed, one sequence": {"max_tokens": 24},
    "packed, all in one": {"max_tokens": 4096},
    "padded by 1": {"packing": False, "size": 1},
    "padded by 2": {"packing": False, "size": 2},
    "padded by 4": {"packing": False, "size": 4},
    "padded by 3, uneven": {"packing": False, "size": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)


@pytest.fixture(scope="module")
def results(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, by name; one launch for each number of ranks."""
    untied = write_tiny_checkpoint(tmp_path_factory.mktemp("untied"), family="qwen2", tied=False)
    kinds: dict[str, dict[str, str]] = {
        "": {"checkpoint": str(checkpoint)},
        " value": {"checkpoint": str(checkpoint), "head": "value"},
        " untied": {"checkpoint": str(untied)},
        " bf16": {"checkpoint": str(checkpoint), "dtype": "bf16"},
    }
    wanted = [*product(["1"], KINDS), *COMPARED]
    actual: dict[str, Any] = {}
    for world_size in sorted({size for size, _ in LAYOUTS.values()}):
        cases = [
            {"name": f"{layout}{kind}", "layout": layout, **kinds[kind]}
            for layout, kind in wanted
            if LAYOUTS[layout][0] == world_size
        ]
        if world_size == 1:
            gradients: dict[str, Any] = {"checkpoint": str(checkpoint), "layout": "1", "moves": False}
            cases += [{"name": cut, **gradients, **how} for cut, how in CUTS.items()]
        if world_size == 2:
            cases += [
                {"name": f"pp2 {cut}", "checkpoint": str(checkpoint), "layout": "pp2", "moves": False, **CUTS[cut]}
                for cut in ("padded by 3, uneven",)
            ]
        actual |= run_ranks(world_size, run_cases, world_size, cases, timeout_s=240)[0]
    return actual


def test_one_rank_matches_hugging_face(checkpoint: Path, results: dict[str, Any]) -> None:
    """Log-probs of one rank within 1e-4 of transformers' own forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = random_experience()
    inside = torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]
    with torch.no_grad():
        logits = model(batch.tokens, attention_mask=inside.long()).logits
    expected = torch.zeros_like(batch.old_logprobs)
    expected[:, 1:] = logits.log_softmax(-1)[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
    actual = results["1"]["outputs"]
    assert actual[~batch.loss_mask].abs().max() == 0
    assert (actual - expected)[batch.loss_mask].abs().max() <= LOGPROB_TOLERANCE
    assert actual[batch.loss_mask].std() > 0.3  # log-probs that differ by so much cannot agree by chance


@pytest.mark.parametrize(("layout", "kind"), [(layout, kind) for layout, kind in COMPARED if kind != " bf16"])
def test_layouts_agree_with_one_rank(results: dict[str, Any], layout: str, kind: str) -> None:
    """Outputs, loss, gradient norm, every gradient, and the weights after two optimizer steps."""
    one, many = results[f"1{kind}"], results[f"{layout}{kind}"]
    assert (many["outputs"] - one["outputs"]).abs().max() <= LOGPROB_TOLERANCE
    loss = "critic/loss" if kind == " value" else "actor/loss"
    for name in (loss, "grad_norm"):
        assert many["metrics"][name] == pytest.approx(one["metrics"][name], rel=RELATIVE_TOLERANCE), name
    distance, name = worst_difference(many["gradients"], one["gradients"])
    assert distance <= RELATIVE_TOLERANCE, name
    for after_one, after_many in zip(one["steps"], many["steps"], strict=True):
        assert after_many["grad_norm"] == pytest.approx(after_one["grad_norm"], rel=1e-4)
    difference = max(float((many["weights"][n] - one["weights"][n]).abs().max()) for n in one["weights"])
    assert difference <= 1e-5
    # Adam divides by the gradient's own size, so rounding counts for much where a gradient is small: compare the way
    # that each tensor has gone as a whole.
    moved = [{n: r["weights"][n] - r["start"][n] for n in r["start"]} for r in (many, one)]
    distance, name = worst_difference(*moved)
    assert distance <= 1e-2, name
    assert all(float(way.norm()) > 0 for way in moved[1].values())


@pytest.mark.parametrize("layout", [layout for layout, kind in COMPARED if kind == " bf16"])
def test_layouts_agree_in_bf16(results: dict[str, Any], layout: str) -> None:
    """Bf16 keeps 8 bits: gradients agree to some 2 % of their norm, log-probs to a few hundredths."""
    one, many = results["1 bf16"], results[f"{layout} bf16"]
    assert (many["outputs"] - one["outputs"]).abs().mean() <= 0.02
    assert many["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=0.05)
    distance, name = worst_difference(many["gradients"], one["gradients"])
    assert distance <= 0.2, name


@pytest.mark.parametrize("cut", list(CUTS))
def test_loss_does_not_depend_on_micro_batches(results: dict[str, Any], cut: str) -> None:
    """The same loss and gradients for every micro-batch size, packed or padded, up to the order of sums."""
    one, other = results["1"], results[cut]
    for name in ("actor/loss", "actor/entropy", "grad_norm"):
        assert other["metrics"][name] == pytest.approx(one["metrics"][name], rel=CUT_TOLERANCE), name
    distance, name = worst_difference(other["gradients"], one["gradients"])
    assert distance <= CUT_TOLERANCE, name


def test_the_cuts_are_different(results: dict[str, Any]) -> None:
    """The test above compares what it says it compares."""
    counts = {cut: results[cut]["metrics"]["num_microbatches"] for cut in CUTS}
    assert counts == {
        "packed, one sequence": counts["packed, one sequence"],
        "packed, all in one": 1.0,
        "padded by 1": 8.0,
        "padded by 2": 4.0,
        "padded by 4": 2.0,
        "padded by 3, uneven": 3.0,
    }
    assert 5 <= counts["packed, one sequence"] <= 8


def test_uneven_padded_micro_batches_in_a_pipeline(results: dict[str, Any]) -> None:
    """The last micro-batch of a pipeline may have another shape than the others."""
    distance, name = worst_difference(results["pp2 padded by 3, uneven"]["gradients"], results["1"]["gradients"])
    assert distance <= RELATIVE_TOLERANCE, name


@pytest.mark.gpu
def test_one_gpu_matches_the_cpu(checkpoint: Path) -> None:
    """In fp32; kernels of another device sum in another order and use other exponentials."""
    case = {"name": "1", "checkpoint": str(checkpoint), "layout": "1", "moves": False}
    cpu, gpu = (run_ranks(1, run_cases, 1, [case], device=device)[0]["1"] for device in ("cpu", "cuda"))
    assert (gpu["outputs"] - cpu["outputs"]).abs().max() <= LOGPROB_TOLERANCE
    assert gpu["metrics"]["grad_norm"] == pytest.approx(cpu["metrics"]["grad_norm"], rel=1e-4)
    distance, name = worst_difference(gpu["gradients"], cpu["gradients"])
    assert distance <= 1e-4, name
