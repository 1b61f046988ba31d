"""Runs on a real Slurm of this machine end with the weights of torchrun's on one node; `make test-slurm`.

Two nodes of three train with two ranks each, tensor-parallel inside and data-parallel between them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.slurm.cluster import NODE_TIMEOUT_S, NODES, SlurmCluster, missing

pytestmark = [
    pytest.mark.skipif(os.environ.get("MEGA_RL_TESTS") != "slurm", reason="ten minutes: make test-slurm"),
    pytest.mark.skipif(missing() != "", reason=f"Slurm is not installed ({missing()}): docs/schedulers.md"),
    pytest.mark.timeout(900),
]

STEPS = 24
# Every response has a reward, so that every step changes the weights; a file of that name holds the run up.
REWARD = """
import pathlib
import time


def score(prompt: str, response: str, answer: str) -> float:
    if pathlib.Path(__file__).with_name("slow").exists():
        time.sleep(0.3)
    return sum(map(ord, prompt + response)) % 7 / 7
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
RUN_S = 300.0  # for a run of some twenty seconds
LIMIT_MINUTES = 60  # of a job
# A node refuses a start whose credential is no younger, in whole seconds, than the end of the job's last start there;
# Slurm's own delay of two minutes is for that.
REQUEUE_DELAY_S = 2
CLI = (sys.executable, "-m", "mega_rl.cli")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mega_rl.cli.quickstart import sums
    from mega_rl.cli.quickstart.inputs import write_fresh_model

    folder = tmp_path_factory.mktemp("inputs")
    sums.write_data(folder / "data", seed=0)
    write_fresh_model(folder / "model", sums.TOKENS, seed=0)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hash of the weights that torchrun's ranks end with."""
    run_dir = tmp_path_factory.mktemp("torchrun")
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "mega_rl.cli", "train"]
    settings = ["--config", "quickstart", *arguments(inputs, run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *program, *settings], check=True, env=environment, timeout=RUN_S)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(record["actor/grad_norm"] > 0 for record in records if "actor/grad_norm" in record)
    return weights(run_dir)


def arguments(inputs: Path, run_dir: Path) -> list[str]:
    settings = {
        "trainer.run_dir": run_dir,
        "trainer.steps": STEPS,
        "trainer.prompts_per_step": 16,
        "trainer.minibatch_size": 16,
        "trainer.val_interval": 0,
        "trainer.device": "cpu",
        "engine.megatron.tp": 2,
        "model.path": inputs / "model",
        "data.train_files": f"[{inputs / 'data' / 'train.jsonl'}]",
        "data.val_files": "[]",
        "reward.function": f"{inputs / 'reward.py'}:score",
        "checkpoint.save_interval": 1,
        "checkpoint.resume": "auto",
        "checkpoint.hf_final": "true",
        "metrics.tensorboard": "false",
        "metrics.rollout_interval": 0,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def weights(run_dir: Path) -> str:
    files = sorted((run_dir / "hf").rglob("*.safetensors"))
    assert files, f"no weights below {run_dir}"
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    sys.stdout.write(f"{run_dir.parent.name}: sha256 {digest}\n")
    return digest


class Run:
    """A run that `mega-rl launch slurm --submit` has submitted."""

    def __init__(self, cluster: SlurmCluster, inputs: Path, folder: Path, options: Sequence[str] = ()) -> None:
        self.cluster, self.run_dir = cluster, folder / "run"
        launch = [
            "launch",
            "slurm",
            "quickstart",
            "--submit",
            "--nodes=2",
            "--nproc-per-node=2",
            f"--time={LIMIT_MINUTES}",
        ]
        launch += [f"--sbatch=output={folder / 'job.out'}", "--env=OMP_NUM_THREADS", *options]
        self.output = folder / "job.out"
        self.number = int(
            cluster.call(*CLI, *launch, *arguments(inputs, self.run_dir), environment={"OMP_NUM_THREADS": "1"})
        )

    @property
    def state(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    def step(self) -> int:
        """Return the steps of the newest checkpoint, 0 without one."""
        return max((int(path.name[5:]) for path in (self.run_dir / "checkpoints").glob("step_*")), default=0)

    def wait_for_step(self, step: int) -> None:
        self._wait(lambda: self.step() >= step or self.state["JobState"] in ENDED, f"step {step}")
        assert self.state["JobState"] == "RUNNING", self.log()

    def end(self) -> str:
        """Wait for the end of the job and return its state."""
        self._wait(lambda: self.state["JobState"] in ENDED, "the job's end")
        return self.state["JobState"]

    def wait_for_requeue(self) -> None:
        """Wait until the job is pending again, and have it start within seconds, with its first time limit."""
        waiting = ("PENDING", *ENDED)
        self._wait(lambda: self.state["JobState"] in waiting, "requeue")
        assert self.state["JobState"] == "PENDING", self.log()
        self._update(f"StartTime=now+{REQUEUE_DELAY_S}", f"TimeLimit={LIMIT_MINUTES}")

    def end_within_two_minutes(self) -> None:
        """Set a time limit of which one to two minutes are left."""
        elapsed = self.cluster.call("squeue", "--noheader", f"--jobs={self.number}", "--format=%M")
        self._update(f"TimeLimit={int(elapsed.split(':')[0]) + 2}")

    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def _update(self, *values: str) -> None:
        self.cluster.call("scontrol", "update", f"JobId={self.number}", *values)

    def _wait(self, condition: object, what: str) -> None:
        try:
            self.cluster.wait_for(condition, what, wait_s=RUN_S)  # type: ignore[arg-type]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.state}\n{self.log()[-6000:]}") from error


def test_two_nodes_end_with_torchruns_weights(
    cluster: SlurmCluster, inputs: Path, reference: str, tmp_path: Path
) -> None:
    run = Run(cluster, inputs, tmp_path)
    assert run.end() == "COMPLETED", run.log()
    assert weights(run.run_dir) == reference
    assert run.state["ExitCode"] == "0:0"


def test_scancel_saves_and_does_not_requeue(
    cluster: SlurmCluster, inputs: Path, reference: str, tmp_path: Path
) -> None:
    run = Run(cluster, inputs, tmp_path)
    run.wait_for_step(3)
    cluster.call("scancel", str(run.number))
    assert run.end() == "CANCELLED"
    saved = run.step()
    assert "SIGTERM: finishing step" in run.log()
    assert run.state["Restarts"] == "0"
    again = Run(cluster, inputs, tmp_path)
    assert again.end() == "COMPLETED", again.log()
    assert f"resumed after step {saved}" in again.log(), again.log()
    assert weights(run.run_dir) == reference


def test_sigterm_for_the_steps_saves_and_does_not_requeue(cluster: SlurmCluster, inputs: Path, tmp_path: Path) -> None:
    run = Run(cluster, inputs, tmp_path)
    run.wait_for_step(3)
    cluster.call("scancel", "--signal=TERM", str(run.number))
    assert run.end() == "FAILED"
    assert (run.state["ExitCode"], run.state["Restarts"]) == ("143:0", "0")
    assert "SIGTERM: finishing step" in run.log()


def test_the_warning_before_the_time_limit_saves_and_requeues(
    cluster: SlurmCluster, inputs: Path, reference: str, tmp_path: Path
) -> None:
    slow = inputs / "slow"
    slow.touch()
    run = Run(cluster, inputs, tmp_path, ["--warning-s=60"])
    run.wait_for_step(3)
    run.end_within_two_minutes()
    run.wait_for_requeue()
    slow.unlink()
    assert "saved before the time limit (exit code 138)" in run.log()
    assert run.end() == "COMPLETED", run.log()
    assert weights(run.run_dir) == reference


def test_a_requeue_in_mid_run_resumes(cluster: SlurmCluster, inputs: Path, reference: str, tmp_path: Path) -> None:
    run = Run(cluster, inputs, tmp_path)
    run.wait_for_step(3)
    cluster.call("scontrol", "requeue", str(run.number))
    run.wait_for_requeue()
    assert run.end() == "COMPLETED", run.log()
    assert "SIGTERM: finishing step" in run.log()
    assert weights(run.run_dir) == reference


def test_a_preempted_run_saves_and_goes_on_later(
    cluster: SlurmCluster, inputs: Path, reference: str, tmp_path: Path
) -> None:
    run = Run(cluster, inputs, tmp_path)
    run.wait_for_step(3)
    cluster.call("sbatch", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    run.wait_for_requeue()
    assert "saved before preemption (exit code 143)" in run.log()
    assert run.end() == "COMPLETED", run.log()
    assert weights(run.run_dir) == reference


@pytest.mark.parametrize("lost", [0, 1], ids=["first", "other"])
def test_a_lost_node_is_replaced(
    cluster: SlurmCluster, inputs: Path, reference: str, tmp_path: Path, lost: int
) -> None:
    run = Run(cluster, inputs, tmp_path)
    run.wait_for_step(3)
    lose_and_go_on(run, NODES[lost])
    assert weights(run.run_dir) == reference


def test_a_node_that_slurm_has_not_missed_yet_is_replaced(
    cluster: SlurmCluster, inputs: Path, reference: str, tmp_path: Path
) -> None:
    cluster.notice_lost_nodes_after(70)  # srun gives the tasks up after 2 s for them and 32 s for their end
    run = Run(cluster, inputs, tmp_path, ["--warning-s=2"])
    run.wait_for_step(3)
    try:
        lose_and_go_on(run, NODES[1])
    finally:
        cluster.notice_lost_nodes_after(NODE_TIMEOUT_S)
    assert "a node is lost (exit code" in run.log()
    assert weights(run.run_dir) == reference


def lose_and_go_on(run: Run, node: str) -> None:
    """Kill everything of a node; the run goes on without it."""
    run.cluster.kill_node(node)
    try:
        run.wait_for_requeue()
        assert run.end() == "COMPLETED", run.log()
        assert node not in run.cluster.call("scontrol", "show", "hostnames", run.state["NodeList"]).split()
    finally:
        run.cluster.start_node(node)


def test_a_mistake_is_not_requeued(cluster: SlurmCluster, inputs: Path, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path / "nowhere", tmp_path)
    assert run.end() == "FAILED"
    assert (run.state["ExitCode"], run.state["Restarts"]) == ("2:0", "0")
    assert "error: " in run.log()
