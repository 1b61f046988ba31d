"""Every recipe for a real model holds for that model and its number of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.errors import UserErrors
from mega_rl.preflight import host, preflight
from tests.helpers.inputs import qwen3_config, write_checkpoint, write_prompts

RECIPES = Path(__file__).parents[2] / "mega_rl" / "recipes"
REAL_MODELS = [
    ("gsm8k_qwen3_0.6b_1gpu", "0.6b", 1),
    ("gsm8k_qwen3_8b_8gpu", "8b", 8),
    ("gsm8k_qwen3_8b_8gpu_fsdp", "8b", 8),
    ("gsm8k_qwen3_32b_64gpu", "32b", 64),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the data the recipes name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "free_bytes", lambda path: 10**15)
    write_prompts(tmp_path / "data/gsm8k/train.jsonl")
    write_prompts(tmp_path / "data/gsm8k/test.jsonl")


@pytest.mark.parametrize(("name", "size", "world_size"), REAL_MODELS)
def test_recipe_holds_for_its_model_and_world(name: str, size: str, world_size: int) -> None:
    recipe = RECIPES / f"{name}.yaml"
    write_checkpoint(Path(f"Qwen/Qwen3-{size.upper()}"), qwen3_config(size))
    config = preflight(recipe, world_size=world_size)
    assert str(world_size) + "gpu" in name
    assert config.model.path in recipe.read_text()


def test_the_64_gpu_recipe_needs_its_layout() -> None:
    """The rules bite: the same recipe on the wrong model or world is refused."""
    recipe = RECIPES / "gsm8k_qwen3_32b_64gpu.yaml"
    write_checkpoint(Path("Qwen/Qwen3-32B"), qwen3_config("8b"))
    with pytest.raises(UserErrors) as caught:
        preflight(recipe, world_size=16)
    assert [line.split(" ")[0] for line in caught.value.problems] == ["world", "engine.megatron.pp*vpp=4*2=8"]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_one_step_of_any_recipe_is_a_smoke_run(path: Path) -> None:
    """A warm-up longer than the run goes, so the one step trains the actor at the full rate."""
    config = load(path, ["trainer.steps=1"])
    ranks = config.engine.megatron.tp * config.engine.megatron.pp
    assert check(config, world_size=ranks) == []
    assert (config.optim.warmup_steps, config.algorithm.critic_warmup_steps) == (0, 0)


def test_every_recipe_is_known_here_or_has_its_own_test() -> None:
    known = {name for name, _, _ in REAL_MODELS} | {"quickstart", "quickstart_sglang"}
    assert {path.stem for path in RECIPES.glob("*.yaml")} <= known
