"""Training on a real server that outlives two killed ranks, as a user would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mega_rl.quickstart import task
from mega_rl.rollout.sglang.server import group, launcher
from mega_rl.rollout.sglang.server.kept import SCRATCH_PREFIX
from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.selection import FULL
from tests.helpers.sglang import needs_sglang, wait_until

pytestmark = [
    needs_sglang,
    pytest.mark.skipif(not FULL, reason="make test-full: minutes of training with a real server"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[4]
STEPS = 6
STEP_S = 400.0  # with the start of ranks and server before it
REWARD = '''
def score(prompt: str, response: str, answer: str) -> float:
    """The share of sevens among four digits."""
    return response.count("7") / 4
'''
# Metrics of the machine, not of training. A server sums in another order in other batches, and so the last bits of its
# log-probs, which training does not read, are not always the same.
MACHINE = (
    *("time/", "perf/", "memory/", "checkpoint/", "sync/", "sglang/"),
    *("rollout/logprob_diff", "rollout/stale_logprob_diff", "importance/"),
)


@dataclass
class Run:
    """A run that has ended, and what was seen of it on the way."""

    folder: Path
    servers: list[int] = field(default_factory=list)  # process of the server before each kill and at the end
    seconds: list[float] = field(default_factory=list)  # from each kill to the end of the next step

    @property
    def output(self) -> str:
        """Return the last lines that the run has printed."""
        return (self.folder / "output").read_text(errors="replace")[-8000:]

    def wait_for(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a step is recorded, or later ones are."""
        wait_until(f"step {step}", lambda: process.poll() is not None or len(self.steps()) >= step, timeout_s=STEP_S)
        assert len(self.steps()) >= step, self.output

    def steps(self) -> list[int]:
        """Return the steps that the run has recorded."""
        path = self.folder / "run" / "metrics.jsonl"
        return [record.step for record in read_metrics(path)] if path.exists() else []


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def write_inputs(folder: Path) -> Path:
    """Write model, data and reward of every run; returns `folder`."""
    task.write_dataset(folder / "data", task.make_task(0))
    task.write_checkpoint(folder / "model", seed=0)
    (folder / "reward.py").write_text(REWARD)
    return folder


def train(inputs: Path, folder: Path, kills: Mapping[int, int], *, server_too: bool = False) -> Run:
    """Run to the last step; kills: rank to be killed, by the step after which. server_too: the server dies with it."""
    run = Run(folder)
    (folder / "tmp").mkdir(parents=True)
    overrides = [
        "engine.megatron.tp=1",
        f"model.path={inputs / 'model'}",
        f"data.train_files=[{inputs / 'data' / 'train.jsonl'}]",
        "data.val_files=[]",
        f"reward.function={inputs / 'reward.py'}:score",
        f"trainer.run_dir={folder / 'run'}",
        f"trainer.steps={STEPS}",
        "trainer.prompts_per_step=16",
        "trainer.minibatch_size=16",
        "trainer.val_interval=0",
        "optim.lr=3e-3",
        "optim.warmup_steps=0",
        "checkpoint.save_interval=1",
        "checkpoint.hf_final=true",
    ]
    command = [sys.executable, "-m", "mega_rl.cli", "train", "--config", "quickstart_sglang", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, *overrides], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            for step, rank in kills.items():
                run.wait_for(step, process)
                run.servers += leaders(folder)
                killed, done = time.monotonic(), len(run.steps())
                os.kill(rank_process(process.pid, rank), signal.SIGKILL)
                if server_too:
                    os.kill(run.servers[-1], signal.SIGKILL)
                run.wait_for(done + 1, process)
                run.seconds.append(time.monotonic() - killed)
            run.wait_for(STEPS - 1, process)
            run.servers += leaders(folder)
            assert process.wait(STEP_S) == 0, run.output
        finally:
            process.kill()
    return run


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(inputs, tmp_path_factory.mktemp("undisturbed"), {})


@pytest.fixture(scope="module")
def killed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(inputs, tmp_path_factory.mktemp("killed"), {2: 1, 4: 0})


def rank_process(launcher: int, rank: int) -> int:
    """Return the process of a rank of a launcher."""
    for process in psutil.Process(launcher).children():
        if process.environ().get("RANK") == str(rank):
            return process.pid
    raise AssertionError(f"no rank {rank} of {launcher}")


def leaders(folder: Path) -> list[int]:
    """Return the servers, by their main processes, whose private folders are below `folder`."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            scratch = process.environ().get(launcher.SCRATCH_VARIABLE, "")
            if os.getpgid(process.pid) == process.pid and scratch.startswith(str(folder)):
                pids.append(process.pid)
    return pids


def test_one_server_serves_three_generations_of_ranks(killed: Run) -> None:
    first, *others = killed.servers
    assert others == [first, first]
    assert len(re.findall("SGLang server 0 is kept after", killed.output)) == 2


def test_nothing_of_it_is_left(killed: Run) -> None:
    assert not group.members(killed.servers[0])
    assert not list((killed.folder / "tmp").glob(f"{SCRATCH_PREFIX}*"))


def test_weights_and_metrics_are_those_of_a_run_that_nobody_disturbed(undisturbed: Run, killed: Run) -> None:
    ours, theirs = (
        {record.step: record.metrics for record in read_metrics(run.folder / "run" / "metrics.jsonl")}
        for run in (killed, undisturbed)
    )
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    for step, metrics in theirs.items():
        training = {name: value for name, value in metrics.items() if not name.startswith(MACHINE)}
        assert {name: ours[step][name] for name in training} == pytest.approx(training, rel=0, abs=0, nan_ok=True)
    ours, theirs = (weights(run) for run in (killed, undisturbed))
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])]


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Return the actor's weights after the last step."""
    (file,) = (run.folder / "run" / "hf").rglob("*.safetensors")
    return load_file(file)


if __name__ == "__main__":  # seconds from the end of a rank to that of the next step, kept and with a new server
    with tempfile.TemporaryDirectory() as name:
        root = write_inputs(Path(name))
        for server_too in (False, True):
            seconds = train(root, root / str(server_too), {2: 1, 4: 0}, server_too=server_too).seconds
            sys.stdout.write(f"server {'new' if server_too else 'kept'}: {seconds}\n")
            sys.stdout.flush()
