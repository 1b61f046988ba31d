"""A whole GRPO step, mega_rl against TRL, in one run on one machine.

Both train the same model in fp32 on the same prompts, generate the same number of tokens and take one optimizer step.
By default: a Qwen3-shaped model with random weights (5.1 M parameters), 64 prompts of 6 tokens, 4 samples each, 64 new
tokens, KL 0.04 to a reference model; TRL has one process of two threads, mega_rl two data-parallel ranks of one.
`--model FOLDER` takes a pretrained model: 8 prompts, 4 samples each, 64 new tokens, no KL, one process each. Both
programs stay alive and take turns (ABBA), so that a drift of the machine's speed meets both.

    make bench            # 1 warm-up and 6 pairs, some 5 minutes on two cores
    python benchmarks/e2e.py --pairs 15
    python benchmarks/e2e.py --model build/real_models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import contenders
from driver import TORCHRUN, Contender, Report, alternating, compare, parser_of

TARGET = 0.7  # of TRL's step time
COVERAGE = 0.97  # of a step inside named phases
START_S, STEP_S = 300.0, 600.0  # deadlines of the first step and of the others
HERE = Path(__file__).parent


def measure(folder: Path, task: contenders.Task, *, pairs: int, warmup: int) -> dict[str, Any]:
    """Return the reports of both contenders, pair by pair, and their peak memory in bytes."""
    program = str(HERE / "contenders.py")
    launcher = [*TORCHRUN, str(task.ranks)] if task.ranks > 1 else []
    runs = [
        Contender("mega_rl", folder / "mega_rl", [*launcher, program, "mega_rl", str(folder)], threads=2 // task.ranks),
        Contender("trl", folder / "trl", [program, "trl", str(folder)], threads=2),
    ]
    records: dict[str, list[dict[str, Any]]] = {run.name: [] for run in runs}
    try:
        for turn in range(warmup + pairs):
            for run in alternating(runs, turn):
                record = run.ask("step", STEP_S if turn else START_S + STEP_S)
                if turn >= warmup:
                    records[run.name].append(record)
        return {"records": records, "peak_bytes": {run.name: run.peak_bytes() for run in runs}}
    finally:
        for run in runs:
            run.stop()


def main() -> int:
    """Print the comparison; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model, in the place of the random one")
    arguments = parser.parse_args()
    report = Report(arguments)
    with tempfile.TemporaryDirectory(prefix="bench_") as name:
        folder = Path(name)
        task = contenders.TINY if arguments.tiny else contenders.TASK
        if arguments.model:
            task = contenders.copy_inputs(folder, arguments.model, contenders.REAL)
        else:
            contenders.write_inputs(folder, task)
        result = measure(folder, task, pairs=2 if arguments.tiny else arguments.pairs, warmup=arguments.warmup)
    records, peak = result["records"], result["peak_bytes"]
    steps = {}
    for label, rows in records.items():
        seconds = [row["seconds"] for row in rows]
        steps[label] = statistics.median(seconds)
        print(
            f"{label:8s} step {steps[label]:6.2f} s (min {min(seconds):.2f}, max {max(seconds):.2f}), "
            f"{statistics.median(row['tokens'] for row in rows):.0f} new tokens, peak memory {peak[label] / 1e9:.2f} GB"
        )
    phases = {
        name: statistics.median(row["phases"].get(name, 0.0) for row in records["mega_rl"])
        for name in records["mega_rl"][0]["phases"]
    }
    for name, value in phases.items():
        print(f"  {name:24s} {value:8.3f}")
    seconds_of = {label: [row["seconds"] for row in rows] for label, rows in records.items()}
    print(report.add(compare("step, mega_rl / TRL", seconds_of["mega_rl"], seconds_of["trl"], TARGET)))
    coverage = min(row["phases"]["time/coverage"] for row in records["mega_rl"])
    print(f"timers cover {coverage:.4f} of a step (target {COVERAGE})")
    if coverage < COVERAGE:
        report.missed.append(f"timers cover {coverage:.4f} of a step")
    wanted = task.prompts * task.samples * task.new_tokens
    counts = {row["tokens"] for rows in records.values() for row in rows}
    if counts != {wanted}:
        report.wrong.append(f"the contenders generated {sorted(counts)} tokens in a step, not {wanted} each")
    return report.end(result, step_s=steps, phases=phases, coverage=coverage, peak_bytes=peak)


if __name__ == "__main__":
    sys.exit(main())
