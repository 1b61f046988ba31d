"""Sampled evaluations on real servers: the same samples again, and training that they leave as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mega_rl.cli.quickstart import sums
from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.selection import FULL
from tests.helpers.sglang import needs_sglang
from tests.unit_tests.rollout.sglang.test_training import REWARD

pytestmark = [
    pytest.mark.skipif(not FULL, reason="make test-full: six commands with a real server, a minute each"),
    needs_sglang,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    sums.write_data(folder, seed=0, num_held_out=6)
    write_fresh_model(folder / "model", sums.TOKENS, seed=0)
    (folder / "reward.py").write_text(REWARD)
    return folder


def mega_rl(*arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mega_rl.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_same_command_gives_the_same_samples(inputs: Path) -> None:
    """In two parts on two replicas, too, and with a length of its own."""
    parts = ("--nproc-per-node", "2", "validation.chunk=8", "rollout.max_new_tokens=2")
    for out, more in (("one", ()), ("two", ()), ("parts", parts)):
        mega_rl(
            "eval", "--out", f"{inputs}/{out}", f"model.path={inputs}/model", "validation.max_new_tokens=4",
            f"validation.sets.sums={inputs}/held_out.jsonl", "validation.n=4", "validation.k=[1,4]",
            f"reward.function={inputs}/reward.py:score",
            "model.dtype=fp32", "trainer.device=cpu", "data.max_prompt_tokens=16", "rollout.backend=sglang",
            "rollout.sglang.server.args.max_total_tokens=20000", *more,
        )  # fmt: skip
    one = (inputs / "one" / "samples.jsonl").read_text()
    assert len(one.splitlines()) == 24
    assert len(set(one.splitlines())) == 24
    assert (inputs / "two" / "samples.jsonl").read_text() == one
    assert (inputs / "parts" / "samples.jsonl").read_text() == one
    assert max(json.loads(line)["response_tokens"] for line in one.splitlines()) == 4
    sets = [json.loads((inputs / out / "results.json").read_text())["sets"] for out in ("one", "parts")]
    assert sets[0] == sets[1]


def test_colocated_servers_of_several_ranks_validate_in_parts(inputs: Path) -> None:
    """Colocated, TP2: sampled, longer than training, two sets in parts of four prompts, records that replay."""
    mega_rl(
        "train", "--nproc-per-node", "2", "--config", "quickstart_sglang", f"model.path={inputs}/model",
        f"data.train_files=[{inputs}/train.jsonl]", f"data.val_files=[{inputs}/held_out.jsonl]",
        f"validation.sets.more={inputs}/held_out.jsonl", f"reward.function={inputs}/reward.py:score",
        f"trainer.run_dir={inputs}/colocated", "trainer.steps=2", "trainer.prompts_per_step=8",
        "trainer.minibatch_size=8", "trainer.val_interval=1", "validation.n=3", "validation.temperature=0.7",
        "validation.chunk=12", "validation.max_new_tokens=6", "rollout.sglang.placement=colocated",
        "metrics.rollout_interval=1", "metrics.records.interval=1", "metrics.records.weights=true",
    )  # fmt: skip
    records = list(read_metrics(inputs / "colocated" / "metrics.jsonl"))
    assert [record.step for record in records] == [0, 1, 2]
    for record in records:
        for area in ("val/", "val/more/"):
            assert record.metrics[f"{area}pass_at_1"] <= record.metrics[f"{area}pass_at_3"]
        assert record.metrics["val/response_tokens_mean"] > 4
    assert records[2].metrics["rollout/response_tokens_max"] <= 4
    mega_rl("replay", f"{inputs}/colocated/records/step_000002", "--layouts", "1")
