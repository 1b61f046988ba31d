"""Planted histories: a rule sees its symptom, and a healthy run has none."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mega_rl.config.keys import FIELDS, SECTIONS, is_mapping
from mega_rl.tracking.metrics.records import Series
from mega_rl.tracking.report.symptoms import NOT_FINITE, RULES, symptoms_of
from tests.unit_tests.tracking.report.planted import HEALTHY, Curve

STEPS = range(1, 101)
PAGE = (Path(__file__).parents[4] / "docs" / "debugging.md").read_text(encoding="utf-8")

SICK: Mapping[str, dict[str, Curve]] = {
    "Trainer and rollout engine drift apart": {"rollout/logprob_diff_mean": lambda step: 1e-5 * 1.1**step},
    "Optimizer steps were skipped": {"actor/skipped_steps": lambda step: float(step == 50)},
    "The gradient norm grows or has spikes": {"actor/grad_norm": lambda step: 200.0 if step == 70 else 1.0},
    "Every gradient is clipped": {"actor/grad_clipped_fraction": lambda step: 1.0},
    "Updates are too large for their batch": {"actor/clip_fraction_high": lambda step: 0.02 if step < 40 else 0.5},
    "The probability ratio is not near 1": {"actor/ratio_mean": lambda step: 1.4},
    "The KL to the reference grows": {"kl/ref": lambda step: 0.01 * step},
    "The entropy collapses": {
        "actor/entropy": lambda step: math.exp(-step / 10), "reward/mean": lambda step: 0.2 + 0.01 * (step % 3),
    },
    "The held-out reward falls while the reward rises": {
        "val/reward_mean": lambda step: 1 - abs(step - 40) / 100, "reward/mean": lambda step: step / 100,
    },
    "Length and reward grow together": {
        "rollout/response_tokens_mean": lambda step: 20.0 + step, "reward/mean": lambda step: step / 100,
    },
    "Truncated responses get more reward than finished ones": {
        "reward/truncated_mean": lambda step: 0.6, "reward/finished_mean": lambda step: 0.4,
    },
    "Samples of a prompt get equal rewards": {"reward/equal_groups_fraction": lambda step: 0.95},
    "A part of the reward is never earned": {"reward/exact": lambda step: 0.0},
    "The policy has stopped exploring": {
        "actor/entropy": lambda step: math.exp(-step / 10), "reward/equal_groups_fraction": lambda step: 0.7,
        "reward/mean": lambda step: min(1.0, step / 80), "val/reward_mean": lambda step: 0.5,
    },
    "Prompts are too easy or too hard": {"reward/worst_groups_fraction": lambda step: 0.9},
    "Responses are cut off": {"rollout/truncated_fraction": lambda step: step / 100},
    "Responses repeat themselves": {"rollout/repeated_fraction": lambda step: 0.002 * step},
    "The critic is worse than a constant": {"values/explained_variance": lambda step: -2.0},
    "Samples are old": {"importance/effective_fraction": lambda step: 0.3},
}  # fmt: skip


def series(curves: Mapping[str, Callable[[int], float]]) -> dict[str, Series]:
    return {name: Series(array("q", STEPS), array("d", map(curve, STEPS))) for name, curve in curves.items()}


def test_healthy_run_has_no_symptom() -> None:
    assert symptoms_of(series(HEALTHY)) == []


def test_every_rule_is_planted() -> None:
    assert [rule["name"] for rule in RULES.values()] == list(SICK)


@pytest.mark.parametrize("name", SICK)
def test_only_its_rule_sees_a_symptom(name: str) -> None:
    symptoms = symptoms_of(series({**HEALTHY, **SICK[name]}))
    assert [symptom.rule for symptom in symptoms] == [name]
    assert symptoms[0].metric in SICK[name]
    assert symptoms[0].step in STEPS


def test_warning_says_since_when() -> None:
    (clipped,) = symptoms_of(series({**HEALTHY, **SICK["Updates are too large for their batch"]}))
    assert clipped.step == 40
    (spike,) = symptoms_of(series({**HEALTHY, **SICK["The gradient norm grows or has spikes"]}))
    assert spike.step == 70
    assert "200 at step 70" in spike.seen


def test_first_metric_that_is_not_finite_is_named() -> None:
    bad = {
        "actor/loss": lambda step: math.nan if step > 30 else 1.0,
        "kl/ref": lambda step: math.inf if step > 40 else 0.1,
    }
    (symptom,) = symptoms_of(series({**HEALTHY, **bad}))
    assert (symptom.rule, symptom.metric, symptom.step) == (NOT_FINITE["name"], "actor/loss", 31)
    assert "1 other metric" in symptom.seen


def test_solved_tasks_may_lose_their_entropy() -> None:
    solved = {"actor/entropy": lambda step: math.exp(-step / 10), "reward/mean": lambda step: min(1.0, step / 80)}
    assert symptoms_of(series({**HEALTHY, **solved})) == []


@pytest.mark.parametrize("rule", [*RULES.values(), NOT_FINITE], ids=lambda rule: rule["name"])
def test_rule_is_on_the_page_and_names_real_settings(rule: Mapping[str, str]) -> None:
    assert f"\n| {rule['row']}" in PAGE
    named = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", rule["action"])
    entries = {name for name in named if (mapping := name.rpartition(".")[0]) in FIELDS and is_mapping(mapping)}
    assert set(named) - entries <= FIELDS.keys() | SECTIONS.keys()
