"""Rollout engine over SGLang servers: prompts in, rows out; lost servers are restarted and refitted."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import raise_together, run_on_all
from mega_rl.protocols import Ranks
from mega_rl.rollout.counter_rng import stream_keys
from mega_rl.rollout.sglang.generation.results import FleetResult, Progress, State
from mega_rl.rollout.sglang.generation.router import Handle, ServerRouter
from mega_rl.rollout.sglang.generation.rows import rollout_of
from mega_rl.rollout.sglang.generation.samples import Failure, Key, RoutedLayers, Sample, SampleRequest, Sampling
from mega_rl.types import Draws, Metrics, Prompt, Rollout

log = logging.getLogger(__name__)

_NAMED_FAILURES = 3  # in an error message


class RolloutFailedError(RunError):
    """Samples failed all their tries, and `rollout.sglang.failed_samples` does not let the run go on without them."""


class ServersLostError(RunError):
    """Samples are unserved and the restarts of one generation are used up."""


@dataclass(frozen=True)
class FailedSamples:
    """Policy for samples without a response after all their tries."""

    mask: bool  # leave them out of the loss; False ends the run
    max_share: float  # of a generation's samples over all ranks; more end the run


@dataclass(frozen=True)
class SglangRolloutSettings:
    """Settings of one rank's generations over SGLang servers."""

    sampling: Sampling
    max_positions: int  # of the model: prompt and response together
    timeout_s: float  # of one sample, from its first try to its last
    concurrency: int  # requests of this rank in flight at all servers together; the others wait their turn
    restarts: int  # times that servers are brought back for one generation
    failed: FailedSamples
    routed: RoutedLayers | None = None  # samples for training report the experts of their tokens
    token_versions: bool = False  # responses may go on under later weights, and tokens carry their version


@dataclass
class Sampled:
    """One rank's requests and the samples it has so far."""

    prompts: Sequence[Prompt]
    requests: list[SampleRequest]  # in the order of the rows
    sampling: Sampling
    trains: bool = True  # the samples are for training, not of an evaluation
    samples: dict[Key, Sample] = field(default_factory=dict)
    failures: dict[Key, Failure] = field(default_factory=dict)
    unserved: dict[Key, Sample] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def add(self, result: FleetResult) -> None:
        """Merge the result of a generation of the unserved requests."""
        self.samples |= result.samples
        self.failures |= result.failures
        self.unserved = result.unserved
        stats = result.stats
        for name, value in (
            ("requests", stats.requests),
            ("retries", stats.retries),
            ("failed_tries", stats.failed_tries.total()),
            ("tokens", stats.tokens),
            ("seconds", stats.seconds),
        ):
            self.numbers[name] = self.numbers.get(name, 0.0) + value


class SglangRolloutEngine:
    """`protocols.BackgroundEngine` over a `ServerRouter`. Every rank is a client and asks for its own prompts' samples.

    `sample` talks to servers and does no collective, so it may run beside training; `collect` is collective over all
    ranks: where a rank lost servers, all ranks bring them back and send them the weights before they get requests.
    """

    def __init__(
        self,
        fleet: ServerRouter,
        *,
        everyone: Ranks,
        weight_version: Callable[[], int],
        bring_back: Callable[[Sequence[int]], None],
        settings: SglangRolloutSettings,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """
        weight_version: of the weights last published.
        bring_back: restarts these servers if they are dead, and sends them the weights; collective.
        """
        self._fleet = fleet
        self._everyone = everyone
        self._version = weight_version
        self._bring_back = bring_back
        self._settings = settings
        self._progress = progress
        self._metrics: Metrics = {}
        self._handle: Handle | None = None
        self._turn = threading.Condition()
        self._held = False  # between interrupt and resume: nothing may be sent
        self._sending = False

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
        limits: Sequence[int] | None = None,
        draws: Draws | None = None,
    ) -> Rollout:
        def sample() -> Sampled:
            return self.sample(prompts, prompt_index, n=n, seed=seed, greedy=greedy, limits=limits, draws=draws)

        return self.collect(run_on_all(sample, self._everyone))

    def sample(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
        limits: Sequence[int] | None = None,
        draws: Draws | None = None,
    ) -> Sampled:
        """Request n samples of each prompt and return those answered within the deadline, for `collect`. No collective.

        Raises UserError for prompts that are empty, hold foreign tokens or leave no room for a response.
        """
        most = self._settings.sampling.max_new_tokens if draws is None else draws.max_new_tokens
        limits = [most or self._settings.sampling.max_new_tokens] * len(prompts) if limits is None else limits
        self._check_lengths(prompts, limits)
        requests = [
            SampleRequest(
                (index, number), tuple(prompt.token_ids), seed=sampling_seed(seed, index, number), limit=limit
            )
            for prompt, index, limit in zip(prompts, prompt_index, limits, strict=True)
            for number in range(n)
        ]
        trains = not greedy and draws is None
        return_routing = self._settings.routed is not None and trains
        greedy = greedy or (draws is not None and not draws.temperature)
        sampling = replace(self._settings.sampling, greedy=greedy, return_routing=return_routing)
        if draws is not None and not greedy:
            sampling = replace(sampling, temperature=draws.temperature, top_p=draws.top_p, top_k=draws.top_k)
        sampled = Sampled(prompts, requests, sampling, trains)
        sampled.unserved = {request.key: Sample() for request in requests}
        deadline = time.monotonic() + self.deadline_s(len(requests))
        while sampled.unserved:
            result = self._ask_servers(sampled, deadline)
            sampled.add(result)
            if not result.interrupted:
                break
        return sampled

    def collect(self, sampled: Sampled) -> Rollout:
        """Return the rows of `sampled`, restarting lost servers for what is unserved; collective over all ranks.

        Raises on all ranks RolloutFailedError for failed samples, ServersLostError when the restarts are used up.
        """

        def ask_again() -> None:
            if sampled.unserved:
                sampled.add(self._ask_servers(sampled, time.monotonic() + self.deadline_s(len(sampled.unserved))))

        for times in range(self._settings.restarts + 1):
            lost = self._lost_servers()
            unserved = int(self._everyone.sum(torch.tensor(len(sampled.unserved))))
            if not unserved and not (lost and times == 0):
                break
            if times == self._settings.restarts:
                raise ServersLostError(
                    f"{unserved} samples are without an answer and servers {lost} have been brought back "
                    f"{times} times (rollout.sglang.restarts={self._settings.restarts}): " + "; ".join(self._reasons())
                )
            if lost:
                log.warning("servers %s are out of rotation: %s", lost, "; ".join(self._reasons()))
                self._bring_back(lost)
            run_on_all(ask_again, self._everyone)
        any_failed = self._settle_failures(sampled)
        self._count(sampled)
        return rollout_of(
            sampled.requests,
            sampled.samples,
            weight_version=self._version(),
            with_failed=any_failed,
            with_token_versions=self._settings.token_versions and sampled.trains,
            routed=self._settings.routed if sampled.sampling.return_routing else None,
        )

    def deadline_s(self, count: int) -> float:
        """Return the seconds that `count` samples may take: `timeout_s` for each round of `concurrency`."""
        return self._settings.timeout_s * max(1, math.ceil(count / self._settings.concurrency))

    def metrics(self) -> Metrics:
        """Return and reset the metrics of the generations since the last call, over all ranks; see `_count`."""
        taken, self._metrics = self._metrics, {}
        return taken

    # -- interruption: a weight update in the middle of a generation that runs beside training ------------------------

    def interrupt(self) -> None:
        """Abort requests in flight, keep their tokens and send no more; return when none is in flight."""
        with self._turn:
            self._held = True
            if self._handle is not None:
                self._handle.interrupt()
            if not self._turn.wait_for(lambda: not self._sending, timeout=self._settings.timeout_s):
                raise RunError(
                    f"requests in flight did not end within {self._settings.timeout_s:g} s of their interruption"
                )

    def resume(self) -> None:
        """Resume the samples that `interrupt` aborted, under the current weights."""
        with self._turn:
            self._held = False
            self._turn.notify_all()

    def _ask_servers(self, sampled: Sampled, deadline: float) -> FleetResult:
        """Run one generation of the unserved samples, after any weight update that holds it back."""
        with self._turn:
            if not self._turn.wait_for(lambda: not self._held, timeout=max(0.0, deadline - time.monotonic())):
                raise RunError("waited for a weight update to end until the deadline of the generation it interrupted")
            handle = self._handle = self._fleet.start(
                [request for request in sampled.requests if request.key in sampled.unserved],
                sampled.sampling,
                version=self._version(),
                deadline=deadline,
                partials=sampled.unserved,
                progress=self._progress,
            )
            self._sending = True
        try:
            return handle.result()
        finally:
            with self._turn:
                self._handle, self._sending = None, False
                self._turn.notify_all()

    # -- what went wrong ---------------------------------------------------------------------------------------------

    def _check_lengths(self, prompts: Sequence[Prompt], limits: Sequence[int]) -> None:
        most, lengths = self._settings.max_positions, [len(prompt.token_ids) for prompt in prompts]
        longest, new = max(zip(lengths, limits, strict=True), key=sum, default=(0, 0))
        if longest + new > most:
            raise UserError(
                f"the longest prompt has {longest} tokens and its response up to {new}: "
                f"together more than the model's max_position_embeddings={most}; lower "
                "data.max_prompt_tokens or the length of responses, rollout.max_new_tokens or validation.max_new_tokens"
            )

    def _lost_servers(self) -> list[int]:
        """Return the servers that are out of rotation on some rank; collective."""
        lost = torch.tensor([int(state is not State.READY) for state, _ in self._fleet.states()])
        return self._everyone.max(lost).nonzero().flatten().tolist()

    def _reasons(self) -> list[str]:
        return [f"server {i}: {why}" for i, (state, why) in enumerate(self._fleet.states()) if state is not State.READY]

    def _settle_failures(self, sampled: Sampled) -> bool:
        """Return whether any rank has failed samples; raise on all ranks when they are fatal or too many."""
        counts = self._everyone.sum(torch.tensor([len(sampled.failures), len(sampled.requests)])).tolist()
        if not counts[0]:
            return False
        share = counts[0] / counts[1]
        too_many = not self._settings.failed.mask or share > self._settings.failed.max_share
        if too_many:
            own = [f"sample {key}: {failure.message}" for key, failure in sampled.failures.items()][:_NAMED_FAILURES]
            rule = (
                f"more than rollout.sglang.max_failed_share={self._settings.failed.max_share:g}"
                if self._settings.failed.mask
                else "rollout.sglang.failed_samples=fatal; mask leaves them out of the loss"
            )
            text = f"{counts[0]} of {counts[1]} samples have no answer ({rule}): " + "; ".join(own)
            raise_together(RolloutFailedError(text) if own else None, self._everyone, error=RolloutFailedError)
        return True

    def _count(self, sampled: Sampled) -> None:
        """Add tokens, requests, retries and failures of all ranks and the slowest rank's seconds; collective."""
        numbers = sampled.numbers
        names = ("requests", "retries", "failed_tries", "tokens")
        sums = self._everyone.sum(
            torch.tensor([numbers.get(name, 0.0) for name in names], dtype=torch.float64)
        ).tolist()
        seconds = float(self._everyone.max(torch.tensor(numbers.get("seconds", 0.0), dtype=torch.float64)))
        for name, value in zip(names, sums, strict=True):
            key = f"sglang/{name}"
            self._metrics[key] = self._metrics.get(key, 0.0) + value
        self._metrics["sglang/seconds"] = self._metrics.get("sglang/seconds", 0.0) + seconds
        if self._metrics["sglang/seconds"] > 0:
            self._metrics["sglang/tokens_per_second"] = self._metrics["sglang/tokens"] / self._metrics["sglang/seconds"]


def sampling_seed(seed: Sequence[int], prompt_index: int, sample_index: int) -> int:
    """Return a 31-bit seed, a function of its arguments alone: the same on any rank and server."""
    key = stream_keys(seed, torch.tensor(prompt_index), torch.tensor(sample_index))
    return int(key) & (2**31 - 1)
