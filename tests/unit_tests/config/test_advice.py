"""Warnings about settings that can run together and seldom should."""

from __future__ import annotations

import pytest

from mega_rl.config.loader import load
from mega_rl.config.packaged import file_of, names
from mega_rl.config.rules import advice, check

SAVED = "checkpoint.save_interval=20"
SEVERAL = ("trainer.prompts_per_step=64", "trainer.minibatch_size=16", "algorithm.epochs=2")


@pytest.mark.parametrize(
    ("overrides", "beginning", "fix"),
    [
        (
            (*SEVERAL, "algorithm.loss.dual_clip=0"),
            "algorithm.loss.dual_clip=0 with 8 optimizer steps for each batch: ",
            "set algorithm.loss.dual_clip=3",
        ),
        (
            (*SEVERAL, "algorithm.loss=kl_cov", "algorithm.loss.dual_clip=0"),
            "algorithm.loss.dual_clip=0 with 8 optimizer steps for each batch: ",
            "set algorithm.loss.dual_clip=3",
        ),
        (
            ("algorithm.advantage=gae", "algorithm.advantage.gae_lambda=0.95", "rollout.max_new_tokens=256"),
            "algorithm.advantage.gae_lambda=0.95 with rollout.max_new_tokens=256: the score at the end",
            "set gae_lambda=1 with policy_lambda=0.95 or length_alpha=0.05",
        ),
        (("checkpoint.save_interval=0",), "checkpoint.save_interval=0 with trainer.steps=100: ", "save_interval=20"),
        (("rollout.top_p=0.9",), "rollout.top_p=0.9: training does not see", "set rollout.top_p=1 and rollout.top_k=0"),
        (("rollout.top_k=50",), "rollout.top_k=50: training does not see", "set rollout.top_p=1 and rollout.top_k=0"),
        (
            ("rollout.top_p=0.9", "rollout.top_k=50"),
            "rollout.top_p=0.9 and rollout.top_k=50: training",
            "lower rollout.temperature",
        ),
    ],
)
def test_what_runs_and_seldom_should_is_warned_of_once(overrides: tuple[str, ...], beginning: str, fix: str) -> None:
    config = load(None, [SAVED, *overrides] if not overrides[0].startswith("checkpoint") else overrides)
    (line,) = advice(config)
    assert line.startswith(beginning)
    assert fix in line
    assert check(config, world_size=1) == []


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        SEVERAL,
        ("checkpoint.save_interval=0", "trainer.steps=60"),
        ("checkpoint.save_interval=0", "checkpoint.memory.interval=5"),
        ("algorithm.loss.dual_clip=0",),
        ("rollout.temperature=0.7",),
        ("algorithm.advantage=gae", "algorithm.advantage.gae_lambda=0.95", "rollout.max_new_tokens=99"),
        ("algorithm.advantage=gae", "algorithm.advantage={gae_lambda: 0.95, length_alpha: 0.05}"),
        ("algorithm.advantage=gae", "algorithm.advantage={gae_lambda: 1, policy_lambda: 0.95}"),
    ],
)
def test_the_usual_is_not(overrides: tuple[str, ...]) -> None:
    assert list(advice(load(None, [SAVED, *overrides]))) == []


@pytest.mark.parametrize("name", names())
def test_no_recipe_needs_advice(name: str) -> None:
    assert list(advice(load(file_of(name), []))) == []
