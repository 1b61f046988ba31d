"""A student's update on the divergence from a teacher of another family and width: any layout, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.losses.aggregation import sequence_mean_token_mean
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import Experience
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import worst_difference
from tests.helpers.fakes import FakeRanks
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.whole_vocabulary_on_ranks import (
    CASES,
    ENTROPY_COEF,
    LOSSES,
    TEMPERATURE,
    run_cases,
)
from tests.unit_tests.parallel.test_divergence import jensen_shannon

pytestmark = pytest.mark.timeout(300)

# As in test_engine_parity: fp32 sums of a few hundred terms, here against float64.
RELATIVE_TOLERANCE = 1e-5

Expected = dict[str, tuple[float, dict[str, Tensor]]]  # loss and gradients by name


VOCABULARY = 51  # is padded for two ranks, and not for one


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "student"
    return write_tiny_checkpoint(folder, family="qwen3", tied=True, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Another family and width with a projection of its own, and a tied mixture of experts."""
    folder, common = tmp_path_factory.mktemp("teachers"), {"vocab_size": VOCABULARY, "seed": 5}
    dense = write_tiny_checkpoint(folder / "dense", family="llama", tied=False, hidden_size=48, **common)
    return {"dense": dense, "experts": write_tiny_checkpoint(folder / "experts", family="qwen3_moe", **common)}


@pytest.fixture(scope="module")
def results(student: Path, teachers: dict[str, Path]) -> dict[str, Any]:
    """Every case, by name: rank 0's, and differences of log-probs on all ranks; one launch for each number of ranks."""
    paths = {name: str(path) for name, path in teachers.items()}
    results: dict[str, Any] = {}
    for size in sorted({case.ranks for case in CASES.values()}):
        ranks = run_ranks(size, run_cases, size, str(student), paths)
        for name, result in ranks[0].items():
            results[name] = {**result, "logprobs": [d for rank in ranks for d in rank[name].get("logprobs", [])]}
    return results


@pytest.fixture(scope="module")
def expected(student: Path, teachers: dict[str, Path]) -> dict[str, Expected]:
    return {name: in_float64(student, path) for name, path in teachers.items()}


def in_float64(student_path: Path, teacher_path: Path) -> Expected:
    """Loss and every gradient of transformers' models in float64, row by row, without packing."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
        for path in (student_path, teacher_path)
    )
    plan = MinibatchPlan(4, 1, sequence_mean_token_mean, max_response_tokens=24, seed=0, ranks=FakeRanks())
    (batch,) = plan.cut(random_experience(), num_prompts=4, step=0)
    reference: Expected = {}
    for name, (beta, _) in LOSSES.items():
        student.zero_grad()
        rows = range(len(batch.tokens))
        losses = [_row_loss(student, teacher, batch, row, beta=beta, mixed=name == "mixed") for row in rows]
        loss = torch.stack(losses).sum()
        loss.backward()
        gradients = {key: parameter.grad.clone() for key, parameter in student.named_parameters()}
        reference[name] = (float(loss.detach()), gradients)
    return reference


def _row_loss(student: Any, teacher: Any, batch: Experience, row: int, *, beta: float, mixed: bool) -> Tensor:
    length = int(batch.lengths[row])
    tokens = batch.tokens[row : row + 1, :length]
    logp = (student(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(dim=-1)
    with torch.no_grad():
        logq = (teacher(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(dim=-1)
    each = jensen_shannon(logp, logq, beta)
    if mixed:
        sampled = logp.gather(1, tokens[0, 1:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(dim=1)
        each = each - batch.advantages[row, 1:length].double() * sampled - ENTROPY_COEF * entropy
    return (batch.loss_weights[row, 1:length].double() * each).sum()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_float64(
    results: dict[str, Any], expected: dict[str, Expected], case: str, loss: str
) -> None:
    """The loss, the gradient norm, and where an engine shows them all gradients."""
    actual, (value, gradients) = results[case][loss], expected[CASES[case].teacher][loss]
    assert actual["metrics"]["actor/loss"] == pytest.approx(value, rel=RELATIVE_TOLERANCE)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert actual["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=RELATIVE_TOLERANCE)
    if "gradients" in actual:
        distance, name = worst_difference(actual["gradients"], gradients)
        assert distance <= RELATIVE_TOLERANCE, name


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.reference is not None])
def test_log_probs_are_those_of_the_students_layout(results: dict[str, Any], case: str) -> None:
    """Sums in fp32 over other parts: log-probs of some nats differ by some 1e-6."""
    assert max(results[case]["logprobs"]) <= 1e-5


def test_the_cases_are_different(results: dict[str, Any]) -> None:
    """Micro-batches are several, the divergence is far from 0, and no two losses are the same."""
    assert min(results[case]["reverse"]["metrics"]["num_microbatches"] for case in ("1", "padded")) >= 2.0
    metrics = {loss: result["metrics"] for loss, result in results["1"].items()}
    assert metrics["reverse"]["actor/teacher_divergence"] > 0.5
    assert len({round(of_loss["grad_norm"], 3) for of_loss in metrics.values()}) == len(LOSSES)
