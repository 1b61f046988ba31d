"""A fleet without servers: the interface of `SglangRolloutEngine` over a policy that is a table of numbers.

A token is a function of its request's seed, its position and the weights last published, so a test knows what each one
must be and which log-prob it must have. `pace` says how many tokens of a request come until somebody looks again, or
interrupts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mega_rl.agents.environment import Environment, Runner, TurnRequest
from mega_rl.parallel.comm import SingleRank
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.generation.engine import NUMBER_BITS, rollout_of, sampling_seed
from mega_rl.rollout.sglang.generation.samples import (
    Key,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
)
from mega_rl.trainer.collect import Collector, SamplingPlan
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.selection import StepVersions, Stock
from mega_rl.types import Metrics, Prompt, Rewards, Rollout
from mega_rl.workers.residency import TAGS, Residency, ResidentModels
from mega_rl.workers.rollout import EnvironmentRollouts, RolloutContext, RolloutWorker
from mega_rl.workers.stream import RolloutStream, ServerFlow
from tests.helpers.fakes import FakeSink, FakeTimer

STOP, VOCABULARY, LONGEST, N = 0, 8, 12, 2
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=LONGEST, stop_token_ids=(STOP,))


def token_of(weights: Tensor, seed: int, position: int) -> int:
    """Return the token of a request at a position of its response."""
    generator = torch.Generator().manual_seed(seed * 1_000 + position)
    at = torch.rand((), generator=generator, dtype=torch.float64)
    return int((weights.softmax(0).cumsum(0) < at).sum().clamp(max=VOCABULARY - 1))


def logits_of(weights: Tensor, context: Sequence[int]) -> Tensor:
    """Return the logits of a turn, which depend on the tokens before it."""
    return weights + ((torch.arange(VOCABULARY) * sum(context) * len(context)) % 5) / 4


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


@dataclass(eq=False)
class _Job:
    """A request at the fleet."""

    request: SampleRequest
    answer: Callable[[Sample | RequestFailure], None]
    sample: Sample
    dropped: bool = False


@dataclass
class FakeFleet:
    """One rank's engine and servers' memory; `pace(key, look)` counts looks of the run. Keys: ticket and sample."""

    policy: Policy
    everyone: Ranks
    pace: Callable[[Key, int], int] = lambda key, number: LONGEST
    fails: Callable[[Key], bool] = lambda key: False
    loses: Callable[[Key, int], bool | None] = lambda key, number: (
        None
    )  # whether the request's server dies at this look
    sampling: Sampling = SAMPLING
    routed: None = None
    by_context: bool = False  # tokens are those of `logits_of`
    looks: int = 0
    tokens: int = 0  # sampled
    held: set[str] = field(default_factory=lambda: set(TAGS))  # memory of the servers
    _jobs: list[_Job] = field(default_factory=list)

    def requests(self, prompts: Sequence[Prompt], places: Sequence[int], *, n: int, seed: Any) -> list[SampleRequest]:
        ids = [
            (prompt.token_ids, place, sample)
            for prompt, place in zip(prompts, places, strict=True)
            for sample in range(n)
        ]
        return [SampleRequest((place, s), own, sampling_seed(seed, place, s), LONGEST) for own, place, s in ids]

    def turn_request(self, turn: TurnRequest, seed: tuple[int, ...]) -> SampleRequest:
        ids, (place, sample, number), limit = turn
        own = sampling_seed(seed, place, sample, number)
        return SampleRequest((place, sample << NUMBER_BITS | number), ids, own, limit)

    def metrics(self) -> Metrics:
        return {}

    def open(self) -> None:
        assert not self._jobs

    @property
    def router(self) -> FakeFleet:
        return self

    def ask(
        self, request: SampleRequest, answer: Callable[[Sample | RequestFailure], None], so_far: Sample
    ) -> Callable[[], object]:
        assert self.held == set(TAGS), "servers have not resumed their memory"
        job = _Job(request, answer, so_far)
        self._jobs.append(job)
        return lambda: setattr(job, "dropped", True)

    def release(self, tags: Sequence[str]) -> None:
        assert not self._jobs, "SGLang's scheduler would die of it"
        assert self.held >= set(tags)
        self.held -= set(tags)

    def resume(self, tags: Sequence[str]) -> None:
        self.held |= set(tags)

    def end(self, *, interrupt: bool = False) -> None:
        self.look()
        jobs, self._jobs = self._jobs, []
        assert interrupt or not jobs
        for job in jobs:
            job.answer(job.sample)

    def settle(self, lost: Callable[[], int], again: Callable[[], None], *, holds: bool = True, times: int = 0) -> int:
        while lost():
            assert self.loses((0, 0), -1) is not None, "no server has died"
            again()
        return times

    def rows(self, requests: Any, samples: Any, failures: Any, *, trains: bool) -> Rollout:
        has_failed = bool(self.everyone.max(torch.tensor(len(failures))))
        version = self.policy.weight_version
        return rollout_of(requests, samples, weight_version=version, with_failed=has_failed, with_token_versions=True)

    def look(self) -> None:
        """Let requests come along until this look."""
        look, self.looks = self.looks, self.looks + 1
        for job in [*self._jobs]:
            key = (job.request.key[0], job.request.key[1] >> NUMBER_BITS)
            self._decode(job, self.pace(key, look))
            if (
                self.loses(key, look)
                or self.fails(key)
                or job.sample.is_whole(job.request, self.sampling)
                or job.dropped
            ):
                self._jobs.remove(job)
                job.answer(RequestFailure("bad_answer", "it is cut") if self.fails(key) else job.sample)

    def _decode(self, job: _Job, count: int) -> None:
        version, before = self.policy.weight_version, job.sample
        weights = self.policy.published[version]
        weights = logits_of(weights, job.request.prompt) if self.by_context else weights
        ids, logprobs, versions = list(before.token_ids), list(before.logprobs), list(before.versions)
        assert job.request.limit is not None
        while count and len(ids) < job.request.limit and STOP not in ids:
            ids.append(token_of(weights, job.request.seed, len(ids)))
            logprobs.append(float(weights.log_softmax(0)[ids[-1]]))
            versions.append(version)
            count, self.tokens = count - 1, self.tokens + 1
        whole = STOP in ids or len(ids) >= job.request.limit
        job.sample = Sample(ids, logprobs, versions, ("stop" if STOP in ids else "length") if whole else "partial")


class Looks(threading.Condition):
    """Whoever waits looks at the fleet first."""

    def __init__(self, fleet: FakeFleet) -> None:
        super().__init__()
        self._fleet = fleet

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = time.monotonic() + (timeout or 0.0)
        self._fleet.look()
        while not super().wait_for(predicate, 0.005) and time.monotonic() < end:
            self._fleet.look()
        return predicate()


class Numbered:
    """The prompts of an endless order: draw t is row t of the data."""

    def take(self, first: int, count: int) -> list[Prompt]:
        return [self.prompt_of(number, number) for number in range(first, first + count)]

    def prompt_of(self, number: int, row: int) -> Prompt:
        assert number == row
        return Prompt(row, (20 + row % 40, 30 + row // 40), f"p{row}", "")

    def metrics(self, drawn: int) -> Metrics:
        return {"data/prompts": float(drawn)}

    def waits(self) -> Metrics:
        return {}


class Lengths:
    """Scorer: the share of a response's tokens above 3, and nothing for every third prompt."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        rows = [prompts[int(number)].index % 3 for number in rollout.prompt_index]
        large = ((rollout.tokens > 3) & rollout.loss_mask).sum(1) / LONGEST
        n = 1 + max(rollout.sample_index.tolist(), default=0)
        of_samples = rollout.prompt_index * n + rollout.sample_index  # rows of a trajectory have its reward
        large = torch.zeros(len(prompts) * n).index_add(0, of_samples, large)[of_samples]
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
    publishes: int = 1  # of a step, each after a part of its updates
    redraws: bool = False
    drawn: int = 0  # prompts of a draw; 0: as many as train in a step
    together: bool = False  # the ranks are one replica, not one each
    in_turns: bool = False  # servers share the trainer's devices
    fleet: dict[str, Any] = field(default_factory=dict)
    environment: Environment | None = None  # samples are its trajectories

    def __post_init__(self) -> None:
        self.policy = Policy()
        engine = FakeFleet(self.policy, self.ranks, by_context=self.environment is not None, **self.fleet)
        self.replicas, replica = (SingleRank(), self.ranks) if self.together else (self.ranks, SingleRank())
        worker = RolloutWorker(engine, self.replicas, replica, N, seed=7)  # type: ignore[arg-type]
        rounds = self.k * self.publishes + self.in_turns
        quantum = 0 if self.free else self.quantum or -(-LONGEST // rounds)
        version, rollouts = lambda: self.policy.weight_version, None
        if self.environment is not None:
            tokenizer: Any = None
            context = RolloutContext(tokenizer, engine, SAMPLING, N, 7, self.replicas, replica, version)
            runner = Runner(self.environment, "rollout.source='own.py:Own'", vocab_size=100)
            rollouts = EnvironmentRollouts(runner, context, self.ranks, window=self.per_step * N)
        self.flow = ServerFlow(
            worker,
            engine,
            self.ranks,
            version,
            quantum,
            timeout_s=2.0,
            beat_s=0.01,
            look_s=0.0,  # type: ignore[arg-type]
            rollouts=rollouts,
            in_turns=self.in_turns,
        )
        self.flow.requests.changed = Looks(engine)
        self.stream, self.stock = (
            RolloutStream(self.flow, self.policy, rollouts or worker),
            Stock(self.flow, StepVersions(self.k, version), self.flow, self.redraws),
        )
        plan = SamplingPlan(
            N,
            self.waves,
            self.per_step,
            self.drawn or self.per_step,
            ahead=self.k,
            steps=0 if self.waves else self.steps,
        )
        self.stage, log = Stages(FakeTimer()), StepLog(FakeSink(), FakeTimer())  # type: ignore[arg-type]
        if self.in_turns:
            accelerator: Any = SimpleNamespace(memory_allocated=lambda: 0, empty_cache=lambda: None)
            engine.held.clear()  # at their start
            self.stage.devices = Residency(ResidentModels(accelerator), self.ranks, engine)  # type: ignore[arg-type]
            self.stage.devices.end_round = self.flow.pause
        self.collector = Collector(
            Numbered(),
            self.stream,
            Lengths(),
            plan,
            self.replicas,
            self.stage,
            log,
            stock=self.stock,  # type: ignore[arg-type]
        )
        self.done = 0
        self.taken: list[Any] = []  # batch of each step
        self.versions: list[int] = []  # of the trainer at each
        self.began: dict[int, int] = {}  # the same by step, of the runs before, too

    def oldest(self, place: int) -> int:
        """Return the oldest version that the batch at a place of `taken` may have: what k steps before began with."""
        return self.began.get(self.done - len(self.taken) + place - self.k, 1)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank."""
        tensors = {name: tensor.clone() for name, tensor in self.stock.state().items()}
        numbers = {"done": self.done, "version": self.policy.weight_version, **self.collector.numbers(self.done)}
        return {
            **numbers,
            "weights": self.policy.weights.clone(),
            "tensors": tensors,
            "published": {**self.policy.published},
            "began": {**self.began},
        }

    def resume(self, saved: Mapping[str, Any], *, same_layout: bool = True) -> StreamRun:
        self.done, self.policy.weights = saved["done"], saved["weights"].clone()
        self.policy.resume_at(saved["version"])
        self.policy.published, self.began = {**saved["published"]}, {**saved["began"]}
        self.stock.restore(saved["tensors"] if same_layout else None)
        self.collector.resume(saved)
        return self

    def kill(self) -> None:
        """Leave what is in progress."""
        if self.flow.players is not None and self.flow.players._play is not None:
            self.flow.players._play.abandoned = True

    def run(self, steps: int | None = None) -> StreamRun:
        """Make steps, by default to the run's end."""
        if not self.versions:
            self.stage.publish(self.stream)
        for _ in range(self.steps - self.done if steps is None else steps):
            self.versions.append(self.policy.weight_version)
            self.began[self.done] = self.policy.weight_version
            batch = self.collector.take(self.done)
            self.taken.append(batch)
            with self.stage("update_actor"):
                assert not self.in_turns or not self.flow.engine.held, "a round runs"  # type: ignore[attr-defined]
            rows = batch.samples.rollout
            for update in range(self.publishes):
                if update:
                    self.stream.publish_within(lambda sync: sync.publish())
                mask = rows.loss_mask & (rows.prompt_index % self.publishes == update)[:, None]
                counts = torch.bincount(rows.tokens[mask], minlength=VOCABULARY)
                moves = self.replicas.sum(counts).double() * torch.arange(VOCABULARY).sub(3).sign() * 2.0**-6
                self.policy.weights = self.policy.weights + moves
            self.done += 1
            self.stage.publish(self.stream)
        return self
