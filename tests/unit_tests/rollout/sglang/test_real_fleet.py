"""A training run over real servers that join late, leave and are killed, started as a user would start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from mega_rl.cli.quickstart import sums
from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.rollout.sglang.control import Keys
from mega_rl.tracking.metrics.records import read_metrics
from mega_rl.types import Metrics
from tests.helpers.selection import FULL
from tests.helpers.sglang import needs_sglang, running_server, wait_until

pytestmark = pytest.mark.skipif(not FULL, reason="make test-full: minutes of training with three real servers")

ROOT = Path(__file__).parents[4]
STEPS = 14


@needs_sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ahead", [0, 2])
def test_run_goes_on_while_servers_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    sums.write_data(tmp_path / "data", seed=0)
    write_fresh_model(tmp_path / "model", sums.TOKENS, seed=0)
    keys = Keys.random()
    keys.write(tmp_path / "keys.json")
    monkeypatch.setattr(Keys, "random", lambda: keys)
    registry = tmp_path / "fleet.txt"
    command = [sys.executable, "-m", "mega_rl.cli", "train", "--nproc-per-node", "2", "--config", "quickstart_sglang"]
    command += [
        f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'data' / 'train.jsonl'}]",
        "data.val_files=[]", f"reward.function={tmp_path / 'data' / 'reward.py'}:points",
        f"trainer.run_dir={tmp_path / 'run'}", f"trainer.steps={STEPS}", "trainer.prompts_per_step=16",
        "trainer.minibatch_size=16", "trainer.val_interval=0", "metrics.records.interval=1",
        f"rollout.sglang.urls={registry}", f"rollout.sglang.keys_file={tmp_path / 'keys.json'}",
        "rollout.sglang.server.args={}",
    ]  # fmt: skip
    if ahead:
        command += [f"trainer.async_steps={ahead}", "algorithm.correction=tis", "rollout.sglang.arrival=free"]

    def steps() -> list[Metrics]:
        path = tmp_path / "run" / "metrics.jsonl"
        return [record.metrics for record in read_metrics(path)] if path.exists() else []

    def log() -> str:
        return (tmp_path / "output").read_text(errors="replace")

    with ExitStack() as stack:
        starts = [running_server(tmp_path / "model", tmp_path / f"server-{i}", index=i) for i in range(3)]
        with ThreadPoolExecutor(3) as pool:
            servers = list(pool.map(stack.enter_context, starts))
        urls = [endpoint.url for _, endpoint in servers]
        output = stack.enter_context((tmp_path / "output").open("wb"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        registry.write_text(f"{urls[0]}\n")
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(run.kill)

        def wait(what: str, ready: int, left: int) -> None:
            def true() -> bool:
                assert run.poll() is None, f"{what}: {log()[-4000:]}"
                last = steps()[-1] if steps() else {}
                return last.get("sglang/servers_ready") == ready and last.get("sglang/servers_left") == left

            wait_until(what, true, timeout_s=200.0)

        wait("the first alone", 1, 0)
        registry.write_text(f"{urls[0]}\n{urls[1]}\n{urls[2]}\n")
        wait("two join", 3, 0)
        registry.write_text(f"{urls[1]}\n{urls[2]}\n")
        wait("the first leaves", 2, 1)
        servers[0][0].stop()
        os.killpg(servers[2][0].pid, signal.SIGKILL)
        wait("the third was killed", 1, 2)
        assert run.wait(timeout=300) == 0, log()[-4000:]
    for said in (
        f"SGLang server 1 at {urls[1]} joins",
        f"SGLang server 2 at {urls[2]} joins",
        f"SGLang server 0 at {urls[0]} leaves: it is no longer in {registry}",
        f"SGLang server 2 at {urls[2]} leaves: {urls[2]}, /health: it does not answer",
    ):
        assert said in " ".join(log().split()).replace("- ", ""), log()[-4000:]
    metrics = steps()
    assert len(metrics) == STEPS
    assert max(one["rollout/logprob_diff_max"] for one in metrics if "rollout/logprob_diff_max" in one) < 1e-4
    assert max(one["sync/probe_logprob_diff_max"] for one in metrics) < 1e-4
    audit = subprocess.run(
        [sys.executable, "-m", "mega_rl.cli", "audit", tmp_path / "run", "--json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
