"""The examples: demonstrations are conversations of their environments, and their recipes train."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import mega_rl
from mega_rl.agents.environment import Answer, Runner, TurnRequest, in_batches
from mega_rl.agents.trajectory import Trajectory, Turn
from mega_rl.data.chat import ChatTemplate
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.types import Prompt
from mega_rl.workers.rollout import RolloutContext
from tests.helpers import sandboxes
from tests.helpers.distributed import run_ranks

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = {"calculator": "Calculator", "search": "Search", "coding": "Coder"}
NUM_PLAYED = 24


def skip_without_needs(name: str) -> None:
    """Skip the test where an example's packages or programs are missing."""
    if name == "search":
        pytest.importorskip("bm25s", reason="pip install 'mega_rl[examples]'")
    if name == "coding" and (problem := sandboxes.problem()):
        pytest.skip(problem)


@pytest.fixture(scope="module", params=list(ENVIRONMENTS))
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return an example's name, and a folder with its inputs."""
    name = str(request.param)
    skip_without_needs(name)
    folder = tmp_path_factory.mktemp("examples") / name
    importlib.import_module(f"examples.{name}.prepare").main(folder)
    return name, folder


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_demonstrations_are_what_the_environment_plays(example: tuple[str, Path]) -> None:
    name, folder = example
    module = importlib.import_module(f"examples.{name}.environment")
    tokenizer = AutoTokenizer.from_pretrained(folder / "fresh_model")
    stop, one = int(tokenizer.eos_token_id), SingleRank()
    context = RolloutContext(
        tokenizer, None, Sampling(1.0, 1.0, 0, 200, (stop,)), 1, 0, one, one, lambda: 1, ChatTemplate(tokenizer)
    )
    scripts, trajectories, wholes = [], [], []
    for place, demonstration in enumerate(read(folder / "data" / "demonstrations.jsonl")[:NUM_PLAYED]):
        asked, *rest = demonstration["messages"]
        opening, whole = (
            tuple(tokenizer.apply_chat_template(part, tools=demonstration["tools"], return_dict=False, **how))
            for part, how in (([asked], {"add_generation_prompt": True}), ([asked, *rest], {}))
        )
        turns = [one for one in rest if one["role"] == "assistant"]
        ready = tuple(tokenizer("assistant\n")["input_ids"])
        starts = [end for end in range(len(ready), len(whole)) if whole[end - len(ready) : end] == ready]
        scripts.append([whole[start : whole.index(stop, start) + 1] for start in starts])
        assert len(turns) == len(scripts[-1])
        assert tokenizer.unk_token_id not in whole
        prompt = Prompt(place, opening, "", demonstration["answer"], (("user", asked["content"]),))
        trajectories.append(Trajectory(prompt, place, 0, 200))
        wholes.append(whole[: -len(tokenizer("\n")["input_ids"])])
    said = Counter[int]()

    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        spoken = []
        for one in requests:
            ids = scripts[one.key[0]][said[one.key[0]]]
            said[one.key[0]] += 1
            spoken.append(Turn(ids, (-0.5,) * len(ids), (), True))
        return spoken

    environment = getattr(module, ENVIRONMENTS[name])(context)
    played = Runner(environment, "the example", len(tokenizer)).run(trajectories, partial(in_batches, sample=sample))
    assert [one.what for one in played] == [""] * NUM_PLAYED
    assert [one.trajectory.branch.token_ids for one in played] == wholes
    scores = [
        one.trajectory.score
        if name == "coding"
        else module.right(
            "",
            "".join(tokenizer.decode(turn.token_ids[:-1]) for turn in one.trajectory.turns),
            one.trajectory.prompt.answer,
        )
        for one in played
    ]
    assert set(scores) == {0.0, 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(0)\ndef f(x):\n    return x\n",
        "def f(x):\n    raise SystemExit(0)\n",
        "class Any:\n    def __eq__(self, other): return True\ndef f(x):\n    return Any()\n",
    ],
)
def test_no_edit_decides_the_verdict_of_its_tests(text: str) -> None:
    skip_without_needs("coding")
    module = importlib.import_module("examples.coding.environment")
    assert asyncio.run(module.File("def f(x):\n    return x + 3\n", "[3, 4]").test()) == "passed"
    assert asyncio.run(module.File(text, "[3, 4]").test()) != "passed"


def train_a_step(rank: int, name: str, folder: str) -> dict[str, float]:
    """Return the metrics of a step with the fresh model."""
    inputs = Path(folder)
    config = mega_rl.load_config(
        ROOT / "examples" / name / "recipe.yaml",
        {
            "engine.megatron.tp": 1, "model.path": str(inputs / "fresh_model"), "rollout.n": 2,
            "data.train_files": [str(inputs / "data" / "train.jsonl")], "data.val_files": [],
            "trainer.run_dir": str(inputs / "run"), "trainer.steps": 1, "trainer.val_interval": 0,
            "trainer.prompts_per_step": 4, "trainer.minibatch_size": 4,
        },
    )  # fmt: skip
    return dict(mega_rl.train(config).history()[-1].metrics)


def test_a_recipe_trains_a_step(example: tuple[str, Path]) -> None:
    name, folder = example
    (metrics,) = run_ranks(1, train_a_step, name, str(folder), device="cpu")
    assert metrics["rollout/sequences"] == 8
    assert metrics["agent/end_error_fraction"] == 0
    assert metrics["rollout/logprob_diff_max"] < 1e-4
