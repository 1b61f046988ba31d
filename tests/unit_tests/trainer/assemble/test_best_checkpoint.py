"""The best checkpoint by pass@k of a sampled validation, in a run and in one that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.unit_tests.distributed.test_layout_invariance import write_inputs
from tests.unit_tests.trainer.assemble.own_sources_on_ranks import run_all

BEST = "val/held/pass_at_2"
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("best"))


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    """Outcomes of a run, and of one that ends after a step and is resumed."""
    settings = {
        "trainer.val_interval": 1,
        "trainer.steps": STEPS,
        "validation.n": 4,
        "validation.temperature": 1.0,
        "validation.k": [2],
        "validation.right_above": 0.3,
        "validation.sets": {"held": f"{folder}/train.jsonl"},
        "checkpoint.save_interval": 1,
        "checkpoint.keep": 1,
        "checkpoint.keep_best": BEST,
        "optim.lr": 0.05,
    }
    wanted = [
        ("whole", dict(settings)),
        ("begun", {**settings, "trainer.steps": 1, "run": "resumed"}),
        ("resumed", {**settings, "run": "resumed"}),
    ]
    (outcomes,) = run_ranks(1, run_all, str(folder), "1", wanted, timeout_s=180)
    return outcomes  # type: ignore[no-any-return]


def validations(outcome: dict[str, Any]) -> list[dict[str, float]]:
    """Metrics of the validation of each step, from step 0 on."""
    return [{name: value for name, value in step.items() if name.startswith("val/")} for step in outcome["metrics"]]


def test_a_resumed_run_validates_as_one_that_was_not_disturbed(runs: dict[str, Any]) -> None:
    """Every metric to the bit; they change from step to step."""
    whole = validations(runs["whole"])
    assert validations(runs["resumed"]) == whole
    assert len(whole) == STEPS + 1
    assert len({step[BEST] for step in whole}) > 1


@pytest.mark.parametrize("name", ["whole", "resumed"])
def test_the_best_checkpoint_is_kept_beside_the_newest(folder: Path, runs: dict[str, Any], name: str) -> None:
    values = {step: metrics[BEST] for step, metrics in enumerate(validations(runs["whole"])) if step}
    best = [f"step_{step:06d}" for step, value in values.items() if value == max(values.values())]
    kept = {path.name for path in (folder / f"own-1-{name}" / "checkpoints").glob("step_*")}
    newest = f"step_{STEPS:06d}"
    assert newest in kept
    assert kept - {newest} <= set(best)
    assert kept & set(best)
    assert len(kept) <= 2
