"""Time from the kill of a rank to the next step that was never finished before, as a multiple of a step.

Two ranks (DP2) of `mega_rl train --max-restarts` train the model of `e2e.py`, with a checkpoint on disk every ten
steps; in half of the runs every step's state is in the hosts' memory as well. Rank 1 is killed five steps after a
checkpoint, halfway to the next. See README.md for how to read it.

    make bench-restart
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import psutil
from driver import Report, child, compare, parser_of, tail

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


def settings_of(folder: Path, run: Path, memory: bool, prompts: int) -> list[str]:
    """Settings of a run of GRPO on the benchmark's model."""
    return [
        f"model.path={folder / 'model'}",
        "model.dtype=fp32",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"data.max_prompt_tokens={contenders.TASK.prompt_tokens}",
        f"rollout.n={contenders.TASK.samples}",
        f"rollout.max_new_tokens={contenders.TASK.new_tokens}",
        f"reward.function={Path(contenders.__file__).resolve()}:score",
        "algorithm.advantage=grpo",
        f"trainer.prompts_per_step={prompts}",
        f"trainer.minibatch_size={prompts}",
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


def wait_for(step: int, run: Path, launcher: Any, log: Path) -> float:
    """Wait for a step's record; return the time of it (monotonic)."""
    deadline = time.monotonic() + WAIT_S
    while True:
        if step in recorded(run)[-1:]:
            return time.monotonic()
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no step {step} within {WAIT_S:.0f} s (exit code {launcher.poll()}); {tail(log)}")
        time.sleep(0.005)


def kill_rank(launcher: Any, rank: int) -> None:
    """Send SIGKILL to a rank of the launcher."""
    for process in psutil.Process(launcher.pid).children():
        if process.environ().get("RANK") == str(rank):
            process.send_signal(signal.SIGKILL)
            return
    raise SystemExit(f"no rank {rank} below the launcher")


def measure(folder: Path, name: str, *, memory: bool, prompts: int) -> Restart:
    """One run, killed once."""
    run = folder / name
    command = ["-m", "mega_rl.cli", "train", *settings_of(folder, run, memory, prompts)]
    command += ["--nproc-per-node", "2", "--max-restarts", "1"]
    with child(command) as (launcher, log):
        times = [wait_for(step, run, launcher, log) for step in range(3, KILLED_AFTER + 1)]
        killed = time.monotonic()
        kill_rank(launcher, 1)
        new = wait_for(KILLED_AFTER + 1, run, launcher, log)
        if launcher.wait(WAIT_S):
            raise SystemExit(f"exit code {launcher.returncode}; {tail(log)}")
        resumed = re.findall(r"resumed after step (\d+)", log.read_text())
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Restart(statistics.median(between), new - killed, KILLED_AFTER - int(resumed[-1]))


def main() -> int:
    """Print both ways; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    outcome = Report(arguments)
    pairs, prompts = (1, 4) if arguments.tiny else (arguments.pairs, 16)
    results: dict[str, list[Restart]] = {"disk": [], "memory": []}
    with tempfile.TemporaryDirectory(prefix="bench_") as name:
        folder = Path(name)
        contenders.write_inputs(folder)
        for pair in range(pairs):
            for kind in ("disk", "memory") if pair % 2 == 0 else ("memory", "disk"):
                results[kind].append(measure(folder, f"{kind}_{pair}", memory=kind == "memory", prompts=prompts))
                print(f"pair {pair} {kind}: {results[kind][-1]}", flush=True)
    numbers = {}
    for kind, rows in results.items():
        step, new = (statistics.median(values) for values in list(zip(*rows, strict=True))[:2])
        repeated = statistics.median(row.repeated for row in rows)
        print(f"{kind:7s} step {step:.2f} s, new step {new:.1f} s = {new / step:.1f} steps, repeated {repeated:.0f}")
        own = {"s of a step": step, "s from the kill to the next new step": new, "steps repeated": repeated}
        numbers |= {f"{kind}: {name}": value for name, value in own.items()}
    memory, disk = ([row.new_step for row in results[kind]] for kind in ("memory", "disk"))
    print(outcome.add(compare("seconds to the next new step, memory / disk", memory, disk, TARGET)))
    return outcome.end({kind: [row._asdict() for row in rows] for kind, rows in results.items()}, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
