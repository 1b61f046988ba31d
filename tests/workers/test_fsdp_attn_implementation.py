"""The attention that a config asks for is the one that each role's model runs, in both engines."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.rewards.model_cases import write_reward_model
from tests.workers.attention_cases import case

ENGINES = ("megatron", "fsdp")
ROLES = ("actor", "critic", "reference", "reward")
DOCS = Path(__file__).parents[2] / "docs" / "config.md"
# name -> (setting in the recipe, command line, what actor, critic, reference and reward model run)
RUNS: dict[str, tuple[str, list[str], tuple[str, str, str, str]]] = {
    "default": ("", [], ("sdpa", "sdpa", "sdpa", "sdpa")),
    "file, everyone": ("model.attn_implementation=eager", [], ("eager", "eager", "eager", "eager")),
    "command line, everyone": ("", ["model.attn_implementation=eager"], ("eager", "eager", "eager", "eager")),
    "file, critic": ("model.critic_attn_implementation=eager", [], ("sdpa", "eager", "sdpa", "sdpa")),
    "command line, critic": ("", ["model.critic_attn_implementation=eager"], ("sdpa", "eager", "sdpa", "sdpa")),
    "command line, reference": ("", ["model.ref_attn_implementation=eager"], ("sdpa", "sdpa", "eager", "sdpa")),
    "file, reward model": ("reward.source.attn_implementation=eager", [], ("sdpa", "sdpa", "sdpa", "eager")),
    "command line, reward model": ("", ["reward.source.attn_implementation=eager"], ("sdpa", "sdpa", "sdpa", "eager")),
    "command line over file": (
        "model.attn_implementation=eager",
        ["model.attn_implementation=sdpa", "model.ref_attn_implementation=eager"],
        ("sdpa", "sdpa", "eager", "sdpa"),
    ),
    "all but actor and reward model": (
        "model.attn_implementation=eager",
        ["model.critic_attn_implementation=sdpa", "model.ref_attn_implementation=auto"],
        ("eager", "sdpa", "sdpa", "eager"),
    ),
    "padded": (
        "model.critic_attn_implementation=eager",
        ["trainer.microbatch.packing=false"],
        ("sdpa", "eager", "sdpa", "sdpa"),
    ),
}
KEYS = (
    *("model.attn_implementation", "model.critic_attn_implementation", "model.ref_attn_implementation"),
    "reward.source.attn_implementation",
)
REFUSED = {f"{key} refused": (key, [f"{key}=flash_attention_2"]) for key in KEYS}


def recipe_of(folder: Path, setting: str) -> str:
    """A recipe, as text, of a run with all roles; `setting` is one more line of it."""
    recipe: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "algorithm": {"advantage": "gae", "kl": "loss"},
        "reward": {"source": {"name": "model", "path": str(folder / "reward")}},
        "trainer": {"device": "cpu", "timeout_s": 60, "microbatch": {"max_tokens": 64}},
    }
    if setting:
        key, _, value = setting.partition("=")
        *sections, name = key.split(".")
        reduce(lambda area, section: area[section], sections, recipe)[name] = value
    return json.dumps(recipe)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine."""
    return str(request.param)


@pytest.fixture(scope="module")
def results(engine: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every run of one engine says and does; one rank."""
    folder = tmp_path_factory.mktemp("attention")
    write_tiny_checkpoint(folder / "model", num_hidden_layers=1)
    write_reward_model(folder / "reward", family="qwen3", num_hidden_layers=1)
    runs = {}
    for number, name in enumerate([*RUNS, *REFUSED]):
        setting, overrides = RUNS[name][:2] if name in RUNS else ("", REFUSED[name][1])
        recipe = folder / f"{number}.yaml"
        recipe.write_text(recipe_of(folder, setting), encoding="utf-8")
        runs[name] = (str(recipe), overrides)
    return dict(run_ranks(1, case, engine, runs, device="cpu")[0])


@pytest.mark.parametrize("name", list(RUNS))
def test_every_role_runs_what_was_asked_for(results: dict[str, Any], name: str) -> None:
    """By name, and by the kernels that really ran in an evaluation and an update: those and no other."""
    assert tuple(results[name]) == ROLES
    for role, expected in zip(ROLES, RUNS[name][2], strict=True):
        attention, ran = results[name][role]
        assert attention == expected, role
        assert list(ran) == [expected], role


def test_roles_and_runs_do_as_much_work_whatever_they_run(results: dict[str, Any]) -> None:
    """A kernel is called once for each layer and length class, whichever it is: none was left out."""
    for role in ROLES:
        counts = {sum(results[name][role][1].values()) for name in RUNS if name != "padded"}
        assert len(counts) == 1, (role, counts)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_there_is_refused(results: dict[str, Any], engine: str, name: str) -> None:
    """FlashAttention on a CPU: the key, why, and what there is instead."""
    owner = {
        "megatron": "Megatron-Core's layers without Transformer Engine",
        "fsdp": r"Hugging Face's models \(engine.backend=fsdp\)",
    }[engine]
    key = re.escape(REFUSED[name][0])
    message = rf"{key}=flash_attention_2 cannot run in {owner}: it needs .+; available here: auto, eager, sdpa"
    assert isinstance(results[name], str)
    assert re.fullmatch(message, results[name]), results[name]


def test_the_default_is_what_the_docs_say() -> None:
    """auto for every role: the best that is there, on a CPU torch's fused attention."""
    rows = {line.split("`")[1]: line for line in DOCS.read_text("utf-8").splitlines() if "attn_implementation`" in line}
    defaults = {key: line.split("`")[3] for key, line in rows.items()}
    assert defaults.pop("model.attn_implementation") == "auto"
    assert set(defaults.values()) == {"same"}
    own = {key.removeprefix("reward.source.") for key in KEYS}  # the page names a kind's settings below its section
    assert set(defaults) == own - {"model.attn_implementation"}
