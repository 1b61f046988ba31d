"""A reference on a layout of its own: its log-probs and lessons are those of the student's layout, and of float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.own_layout_on_ranks import CASES, run_cases
from tests.unit_tests.distributed.test_whole_vocabulary import Expected, check_update, in_float64
from tests.unit_tests.distributed.whole_vocabulary_on_ranks import LOSSES

pytestmark = pytest.mark.timeout(300)

# Sums in fp32 over other parts: log-probs of some nats differ by some 1e-6.
TOLERANCE = 1e-5
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
    for ranks in sorted({case.ranks for case in CASES.values()}):
        of_ranks = run_ranks(ranks, run_cases, ranks, str(student), paths)
        for name, result in of_ranks[0].items():
            results[name] = {**result, "logprobs": [d for each in of_ranks for d in each[name]["logprobs"]]}
    return results


@pytest.fixture(scope="module")
def expected(student: Path, teachers: dict[str, Path]) -> dict[str, Expected]:
    return {name: in_float64(student, path) for name, path in teachers.items()}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_those_of_the_students_layout(results: dict[str, Any], case: str) -> None:
    """Of all rows, and of one row for each of the student's replicas: the reference may have more of them."""
    assert max(results[case]["logprobs"]) <= TOLERANCE


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_lessons_equal_float64(results: dict[str, Any], expected: dict[str, Expected], case: str, loss: str) -> None:
    """Loss, gradient norm, and every gradient."""
    check_update(results[case][loss], expected[CASES[case].teacher][loss])
