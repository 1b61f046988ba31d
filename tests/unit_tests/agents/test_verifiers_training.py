"""An installed environment of verifiers, by its name: its rows are the run's prompts, its rubric the reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.tracking.records.reader import read_record
from tests.helpers.distributed import run_ranks
from tests.peers.package import FOLDER, missing
from tests.unit_tests.agents.test_gateway_training import train_all, write_model

pytestmark = pytest.mark.skipif(missing("verifiers") is not None, reason=str(missing("verifiers")))

# An environment package, as `pip install` would put it on the path.
PACKAGE = """
import datasets
import verifiers

def share(completion):
    text = completion[-1]["content"]
    return text.count("a") / max(len(text), 1)

def load_environment(rows=6):
    given = [{"question": f"{n} b", "answer": str(n)} for n in range(rows)]
    held_out = [{"question": "7 a", "answer": "7"}]
    return verifiers.SingleTurnEnv(
        dataset=datasets.Dataset.from_list(given), eval_dataset=datasets.Dataset.from_list(held_out),
        rubric=verifiers.Rubric(funcs=[share]),
    )
"""
AGENT = """
import sys
sys.path += {folders!r}
from dataclasses import dataclass
import mega_rl
import verifiers

@dataclass
class Agent(mega_rl.Verifiers):
    name: str = "tiny-letters"

@dataclass
class Rows:
    context: mega_rl.DataContext
    has_validation = True

    def __iter__(self):
        return mega_rl.Verifiers.rows(verifiers.load_environment(Agent.name), self.context.split)
"""


def test_rows_of_a_named_environment_train(tmp_path: Path) -> None:
    package, agent = tmp_path / "installed" / "tiny_letters", tmp_path / "agent.py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    agent.write_text(AGENT.format(folders=[str(FOLDER), str(package.parent)]))
    write_model(tmp_path / "model")
    settings: dict[str, Any] = {
        "model.path": str(tmp_path / "model"), "model.dtype": "fp32", "optim.lr": 5e-3, "data.max_prompt_tokens": 16,
        "data.source": f"{agent}:Rows", "data.chat.template": "true", "rollout.source": f"{agent}:Agent",
        "rollout.n": 4, "rollout.max_new_tokens": 16, "reward.source": "environment", "checkpoint.resume": "never",
        "checkpoint.save_final": False, "trainer.run_dir": str(tmp_path / "run"), "trainer.steps": 3,
        "trainer.prompts_per_step": 2, "trainer.minibatch_size": 2, "trainer.timeout_s": 60.0,
        "trainer.val_interval": 3, "metrics.records.interval": 1, "metrics.progress_bar": False,
    }  # fmt: skip
    ((sampled,),) = run_ranks(1, train_all, [settings], timeout_s=280)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    asked = {f"<u>{n} b<e>\n<a>" for n in range(6)}
    prompts, rewards = set[str](), list[float]()
    for step in range(1, 4):
        record = read_record(tmp_path / "run" / "records" / f"step_{step:06d}")
        for tokens, mask, reward in zip(
            *(record.tensors[key] for key in ("tokens", "loss_mask", "rewards")), strict=True
        ):
            own = mask.nonzero()[0].tolist()
            prompts.add(tokenizer.decode(tokens[: own[0]]))
            text = tokenizer.decode(tokens[own[0] : own[-1] + 1], skip_special_tokens=True).strip()
            assert float(reward) == pytest.approx(text.count("a") / max(len(text), 1)), text
            rewards.append(float(reward))
    assert prompts == asked  # six rows, two a step
    assert len(rewards) == 24
    assert len({tuple(read) for read, *_ in sampled}) == 7  # and the held-out one
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "reward/mean" in step]
    assert len(trained) == 3
    assert min(step["actor/grad_norm"] for step in trained) > 0
    assert trained[0]["reward/mean"] == pytest.approx(sum(rewards[:8]) / 8, rel=1e-5)
