"""`mega-rl eval` with the rewards of a reward model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.unit_tests.cli.test_eval import ENVIRONMENT
from tests.unit_tests.rewards.model_cases import transformers_scores, write_reward_model

PROMPTS = ("1+1=", "2+30=")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval_rewards")
    write_tiny_checkpoint(folder / "model", num_hidden_layers=1)
    write_digit_tokenizer(folder / "model", vocab_size=50)
    write_reward_model(folder / "reward", family="qwen3", num_hidden_layers=1)
    rows = [{"prompt": prompt, "answer": "2"} for prompt in PROMPTS]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def samples(inputs: Path, out: str, *settings: str) -> list[dict[str, Any]]:
    """Return the rows of an evaluation of three samples a prompt."""
    command = [sys.executable, "-m", "mega_rl.cli", "eval", "--out", f"{inputs}/{out}", f"model.path={inputs}/model"]
    command += [f"data.val_files=[{inputs}/held_out.jsonl]", "validation.n=3", "validation.max_new_tokens=4"]
    command += ["model.dtype=fp32"]
    command += ["trainer.device=cpu", "data.max_prompt_tokens=16", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (inputs / out / "samples.jsonl").read_text().splitlines()]


def test_a_reward_model_scores(inputs: Path) -> None:
    rows = samples(inputs, "model", "reward.source=model", f"reward.source.path={inputs}/reward")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    compared = []
    for row in rows:
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        if len(response) == row["response_tokens"] - (row["finish"] == "stop"):  # else it holds tokens without a text
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            stop = [tokenizer.eos_token_id] * (row["finish"] == "stop")
            compared.append((row["reward"], [*prompt, *response, *stop]))
    expected = transformers_scores(inputs / "reward", [ids for _, ids in compared])
    # One layer in float32; kernels add in another order.
    assert [reward for reward, _ in compared] == pytest.approx(expected.tolist(), abs=1e-4)
    assert len({reward for reward, _ in compared}) > 2
