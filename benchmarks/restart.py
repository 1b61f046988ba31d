"""Time from the kill of a rank to the next step that was never finished before, as a multiple of a step.

Two ranks (DP2) of `mega_rl train --max-restarts` train the model of `e2e.py`, with a checkpoint on disk every ten
steps; in half of the runs every step's state is in the hosts' memory as well. Rank 1 is killed five steps after a
checkpoint, halfway to the next. See README.md for how to read it.

    make bench-restart
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import contenders
import psutil
from e2e import verdict

SAVE_INTERVAL, KILLED_AFTER = 10, 15  # steps
WAIT_S = 300.0
# (with memory) / (without), of seconds from the kill to the next new step: memory must not be the slower way.
TARGET = 1.0


class Restart(NamedTuple):
    """step: median seconds between two records before the kill. new_step: seconds from the kill to the record of the
    step after the last recorded one. repeated: steps that were done twice."""

    step: float
    new_step: float
    repeated: int


def settings_of(folder: Path, run: Path, memory: bool) -> list[str]:
    """Settings of a run of GRPO on the benchmark's model."""
    return [
        f"model.path={folder / 'model'}",
        "model.dtype=fp32",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"data.max_prompt_tokens={contenders.PROMPT_TOKENS}",
        "rollout.stop_token_ids=[1]",
        f"rollout.n={contenders.SAMPLES}",
        f"rollout.max_new_tokens={contenders.NEW_TOKENS}",
        f"reward.function={Path(contenders.__file__).resolve()}:score",
        "algorithm.advantage=grpo",
        "trainer.prompts_per_step=16",
        "trainer.minibatch_size=16",
        f"trainer.steps={KILLED_AFTER + 3}",
        f"trainer.run_dir={run}",
        "trainer.microbatch.max_tokens=4096",
        f"checkpoint.save_interval={SAVE_INTERVAL}",
        f"checkpoint.memory.interval={int(memory)}",
        "metrics.tensorboard=false",
        "metrics.progress_bar=false",
    ]


def recorded(run: Path) -> list[int]:
    """Steps of metrics.jsonl, in the order of its lines; whole lines alone."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["step"] for line in text.rpartition("\n")[0].splitlines()]


def wait_for(step: int, run: Path, launcher: subprocess.Popen[bytes], log: Path) -> float:
    """Wait for a step's record; return the time of it (monotonic)."""
    deadline = time.monotonic() + WAIT_S
    while True:
        if step in recorded(run)[-1:]:
            return time.monotonic()
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no step {step} within {WAIT_S:.0f} s (exit code {launcher.poll()}):\n{log.read_text()}")
        time.sleep(0.005)


def kill_rank(launcher: subprocess.Popen[bytes], rank: int) -> None:
    """Send SIGKILL to a rank of the launcher."""
    for child in psutil.Process(launcher.pid).children():
        if child.environ().get("RANK") == str(rank):
            child.send_signal(signal.SIGKILL)
            return
    raise SystemExit(f"no rank {rank} below the launcher")


def measure(folder: Path, name: str, memory: bool) -> Restart:
    """One run, killed once."""
    run, log = folder / name, folder / f"{name}.log"
    command = [sys.executable, "-m", "mega_rl.cli", "train", *settings_of(folder, run, memory)]
    command += ["--nproc-per-node", "2", "--max-restarts", "1"]
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder
        )
    try:
        times = [wait_for(step, run, launcher, log) for step in range(3, KILLED_AFTER + 1)]
        killed = time.monotonic()
        kill_rank(launcher, 1)
        new = wait_for(KILLED_AFTER + 1, run, launcher, log)
        if launcher.wait(WAIT_S):
            raise SystemExit(f"exit code {launcher.returncode}:\n{log.read_text()}")
    finally:
        launcher.kill()
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    resumed = re.findall(r"resumed after step (\d+)", log.read_text())
    return Restart(statistics.median(between), new - killed, KILLED_AFTER - int(resumed[-1]))


def main() -> int:
    """Print both ways; exit code 1 if checkpoints in memory make the next step later."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every number here")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load average before the run: {load:.1f}")
    results: dict[str, list[Restart]] = {"disk": [], "memory": []}
    with tempfile.TemporaryDirectory(prefix="bench_") as name:
        folder = Path(name)
        contenders.write_inputs(folder)
        for pair in range(arguments.pairs):
            for kind in ("disk", "memory") if pair % 2 == 0 else ("memory", "disk"):
                results[kind].append(measure(folder, f"{kind}_{pair}", kind == "memory"))
                print(f"pair {pair} {kind}: {results[kind][-1]}", flush=True)
    for kind, rows in results.items():
        step, new = (statistics.median(values) for values in list(zip(*rows, strict=True))[:2])
        repeated = statistics.median(row.repeated for row in rows)
        print(f"{kind:7s} step {step:.2f} s, new step {new:.1f} s = {new / step:.1f} steps, repeated {repeated:.0f}")
    ratios = [a.new_step / b.new_step for a, b in zip(results["memory"], results["disk"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"memory / disk: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; target below {TARGET})")
    if arguments.json:
        arguments.json.write_text(json.dumps({kind: [row._asdict() for row in rows] for kind, rows in results.items()}))
    return verdict([] if ratio < TARGET else [f"memory / disk {ratio:.2f}"], load=load)


if __name__ == "__main__":
    sys.exit(main())
