"""Whole runs whose reward function runs in worker processes, on two ranks that share a replica.

Two steps of PPO with a reward that depends on every character of a response: metrics are those of the same function
in the ranks themselves, bit for bit, also after a resume. Workers count what they cannot score.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema import RewardConfig, RewardFunctionConfig
from mega_rl.rewards import build
from mega_rl.rewards.pool import FunctionRewards
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.unit_tests.trainer.assemble.run_cases import run_all

STEPS, SAVED = 2, 1
MACHINE = ("time/", "perf/", "memory/", "checkpoint/")  # metrics of the machine rather than of training
SOURCES = [f'"data_source": "digits/sums", "parity": "{parity}"' for parity in ("even", "odd")]
REWARDS = """
import os, random

def of_the_text(prompt, response, answer):
    return random.Random(prompt + response + answer).gauss(0, 1)

def crashes(prompt, response, prompt_index):
    if prompt_index == 3:
        os.kill(os.getpid(), 9)
    return of_the_text(prompt, response, "") - 10

def silent(prompt, response, prompt_index):
    return None if prompt_index == 3 else of_the_text(prompt, response, "")

def form(response):
    return {"short": -len(response) / 7, "odd": len(response) % 2}

def raises(prompt, response, prompt_index):
    return of_the_text(prompt, response, "") if prompt_index != 3 else {}[response]
"""


def settings_of(root: Path, name: str, *more: str, function: str = "of_the_text") -> list[str]:
    return [
        *(f"model.path={root / 'actor'}", "model.dtype=fp32", "optim.lr=1e-3", "engine.megatron.tp=2"),
        *(f"data.train_files=[{root / 'train.jsonl'}]", "data.max_prompt_tokens=8", "data.shuffle=false"),
        *("rollout.max_new_tokens=6", "rollout.n=2", "metrics.tensorboard=false"),
        *(f"trainer.steps={STEPS}", "trainer.prompts_per_step=4", "trainer.minibatch_size=4"),
        *("trainer.microbatch.max_tokens=64", "trainer.timeout_s=90", "trainer.device=cpu"),
        *(f"trainer.run_dir={root / name}", f"reward.function={root / 'rewards.py'}:{function}", *more),
    ]


class CountedPool:
    """In place of a pool: the number of its workers."""

    def __init__(self, *_: object, num_workers: int, **__: object) -> None:
        self.num_workers = num_workers

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("workers", "cores", "function", "num_workers"),
    [
        (-1, 4, "math_verify", 3),
        (-1, 64, "math_verify", 8),
        (-1, 1, "math_verify", 1),
        (-1, 4, "exact_match", 0),
        (2, 1, "exact_match", 2),
        (0, 4, "math_verify", 0),
        (-1, 4, "", 0),  # of a Python program
    ],
)
def test_rank_has_workers_where_they_guard_something(
    monkeypatch: pytest.MonkeyPatch, workers: int, cores: int, function: str, num_workers: int
) -> None:
    """By default one for each of its cores but one."""
    monkeypatch.setattr(build, "WorkerPool", CountedPool)
    monkeypatch.setattr(build, "own_cores", lambda: cores)
    config = RewardConfig(function=function, source=RewardFunctionConfig(workers=workers))
    with ExitStack() as resources:
        given = None if function else lambda response: -float(len(response))
        source = build.build_rewards(config, given, resources=resources).source
    assert isinstance(source, FunctionRewards)
    assert getattr(source.pool, "num_workers", 0) == num_workers


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    write_tiny_checkpoint(folder / "actor", num_hidden_layers=1)
    write_digit_tokenizer(folder / "actor", vocab_size=50)
    (folder / "train.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+2=", "answer": "{i + 2}", {SOURCES[i % 2]}}}\n' for i in range(8))
    )
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def several(root: Path) -> tuple[str, ...]:
    """Return the settings of a run with two reward functions, of which one has two parts."""
    functions = f"correct: '{root}/rewards.py:of_the_text', form: '{root}/rewards.py:form'"
    return (
        *("reward.function=null", f"reward.functions={{{functions}}}", "reward.weights={form_odd: 0.5}"),
        *("algorithm.advantage=gdpo", "engine.megatron.tp=1", "reward.overlong.buffer_tokens=2"),
    )


@pytest.fixture(scope="module")
def runs(root: Path) -> list[dict[str, Any]]:
    """What each rank sampled and printed, by run."""
    saving = (f"checkpoint.save_interval={SAVED}",)
    cases = {
        "in ranks": settings_of(root, "in ranks", "reward.source.workers=0"),
        "workers": settings_of(root, "workers", *saving, "reward.source.workers=2"),
        "resumed": settings_of(
            root, "resumed", "reward.source.workers=2",
            f"checkpoint.resume={root}/workers/checkpoints/step_00000{SAVED}"
        ),
        "crashes": settings_of(
            root, "crashes", "reward.source.workers=1", "reward.source.failure_score=-20",
            "reward.source.max_failed_share=0.25", function="crashes",
        ),
        "left out": settings_of(root, "left out", "reward.source.workers=0", "engine.megatron.tp=1", function="silent"),
        "masked": settings_of(
            root, "masked", "reward.source.workers=1", "engine.megatron.tp=1", "reward.source.on_failure=mask",
            "reward.source.max_failed_share=0.25", function="raises",
        ),
        "no source": settings_of(root, "no source", *several(root), "reward.source.workers=1"),
        "one source": settings_of(
            root, "one source", *several(root), "reward.sources={digits/sums: [correct, form]}",
            "reward.source.workers=0",
        ),
        "two sources": settings_of(
            root, "two sources", *several(root), "data.source_key=parity", "reward.source.workers=1",
            "reward.sources={even: [correct, form], odd: [form]}", "metrics.records.interval=1",
            "rollout.dynamic_sampling.max_generations=2",
        ),
    }  # fmt: skip
    return run_ranks(2, run_all, cases, device="cpu")


def metrics(root: Path, run: str) -> dict[int, dict[str, float]]:
    """The records of a run by step, without what tells of the machine."""
    records = [json.loads(line) for line in (root / run / "metrics.jsonl").read_text().splitlines()]
    return {
        record.pop("step"): {name: value for name, value in record.items() if not name.startswith(MACHINE)}
        for record in records
    }


def test_workers_change_no_number_of_a_run(root: Path, runs: list[dict[str, Any]]) -> None:
    expected, scored = metrics(root, "in ranks"), metrics(root, "workers")
    assert list(expected) == [1, 2]
    assert all(record["reward/std"] > 0.1 for record in expected.values())
    assert scored == expected
    for rank in runs:
        assert rank["workers"]["rows"] == rank["in ranks"]["rows"]


def test_a_resumed_run_goes_on_with_workers_of_its_own(root: Path, runs: list[dict[str, Any]]) -> None:
    assert metrics(root, "resumed") == {STEPS: metrics(root, "workers")[STEPS]}


def test_responses_that_crash_a_worker_are_scored_and_counted(root: Path, runs: list[dict[str, Any]]) -> None:
    """Both samples of prompt 3, which is in the first step."""
    records = metrics(root, "crashes")
    assert [record["reward/crashes"] for record in records.values()] == [2.0, 0.0]
    assert records[1]["reward/min"] == -20.0 < records[2]["reward/min"]
    printed = "".join(rank["crashes"]["printed"] for rank in runs)
    assert printed.count("prompt 3: '3+2='") == 2


def test_each_data_source_has_its_parts(root: Path, runs: list[dict[str, Any]]) -> None:
    """Prompts of even number have all three parts, the others those of their form alone; nothing becomes NaN."""
    records = metrics(root, "two sources")
    assert list(records) == [1, 2]
    for record in records.values():
        assert all(math.isfinite(value) for value in record.values())
        assert {"reward/correct", "reward/form_odd", "reward/form_short"} <= record.keys()
    for record in sorted((root / "two sources" / "records").iterdir()):
        rows = [json.loads(line) for file in record.glob("*.jsonl") for line in file.read_text().splitlines()]
        for row in rows:
            assert (row["reward_correct"] is None) == (row["data_row"] % 2 == 1)
            assert row["reward_form_odd"] is not None
