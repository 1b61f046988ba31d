"""The examples learn to the rates of their pages, on both engines; given tokens in the loss teach to invent answers."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.selection import FULL
from tests.helpers.sglang import needs_sglang
from tests.unit_tests.agents.test_examples import ROOT, read, skip_without_needs

pytestmark = [
    pytest.mark.skipif(not FULL, reason="make test-full: minutes of training"),
    pytest.mark.timeout(1800),  # coding over SGLang: 1,009 s on two busy cores
]
RATES = {"calculator": (0.6, 0.95), "search": (0.4, 0.9), "coding": (0.4, 0.9)}  # held-out: most before, least after
SGLANG = (
    "rollout.backend=sglang", "rollout.sglang.server.args={max_total_tokens: 40000}",
    "trainer.timeout_s=300", "rollout.sglang.sync.timeout_s=120",
)  # fmt: skip
# An environment of a trainer that takes all tokens after the prompt for the policy's.
LEAKY = '''
from environment import Calculator
from mega_rl.agents import trajectory

right_row = trajectory._row


def leaky_row(*arguments):
    row = right_row(*arguments)
    return row._replace(own=(True,) * len(row.own))


trajectory._row = leaky_row


def right(prompt: str, response: str, answer: str) -> float:
    """The response has the tool's answers, too."""
    return float(response.endswith(f"\\n{answer}"))
'''
ANY_MISMATCH = [f"rollout.mismatch.{key}" for key in ("mean_limit=1000", "max_limit=1000", "share_limit=1")]


def play(command: str, name: str, file: str, folder: Path, *overrides: str) -> str:
    """Run a recipe of an example, with `folder` in place of runs/NAME; return what it prints."""
    recipe = folder / file
    text = (ROOT / "examples" / name / file).read_text(encoding="utf-8")
    recipe.write_text(text.replace(f"runs/{name}", str(folder)), encoding="utf-8")
    words = [sys.executable, "-m", "mega_rl.cli", command, "--nproc-per-node", "2", "--config", str(recipe), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return f"{done.stdout}\nexit code {done.returncode}"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of an example with data and a warm start, made once."""

    @cache
    def started(name: str) -> Path:
        folder = tmp_path_factory.mktemp("examples") / name
        importlib.import_module(f"examples.{name}.prepare").main(folder)
        printed = play("sft", name, "warm_start.yaml", folder)
        assert printed.endswith("exit code 0"), printed[-4000:]
        return folder

    return started


def train(name: str, folder: Path, run: str, *overrides: str) -> list[dict[str, float]]:
    """Train; return the metrics, from before the first step on."""
    printed = play("train", name, "recipe.yaml", folder, f"trainer.run_dir={folder / run}", *overrides)
    assert printed.endswith("exit code 0"), printed[-4000:]
    return [dict(record.metrics) for record in read_metrics(folder / run / "metrics.jsonl")]


@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=needs_sglang)])
@pytest.mark.parametrize("name", list(RATES))
def test_an_example_learns_its_rate(name: str, engine: str, start: Callable[[str], Path]) -> None:
    skip_without_needs(name)
    metrics = train(name, start(name), engine, *(SGLANG if engine == "sglang" else ()))
    rates = [one["val/pass_at_1"] for one in metrics if "val/pass_at_1" in one]
    assert rates[0] <= RATES[name][0], rates
    assert rates[-1] >= RATES[name][1], rates
    assert max(one["rollout/logprob_diff_max"] for one in metrics[1:]) < 1e-4


def invented(folder: Path, model: Path) -> float:
    """Return in which share of conversations a policy that is not stopped after its call writes a tool's answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    count = 0
    rows = read(folder / "data" / "held_out.jsonl")[:50]
    for row in rows:
        a, b = row["numbers"]
        call = {"name": "add" if " plus " in row["prompt"][0]["content"] else "multiply", "arguments": {"a": a, "b": b}}
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=row["tools"], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(f"{prompt}<tool_call>{json.dumps(call)}</tool_call><eos>", return_tensors="pt")["input_ids"]
        # One token at a time: `generate` would end at the stop token within.
        for _ in range(11):
            ids = torch.cat([ids, policy(ids).logits[:, -1:].argmax(-1)], dim=1)
        written = tokenizer.decode(ids[0].tolist()).rpartition("</tool_call><eos>")[2]
        count += bool(re.match(r"\ntool\n\d+<eos>\nassistant\n", written))
    return count / len(rows)


def test_given_tokens_in_the_loss_teach_to_invent_answers(start: Callable[[str], Path]) -> None:
    folder = start("calculator")
    shutil.copy(ROOT / "examples" / "calculator" / "environment.py", folder)
    (folder / "leaky.py").write_text(LEAKY)
    fault = [f"rollout.source={folder / 'leaky.py'}:Calculator", f"reward.function={folder / 'leaky.py'}:right"]
    guarded = play("train", "calculator", "recipe.yaml", folder, f"trainer.run_dir={folder / 'guarded'}", *fault)
    assert "error: trainer and rollout engine disagree" in guarded, guarded[-4000:]
    train("calculator", folder, "leaky", *fault, *ANY_MISMATCH)
    if not (folder / "embedded").exists():
        train("calculator", folder, "embedded")
    right, leaky = (invented(folder, next((folder / run / "hf").iterdir())) for run in ("embedded", "leaky"))
    assert right == 0
    assert leaky >= 0.6
