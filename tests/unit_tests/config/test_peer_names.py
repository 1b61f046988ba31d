"""Names of settings in TRL, verl, OpenRLHF and slime are answered with ours, and so are misspelt names."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest

from mega_rl.cli import app
from mega_rl.config.choices import CHOICES
from mega_rl.config.keys import FIELDS, SECTIONS, is_mapping, keys_in
from mega_rl.config.loader import NAMES, in_peers, load, nearest_key
from mega_rl.config.schema import Config
from mega_rl.errors import UserErrors

ENTRIES = {
    f"{key}.{field.name}"
    for key, choice in CHOICES.items()
    for kind in choice.builtin.values()
    for field in dataclasses.fields(kind)  # type: ignore[arg-type]
}


def problems(recipe: Path | None, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(UserErrors) as caught:
        load(recipe, overrides)
    return caught.value.problems


@pytest.mark.parametrize("peer", NAMES)
def test_every_name_stands_for_a_setting(peer: str) -> None:
    for name, setting in NAMES[peer].items():
        assert name not in FIELDS
        key, _, value = setting.partition(" ")[0].partition("=")
        assert key in FIELDS or key in ENTRIES or key.startswith("rollout.sglang.server.args."), (
            f"{name}: no setting {key}"
        )
        choices = FIELDS[key].metadata["choices"] if key in FIELDS else None
        assert not value or choices is None or value in choices, f"{name}: {key} cannot be {value}"
        assert key.rpartition(".")[0] in SECTIONS or is_mapping(key.rpartition(".")[0])


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("rollout.num_generations=8", "TRL's num_generations is rollout.n here"),
        ("algorithm.adv_estimator=grpo", "verl's adv_estimator is algorithm.advantage here"),
        (
            "data.train_batch_size=8",
            "verl's train_batch_size is trainer.prompts_per_step (prompts of a step over all ranks) here",
        ),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "verl's rollout.tensor_model_parallel_size is rollout.sglang.server.tp here",
        ),
        ("tensor-model-parallel-size=2", "slime's tensor_model_parallel_size is engine.megatron.tp here"),
        ("rollout.n_samples_per_prompt=4", "OpenRLHF's and slime's n_samples_per_prompt is rollout.n here"),
        ("reward.model_name_or_path=x", "OpenRLHF's reward.model_name_or_path is reward.source.path here"),
        ("x.model_name_or_path=x", "TRL's model_name_or_path is model.path here"),
    ],
)
def test_a_peers_name_is_answered_with_ours(override: str, answer: str) -> None:
    key = override.partition("=")[0]
    shown = key if key[0].isalnum() else repr(key)
    assert problems(None, override) == (f"{shown}: unknown key; {answer}",)


def test_a_recipe_of_other_names_is_answered_all_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "num_generations: 8\nengine:\n  megatron: {tpp: 1}\ndata: {max_prompt_length: 9}\noptim:\n  lr: 1\n"
    )
    lines = (
        "num_generations: unknown key; TRL's num_generations is rollout.n here",
        "engine.megatron.tpp: unknown key; did you mean engine.megatron.tp?",
        "data.max_prompt_length: unknown key; verl's max_prompt_length is data.max_prompt_tokens here",
    )
    assert problems(recipe) == lines
    assert app.main(["train", "--config", str(recipe)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {line}" for line in lines]


def test_a_name_that_no_peer_has_gets_the_nearest_of_ours() -> None:
    assert in_peers("algorithm.kl_coeff") == ""
    assert nearest_key("engine.megatron.pipelines") == "did you mean engine.megatron.pipeline?"
    assert nearest_key("engine.tp") == "did you mean engine.megatron.tp?"


def test_a_key_without_a_value_in_a_recipe_takes_its_default(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optim:\n  lr:\n  schedule: null\nmodel:\n  path:\nengine:\n  megatron:\n")
    assert load(recipe) == Config()


def test_a_section_has_at_most_twelve_settings() -> None:
    assert {section: len(keys_in(section)) for section in SECTIONS if len(keys_in(section)) > 12} == {}


def test_sections_come_before_what_is_in_them() -> None:
    assert all(outer != inner and not outer.startswith(f"{inner}.") for outer, inner in pairwise(SECTIONS))
