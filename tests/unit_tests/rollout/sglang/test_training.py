"""PPO at TP2 with a real server, started as a user would start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from mega_rl.cli.quickstart import sums
from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.selection import FULL
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.skipif(not FULL, reason="make test-full: a minute of training with a real server")

ROOT = Path(__file__).parents[4]
STEPS = 4
REWARD = '''
def score(prompt: str, response: str, answer: str) -> float:
    """The share of sevens among four digits."""
    return response.count("7") / 4
'''


@dataclass
class Watch:
    """What was seen of the servers' keys and of all command lines while a run went on."""

    scratch: Path
    keys: set[str] = field(default_factory=set)
    command_lines: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)

    def look(self, pid: int) -> None:
        """Read key files and the command lines of the processes below `pid`."""
        for file in self.scratch.glob("*/*"):
            try:
                actual = json.loads(file.read_text())
                assert file.stat().st_mode & 0o077 == 0
                self.keys |= {actual["api_key"], actual["admin_key"]}
            except (OSError, ValueError, KeyError, TypeError, UnicodeDecodeError):
                continue  # being written, or no file of keys
        try:
            for process in psutil.Process(pid).children(recursive=True):
                self.pids.add(process.pid)
                self.command_lines.add(" ".join(process.cmdline()))
        except psutil.Error:
            return


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch, str]:
    """The folder of a finished run, what was seen on the way, and what it printed."""
    folder = tmp_path_factory.mktemp("ppo")
    sums.write_data(folder / "data", seed=0)
    sums.write_model(folder / "model", seed=0)
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
    watch = Watch(folder / "tmp")
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        ended = threading.Event()

        def keep_looking() -> None:
            while not ended.wait(0.2):
                watch.look(process.pid)

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
    return folder / "run", watch, printed


@needs_sglang
@pytest.mark.timeout(560)
def test_the_policy_learns_from_what_the_server_samples(run: tuple[Path, Watch, str]) -> None:
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
def test_keys_are_written_nowhere(run: tuple[Path, Watch, str]) -> None:
    folder, watch, printed = run
    assert len(watch.keys) == 2, "the keys of one server were to be seen while it ran"
    assert any("--tp-size" in line for line in watch.command_lines)
    written = [path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 3
    for key in watch.keys:
        assert not any(key in text for text in [*written, *watch.command_lines, printed])


@needs_sglang
@pytest.mark.timeout(560)
def test_nothing_is_left_running(run: tuple[Path, Watch, str]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in run[1].pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in run[1].pids if psutil.pid_exists(pid)]
    assert not list(run[1].scratch.glob("mega-rl-sglang-*"))
