"""A fleet without servers: the interface of `SglangRolloutEngine` over a policy that is a table of numbers.

A token is a function of its request's seed, its position and the weights last published, so a test knows what each one
must be and which log-prob it must have. `pace` says how many tokens of a request come until somebody looks again, or
interrupts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.generation.engine import rollout_of, sampling_seed
from mega_rl.rollout.sglang.generation.samples import (
    GenerationResult,
    Key,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
)
from mega_rl.trainer.collect import Collector, SamplingPlan
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.selection import Stock
from mega_rl.types import Metrics, Prompt, Rewards, Rollout
from mega_rl.workers.rollout import RolloutWorker
from mega_rl.workers.stream import RolloutStream, ServerFlow
from tests.helpers.fakes import FakeSink, FakeTimer

STOP, VOCABULARY, LONGEST, N = 0, 8, 12, 2
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=LONGEST, stop_token_ids=(STOP,))


def token_of(weights: Tensor, seed: int, position: int) -> int:
    """Return the token of a request at a position of its response."""
    generator = torch.Generator().manual_seed(seed * 1_000 + position)
    at = torch.rand((), generator=generator, dtype=torch.float64)
    return int((weights.softmax(0).cumsum(0) < at).sum().clamp(max=VOCABULARY - 1))


@dataclass
class Policy:
    """Weights and their sync: what was published is kept by version."""

    weights: Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY, dtype=torch.float64))
    weight_version: int = 0
    published: dict[int, Tensor] = field(default_factory=dict)

    def resume_at(self, version: int) -> None:
        self.weight_version = version - 1

    def publish(self) -> Metrics:
        self.weight_version += 1
        self.published[self.weight_version] = self.weights.clone()
        return {}


@dataclass
class FakeFleet:
    """One rank's engine; `pace(key, look)` counts the looks of the whole run."""

    policy: Policy
    everyone: Ranks
    pace: Callable[[Key, int], int] = lambda key, number: LONGEST
    fails: Callable[[Key], bool] = lambda key: False
    sampling: Sampling = SAMPLING
    looks: int = 0
    _begun: int = 0  # looks before the round
    _asked: Sequence[SampleRequest] = ()
    _partials: Mapping[Key, Sample] = field(default_factory=dict)

    def requests(self, prompts: Sequence[Prompt], places: Sequence[int], *, n: int, seed: Any) -> list[SampleRequest]:
        ids = [
            (prompt.token_ids, place, sample)
            for prompt, place in zip(prompts, places, strict=True)
            for sample in range(n)
        ]
        return [SampleRequest((place, s), own, sampling_seed(seed, place, s), LONGEST) for own, place, s in ids]

    def metrics(self) -> Metrics:
        return {}

    def begin(self, requests: Sequence[SampleRequest], partials: Mapping[Key, Sample]) -> None:
        self._asked, self._partials, self._begun = requests, partials, self.looks

    @property
    def router(self) -> FakeFleet:
        return self

    def so_far(self, wait_s: float = 0.0) -> tuple[GenerationResult, bool]:
        self.looks += 1
        result = self._played(interrupt=True)
        return (replace(result, unserved={}), False) if result.unserved else (GenerationResult(), True)

    def end(self, *, interrupt: bool = False) -> GenerationResult:
        self.looks += 1
        return self._played(interrupt=interrupt)

    def settle(self, lost: Callable[[], int], again: Callable[[], None], *, holds: bool = True) -> None:
        assert not lost()

    def rows(self, requests: Any, samples: Any, failures: Any, *, trains: bool) -> Rollout:
        has_failed = bool(self.everyone.max(torch.tensor(len(failures))))
        version = self.policy.weight_version
        return rollout_of(requests, samples, weight_version=version, with_failed=has_failed, with_token_versions=True)

    def _played(self, *, interrupt: bool) -> GenerationResult:
        result, version = GenerationResult(), self.policy.weight_version
        weights = self.policy.published[version]
        for request in self._asked:
            before = self._partials[request.key]
            ids, logprobs, versions = list(before.token_ids), list(before.logprobs), list(before.versions)
            left = (
                sum(self.pace(request.key, look) for look in range(self._begun, self.looks)) if interrupt else LONGEST
            )
            assert request.limit is not None
            while left and len(ids) < request.limit and STOP not in ids:
                ids.append(token_of(weights, request.seed, len(ids)))
                logprobs.append(float(weights.log_softmax(0)[ids[-1]]))
                versions.append(version)
                left -= 1
            sample = Sample(ids, logprobs, versions, "stop" if STOP in ids else "length")
            if self.fails(request.key):
                result.failures[request.key] = RequestFailure("bad_answer", "it is cut")
            elif sample.is_whole(request, SAMPLING):
                result.samples[request.key] = sample
            else:
                result.unserved[request.key] = replace(sample, finish="partial")
        return result


class Numbered:
    """The prompts of an endless order: draw t is row t of the data."""

    def take(self, first: int, count: int) -> list[Prompt]:
        return [self.prompt_of(number, number) for number in range(first, first + count)]

    def prompt_of(self, number: int, row: int) -> Prompt:
        assert number == row
        return Prompt(row, (20 + row % 40, 30 + row // 40), f"p{row}", "")


class Lengths:
    """Scorer: the share of a response's tokens above 3, and nothing for every third prompt."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        rows = [prompts[int(number)].index % 3 for number in rollout.prompt_index]
        large = ((rollout.tokens > 3) & rollout.loss_mask).sum(1) / LONGEST
        return Rewards(torch.where(torch.tensor(rows, dtype=torch.int64) == 0, 0.0, large.float()))

    def metrics(self) -> Metrics:
        return {}


@dataclass
class StreamRun:
    """A run of a collector over a fleet; the policy moves by whole numbers, so that ranks may add in any order."""

    k: int
    ranks: Ranks
    free: bool = False
    steps: int = 6
    per_step: int = 4
    waves: int = 0
    quantum: int = 0
    redraws: bool = False
    drawn: int = 0  # prompts of a draw; 0: as many as train in a step
    together: bool = False  # the ranks are one replica, not one each
    fleet: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy = Policy()
        engine = FakeFleet(self.policy, self.ranks, **self.fleet)
        self.replicas, replica = (SingleRank(), self.ranks) if self.together else (self.ranks, SingleRank())
        worker = RolloutWorker(engine, self.replicas, replica, N, seed=7)  # type: ignore[arg-type]
        quantum = 0 if self.free else self.quantum or -(-LONGEST // self.k)
        version = lambda: self.policy.weight_version  # noqa: E731
        self.flow = ServerFlow(
            worker,
            engine,
            self.ranks,
            version,
            quantum,
            timeout_s=2.0,
            beat_s=0.01,
            look_s=0.0,  # type: ignore[arg-type]
        )
        self.stream, self.stock = (
            RolloutStream(self.flow, self.policy),
            Stock(self.flow, version, self.flow, self.redraws),
        )
        plan = SamplingPlan(
            N,
            self.waves,
            self.per_step,
            self.drawn or self.per_step,
            ahead=self.k,
            steps=0 if self.waves else self.steps,
        )
        stage, log = Stages(FakeTimer()), StepLog(FakeSink(), FakeTimer())  # type: ignore[arg-type]
        self.collector = Collector(
            Numbered(),
            self.stream,
            Lengths(),
            plan,
            self.replicas,
            stage,
            log,
            stock=self.stock,  # type: ignore[arg-type]
        )
        self.done = 0
        self.taken: list[Any] = []  # batch of each step
        self.versions: list[int] = []  # of the trainer at each

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank."""
        tensors = {name: tensor.clone() for name, tensor in self.stock.state().items()}
        numbers = {"done": self.done, "version": self.policy.weight_version, **self.collector.numbers(self.done)}
        return {
            **numbers,
            "weights": self.policy.weights.clone(),
            "tensors": tensors,
            "published": {**self.policy.published},
        }

    def resume(self, saved: Mapping[str, Any], *, same_layout: bool = True) -> StreamRun:
        self.done, self.policy.weights = saved["done"], saved["weights"].clone()
        self.policy.resume_at(saved["version"])
        self.policy.published = {**saved["published"]}
        self.stock.restore(saved["tensors"] if same_layout else None)
        self.collector.resume(saved)
        return self

    def run(self, steps: int | None = None) -> StreamRun:
        """Make steps, by default to the run's end."""
        if not self.versions:
            self.stream.publish()
        for _ in range(self.steps - self.done if steps is None else steps):
            self.versions.append(self.policy.weight_version)
            batch = self.collector.take(self.done)
            self.taken.append(batch)
            rows = batch.samples.rollout
            counts = torch.bincount(rows.tokens[rows.loss_mask], minlength=VOCABULARY)
            moves = self.replicas.sum(counts).double() * torch.arange(VOCABULARY).sub(3).sign() * 2.0**-6
            self.policy.weights = self.policy.weights + moves
            self.done += 1
            self.stream.publish()
        return self
