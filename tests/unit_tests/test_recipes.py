"""Every recipe for a real model holds for that model and its number of GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mega_rl.assemble.plan import RunPlan, engine_settings, roles_of
from mega_rl.assemble.servers import device_share
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.errors import UserErrors
from mega_rl.preflight import host, preflight
from mega_rl.rollout.sglang.weights.reshard import sending_bytes
from tests.helpers.inputs import qwen3_config, write_checkpoint, write_prompts

DEVICE = 80 * 10**9
RECIPES = Path(__file__).parents[2] / "mega_rl" / "recipes"
REAL_MODELS = [
    ("gsm8k_qwen3_0.6b_1gpu", "0.6b", 1),
    ("mixture_qwen3_0.6b_1gpu", "0.6b", 1),
    ("gsm8k_qwen3_8b_8gpu", "8b", 8),
    ("gsm8k_qwen3_8b_8gpu_fsdp", "8b", 8),
    ("gsm8k_qwen3_32b_64gpu", "32b", 64),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the data the recipes name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "free_bytes", lambda path: 10**15)
    for problems in ("gsm8k", "math"):
        write_prompts(tmp_path / f"data/{problems}/train.jsonl")
        write_prompts(tmp_path / f"data/{problems}/test.jsonl")


@pytest.mark.parametrize(("name", "size", "world_size"), REAL_MODELS)
def test_recipe_holds_for_its_model_and_world(name: str, size: str, world_size: int) -> None:
    recipe = RECIPES / f"{name}.yaml"
    write_checkpoint(Path(f"Qwen/Qwen3-{size.upper()}"), qwen3_config(size))
    config = preflight(recipe, world_size=world_size)
    assert str(world_size) + "gpu" in name
    assert config.model.path in recipe.read_text()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*qwen3*.yaml")), ids=lambda path: path.stem)
def test_recipes_for_qwen3_do_not_think(recipe: Path) -> None:
    """Qwen's model cards: no greedy decoding in thinking mode, and validation is greedy."""
    config = load(recipe, [])
    assert config.trainer.val_interval > 0
    assert config.data.chat.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(("name", "size", "world_size"), REAL_MODELS)
def test_recipe_fits_devices_of_80_gb(name: str, size: str, world_size: int) -> None:
    """Weights, gradients, optimizer and rollouts, with a quarter of the device for activations and all the rest."""
    config = load(RECIPES / f"{name}.yaml", [])
    hf = parse_hf_config(qwen3_config(size))
    plan = RunPlan(config, engine_settings(config), {"actor": cast(Any, SimpleNamespace(hf=hf))}, torch.bfloat16)
    share = device_share(plan, total=DEVICE, world_size=world_size)
    trainer = trainer_bytes(config, policy_parameters(plan, world_size), world_size)
    assert trainer < 0.75 * DEVICE
    if config.rollout.backend == "hf":
        rows = min(config.rollout.hf.batch_size, config.trainer.prompts_per_step * config.rollout.n // world_size)
        assert trainer + share.weights + 1.5 * rows * sequence_bytes(config, hf) < 0.75 * DEVICE
        return
    # With SGLang the trainer has left, and the cache holds at least eight whole sequences of each server.
    cache = share.fraction(0.0) * DEVICE - share.weights
    assert cache * config.rollout.sglang.server.tp > 8 * sequence_bytes(config, hf)


def policy_parameters(plan: RunPlan, world_size: int) -> float:
    """Number of parameters of the policy on the rank that has most."""
    hf, itemsize = plan.models["actor"].hf, plan.rollout_dtype.itemsize
    buckets = sending_bytes(hf, bucket_bytes=plan.config.rollout.bucket_mib << 20, itemsize=itemsize)
    size = 4 if plan.config.engine.backend == "fsdp" else 2
    return (device_share(plan, total=DEVICE, world_size=world_size).policy - buckets) / size


def trainer_bytes(config: Config, parameters: float, world_size: int) -> float:
    """Static bytes of all roles on a rank: bf16 weights, FP32 gradients, FP32 main parameters and two moments."""
    roles = roles_of(config)
    trained = sum(role in ("actor", "critic") for role in roles)
    if config.engine.backend == "fsdp":  # all of it FP32, in shards
        return parameters * (16 * trained + 4 * (len(roles) - trained))
    megatron = config.engine.megatron
    replicas = world_size // (megatron.tp * megatron.pp)
    return parameters * (trained * (2 + 4 + 12 / replicas) + 2 * (len(roles) - trained))


def sequence_bytes(config: Config, hf: HFConfig) -> int:
    """Bytes of the bf16 keys and values of one sequence at full length."""
    tokens = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return 2 * 2 * hf.num_layers * hf.dims["kv"] * tokens


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
    known = {name for name, _, _ in REAL_MODELS} | {
        "quickstart",
        "quickstart_sglang",
        "quickstart_gsm8k",
        "quickstart_code",
    }
    assert {path.stem for path in RECIPES.glob("*.yaml")} <= known
