"""PPO whose models take turns on the device, against the same run without: metrics, weights, saves and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.unit_tests.rewards.model_cases import write_reward_model
from tests.unit_tests.trainer.assemble.turn_cases import run_all

ENGINES = ("megatron", "fsdp")
STEPS, SAVED = 3, 2
PPO = (
    *("model.dtype=fp32", "data.max_prompt_tokens=8", "data.val_size=2", "trainer.val_interval=2"),
    *("algorithm.advantage=gae", "algorithm.kl=reward", "algorithm.kl.coef=0.1", "reward.source=model"),
    *("rollout.max_new_tokens=4", "rollout.n=2", "rollout.temperature=1.0", "trainer.microbatch.max_tokens=64"),
    *("trainer.prompts_per_step=4", "trainer.minibatch_size=2", "optim.lr=1e-2", "optim.critic_lr=1e-2"),
    *("trainer.timeout_s=90", "trainer.device=cpu", "metrics.tensorboard=false", "metrics.progress_bar=false"),
)
OF_A_MACHINE = ("time/", "perf/", "memory/", "checkpoint/")


def settings_of(root: Path, engine: str, run: str, *changes: str) -> list[str]:
    files = [f"model.path={root / 'm'}", f"reward.source.path={root / 'r'}", f"data.train_files=[{root / 'd.jsonl'}]"]
    return [*PPO, *files, f"engine.backend={engine}", f"trainer.run_dir={root / engine / run}", *changes]


def numbers_of(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of every step that depend on what was computed."""
    return {
        record.step: {name: value for name, value in record.metrics.items() if not name.startswith(OF_A_MACHINE)}
        for record in read_metrics(run / "metrics.jsonl")
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    rows = [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(8)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tiny_checkpoint(folder / "m", num_hidden_layers=1)
    write_digit_tokenizer(folder / "m", vocab_size=50)
    write_reward_model(folder / "r", family="qwen3", num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def runs(root: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """(Folder of the engine's runs, what the first of two ranks saw in each)."""
    engine, whole, turns = request.param, ["trainer.steps=3", "checkpoint.hf_final=true"], "engine.resident_roles=one"
    settings = {
        "together": settings_of(root, engine, "together", *whole),
        "in turn": settings_of(root, engine, "in turn", turns, f"trainer.steps={SAVED}", "checkpoint.save_final=true"),
        "resumed": settings_of(root, engine, "in turn", turns, *whole),
    }
    return root / engine, run_ranks(2, run_all, settings, device="cpu")[0]


def test_metrics_and_weights_are_equal_to_the_bit(runs: tuple[Path, dict[str, Any]]) -> None:
    """Two steps, a save while all models are away, a resume into models that are away, a third step, an export."""
    folder, _ = runs
    together, turns = (numbers_of(folder / name) for name in ("together", "in turn"))
    assert sorted(together) == [0, *range(1, STEPS + 1)]  # 0: the validation before the first
    for step, numbers in together.items():
        assert {name: turns[step][name] for name in numbers} == numbers
    own, other = (load_file(folder / run / "hf/step_000003/model.safetensors") for run in ("together", "in turn"))
    assert own.keys() == other.keys()
    assert all(own[name].equal(other[name]) for name in own)


def test_one_model_is_there_at_a_time(runs: tuple[Path, dict[str, Any]]) -> None:
    _, seen = runs
    everything, state = ["parameters", "gradients", "optimizer"], ["parameters", "optimizer"]
    parts = {"forward": ["parameters"], "train_minibatch": everything, "state": state, "save_hf": ["parameters"]}
    for run in ("in turn", "resumed"):
        for event, here in seen[run]:
            role, _, work = event.partition(" ")
            assert here == ({role: parts[work]} if work else {"actor": ["parameters"]} if role == "publish" else {})
    events = [event for run in ("in turn", "resumed") for event, _ in seen[run]]
    assert {event for event, _ in seen["together"]} | {"actor state", "critic state"} == set(events)
    assert all(set(here) == {"actor", "critic", "reference", "reward"} for _, here in seen["together"])
