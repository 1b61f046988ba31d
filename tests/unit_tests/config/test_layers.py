"""Arguments over a recipe: what they switch off, and what they leave alone."""

from __future__ import annotations

import logging
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_rl.config.keys import flat
from mega_rl.config.loader import load
from mega_rl.config.needs import unmet
from mega_rl.config.packaged import parse_value
from mega_rl.config.rules import check
from mega_rl.config.schema import Config

DEFAULTS = flat(Config())


def recipe(tmp_path: Path, *settings: str) -> Path:
    """A recipe of `section.key=value` settings."""
    path = tmp_path / "recipe.yaml"
    content: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        *sections, name = key.split(".")
        area = reduce(lambda outer, section: outer.setdefault(section, {}), sections, content)
        area[name] = parse_value(value)
    path.write_text(yaml.safe_dump(content))
    return path


SWITCHED_OFF = {
    "trainer.val_interval=0": ("trainer.val_interval=5", "data.val_files=[a.jsonl]"),
    "data.val_files=null": ("data.val_files=[a.jsonl]", "trainer.val_interval=5"),
    "data.val_files=[b.jsonl]": ("trainer.val_interval=5", "data.val_size=4"),
    "engine.backend=fsdp": (
        "engine.megatron.tp=2", "engine.megatron.sequence_parallel=true",
        "engine.megatron.ddp.overlap_grad_reduce=true",
    ),
    "engine.megatron.tp=1": ("engine.megatron.tp=2", "engine.megatron.sequence_parallel=true"),
    "engine.megatron.pp=1": ("engine.megatron.pp=2", "engine.megatron.vpp=2"),
    "reward.source=http reward.source.url=http://localhost:1/": ("reward.function=math_verify",),
    "reward.source=none algorithm.advantage=distillation model.ref_path=t": (
        "reward.function=r.py:parts", "reward.weights={format: 0.2}", "reward.overlong.buffer_tokens=16",
        "algorithm.advantage=grpo", "rollout.n=2",
        "rollout.dynamic_sampling.max_generations=4",
    ),
    "algorithm.advantage=grpo rollout.n=2": (
        "algorithm.advantage=gae", "optim.critic_lr=1e-3", "algorithm.critic_warmup_steps=3",
    ),
    "rollout.sglang.urls=http://localhost:1 rollout.sglang.keys_file=k": (
        "rollout.backend=sglang", "rollout.sglang.server.count=2",
    ),
    "rollout.backend=hf": (
        "rollout.backend=sglang", "trainer.async_steps=1", "algorithm.correction=tis", "rollout.sglang.server.tp=2",
    ),
    "trainer.steps=1": ("algorithm.advantage=gae", "optim.warmup_steps=10", "algorithm.critic_warmup_steps=10"),
    "trainer.steps=15": ("algorithm.advantage=gae", "optim.warmup_steps=10", "algorithm.critic_warmup_steps=10"),
}  # fmt: skip


@pytest.mark.parametrize("arguments", SWITCHED_OFF)
def test_an_argument_may_switch_off_what_the_recipe_sets(
    tmp_path: Path, arguments: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = recipe(tmp_path, *SWITCHED_OFF[arguments])
    assert not list(unmet(load(path)))  # all of it had its effect
    with caplog.at_level(logging.INFO, logger="mega_rl.config.loader"):
        config = load(path, arguments.split())
    assert check(config, world_size=1) == []
    values, recipe_values, without_recipe = flat(config), flat(load(path)), flat(load(None, arguments.split()))
    given = {argument.partition("=")[0] for argument in arguments.split()}
    dropped = {key for key in values if values[key] != recipe_values[key]} - given
    assert all(values[key] == without_recipe[key] for key in dropped)
    named = dropped & {setting.partition("=")[0] for setting in SWITCHED_OFF[arguments]}
    assert named
    (line,) = caplog.messages
    assert all(key in line for key in named)


def test_an_argument_without_effect_is_an_error(tmp_path: Path) -> None:
    path = recipe(tmp_path, "optim.critic_lr=1e-3")
    config = load(path, ["algorithm.advantage=grpo", "rollout.n=2", "optim.critic_lr=1e-4"])
    assert config.optim.critic_lr == 1e-4
    (line,) = check(config, world_size=1)
    assert line == (
        "optim.critic_lr=0.0001 has no effect: it needs algorithm.advantage=gae; set that or leave it out "
        "(on a command line: optim.critic_lr=null)"
    )


def test_a_recipe_that_never_had_an_effect_stays_an_error(tmp_path: Path) -> None:
    path = recipe(tmp_path, "optim.min_lr_ratio=0.5", "engine.megatron.tp=2")
    for arguments in ([], ["trainer.seed=3"], ["engine.backend=fsdp"]):
        config = load(path, arguments)
        assert config.optim.min_lr_ratio == 0.5
        assert any("optim.min_lr_ratio=0.5 has no effect" in line for line in check(config, world_size=2))
    assert config.engine.megatron.tp == 1


@pytest.mark.parametrize("spelling", ["optim.lr=null", "~optim.lr"])
def test_a_setting_is_unset_by_null(tmp_path: Path, spelling: str) -> None:
    path = recipe(tmp_path, "optim.lr=0.5", "model.ref_path=old", "algorithm.kl=loss")
    assert load(path, [spelling]).optim.lr == DEFAULTS["optim.lr"]
    assert load(path, ["optim.lr=0.25", spelling]).optim.lr == DEFAULTS["optim.lr"]
    assert load(path, [spelling, "optim.lr=0.25"]).optim.lr == 0.25
    assert load(path, ["model.ref_path=null"]).model.ref_path == ""
    assert load(path, ["model.ref_path='null'"]).model.ref_path == "null"


def test_a_value_that_refers_to_a_dropped_one_follows_it(tmp_path: Path) -> None:
    path = recipe(tmp_path, "engine.megatron.tp=2", "trainer.minibatch_size=${engine.megatron.tp}")
    assert load(path, ["engine.backend=fsdp"]).trainer.minibatch_size == 1


def test_a_list_of_one_needs_no_brackets(tmp_path: Path) -> None:
    path = recipe(tmp_path, "data.val_files=a.jsonl", "rollout.stop_token_ids=3")
    assert load(path).data.val_files == ["a.jsonl"]
    assert load(path).rollout.stop_token_ids == [3]
    assert load(None, ["data.train_files=train.jsonl"]).data.train_files == ["train.jsonl"]
