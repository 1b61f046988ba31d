"""Time of a step by the number of steps that generation runs ahead: scripted servers, a training that sleeps.

Router, engine, flow and collector are those of a run; see README.md.

python benchmarks/ahead.py
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from driver import ROOT, Report, compare, parser_of

from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.generation.engine import SglangRolloutEngine, SglangRolloutSettings, sampling_seed
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.generation.samples import Sampling, State
from mega_rl.tracking.metrics.steps import PhaseTimer
from mega_rl.trainer.collect import Batch, Collector, SamplingPlan
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.selection import StepVersions, Stock
from mega_rl.types import Metrics, Prompt
from mega_rl.workers.rollout import RolloutWorker
from mega_rl.workers.stream import RolloutStream, ServerFlow

sys.path.append(str(ROOT))
from tests.helpers.fake_sglang import STOP, FakeServer
from tests.helpers.fakes import FakeSink
from tests.helpers.fleet import Lengths, Numbered

TARGET = 1 / 1.6  # step two ahead / synchronous step
AHEAD = (1, 2, 4, 8)
ARRIVALS = ("lock", "free", "lock in turns", "free in turns")
SERVERS, SEED = 2, 7
PROMPT, VOCABULARY = 2, 1000  # tokens of each of `Numbered`, and more than there are
SPREAD = 1.0  # standard deviation of a length's logarithm
WAIT_S = 60.0  # longest wait for samples


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    prompts: int = 16  # of a step
    samples: int = 4  # of a prompt
    limit: int = 128  # tokens of a response; the median has an eighth
    token_s: float = 0.005  # of each request, whatever else is in flight
    in_flight: int = 32  # requests at all servers together
    steps: int = 12  # after k + 1 that do not count


@cache
def length_of(seed: int, limit: int) -> int:
    """Return how many tokens a request with this seed would have without a limit."""
    return max(1, round(random.Random(seed).lognormvariate(math.log(limit / 8), SPREAD)))


def token_of(seed: int, position: int, *, limit: int) -> int:
    """Return the token at a position of prompt and response."""
    return STOP if position - PROMPT + 1 == length_of(seed, limit) else STOP + 1


class Order(Numbered):
    """Prompts with the methods for steps that do not choose."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts

    def batch(self, step: int) -> list[Prompt]:
        return self.take(step * self.prompts, self.prompts)

    def drawn_after(self, done: int) -> int:
        return done * self.prompts


@dataclass
class Versions:
    """Weight sync that sends nothing: the servers answer with the next version."""

    router: ServerRouter
    servers: list[FakeServer]
    weight_version: int = 0

    def publish(self) -> Metrics:
        self.weight_version += 1
        for place, server in enumerate(self.servers):
            server.version = self.weight_version
            server.seen.clear()  # a server searches it for every request
            self.router.mark(place, State.READY, version=self.weight_version)
        return {}


@dataclass
class Run:
    """A run of the collector, `k` steps ahead of training.

    free: an update interrupts responses. in_turns: servers generate only while training waits.
    """

    sizes: Sizes
    k: int
    free: bool
    in_turns: bool
    stack: ExitStack

    def __post_init__(self) -> None:
        sizes, ranks = self.sizes, SingleRank()
        token = partial(token_of, limit=sizes.limit)
        servers = [FakeServer(index=i, seconds_per_token=sizes.token_s, token=token) for i in range(SERVERS)]
        router = ServerRouter(
            [self.stack.enter_context(server).endpoint for server in servers],
            vocab_size=VOCABULARY,
            max_concurrency=sizes.in_flight // SERVERS,
            retries=0,
            request_timeout_s=WAIT_S,
        )
        self.stack.callback(router.close)
        self.sync = Versions(router, servers)
        version = lambda: self.sync.weight_version  # noqa: E731
        settings = SglangRolloutSettings(
            Sampling(1.0, 1.0, 0, sizes.limit, (STOP,)),
            max_positions=PROMPT + sizes.limit,
            timeout_s=WAIT_S,
            concurrency=sizes.in_flight,
            restarts=0,
            max_failed_share=0.0,
            token_versions=True,
        )
        engine = SglangRolloutEngine(
            router, everyone=ranks, weight_version=version, bring_back=lambda dead: None, settings=settings
        )
        source: Any = RolloutWorker(engine, ranks, SingleRank(), sizes.samples, SEED)
        stock, self.publish, self.end_round = None, self.sync.publish, lambda: None
        if self.k:
            quantum = 0 if self.free else math.ceil(sizes.limit / (self.k + self.in_turns))
            flow = ServerFlow(source, engine, ranks, version, quantum, timeout_s=WAIT_S, in_turns=self.in_turns)
            source, stock = RolloutStream(flow, self.sync, source), Stock(flow, StepVersions(self.k, version), flow)
            self.stack.callback(flow.close)
            self.publish = source.publish
            if self.in_turns:
                self.end_round = flow.pause
        plan = SamplingPlan(sizes.samples, 0, sizes.prompts, sizes.prompts, ahead=self.k)
        timer = PhaseTimer()
        log = StepLog(FakeSink(), timer)
        self.collector = Collector(
            Order(sizes.prompts), source, Lengths(), plan, ranks, Stages(timer), log, stock=stock
        )

    def measure(self, training_s: float) -> dict[str, Any]:
        """Make all steps; returns seconds of each, and numbers of what trained."""
        seconds, waits, batches, ages = list[float](), list[float](), list[Batch](), list[torch.Tensor]()
        self.publish()
        for step in range(self.k + 1 + self.sizes.steps):
            begin = time.perf_counter()
            batch = self.collector.take(step)
            self.end_round()
            took = time.perf_counter() - begin
            rows = batch.rollout
            time.sleep(training_s)
            current = self.sync.weight_version
            self.publish()
            if step > self.k:
                seconds.append(time.perf_counter() - begin)
                waits.append(took)
                batches.append(batch)
                ages.append(current - rows.token_versions[rows.loss_mask])
        tokens = torch.cat(ages).double()
        lengths = torch.cat([batch.rollout.loss_mask.sum(1) for batch in batches]).double()
        return {
            "steps": seconds,
            "step_s": statistics.median(seconds),
            "generation_s": statistics.mean(waits),
            "age": float(tokens.mean()),
            "oldest": int(tokens.max()),
            "trained": float(lengths.mean()),
            "drawn": self._drawn(),
            "dropped": sum(len(batch.dropped) for batch in batches),
        }

    def _drawn(self) -> float:
        """Return the mean length of the responses of as many prompts, in the order of the data."""
        sizes, first = self.sizes, self.k + 1
        seeds = [
            sampling_seed((SEED, ticket // sizes.prompts), ticket % sizes.prompts, number)
            for ticket in range(first * sizes.prompts, (first + sizes.steps) * sizes.prompts)
            for number in range(sizes.samples)
        ]
        return statistics.mean(min(length_of(seed, sizes.limit), sizes.limit) for seed in seeds)


def measured(sizes: Sizes, k: int, training_s: float, *, free: bool = False, in_turns: bool = False) -> dict[str, Any]:
    with ExitStack() as stack:
        return Run(sizes, k, free, in_turns, stack).measure(training_s)


def main() -> int:
    """Print a table and the target; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--training", type=float, default=1.0, help="its time / that of a generation (1)")
    options = parser.parse_args()
    outcome = Report(options)
    sizes = Sizes(prompts=4, samples=2, limit=16, token_s=0.002, in_flight=8, steps=3) if options.tiny else Sizes()
    generation_s = measured(sizes, 0, 0.0)["generation_s"]
    training_s = options.training * generation_s
    print(f"a synchronous generation {generation_s:.3f} s, training {training_s:.3f} s")
    print(f"{'':>17} {'step s':>7} {'ratio':>6} {'age':>5} {'oldest':>6} {'trained':>8} {'drawn':>6} {'dropped':>7}")
    runs = {"synchronous": measured(sizes, 0, training_s)}
    lines = {}
    for k, arrival in [(0, ""), *((k, arrival) for k in AHEAD for arrival in ARRIVALS)]:
        name = f"k={k} {arrival}" if k else "synchronous"
        if k:
            runs[name] = measured(sizes, k, training_s, free="free" in arrival, in_turns="in turns" in arrival)
        own = runs[name]
        ratio = runs["synchronous"]["step_s"] / own["step_s"]
        print(
            f"{name:>17} {own['step_s']:7.3f} {ratio:6.2f} {own['age']:5.2f} {own['oldest']:6d} "
            f"{own['trained']:8.1f} {own['drawn']:6.1f} {own['dropped']:7d}",
            flush=True,
        )
        if k:
            hides = "in turns" not in arrival  # training
            target = TARGET if k == 2 and options.training == 1 and hides else None
            outcome.add(compare(f"{name} / synchronous", own["steps"], runs["synchronous"]["steps"], target))
        lines[name] = (
            f"{own['step_s']:.2f} s, {ratio:.2f} times as fast; age {own['age']:.2f}, at most {own['oldest']}; "
            f"tokens of a response {own['trained']:.1f}, of those drawn {own['drawn']:.1f}; dropped {own['dropped']}"
        )
        if own["oldest"] > k:
            outcome.wrong.append(f"{name}: a token is {own['oldest']} versions old")
    print(f"load after: {os.getloadavg()[0]:.1f}")
    numbers = {"s of a synchronous generation": generation_s, "s of a training": training_s}
    return outcome.end(runs, numbers=numbers, lines=lines)


if __name__ == "__main__":
    sys.exit(main())
