"""Trainings under the launcher: which ports they open, and that a rank's death changes nothing in what is learned."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from safetensors import safe_open

from tests.unit_tests.operations.launcher.programs import ROOT
from tests.unit_tests.test_bad_inputs import SETTINGS, write_good_inputs

WAIT_S = 240.0  # for what takes a quarter of a minute on an idle machine
STEPS = 8
REWARD = "def score(prompt, response, answer):\n    return len(set(response)) / 4\n"
KEY = "fedcba9876543210fedcba9876543210"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    write_good_inputs(path)
    (path / "reward.py").write_text(REWARD)
    return path


def start(folder: Path, run: str, *options: str) -> subprocess.Popen[str]:
    settings = ["reward.function=reward.py:score", "optim.lr=1e-2", "optim.warmup_steps=0", f"trainer.steps={STEPS}"]
    settings += ["checkpoint.save_interval=1", f"checkpoint.keep={STEPS}", f"trainer.run_dir={run}"]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return subprocess.Popen(
        [sys.executable, "-m", "mega_rl.cli", "train", *SETTINGS, *settings, *options],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGA_RL_LAUNCH_KEY": KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line)["step"] for line in whole.splitlines()]


def end_of(
    launchers: Sequence[subprocess.Popen[str]], run: Path, step: int, act: Callable[[], None]
) -> list[tuple[int, str]]:
    """Exit codes and standard errors of launchers; `act` is called once the step is done."""
    try:
        deadline = time.monotonic() + WAIT_S
        while step not in steps_of(run):
            assert launchers[0].poll() is None, launchers[0].communicate()[1]
            assert time.monotonic() < deadline, "a step takes too long"
            time.sleep(0.01)
        act()
        ends = [launcher.communicate(timeout=WAIT_S)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    return [(launcher.returncode, errors) for launcher, errors in zip(launchers, ends, strict=True)]


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    children = psutil.Process(launcher.pid).children()
    return {int(one.environ()["RANK"]): one for one in children if "RANK" in one.environ()}


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which a process and what it has started accept connections."""
    below = [process, *process.children(recursive=True)]
    every = [entry for one in below for entry in one.net_connections(kind="inet")]
    return {entry.laddr.ip for entry in every if entry.status == psutil.CONN_LISTEN}


def weights_of(run: Path, step: int = STEPS) -> dict[str, bytes]:
    """Weights and optimizer state of a checkpoint, bit by bit. Random states of Python and numpy are of a process."""
    tensors: dict[str, bytes] = {}
    shards = sorted((run / "checkpoints" / f"step_{step:06d}").glob("*.safetensors"))
    for number, shard in enumerate(shards):
        with safe_open(shard, "numpy") as file:
            names = [name for name in list(file.keys()) if name.startswith("actor/")]
            tensors |= {f"{number} {name}": file.get_tensor(name).tobytes() for name in names}
    assert len(shards) == 2
    assert len(tensors) > 100
    return tensors


class Undisturbed(NamedTuple):
    """What a run ended with, and the addresses at which it listened."""

    weights: dict[str, bytes]
    addresses: set[str]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Undisturbed:
    """A run of two ranks on one node."""
    addresses: set[str] = set()
    launcher = start(folder, "undisturbed", "--nproc-per-node", "2")
    run = folder / "undisturbed"
    ((code, errors),) = end_of([launcher], run, 2, lambda: addresses.update(listening(psutil.Process(launcher.pid))))
    assert code == 0, errors
    assert weights_of(run) != weights_of(run, 1), "a run that learns nothing shows nothing"
    return Undisturbed(weights_of(run), addresses)


def test_one_node_listens_only_on_loopback(undisturbed: Undisturbed) -> None:
    """Store, gloo, whatever else."""
    assert undisturbed.addresses, "the store and gloo listen"
    assert all(ipaddress.ip_address(address).is_loopback for address in undisturbed.addresses)


def test_killed_rank_changes_no_weights(folder: Path, undisturbed: Undisturbed) -> None:
    """At a random moment after a random step; the last lines are those of any run."""
    launcher = start(folder, "killed", "--nproc-per-node", "2")
    step, victim = random.randrange(1, STEPS - 1), random.randrange(2)

    def kill() -> None:
        time.sleep(random.random() / 20)
        ranks_of(launcher)[victim].send_signal(signal.SIGKILL)

    ((code, errors),) = end_of([launcher], folder / "killed", step, kill)
    where = f"rank {victim} after step {step}: {errors}"
    assert code == 0, where
    assert len(re.findall(rf"rank {victim} \(pid \d+, .*\) was killed by SIGKILL", errors)) == 1, where
    assert errors.count(": restart 1 of at most 3, from the checkpoint of step ") == 1, where
    assert "Traceback" not in errors, where
    assert "error" not in errors, where
    assert steps_of(folder / "killed") == list(range(1, STEPS + 1)), where
    assert weights_of(folder / "killed") == undisturbed.weights, where
