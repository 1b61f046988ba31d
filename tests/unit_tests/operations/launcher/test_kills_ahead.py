"""Runs eight steps ahead whose ranks and launchers are killed at random: one SHA-256 of weights and records."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from mega_rl.cli.app import main
from mega_rl.verify.audit_run import audit_run
from tests.helpers import distributed
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.operations.launcher.test_training import REWARD, ranks_of, start, steps_of
from tests.unit_tests.test_bad_inputs import SETTINGS, write_good_inputs

pytestmark = [pytest.mark.skipif(not FULL, reason="make test-full: ten minutes of kills"), pytest.mark.timeout(1800)]

KILLS, LAUNCHED = (int(os.environ.get(name, most)) for name, most in (("KILLS", 80), ("KILLS_LAUNCHED", 20)))
STEPS, RANKS, AHEAD = 16, 2, 8
WAIT_S = 240.0
OPTIONS = [
    *("reward.function=reward.py:score", "reward.source.workers=0", "optim.lr=1e-2", "optim.warmup_steps=0"),
    *(
        f"trainer.steps={STEPS}",
        f"trainer.async_steps={AHEAD}",
        "algorithm.correction=tis",
        "rollout.max_new_tokens=18",
    ),
    *("rollout.mismatch.mean_limit=10", "rollout.mismatch.max_limit=100", "rollout.mismatch.share_limit=1"),
    *("checkpoint.save_interval=1", "checkpoint.keep=2", "metrics.records.interval=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    write_good_inputs(path)
    (path / "reward.py").write_text(REWARD)
    return path


def train(rank: int, folder: str, run: str) -> None:
    """Train on, as `mega-rl train` under torchrun; the process is named in the folder."""
    os.chdir(folder)
    (Path(folder) / f"{run}.{rank}").write_text(str(os.getpid()))
    assert main(["train", *SETTINGS, *OPTIONS, f"trainer.run_dir={run}"]) == 0


def digests(folder: Path, run: str) -> dict[str, str]:
    """SHA-256 of the tensors of the last checkpoint, without random states of processes, and of all records."""
    shards = sorted((folder / run / "checkpoints" / f"step_{STEPS:06d}").glob("*.safetensors"))
    rows = sorted((folder / run / "records").glob("*/*.safetensors"))
    assert (len(shards), len(rows)) == (RANKS, RANKS * STEPS)
    totals = {}
    for path in (*shards, *rows):
        total = hashlib.sha256()
        with safe_open(path, "numpy") as file:
            for name in sorted(file.keys()):
                if path not in shards or name.startswith("actor/"):
                    total.update(name.encode() + file.get_tensor(name).tobytes())
        totals[str(path.relative_to(folder / run))] = total.hexdigest()
    return totals


def moment(run: Path, draw: random.Random, is_over: Callable[[], object]) -> None:
    """Wait until a random moment of a run: while it starts, or after some steps more."""
    deadline, done = time.monotonic() + draw.uniform(0.0, 3.0), STEPS
    if draw.random() < 0.7:
        deadline, done = time.monotonic() + WAIT_S, len(steps_of(run)) + draw.randint(1, 4)
    while time.monotonic() < deadline and not is_over() and not done <= len(steps_of(run)) < STEPS:
        time.sleep(0.005)
    time.sleep(draw.uniform(0.0, 0.3))


def forked(folder: Path, run: str, draw: random.Random) -> tuple[int, bool]:
    """Train in ranks that are forked and killed, one or both; return the number of kills, and if the run ended."""
    victims, killed = draw.choice([[0], [1], [0, 1]]), list[int]()
    for rank in range(RANKS):
        (folder / f"{run}.{rank}").unlink(missing_ok=True)
    ended = threading.Event()

    def kill() -> None:
        moment(folder / run, draw, ended.is_set)
        for victim in victims:
            with suppress(FileNotFoundError, ValueError, ProcessLookupError):
                if not ended.is_set():
                    os.kill(int((folder / f"{run}.{victim}").read_text()), signal.SIGKILL)
                    killed.append(victim)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        run_ranks(RANKS, train, str(folder), run, timeout_s=WAIT_S, device="cpu")
    except RanksFailed as failure:
        if not killed or "died of SIGKILL" not in str(failure):
            raise
        return 1, False
    finally:
        ended.set()
        killer.join()
    return 0, True


def launched(folder: Path, run: str, draw: random.Random) -> tuple[int, bool]:
    """Train under a launcher, which restarts killed ranks, until it is killed or ends; return the same."""
    launcher, kills = start(folder, run, "--nproc-per-node", str(RANKS), *OPTIONS), 0
    try:
        while launcher.poll() is None:
            moment(folder / run, draw, launcher.poll)
            victim, ranks = draw.randrange(RANKS + 1), dict[int, psutil.Process]()
            with suppress(psutil.Error):
                ranks = ranks_of(launcher)
            if launcher.poll() is not None:
                break
            if victim == RANKS:
                launcher.kill()
                psutil.wait_procs(ranks.values(), timeout=WAIT_S)
                kills += 1
            elif victim in ranks:
                with suppress(psutil.Error):
                    ranks[victim].kill()
                    kills += 1
        _, errors = launcher.communicate(timeout=WAIT_S)
        assert kills or launcher.returncode == 0, errors
    finally:
        launcher.kill()
    return kills, launcher.returncode == 0


@pytest.mark.parametrize(("how", "most"), [(forked, KILLS), (launched, LAUNCHED)])
def test_killed_runs_ahead_end_with_the_same_weights(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: Callable[[Path, str, random.Random], tuple[int, bool]],
    most: int,
) -> None:
    """SIGKILL to a rank, both or the launcher, at random moments of starts, steps and saves; then it continues."""
    monkeypatch.setattr(distributed, "GRACE_S", 0.1)
    draw, kills, runs = random.Random(os.environ.get("KILLS_SEED", how.__name__)), 0, list[str]()
    run_ranks(RANKS, train, str(folder), "undisturbed", timeout_s=WAIT_S, device="cpu")
    expected = digests(folder, "undisturbed")
    while kills < most:
        runs.append(f"{how.__name__}{len(runs)}")
        ended = False
        while not ended:
            more, ended = how(folder, runs[-1], draw)
            kills += more
        assert steps_of(folder / runs[-1]) == list(range(1, STEPS + 1))
        assert digests(folder, runs[-1]) == expected, runs[-1]
        print(f"{runs[-1]}: {kills} kills", flush=True)
    monkeypatch.chdir(folder)
    for run in ("undisturbed", runs[-1]):
        assert audit_run(folder / run, folder, versions=0).breaches == []
