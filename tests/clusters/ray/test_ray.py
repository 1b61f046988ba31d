"""Runs on a real Ray of this machine, two nodes and a head, end with the weights of torchrun's; `make test-ray`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mega_rl.operations.schedulers import RecipeFacts
from mega_rl.operations.schedulers.ray import RayCluster, RayRun, drive

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not there: make test-ray"),
    pytest.mark.timeout(900),
]

STEPS = 40
BUNDLE = {"CPU": 1.0}
WAIT_S = 300.0  # for what happens within seconds on an idle machine


class Nodes:
    """Two nodes of a CPU each beside a head without any; one can be lost."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]

    def replace_one(self) -> None:
        """Add a node, and kill the daemons of another without a warning."""
        self._nodes.append(self.cluster.add_node(num_cpus=1))
        self.cluster.remove_node(self._nodes.pop(1), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0" * 64)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Nodes()
        yield made
        made.cluster.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mega_rl.cli.quickstart import sums
    from mega_rl.cli.quickstart.inputs import write_fresh_model

    folder = tmp_path_factory.mktemp("inputs")
    sums.write_data(folder / "data", seed=0)
    write_fresh_model(folder / "model", sums.TOKENS, seed=0)
    return folder


@pytest.fixture(scope="module")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hash of the weights that torchrun's ranks end with."""
    run_dir = tmp_path_factory.mktemp("torchrun")
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mega_rl.cli", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *program, *arguments(inputs, run_dir)], check=True, env=environment, timeout=WAIT_S)
    return weights(run_dir)


def arguments(inputs: Path, run_dir: Path) -> list[str]:
    settings = {
        "trainer.run_dir": run_dir,
        "trainer.steps": STEPS,
        "trainer.prompts_per_step": 32,
        "trainer.minibatch_size": 16,
        "trainer.val_interval": 0,
        "trainer.device": "cpu",
        "model.path": inputs / "model",
        "data.train_files": f"[{inputs / 'data' / 'train.jsonl'}]",
        "data.val_files": "[]",
        "reward.function": f"{inputs / 'data' / 'reward.py'}:points",
        "checkpoint.save_interval": 1,
        "checkpoint.hf_final": "true",
        "metrics.tensorboard": "false",
        "metrics.rollout_interval": 0,
    }
    return ["--config", "quickstart", *(f"{key}={value}" for key, value in settings.items())]


def weights(run_dir: Path) -> str:
    files = sorted((run_dir / "hf").rglob("*.safetensors"))
    assert files, f"no weights below {run_dir}"
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def run(
    nodes: Nodes, inputs: Path, run_dir: Path, *, during: Callable[[], None] | None = None, resume: str = "never"
) -> tuple[int, list[str]]:
    """Drive a run, calling `during` once it has saved a few steps; returns the exit code and output."""
    job = RayRun(nodes=2, nproc_per_node=1, node_restarts=2, max_restarts=0, env=["OMP_NUM_THREADS=1"])
    overrides = [*arguments(inputs, run_dir)[2:], f"checkpoint.resume={resume}"]
    facts = RecipeFacts(
        recipe="quickstart", text="", overrides=overrides, run_dir=str(run_dir), resume=resume, device="cpu", saves=True
    )
    lines: list[str] = []
    left = [] if during is None else [during]

    def write(line: str) -> None:  # in the main thread, as Ray's test cluster wants it
        lines.append(line)
        if left and last_step(run_dir) >= 3:
            left.pop()()

    cluster = RayCluster(nodes.cluster.address)
    try:
        code = drive(job, facts, lambda stop: cluster.place(2, BUNDLE, wait_s=WAIT_S, stop=stop), write=write)
    finally:
        cluster.close()
    assert left == [], "the run ended before the fault"
    return code, lines


def last_step(run_dir: Path) -> int:
    """Return the steps of the newest checkpoint, 0 without one."""
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*")), default=0)


def test_two_nodes_end_with_torchruns_weights(nodes: Nodes, inputs: Path, reference: str, tmp_path: Path) -> None:
    code, lines = run(nodes, inputs, tmp_path)
    assert code == 0, "\n".join(lines)
    assert weights(tmp_path) == reference
    assert any(line.startswith("[node 0]") for line in lines)


def test_a_lost_node_is_replaced_and_the_weights_are_the_same(
    nodes: Nodes, inputs: Path, reference: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, lines = run(nodes, inputs, tmp_path, during=nodes.replace_one)
    assert code == 0, "\n".join(lines)
    assert weights(tmp_path) == reference
    assert "restart 1 of at most 2" in caplog.text
    assert any("resumed" in line for line in lines), "\n".join(lines)


def test_sigterm_saves_and_the_next_launch_goes_on(nodes: Nodes, inputs: Path, reference: str, tmp_path: Path) -> None:
    code, lines = run(nodes, inputs, tmp_path, during=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert code == 128 + signal.SIGTERM, "\n".join(lines)
    assert not (tmp_path / "hf").exists()
    code, lines = run(nodes, inputs, tmp_path, resume="auto")
    assert code == 0, "\n".join(lines)
    assert weights(tmp_path) == reference


def test_a_mistake_is_not_tried_again(
    nodes: Nodes, inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, lines = run(nodes, tmp_path / "nowhere", tmp_path / "run")
    assert code == 2
    assert any("error:" in line for line in lines)
    assert "restart" not in caplog.text
