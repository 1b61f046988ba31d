"""On-policy distillation as a whole run: by sampled tokens, and over the whole vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.distributed.test_layout_invariance import write_inputs
from tests.unit_tests.trainer.assemble.distillation_on_ranks import (
    WITHOUT_REWARDS,
    distil,
    distil_on_layouts,
    distil_without_rewards,
)


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
    assert run["roles"] == ["actor", "reference"]
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


def test_without_a_reward_the_weights_are_those_of_a_reward_of_zeros(
    folder: Path,
) -> None:
    """To the bit, on both engines and over tensors, pipelines and data; nothing that is reported speaks of rewards."""
    (runs, _) = run_ranks(2, distil_without_rewards, str(folder))
    for layout in WITHOUT_REWARDS:
        zeros, none = runs[f"{layout}, function"], runs[f"{layout}, none"]
        assert zeros.keys() == none.keys()
        assert all(torch.equal(zeros[name], none[name]) for name in zeros), layout
        beside, alone = (run_report(folder / f"{layout}-{source}") for source in ("function", "none"))
        assert {"reward/mean", "val/reward_mean", "reward"} <= beside
        assert {name for name in beside - alone if "reward" not in name} == set()
        assert {name for name in alone if "reward" in name} == {"time/reward_s"}
        assert {"val/response_tokens_mean", "rollout/response_tokens_mean", "advantage_mean"} <= alone
    assert any(not torch.equal(runs["tp2, none"][name], runs["fsdp 2, none"][name]) for name in runs["tp2, none"])


def run_report(run_dir: Path) -> set[str]:
    """Return the names of a run's metrics and the columns of its dumps, of training and of validation."""
    files = [run_dir / "metrics.jsonl", *run_dir.glob("rollouts/*.jsonl")]
    assert len(files) == 1 + 2 + 3
    return {name for file in files for line in file.read_text().splitlines() for name in json.loads(line)}


def test_a_teacher_on_a_layout_of_its_own_teaches_the_same(folder: Path) -> None:
    """Two ranks share the student's rows, and the teacher or its tensors; both forms, the second with turns.

    Tolerance: sums in fp32 in another order, through one update of Adam.
    """
    (runs, _) = run_ranks(2, distil_on_layouts, str(folder))
    for loss, learnt in {"ppo": "kl/ref_k1", "distillation": "actor/teacher_divergence"}.items():
        same, own = runs[f"{loss}, the same"], runs[f"{loss}, its own"]
        areas = ("actor/", "kl/", "advantage/", "reward/", "rollout/length", "batch/")
        names = [name for name in same[0] if name.startswith(areas) and not name.endswith(("_s", "_mean_s"))]
        assert learnt in names
        assert same[0][learnt] > 0.5
        for step in range(2):
            for name in names:
                assert own[step][name] == pytest.approx(same[step][name], rel=1e-5, abs=1e-6), (loss, step, name)
