"""Reward workers: how much two of them save, what a response costs beside its function, and its share of a step.

See README.md.

python benchmarks/reward_pool.py
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from driver import Report, parser_of

from mega_rl.cli.quickstart import sums
from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.cli.quickstart.run import NUM_RANKS, TASKS, launch
from mega_rl.rewards.call import load_functions
from mega_rl.rewards.pool import FunctionRewards, WorkerPool
from mega_rl.rewards.score import Response, ignore
from mega_rl.tracking.metrics.records import read_metrics
from mega_rl.types import Prompt

SPEEDUP = 1.7  # of two workers over one
GLUE_US = 500.0  # of a response that costs nothing
GLUE_SHARE = 0.02  # of a step of the quickstart: 512 responses, whose function costs microseconds
SECONDS = 0.05  # of one response
FUNCTIONS = f"""
import time

def computes(response):
    end = time.thread_time() + {SECONDS}
    while time.thread_time() < end:
        pass
    return float(response)

def waits(response):
    time.sleep({SECONDS})
    return float(response)

def nothing(response):
    return float(response)

def nothing_of_several(responses):
    return [float(response) for response in responses]
"""


def seconds(scorer: FunctionRewards, count: int) -> float:
    """Return how long `count` responses take."""
    items = [
        (Prompt(index=i, token_ids=(1,), text="1+1=", answer="2"), Response(str(i), num_tokens=1, finish="stop"))
        for i in range(count)
    ]
    begin = time.perf_counter()
    assert scorer.score(items, ignore) == [float(i) for i in range(count)]
    return time.perf_counter() - begin


def shares_of_step(num_workers: int, steps: int, folder: Path) -> dict[str, float]:
    """Return medians over steps of the quickstart's PPO on two ranks: seconds, and shares of scoring and of its phase.

    Scoring is all between texts and scores, which the function itself needs microseconds for; the phase of rewards also
    decodes the responses and computes the metrics of the rollout.
    """
    run_dir = folder / f"workers{num_workers}"
    sums.write_data(run_dir / "data", seed=0)
    write_fresh_model(run_dir / "model", sums.TOKENS, seed=0)
    settings = [*TASKS["sums"].overrides(run_dir, seed=0), f"reward.source.workers={num_workers}"]
    settings += [f"trainer.steps={steps}", "checkpoint.save_final=false"]
    launch(["train", "--config", "quickstart", *settings], run_dir)
    records = [one.metrics for one in read_metrics(run_dir / "metrics.jsonl") if "time/reward_s" in one.metrics]
    of_steps = [
        {
            "step_s": one["time/step_s"],
            "scoring": one["time/reward_latency_s"] * one["rollout/sequences"] / NUM_RANKS / one["time/step_s"],
            "phase": one["time/reward_s"] / one["time/step_s"],
        }
        for one in records[2:]  # after the first ones
    ]
    return {name: statistics.median(one[name] for one in of_steps) for name in of_steps[0]}


def with_workers(function: str, num_workers: int, work: Callable[[FunctionRewards], float]) -> float:
    """Return what `work` measures with these workers, which have started."""
    pool = WorkerPool(function, num_workers=num_workers, timeout_s=60.0)
    rewards = FunctionRewards(load_functions(function), pool=pool)
    try:
        seconds(rewards, 4 * num_workers)
        return work(rewards)
    finally:
        pool.close()


def main() -> int:
    """Print ratios and targets; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="responses of 50 ms (1000)")
    parser.add_argument("--rounds", type=int, default=3, help="of the overhead (3)")
    parser.add_argument("--steps", type=int, default=12, help="of the quickstart, at least 3; 0 leaves them out (12)")
    options = parser.parse_args()
    outcome = Report(options)
    if options.tiny:
        options.count, options.rounds, options.steps = 20, 1, 0
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "functions.py")
        file.write_text(FUNCTIONS)
        for name in ("computes", "waits"):
            one, two = (
                with_workers(f"{file}:{name}", workers, lambda scorer: seconds(scorer, options.count))
                for workers in (1, 2)
            )
            numbers[f"one worker / two, each {name} 50 ms"] = one / two
            if one / two < SPEEDUP:
                outcome.missed.append(f"one worker / two where each {name}: {one / two:.2f}, target {SPEEDUP}")
            print(f"{options.count} responses, each {name} 50 ms: one worker {one:.2f} s, two {two:.2f} s, "
                  f"ratio {one / two:.2f} (target {SPEEDUP:g})")  # fmt: skip
        own = statistics.median(
            seconds(FunctionRewards(load_functions(f"{file}:nothing")), 2000) for _ in range(options.rounds)
        )
        for workers, name in ((1, "nothing"), (2, "nothing"), (1, "nothing_of_several")):
            glue = with_workers(
                f"{file}:{name}",
                workers,
                lambda scorer: statistics.median(seconds(scorer, 2000) for _ in range(options.rounds)),
            )
            numbers[f"us of a response of {name}, workers {workers}"] = 1e6 * glue / 2000
            if 1e6 * glue / 2000 > GLUE_US:
                outcome.missed.append(f"a response of {name}: {1e6 * glue / 2000:.0f} us, target {GLUE_US:g}")
            print(f"a response of {name}: {1e6 * glue / 2000:.0f} us with {workers} worker(s), "
                  f"{1e6 * own / 2000:.0f} us in the rank (target {GLUE_US:g})")  # fmt: skip
        for workers in (0, 1) if options.steps else ():
            of_step = shares_of_step(workers, options.steps, Path(folder))
            numbers |= {f"{key}, workers {workers}": value for key, value in of_step.items()}
            if of_step["scoring"] > GLUE_SHARE:
                outcome.missed.append(f"scoring takes {of_step['scoring']:.1%} of a step, target {GLUE_SHARE:.0%}")
            print(f"a step of the quickstart with {workers} worker(s): {of_step['step_s']:.2f} s, scoring "
                  f"{of_step['scoring']:.1%} (target {GLUE_SHARE:.0%}), its phase {of_step['phase']:.1%}")  # fmt: skip
    print(f"load after: {os.getloadavg()[0]:.1f}")
    return outcome.end(numbers, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
