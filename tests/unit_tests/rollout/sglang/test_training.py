"""PPO at TP2 of a quantised checkpoint with a real server, started as a user would start it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mega_rl.cli.quickstart import sums
from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.tracking.metrics.records import read_metrics
from mega_rl.verify import audit_run
from mega_rl.verify.audit import read_steps
from tests.helpers.selection import FULL
from tests.helpers.sglang import needs_sglang
from tests.unit_tests.converters.wrapped import quantise

pytestmark = pytest.mark.skipif(not FULL, reason="make test-full: a minute of training with a real server")

ROOT = Path(__file__).parents[4]
STEPS = 4
REWARD = '''
def score(prompt: str, response: str, answer: str) -> float:
    """The share of sevens among four digits."""
    return response.count("7") / 4
'''

AGENT = '''
import asyncio
from dataclasses import dataclass
import mega_rl

@dataclass
class Agent(mega_rl.Environment):
    """Two turns with a tool between them; the second one of some prompts is a row of its own, or is missing."""

    context: mega_rl.RolloutContext

    async def run(self, policy, prompt, trajectory):
        turn = await policy.turn(limit=2)
        await asyncio.sleep(0.05 * (prompt.index % 4))
        if prompt.index % 3 == 0:
            trajectory.open((*prompt.token_ids, turn.token_ids[0]))
        elif len(turn.token_ids) == 2:
            trajectory.give(prompt.token_ids[:1])
        await policy.turn()
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[int]]:
    """The folder of a finished run, its folder of temporary files, and the processes that it had."""
    folder = tmp_path_factory.mktemp("ppo")
    sums.write_data(folder / "data", seed=0)
    write_fresh_model(folder / "model", sums.TOKENS, seed=0)
    quantise(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "tmp").mkdir()
    overrides = [
        f"model.path={folder / 'model'}",
        f"data.train_files=[{folder / 'data' / 'train.jsonl'}]",
        f"data.val_files=[{folder / 'data' / 'held_out.jsonl'}]",
        f"reward.function={folder / 'reward.py'}:score",
        "reward.source.workers=1",  # which score each sample as it comes
        f"trainer.run_dir={folder / 'run'}",
        f"trainer.steps={STEPS}",
        "trainer.prompts_per_step=16",
        "trainer.minibatch_size=16",
        "trainer.val_interval=0",
        "data.val_files=[]",
        "optim.lr=3e-3",
        "optim.warmup_steps=0",
    ]
    command = [sys.executable, "-m", "mega_rl.cli", "train", "--nproc-per-node", "2"]
    command += ["--config", "quickstart_sglang", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    pids: set[int] = set()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        ended = threading.Event()

        def keep_looking() -> None:
            while not ended.wait(0.2):
                with contextlib.suppress(psutil.Error):
                    pids.update(child.pid for child in psutil.Process(process.pid).children(recursive=True))

        watcher = threading.Thread(target=keep_looking, daemon=True)
        watcher.start()
        try:
            code = process.wait(timeout=500)
        finally:
            process.kill()
            ended.set()
            watcher.join()
    printed = (folder / "output").read_text(errors="replace")
    assert code == 0, printed[-4000:]
    return folder / "run", folder / "tmp", pids


@needs_sglang
@pytest.mark.timeout(560)
def test_the_policy_learns_from_what_the_server_samples(run: tuple[Path, Path, set[int]]) -> None:
    metrics = [record.metrics for record in read_metrics(run[0] / "metrics.jsonl")]
    assert len(metrics) == STEPS
    rewards = [one["reward/mean"] for one in metrics]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.4, rewards
    for step, one in enumerate(metrics, start=1):
        # One version is published before the first step and one after each.
        assert one["rollout/weight_version"] == step + 1
        # float32 on both sides: sums of some dozen products in another order.
        assert one["rollout/logprob_diff_max"] < 1e-4
        assert one["sync/probe_logprob_diff_max"] < 1e-4
        assert one["sync/failed_servers"] == 0
        assert one["rollout/sequences"] == 64
        assert one["reward/timeouts"] == one["reward/crashes"] == 0


@needs_sglang
@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    "how", ["lock", "free", "lock agent", "free agent", "lock in turns", "free agent in turns", "lock within"]
)
def test_a_run_ahead_survives_a_kill_and_passes_its_audit(run: tuple[Path, Path, set[int]], how: str) -> None:
    """Three steps ahead, killed in the middle: it goes on, and no ticket is lost, doubled or too old.

    In turns its servers release and resume their memory around each step. Within: weights are also published in the
    middle of each step.
    """
    folder, (arrival, *_), agent, in_turns = run[0].parent, how.split(), "agent" in how, "in turns" in how
    within = "within" in how
    own = folder / how.replace(" ", "_")
    command = [sys.executable, "-m", "mega_rl.cli", "train", "--nproc-per-node", "2", "--config", "quickstart_sglang"]
    command += [
        f"model.path={folder / 'model'}", f"data.train_files=[{folder / 'data' / 'train.jsonl'}]", "data.val_files=[]",
        f"reward.function={folder / 'reward.py'}:score", f"trainer.run_dir={own}", "trainer.steps=10",
        "trainer.prompts_per_step=16", "trainer.minibatch_size=16", "trainer.val_interval=0", "optim.lr=1e-3",
        "optim.warmup_steps=0", "algorithm.correction=tis", "trainer.async_steps=3",
        f"rollout.sglang.arrival={arrival}", "checkpoint.save_interval=1", "checkpoint.keep=12",
        "checkpoint.resume=auto", "metrics.records.interval=1",
    ]  # fmt: skip
    if in_turns:
        command.append("rollout.sglang.placement=colocated")
    if agent:
        (folder / "agent.py").write_text(AGENT)
        command.append(f"rollout.source={folder / 'agent.py'}:Agent")
    if within:
        command += ["trainer.minibatch_size=8", "rollout.sglang.sync.interval=1", "rollout.max_new_tokens=24"]
    environment, written = {**os.environ, "OMP_NUM_THREADS": "1"}, own.with_suffix(".log")
    with written.open("wb") as output:
        given: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": output, "stderr": subprocess.STDOUT}
        first = subprocess.Popen(command, **given)
        deadline = time.monotonic() + 250
        while not (own / "checkpoints" / "step_000004").is_dir():
            assert first.poll() is None, written.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first.kill()
        first.wait()
        assert subprocess.run(command, timeout=250, **given).returncode == 0
    audit = subprocess.run(
        [sys.executable, "-m", "mega_rl.cli", "audit", own, "--json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "resumed after step" in written.read_text(errors="replace")
    steps = [record.metrics for record in read_metrics(own / "metrics.jsonl")]
    assert len(steps) == 10
    assert 1 <= max(one["rollout/staleness_max"] for one in steps) <= 3
    assert [one["rollout/weight_version"] for one in steps] == [1 + (1 + within) * step for step in range(1, 11)]
    if within:
        known = [(step.description.begun, step.tensors) for step in read_steps(own)]
        middle = [((one["token_versions"] % 2 == 0) & one["loss_mask"]).sum() for _, one in known]
        assert sum(count > 0 for count in middle) > 5, middle
        return
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.2
    assert not agent or max(one.get("agent/turns_mean", 0.0) for one in steps) > 1.5
    assert in_turns == all("memory/generating_bytes" in one for one in steps)


@needs_sglang
@pytest.mark.timeout(560)
@pytest.mark.parametrize("within", [False, True])
def test_responses_keep_their_cache_over_updates(
    run: tuple[Path, Path, set[int]], within: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two steps ahead, no update interrupts a response, and the tokens before it have their version's log-probs.

    Within: weights are also published in the middle of each step.
    """
    folder = run[0].parent
    command = [sys.executable, "-m", "mega_rl.cli", "train", "--config", "quickstart_sglang"]
    command += [
        f"model.path={folder / 'model'}", f"data.train_files=[{folder / 'data' / 'train.jsonl'}]", "data.val_files=[]",
        f"reward.function={folder / 'reward.py'}:score", f"trainer.run_dir={tmp_path / 'kept'}", "trainer.steps=6",
        "trainer.prompts_per_step=32", "trainer.minibatch_size=32", "trainer.val_interval=0", "optim.lr=1e-3",
        "optim.warmup_steps=0", "algorithm.correction=tis", "trainer.async_steps=2", "engine.megatron.tp=1",
        "rollout.max_new_tokens=56", "rollout.sglang.arrival=free", "rollout.sglang.sync.in_flight=keep",
        "rollout.sglang.max_concurrency=16",
        "metrics.records.interval=1", "metrics.records.weights=true",
        *(("trainer.minibatch_size=16", "rollout.sglang.sync.interval=1") if within else ()),
    ]  # fmt: skip
    with (tmp_path / "output").open("wb") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=400, check=False
        )
    assert ended.returncode == 0, (tmp_path / "output").read_text(errors="replace")[-4000:]
    monkeypatch.setattr(audit_run, "LOGPROB_ATOL", 1e-4)
    audit = audit_run.audit_run(tmp_path / "kept", tmp_path, versions=10)
    assert audit.breaches == []
    assert audit.checked["logprobs"] > 500
    assert any("sampled on KV cache" in what for what in audit.unchecked)
    of_two = 0
    for step in read_steps(tmp_path / "kept"):
        versions, kept = step.tensors["token_versions"], step.tensors["kept"]
        for row, mask in enumerate(step.tensors["loss_mask"]):
            own = versions[row, mask]
            # A request whose prompt was read before an update may be kept from its first token on.
            assert not (own != own[0])[~kept[row, mask]].any(), "a response was interrupted"
            of_two += len(set(own.tolist())) > 1 and not kept[row, mask][0]
    assert of_two > 10
    steps = [record.metrics for record in read_metrics(tmp_path / "kept" / "metrics.jsonl")]
    assert max(one.get("rollout/kept_tokens_fraction", 0.0) for one in steps) > 0.05
    assert max(one["sync/probe_logprob_diff_max"] for one in steps) < 1e-4


@needs_sglang
@pytest.mark.timeout(560)
def test_nothing_is_left_running(run: tuple[Path, Path, set[int]]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in run[2]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in run[2] if psutil.pid_exists(pid)]
    assert not list(run[1].glob("mega-rl-sglang-*"))
