"""A run's length in epochs: steps are computed from the prompts that are left, and rules hold for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.errors import UserError
from mega_rl.trainer.assemble.data import with_length

SIZES = ("trainer.prompts_per_step=3", "trainer.minibatch_size=3", "algorithm.advantage=grpo", "rollout.n=2")


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"), [("2", 9, 6), ("2", 10, 7), ("0.1", 30, 1), ("0.1", 31, 2), ("0.01", 3, 1)]
)
def test_steps_are_the_epochs_rounded_up(epochs: str, prompts: int, steps: int) -> None:
    config = load(None, [*SIZES, f"trainer.epochs={epochs}"])
    assert check(config, world_size=1) == []
    resolved = with_length(config.trainer, prompts, warmup=0)
    assert (resolved.steps, resolved.epochs) == (steps, 0.0)
    assert with_length(resolved, 1000, warmup=0) == resolved


def test_rules_of_the_length_hold_when_it_is_known() -> None:
    """A warm-up above the default of trainer.steps is none of a mistake before."""
    config = load(None, [*SIZES, "trainer.epochs=50", "optim.warmup_steps=120"])
    assert check(config, world_size=1) == []
    assert with_length(config.trainer, 9, warmup=120).steps == 150
    with pytest.raises(UserError, match=r"trainer.epochs=50 is trainer.steps=100: optim.warmup_steps and .* are 120"):
        with_length(config.trainer, 6, warmup=120)


def test_one_of_steps_and_epochs(tmp_path: Path) -> None:
    (line,) = check(load(None, [*SIZES, "trainer.epochs=2", "trainer.steps=7"]), world_size=1)
    assert line.startswith("trainer.steps=7 has no effect: it needs no trainer.epochs")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {steps: 7}\n", encoding="utf-8")
    assert check(load(recipe, [*SIZES, "trainer.epochs=2"]), world_size=1) == []
