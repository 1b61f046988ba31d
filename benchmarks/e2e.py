"""A whole GRPO step, mega_rl against TRL, in one run on one machine.

Both train the same Qwen3-shaped model (5.1 M parameters, fp32) on the same prompts: 64 prompts of 6 tokens, 4 samples
each, 64 new tokens, KL 0.04 to a reference model, one optimizer step. TRL runs one process of two threads, mega_rl two
data-parallel ranks of one thread. Both processes stay alive and take turns (ABBA), so that a drift of the machine's
speed meets both; the figure is the median of the paired ratios, with a bootstrap interval.

    make bench            # 1 warm-up and 6 pairs, some 5 minutes on two cores
    python benchmarks/e2e.py --pairs 15
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import contenders

TARGET = 0.7  # of TRL's step time
COVERAGE = 0.97  # of a step inside named phases
HERE = Path(__file__).parent


@dataclass
class Contender:
    """A running contender and the driver's ends of its pipes."""

    process: subprocess.Popen[bytes]
    commands: TextIO
    reports: TextIO
    log: Path

    def step(self) -> dict[str, Any]:
        """Run one step and return its report."""
        self.commands.write("step\n")
        self.commands.flush()
        line = self.reports.readline()
        if not line:
            raise SystemExit(f"contender ended early; its output:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def stop(self) -> None:
        """Let it end; kill it if it does not."""
        self.commands.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(name: str, folder: Path, launcher: list[str], threads: int) -> Contender:
    """Start a contender; returns when it has opened its pipes."""
    (folder / name).mkdir()
    for pipe in ("commands", "reports"):
        os.mkfifo(folder / name / pipe)
    log = folder / f"{name}.log"
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(HERE / "contenders.py"), name, str(folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    return Contender(process, open(folder / name / "commands", "w"), open(folder / name / "reports"), log)


def bootstrap(ratios: list[float], *, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def verdict(missed: list[str], *, load: float) -> int:
    """Says what was missed; exit code 1 if anything was, 2 when the machine was too busy before the run to tell."""
    for line in missed:
        print(f"missed: {line}")
    if load > 1.5:
        print("void: the machine was busy before the run began")
        return 2
    return 1 if missed else 0


def measure(pairs: int, warmup: int) -> dict[str, Any]:
    """Reports of both contenders and their paired ratios."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory(prefix="bench_") as name:
        folder = Path(name)
        contenders.write_inputs(folder)
        mega_rl = start("mega_rl", folder, launcher, threads=1)
        trl = start("trl", folder, [], threads=2)
        try:
            for _ in range(warmup):
                mega_rl.step()
                trl.step()
            records: dict[str, list[dict[str, Any]]] = {"mega_rl": [], "trl": []}
            for pair in range(pairs):
                order = [("mega_rl", mega_rl), ("trl", trl)]
                for label, contender in order if pair % 2 == 0 else order[::-1]:
                    records[label].append(contender.step())
        finally:
            mega_rl.stop()
            trl.stop()
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(records["mega_rl"], records["trl"], strict=True)]
    return {"records": records, "ratios": ratios}


def main() -> int:
    """Print the comparison; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every number here")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    result = measure(arguments.pairs, arguments.warmup)
    records, ratios = result["records"], result["ratios"]
    low, high = bootstrap(ratios)
    print(f"load average before the run: {load:.1f}")
    for label, rows in records.items():
        seconds = [row["seconds"] for row in rows]
        tokens = statistics.median(row["tokens"] for row in rows)
        print(
            f"{label:8s} step {statistics.median(seconds):6.2f} s "
            f"(min {min(seconds):.2f}, max {max(seconds):.2f}), {tokens:.0f} new tokens"
        )
    phases = {
        name: statistics.median(row["phases"].get(name, 0.0) for row in records["mega_rl"])
        for name in records["mega_rl"][0]["phases"]
    }
    for name, value in phases.items():
        print(f"  {name:24s} {value:8.3f}")
    coverage = min(row["phases"]["time/coverage"] for row in records["mega_rl"])
    median = statistics.median(ratios)
    print(f"mega_rl / TRL: {median:.3f} (95 % interval {low:.3f} to {high:.3f}; target {TARGET})")
    print(f"timers cover {coverage:.4f} of a step (target {COVERAGE})")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    same_work = all(a["tokens"] == b["tokens"] for a, b in zip(records["mega_rl"], records["trl"], strict=True))
    if not same_work:
        print("void: the contenders generated different numbers of tokens")
    return 0 if same_work and high <= TARGET and coverage >= COVERAGE else 1


if __name__ == "__main__":
    sys.exit(main())
