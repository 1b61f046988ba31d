"""On-policy distillation as a whole run: a Qwen3 student, a Llama teacher of another size with its vocabulary."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.assemble.distillation_on_ranks import distil
from tests.unit_tests.distributed.test_layout_invariance import write_inputs


def test_the_student_comes_to_a_teacher_of_another_family(tmp_path: Path) -> None:
    """KL at the student's tokens, nats each, before each step: two random models, and once eleven updates were made."""
    folder = write_inputs(tmp_path)
    write_tiny_checkpoint(folder / "teacher", family="llama", tied=False, hidden_size=48, num_hidden_layers=2, seed=5)
    (run,) = run_ranks(1, distil, str(folder))
    assert run["critic"]
    assert run["kl"][0] > 0.5
    assert run["kl"][-1] < 0.6 * run["kl"][0]
