"""Choices of advantage estimator, policy loss and correction: built-in names, settings, and a user's own class."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

import mega_rl
from mega_rl.algorithms.advantages import GAE
from mega_rl.algorithms.corrections import CORRECTIONS
from mega_rl.config.choices import ADVANTAGE, CORRECTION, LOSS, OWN_CHOICES, chosen, needs_critic, reads_reference
from mega_rl.config.loader import load
from mega_rl.config.needs import is_on_policy, requested_models
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.setup import models_of
from mega_rl.trainer.assemble.algorithms import choose_method
from tests.helpers.inputs import qwen3_config

MINE = """
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Estimator:
    needs_critic: ClassVar[bool] = True
    needs_groups = True

    alpha: float
    beta: float = 1.0

    def __call__(self, inputs):
        return inputs


class Heir(Estimator):
    gamma: float = 0.5


def plain(inputs):
    return inputs


number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "fails.py").write_text("import torch\n\ntorch.no_such_name\n")
    return tmp_path


def problems(*overrides: str) -> list[str]:
    """The errors of loading, or of the checks of files."""
    try:
        config = load(None, overrides)
    except UserErrors as errors:
        return list(errors.problems)
    return [line for choice in OWN_CHOICES for line in choice.own_problems(config)]


def test_a_config_has_every_setting_of_its_choices() -> None:
    gae = ["algorithm.advantage=gae", "algorithm.advantage.gae_lambda=0.5"]
    config = load(None, [*gae, "algorithm.loss={clip_high: 1}"])
    assert config.algorithm.advantage == GAE(gae_lambda=0.5)
    assert config.algorithm.loss.plain == {"name": "ppo", "clip_low": 0.2, "clip_high": 1.0, "dual_clip": 3.0}
    assert load(None, ["algorithm.advantage=gae"]).algorithm.advantage == GAE()
    assert load(None, []).algorithm.advantage.plain == {"name": "grpo", "std": "group"}
    assert load(None, ["algorithm.advantage=null"]) == Config()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("algorithm.kl.coef=0.1", "algorithm.kl=none has no such setting; it belongs to algorithm.kl=reward or loss"),
        (
            "engine.megatron.ddp=torch_fsdp2 engine.megatron.ddp.optimizer_instances=2",
            "it belongs to engine.megatron.ddp=ddp or megatron_fsdp",
        ),
        ("reward.source.url=http://h/", "reward.source=function has no such setting; it belongs to reward.source=http"),
        ("reward.sandbox.url=http://h/", "it belongs to reward.sandbox=remote"),
        ("data.curriculum.explore=0.5", "it belongs to data.curriculum=success"),
        ("data.curriculum=hard", "data.curriculum='hard': legal: none, success"),
    ],
)
def test_a_setting_of_another_name_is_unknown(overrides: str, line: str) -> None:
    (actual,) = problems(*overrides.split())
    assert line in actual


def test_a_recipes_setting_stays_beside_an_argument_and_goes_with_its_choice(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: {advantage: {name: gae, gamma: 0.9}}\n")
    both = load(recipe, ["algorithm.advantage.gae_lambda=0.5", "algorithm.advantage=gae"])
    assert both.algorithm.advantage == GAE(gamma=0.9, gae_lambda=0.5)
    other = load(recipe, ["algorithm.advantage=grpo", "algorithm.advantage.std=none"])
    assert other.algorithm.advantage.plain == {"name": "grpo", "std": "none"}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "algorithm.advantage=gpro",
            "algorithm.advantage='gpro': legal: gae, grpo or path/to/file.py:class; did you mean grpo?",
        ),
        (
            "algorithm.loss.clip_hig=0.3",
            "algorithm.loss.clip_hig has no effect: algorithm.loss=ppo has no such setting; did you mean clip_high?",
        ),
        (
            "algorithm.correction.cap=2",
            "algorithm.correction.cap has no effect: algorithm.correction=auto has no such setting; it belongs to "
            "algorithm.correction=tis",
        ),
        (
            "algorithm.advantage=gae algorithm.advantage.gamma=2",
            "algorithm.advantage.gamma=2: must be at least 0 and at most 1",
        ),
        (
            "algorithm.advantage=gae algorithm.advantage.whiten=1",
            "algorithm.advantage.whiten=1: needs true or false",
        ),
        (
            "algorithm.advantage=3",
            "algorithm.advantage=3: needs a name, or a mapping such as {name: grpo}",
        ),
    ],
)
def test_mistakes_in_names_and_settings(override: str, line: str) -> None:
    built_in = ", ".join(ADVANTAGE.builtin)
    assert problems(*split(override)) == [line.replace("gae, grpo", built_in)]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("algorithm.loss={}/none.py:Loss", "algorithm.loss='{}/none.py:Loss': {}/none.py: no such file"),
        (
            "algorithm.advantage={}/mine.py:Estimate",
            "algorithm.advantage='{}/mine.py:Estimate': {}/mine.py defines no 'Estimate'; it has Estimator, Heir, "
            "plain",
        ),
        (
            "algorithm.advantage={}/mine.py",
            "algorithm.advantage='{}/mine.py': name the class too, as {}/mine.py",
        ),
        (
            "algorithm.advantage={}/mine.py:Estimator",
            "algorithm.advantage='{}/mine.py:Estimator': it is made or called with the settings {{}}, but missing a "
            "required argument: 'alpha'",
        ),
        (
            "algorithm.advantage={}/mine.py:number",
            "algorithm.advantage='{}/mine.py:number': it is made or called with one AdvantageInputs and the settings "
            "{{}}, but 3 is not a callable object",
        ),
        (
            "algorithm.advantage={}/fails.py:plain",
            "algorithm.advantage='{}/fails.py:plain': {}/fails.py fails to import: AttributeError",
        ),
        (
            "algorithm.advantage={}/mine.py:Estimator algorithm.advantage={{alpha: 1, bata: 2}}",
            "algorithm.advantage='{}/mine.py:Estimator': it is made or called with the settings "
            "{{'alpha': 1, 'bata': 2}}, but got an unexpected keyword argument 'bata'",
        ),
        (
            "algorithm.loss={}/mine.py:plain algorithm.loss.a=1",
            "algorithm.loss='{}/mine.py:plain': it is made or called with one PolicyTokens and the settings "
            "{{'a': 1}}, but got an unexpected keyword argument 'a'",
        ),
    ],
)
def test_mistakes_in_a_file_are_named(mine: Path, overrides: str, line: str) -> None:
    (actual,) = problems(*split(overrides.format(*[mine] * 4)))
    assert actual.startswith(line.format(*[mine] * 4))


def split(overrides: str) -> list[str]:
    return [f"algorithm.{text.strip()}" for text in overrides.split("algorithm.") if text]


def test_needs_are_those_of_the_users_class(mine: Path) -> None:
    config = load(None, [f"algorithm.advantage={mine}/mine.py:Estimator", "algorithm.advantage.alpha=1"])
    assert problems(f"algorithm.advantage={mine}/mine.py:Estimator", "algorithm.advantage.alpha=1") == []
    assert list(requested_models(config)) == ["actor", "critic"]
    assert ADVANTAGE.needs(config, "needs_groups")
    assert not ADVANTAGE.needs(config, "takes_kl")
    assert needs_critic(load(None, [f"algorithm.advantage={mine}/mine.py:Heir"]))
    for name in ("mine.py:plain", "fails.py:plain", "none.py:plain"):
        assert not needs_critic(load(None, [f"algorithm.advantage={mine}/{name}"]))


def test_a_teacher_is_a_reference_without_a_kl() -> None:
    """Its log-probs are compared with the trainer's, so old ones are not those of the rollout engine."""
    config = load(
        None,
        [
            "algorithm.advantage=distillation",
            "model.ref_path=teacher",
            "trainer.prompts_per_step=8",
            "trainer.minibatch_size=8",
        ],
    )
    assert list(requested_models(config)) == ["actor", "reference"]
    assert not is_on_policy(config)
    architecture = parse_hf_config(qwen3_config("8b"))
    teacher = replace(architecture, num_layers=2)
    models = models_of(config, {"model.path": architecture, "model.ref_path": teacher})
    assert {role: model.hf.num_layers for role, model in models.items()} == {
        "actor": architecture.num_layers,
        "reference": 2,
    }
    other = load(
        None, ["algorithm.advantage=grpo", "rollout.n=2", "trainer.prompts_per_step=8", "trainer.minibatch_size=8"]
    )
    assert list(requested_models(other)) == ["actor"]
    assert is_on_policy(other)


def test_a_teacher_of_whole_distributions_costs_one_forward() -> None:
    """The reference is there, its log-probs are not asked for, and old ones come from the update."""
    overrides = ["trainer.prompts_per_step=8", "trainer.minibatch_size=8", "model.ref_path=teacher"]
    config = load(None, [*overrides, "algorithm.advantage=distillation", "algorithm.loss=distillation"])
    assert list(requested_models(config)) == ["actor", "reference"]
    assert not reads_reference(config)
    assert is_on_policy(config)
    assert problems(*overrides, "algorithm.advantage=distillation", "algorithm.loss=distillation") == []
    anchored = [*overrides, "algorithm.loss=distillation", "algorithm.old_logprobs=rollout"]
    assert problems(*anchored, "algorithm.advantage=distillation") == []


def test_a_users_class_may_need_no_reward(tmp_path: Path) -> None:
    """It says so itself; what else of the run reads rewards is refused still."""
    text = "class Blind:\n    needs_no_rewards = True\n    {0}\n    def __call__(self, inputs): ...\n"
    (tmp_path / "blind.py").write_text(text.format("needs_groups = True"))
    (tmp_path / "greedy.py").write_text(text.format("needs_greedy = True"))
    blind = ["reward.source=none", f"algorithm.advantage={tmp_path}/blind.py:Blind", "rollout.n=4"]
    assert check(load(None, blind), world_size=1) == []
    (line,) = check(load(None, [*blind, "rollout.dynamic_sampling.max_generations=4"]), world_size=1)
    assert line.startswith(
        "rollout.dynamic_sampling.max_generations=4 has no effect: it needs rewards, which reward.source=none has not"
    )
    greedy = ["reward.source=none", f"algorithm.advantage={tmp_path}/greedy.py:Blind"]
    (line,) = check(load(None, greedy), world_size=1)
    assert line.startswith(
        f"reward.source=none with algorithm.advantage={tmp_path}/greedy.py:Blind: it makes advantages"
    )


def test_scores_of_an_environment_need_one(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    async def run(self, policy, prompt, trajectory): ...\n")
    (line,) = check(load(None, ["reward.source=environment"]), world_size=1)
    assert line.startswith("reward.source=environment needs an environment that scores; set rollout.source=")
    own = ["reward.source=environment", f"rollout.source={tmp_path}/own.py:Own"]
    assert check(load(None, own), world_size=1) == []


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ("rollout.backend=hf", "none"),
        ("rollout.backend=hf model.dtype=fp32 trainer.async_steps=1", "tis"),
        ("rollout.backend=sglang", "tis"),
        ("rollout.backend=sglang model.path=mixture", "icepop"),
        ("rollout.backend=sglang model.dtype=fp32", "none"),
        ("rollout.backend=sglang model.dtype=fp32 rollout.dtype=bf16", "tis"),
        ("rollout.backend=sglang model.dtype=fp32 trainer.async_steps=1", "tis"),
        ("rollout.backend=sglang trainer.async_steps=1 algorithm.old_logprobs=rollout", "none"),
        ("rollout.backend=sglang algorithm.advantage=distillation algorithm.loss=distillation", "none"),
    ],
)
def test_the_correction_of_auto(
    settings: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mixture").mkdir()
    Path("mixture/config.json").write_text(json.dumps(qwen3_config("30b-a3b")))
    config = load(None, settings.split())
    with caplog.at_level("INFO"):
        correction = choose_method(config).correction
    assert chosen(config, CORRECTION) == taken
    assert f"algorithm.correction=auto takes {taken}" in caplog.messages
    assert (type(correction) is CORRECTIONS[taken]) if taken != "none" else correction is None
    assert getattr(correction, "cap", 2.0) == 2.0


@dataclasses.dataclass(frozen=True)
class Registered:
    needs_critic: ClassVar[bool] = True

    alpha: float
    names: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, inputs: object) -> object:
        return self.alpha


def test_a_program_registers_its_own_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSS.registered, "other", id)
    monkeypatch.setitem(ADVANTAGE.registered, "mine", Registered)
    assert mega_rl.register_advantage("mine")(Registered) is Registered
    config = load(None, ["algorithm.advantage=mine", "algorithm.advantage.alpha=3"])
    assert config.algorithm.advantage.plain == {"name": "mine", "alpha": 3}
    assert needs_critic(config)
    assert ADVANTAGE.build(config)(None) == 3  # type: ignore[arg-type, comparison-overlap]
    assert problems("algorithm.advantage=mine", "algorithm.advantage.alpha=3") == []
    (line,) = problems("algorithm.advantage=mine")
    assert line.endswith("made or called with the settings {}, but missing a required argument: 'alpha'")
    (line,) = problems("algorithm.loss=other", "algorithm.loss.a=1")
    assert "'other': it is made or called with one PolicyTokens and the settings {'a': 1}, but" in line
    for name, reason in (("gae", "is a built-in one"), ("my file", "is not a name")):
        with pytest.raises(UserError, match=reason):
            mega_rl.register_advantage(name)(Registered)


def test_a_class_that_takes_no_inputs_is_refused(mine: Path) -> None:
    (mine / "deaf.py").write_text("class Deaf:\n    def __call__(self): ...\n\ndef deaf(): ...\n")
    with pytest.raises(UserError, match=r"or a call with one AdvantageInputs: too many"):
        ADVANTAGE.build(load(None, [f"algorithm.advantage={mine}/deaf.py:Deaf"]))
    with pytest.raises(UserError, match=r"made or called with one AdvantageInputs and the settings \{\}, but too"):
        ADVANTAGE.build(load(None, [f"algorithm.advantage={mine}/deaf.py:deaf"]))


def test_a_file_runs_once_for_load_rules_and_assembly(tmp_path: Path) -> None:
    file, ran = tmp_path / "counted.py", tmp_path / "ran"
    text = (
        f"open({str(ran)!r}, 'a').write('x')\nclass Mine:\n    needs_critic = True\n    def __call__(self, inputs): ..."
    )
    file.write_text(text)
    config = load(None, [f"algorithm.advantage={file}:Mine"])
    check(config, world_size=1)
    ADVANTAGE.build(config)
    assert problems(f"algorithm.advantage={file}:Mine") == []
    assert ran.read_text() == "x"
