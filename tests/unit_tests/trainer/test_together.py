"""Runs with adapters on one base get, bit for bit, the state and the metrics that each gets alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mega_rl
from tests.helpers.distributed import run_ranks
from tests.helpers.given import write_inputs
from tests.helpers.selection import without

SHARED: dict[str, Any] = {
    "model.dtype": "fp32", "model.adapter": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]},
    "data.max_prompt_tokens": 40, "trainer.prompts_per_step": 4, "trainer.minibatch_size": 2, "trainer.steps": 4,
    "trainer.microbatch.max_tokens": 96, "trainer.timeout_s": 120, "trainer.device": "cpu", "trainer.val_interval": 2,
    "checkpoint.save_interval": 2, "checkpoint.keep": 9, "checkpoint.hf_final": True, "metrics.tensorboard": False,
}  # fmt: skip
# Every setting of the optimizer that a step reads, the sampler's own, and a run that is shorter.
RUNS: dict[str, dict[str, Any]] = {
    "long": {
        "algorithm.advantage": "grpo", "rollout": {"n": 4, "max_new_tokens": 6, "temperature": 0.8},
        "optim": {"lr": 3e-2, "weight_decay": 0.1, "clip_grad": 0.01, "schedule": "linear"},
        "data.train_files": ["prompts.jsonl"], "data.val_files": ["sft.jsonl"],
    },
    "early": {
        "algorithm": {"advantage": "rloo", "kl": {"name": "loss", "coef": 0.1}}, "optim": {"lr": 1e-2, "beta1": 0.5},
        "rollout": {"n": 3, "max_new_tokens": 8, "top_k": 9},
        "trainer": {"steps": 3, "seed": 5, "val_interval": 0, "async_steps": 1},
        "data.train_files": ["sft.jsonl"], "rollout.stop_token_ids": [3], "rollout.verify_interval": 2,
    },
    "given": {
        "algorithm.kind": "sft", "optim": {"lr": 5e-3, "beta2": 0.9, "eps": 1e-3, "warmup_steps": 2},
        "data.train_files": ["sft.jsonl"], "data.val_files": ["sft.jsonl"],
    },
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2-sp": (2, {"engine.megatron.tp": 2, "engine.megatron.sequence_parallel": True}),
    "dp2, bf16": (2, {"model.dtype": "bf16"}),
    "fsdp2": (2, {"engine.backend": "fsdp"}),
}


def length(response: str) -> float:
    return -float(len(response))


def letters(response: str) -> float:
    return float(sum(response.count(letter) for letter in "abc"))


REWARDS = {"long": length, "early": letters, "given": None}


def config_of(folder: Path, name: str, runs: str, **more: Any) -> mega_rl.Config:
    own = {key: [str(folder / f) for f in v] if key.startswith("data.") else v for key, v in RUNS[name].items()}
    place = {"model.path": str(folder / "sft"), "trainer.run_dir": str(folder / runs / name)}
    return mega_rl.load_config(None, [*texts(SHARED), *texts(own), *texts(place), *texts(more)])


def texts(settings: dict[str, Any]) -> list[str]:
    """Return settings as texts, in which later ones add to sections."""
    flat = {
        f"{key}.{name}" if isinstance(value, dict) else key: one
        for key, value in settings.items()
        for name, one in (value.items() if isinstance(value, dict) else [("", value)])
    }
    return [f"{key}={json.dumps(value)}" for key, value in flat.items()]


def train_together(folder: Path, runs: str, **more: Any) -> list[mega_rl.Outcome]:
    configs = [config_of(folder, name, runs, **more) for name in RUNS]
    return mega_rl.train_together(configs, rewards=[*REWARDS.values()])


def train(rank: int, folder_text: str, how: dict[str, Any]) -> dict[str, Any]:
    """Train every run alone, all together, and together from the second step on; return steps and exit codes."""
    folder = Path(folder_text)
    for name, reward in REWARDS.items():
        mega_rl.train(config_of(folder, name, "alone", **how), reward=reward)
    outcomes = train_together(folder, "together", **how)
    if rank == 0:
        shutil.copytree(folder / "together", folder / "resumed")
        for last in [*(folder / "resumed").glob("*/checkpoints/step_*[34]"), *(folder / "resumed").glob("*/hf/*")]:
            shutil.rmtree(last)
    resumed = train_together(folder, "resumed", **how)  # rank 0 has its locks when the others look
    return {"steps": [outcome.steps for outcome in outcomes], "again": [outcome.steps for outcome in resumed]}


def digests(run: Path) -> dict[str, str]:
    """Return the SHA-256 of a run's state after its last step: adapters, optimizer, random numbers, export."""
    last = [max(run.glob(f"{kind}/step_*")) for kind in ("checkpoints", "hf")]
    files = [path for folder in last for path in folder.rglob("*.safetensors")]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metrics without times, rates and the memory of the process."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time", "perf/", "memory/", "checkpoint/", "rollout/ahead_wait_s")
    return [{key: value for key, value in one.items() if not key.startswith(measured)} for one in records]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    rows = [{"prompt": "ab" * (1 + number % 5) + "="} for number in range(30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("case", without(CASES, "tp2-sp", "dp2, bf16", "fsdp2"))
def test_runs_together_equal_runs_alone(case: str, folder: Path) -> None:
    ranks, how = CASES[case]
    answer = run_ranks(ranks, train, str(folder), how, timeout_s=600.0)[0]
    assert answer == {"steps": [4, 3, 4], "again": [4, 3, 4]}
    alone = {name: digests(folder / "alone" / name) for name in RUNS}
    assert len({str(one) for one in alone.values()}) == len(RUNS)
    for runs in ("together", "resumed"):
        for name in RUNS:
            assert len(alone[name]) >= 2
            assert digests(folder / runs / name) == alone[name], (runs, name)
            assert metrics(folder / runs / name) == metrics(folder / "alone" / name), (runs, name)
