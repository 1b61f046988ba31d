"""On-policy distillation as a whole run: by sampled tokens, and over the whole vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.assemble.distillation_on_ranks import distil
from tests.unit_tests.distributed.test_layout_invariance import write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 student with prompts, and a Llama teacher of another size."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    write_tiny_checkpoint(folder / "llama", family="llama", tied=False, hidden_size=48, num_hidden_layers=2, seed=5)
    return folder


def test_the_student_comes_to_a_teacher_of_another_family(folder: Path) -> None:
    """KL at the student's tokens, nats each, before each step: two random models, and once eleven updates were made."""
    (run,) = run_ranks(1, distil, str(folder), "ppo", "llama", 1e-2)
    kl = [record["kl/ref_k1"] for record in run["records"]]
    assert run["critic"]
    assert kl[0] > 0.5
    assert kl[-1] < 0.6 * kl[0]


def test_the_student_comes_to_it_by_whole_distributions(folder: Path) -> None:
    """The models take turns: the projection that the student reads is a copy. No pass is made for log-probs."""
    (run,) = run_ranks(1, distil, str(folder), "distillation", "llama", 1e-2, "one")
    divergences = [record["actor/teacher_divergence"] for record in run["records"]]
    assert divergences[0] > 0.5
    assert sum(divergences[-3:]) / 3 < 0.6 * divergences[0], divergences
    assert not {name for name in run["records"][0] if name.startswith("kl/ref")}
    assert all(record["advantage/abs_mean"] == 0.0 for record in run["records"])
