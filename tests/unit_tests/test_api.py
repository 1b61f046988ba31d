"""The Python interface: its names, the example of its page, and what ends with a trainer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import mega_rl
from mega_rl.config.keys import with_settings
from mega_rl.config.loader import load
from tests.helpers.distributed import run_ranks
from tests.helpers.inputs import write_prompts
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.helpers.selection import without
from tests.unit_tests.test_metrics_page import documented

ROOT = Path(__file__).parents[2]
# Programs of the page in its order; the second has a reward of its own, too.
PROGRAMS = without({"reward": 0, "estimator": 1, "sources": 2}, "reward", "sources")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the example of the page reads."""
    folder = tmp_path_factory.mktemp("api")
    write_tiny_checkpoint(folder / "my_model", num_hidden_layers=1, max_position_embeddings=2048)
    write_digit_tokenizer(folder / "my_model", vocab_size=50)
    (folder / "my_model" / "chat_template.jinja").write_text("<eos>{{ messages[0].content }}<eos>")
    write_prompts(folder / "prompts.jsonl", rows=8)
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter in `folder`, without a launcher's environment."""
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


# -- names ------------------------------------------------------------------------------------------------------------


def test_every_name_of_the_interface_is_there_and_on_the_page() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for name in mega_rl.__all__:
        assert getattr(mega_rl, name) is not None
        assert name in dir(mega_rl)
        assert name in page or name.startswith("__"), name
    with pytest.raises(AttributeError, match="module 'mega_rl' has no attribute 'fit'"):
        mega_rl.fit  # noqa: B018


def test_a_module_may_be_imported_before_prepare(folder: Path) -> None:
    code = "import mega_rl.trainer.assemble\nfrom mega_rl.parallel.accelerator import prepare\nprint(prepare().name)"
    done = python(folder, "-c", code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout in ("cpu\n", "cuda\n")


# -- configs ----------------------------------------------------------------------------------------------------------


def test_overrides_are_texts_or_a_mapping() -> None:
    texts = mega_rl.load_config("quickstart", ["optim.lr=0.5", "data.train_files=[a.jsonl]", "rollout.n=3"])
    flat = {"optim.lr": 0.5, "data.train_files": (Path("a.jsonl"),), "rollout.n": 3}
    sections = {"optim": {"lr": 0.5}, "data": {"train_files": ["a.jsonl"]}, "rollout": {"n": 3}}
    assert texts == mega_rl.load_config("quickstart", flat) == mega_rl.load_config(Path("quickstart"), sections)
    assert mega_rl.load_config(None, "optim.lr=0.5").optim.lr == 0.5
    assert mega_rl.load_config() == load(None)


def test_mistakes_of_a_mapping_are_shown_together() -> None:
    with pytest.raises(mega_rl.UserError) as error:
        mega_rl.load_config(None, {"optim.learning_rate": 1, "rollout": {"n": "two"}, "modle": {"path": "x"}})
    assert str(error.value).splitlines() == [
        "optim.learning_rate: unknown key; TRL's learning_rate is optim.lr here",
        "modle: unknown key; did you mean model?",
        "rollout.n='two': needs a whole number, at least 1",
    ]


# -- trainers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", PROGRAMS.values(), ids=PROGRAMS)
def test_the_examples_of_the_page_run(folder: Path, number: int) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(programs) == 3
    (folder / "program.py").write_text(programs[number])
    done = python(folder, "program.py")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"1 -?\d+\.\d+\n2 -?\d+\.\d+\n", done.stdout), done.stdout
    assert "Warning" not in done.stderr, done.stderr
    assert ("step 2 |" in done.stderr) == (number == 0)  # it alone asks for a line of each step


def settings(folder: Path, run: str, **trainer: Any) -> dict[str, Any]:
    """A run of one step in `folder`/`run`."""
    sizes = {"prompts_per_step": 2, "minibatch_size": 2, "steps": 1, "microbatch": {"max_tokens": 64}}
    return {
        "model": {"path": folder / "my_model", "dtype": "fp32"},
        "data": {"train_files": [folder / "prompts.jsonl"], "max_prompt_tokens": 8},
        "algorithm.advantage": "grpo",
        "rollout": {"n": 2, "max_new_tokens": 4},
        "metrics": {"tensorboard": False, "rollout_interval": 1, "rollout_samples": 1},
        "trainer": {"run_dir": folder / run, "device": "cpu", **sizes, **trainer},
    }


def one(prompt: str, response: str, answer: str) -> float:
    """Score everything alike."""
    return 1.0


def broken(prompt: str, response: str, answer: str) -> float:
    """Score nothing."""
    raise KeyError(answer)


def use_trainers(rank: int, folder_text: str) -> dict[str, Any]:
    """Build trainers after one another, wrongly and well; returns what came of it."""
    folder = Path(folder_text)
    seen: dict[str, Any] = {}

    def error(key: str, call: Any) -> None:
        try:
            call()
        except (mega_rl.UserError, mega_rl.RunError) as problem:
            seen[key] = f"{type(problem).__name__}: {problem}"

    config = mega_rl.load_config(None, settings(folder, "first", steps=2))
    config = with_settings(config, {"data.chat.template": "true"})
    handler = signal.getsignal(signal.SIGTERM)
    with mega_rl.Trainer(config, reward=one) as trainer:
        error("second", lambda: mega_rl.Trainer(config))
        outcome = trainer.fit()
        error("again", trainer.fit)
    error("closed", trainer.fit)
    trainer.close()
    seen["handlers are back"] = signal.getsignal(signal.SIGTERM) is handler
    seen["outcome"] = [outcome.steps, outcome.exit_code, str(outcome.run_dir)]
    seen["rewards"] = [record.metrics["reward/mean"] for record in outcome.history()]
    broken_config = mega_rl.load_config(None, settings(folder, "second"))
    error("broken", lambda: mega_rl.train(broken_config, reward=broken))
    error("signature", lambda: mega_rl.train(broken_config, reward=lambda text: 1.0))  # type: ignore[arg-type, misc]
    thread = threading.Thread(target=lambda: seen.update(thread=mega_rl.train(broken_config, reward=one).steps))
    thread.start()
    thread.join(60)
    http = mega_rl.load_config(
        None, {**settings(folder, "third"), "reward": {"source": {"name": "http", "url": "http://[::1]/"}}}
    )
    error("http", lambda: mega_rl.Trainer(http, reward=one))
    return seen


def test_trainers_end_and_others_follow(folder: Path) -> None:
    (seen,) = run_ranks(1, use_trainers, str(folder), device="cpu")
    assert seen["second"] == (
        "UserError: another mega_rl.Trainer is open in this process; close it, or use it in a with block"
    )
    assert seen["again"] == "UserError: this mega_rl.Trainer has been fitted; build another one"
    assert seen["closed"] == "UserError: this mega_rl.Trainer is closed; build another one"
    assert seen["handlers are back"]
    assert seen["outcome"] == [2, 0, str(folder / "first")]
    assert seen["rewards"] == [1.0, 1.0]
    assert re.match(
        "RewardError: . of . responses have no score, .* the reward function raised KeyError: ", seen["broken"]
    )
    assert seen["signature"].startswith("UserError: reward.function='python:tests.unit_tests.test_api.use_trainers.")
    assert "it takes one response, by the names prompt, response, answer" in seen["signature"]
    assert seen["thread"] == 1, "a run outside the main thread, after one that failed"
    assert seen["http"] == (
        "UserError: reward: a function is given, but reward.source=http; set reward.source=function"
    )
    written = (folder / "first" / "config.yaml").read_text()
    assert "function: python:tests.unit_tests.test_api.one" in written
    rows = [json.loads(line) for line in (folder / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert sorted({name for row in rows for name in row} - documented() - {"step"}) == [], "docs/metrics.md"
    row = json.loads((folder / "first" / "rollouts" / "step_000002.jsonl").read_text().splitlines()[0])
    assert row["rendered_prompt"] == f"<eos>{row['prompt']}<eos>", "what the model read, template and special tokens"
    assert (row["step"], row["prompt_tokens"]) == (2, 6)
