"""Every recipe for a real model holds for that model and its number of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config import packaged
from mega_rl.config.loader import load
from mega_rl.config.rules import advice, check
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.memory import judge
from mega_rl.plan.preflight import host, preflight
from mega_rl.plan.setup import Machine, RunSetup
from tests.helpers.inputs import published_config, write_checkpoint, write_prompts

DEVICE = 80 * 10**9
RECIPES = packaged.FOLDER
# Recipe -> ranks that train. Servers have the other half of the GPUs of the one that runs ahead.
REAL_MODELS = {
    "gsm8k_qwen3_0.6b_1gpu": 1,
    "mixture_qwen3_0.6b_1gpu": 1,
    "gsm8k_qwen3_8b_8gpu": 8,
    "gsm8k_qwen3_8b_8gpu_fsdp": 8,
    "gsm8k_qwen3_8b_lora_1gpu": 1,
    "gsm8k_qwen3_32b_64gpu": 64,
    "math_qwen3_8b_8gpu": 8,
    "math_qwen3_32b_64gpu_async": 32,
    "moe_qwen3_30b_a3b": 16,
    "distill_qwen3_8b_from_32b": 8,
    "sft_8b": 8,
    "dpo_8b": 8,
    "rm_8b": 8,
    **dict.fromkeys(("sft_135m", "dpo_135m", "rm_135m", "gsm8k_135m_lora"), 1),
}
real_models = pytest.mark.parametrize(("name", "world_size"), REAL_MODELS.items())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the data the recipes name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "free_bytes", lambda path: 10**15)
    for problems in ("gsm8k", "math", "chats", "pairs"):
        write_prompts(tmp_path / f"data/{problems}/train.jsonl")
        write_prompts(tmp_path / f"data/{problems}/test.jsonl")


def models_of(config: Config) -> dict[str, HFConfig]:
    """The checkpoints that a recipe names, by key, from the sizes of the real models."""
    paths = {"model.path": config.model.path, "model.ref_path": config.model.ref_path}
    return {key: parse_hf_config(published_config(path), where=path) for key, path in paths.items() if path}


@real_models
def test_recipe_holds_for_its_model_and_world(name: str, world_size: int) -> None:
    recipe = RECIPES / f"{name}.yaml"
    for path in filter(None, [load(recipe, []).model.path, load(recipe, []).model.ref_path]):
        write_checkpoint(Path(path), published_config(path))
    (config,) = preflight([recipe], world_size=world_size)
    assert config.model.path in recipe.read_text()


@real_models
def test_recipe_passes_its_own_advice_and_plan(name: str, world_size: int) -> None:
    """On H100s of 80 GB, with Transformer Engine's layers, at full length of every response."""
    config = load(RECIPES / f"{name}.yaml", [])
    assert list(advice(config)) == []
    ranks_per_host = min(world_size, 4 if config.trainer.async_steps else 8)
    machine = Machine(world_size, ranks_per_host, gpu_memory=DEVICE, has_te=True)
    verdict = judge(RunSetup(config, models_of(config), machine))
    assert verdict.fits is True, verdict.sentence


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_one_step_of_any_recipe_is_a_smoke_run(path: Path) -> None:
    """A warm-up longer than the run goes, so the one step trains the actor at the full rate."""
    config = load(path, ["trainer.steps=1"])
    ranks = REAL_MODELS.get(path.stem, config.engine.megatron.tp)
    assert check(config, world_size=ranks) == []
    assert (config.optim.warmup_steps, config.algorithm.critic_warmup_steps) == (0, 0)
