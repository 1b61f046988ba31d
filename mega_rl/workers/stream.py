"""Generation next to training, up to k steps ahead: groups in progress, and weight updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import raise_together
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks, WeightSync
from mega_rl.rollout.sglang.generation.engine import SglangRolloutEngine
from mega_rl.rollout.sglang.generation.samples import GenerationResult, Key, RequestFailure, Sample, SampleRequest
from mega_rl.types import Arrived, Draw, Draws, Metrics, Prompt, Rollout
from mega_rl.workers.rollout import RolloutWorker, own_share

log = logging.getLogger(__name__)

_FINISHES = ("partial", "stop", "length", "failed")  # in a checkpoint


class StreamError(RunError):
    """Generation next to training failed or was late."""


@dataclass
class _Flight:
    """Group in progress: samples of one prompt, on the rank that asks for them."""

    prompt: Prompt
    in_replica: bool  # this rank's replica asks for them
    requests: dict[Key, SampleRequest] = field(default_factory=dict)  # by (ticket, number of the sample)
    samples: dict[Key, Sample] = field(default_factory=dict)  # whole, or as far as they came
    failures: dict[Key, RequestFailure] = field(default_factory=dict)

    def open(self) -> list[SampleRequest]:
        """Return the requests whose samples are neither whole nor failed."""
        done = {key for key, sample in self.samples.items() if sample.finish != "partial"} | self.failures.keys()
        return [request for key, request in self.requests.items() if key not in done]

    def oldest(self, current: int) -> int:
        """Return the version of the oldest token; `current` without a token."""
        return min((min(sample.versions, default=current) for sample in self.samples.values()), default=current)


@dataclass
class ServerFlow:
    """Flow of groups over servers that generate while the trainer trains.

    Generation goes in rounds, between two weight updates. With `quantum` a round ends by itself, when each response
    has that many more tokens or its end, and an update waits for it: versions, arrival and so the run are a function
    of the seed. With 0 an update interrupts the round, and arrival goes by the clock. An interrupted response
    continues under the new weights, its prefix computed again, so that each token has the log-prob of one version.
    """

    worker: RolloutWorker
    engine: SglangRolloutEngine
    everyone: Ranks
    version: Callable[[], int]  # of the weights last published
    quantum: int
    timeout_s: float  # deadline of one wait
    beat_s: float = 5.0  # the ranks meet this often while a round ends, within the deadline of a collective
    look_s: float = 0.05  # and this often while a step waits for groups
    waiting: dict[int, int] = field(default_factory=dict, init=False)
    waited_s: float = field(default=0.0, init=False)  # time that training has waited
    flights: dict[int, _Flight] = field(default_factory=dict, init=False)  # by ticket, in progress or not yet returned
    _saved: dict[Key, Sample] = field(default_factory=dict, init=False)  # of a checkpoint
    _runs: bool = field(default=False, init=False)  # a round

    # -- groups --------------------------------------------------------------------------------------------------------

    def add(self, draw: Draw, prompts: Mapping[int, Prompt]) -> None:
        """Begin groups with the next round. Raises UserError on all ranks, as the engine's `requests`."""
        mine = set(own_share(draw.size, self.worker.data_parallel, self.worker.replica))
        replicas = set(share(draw.size, self.worker.data_parallel))
        failure: Exception | None = None
        for ticket, prompt in prompts.items():
            place = ticket - draw.first
            flight = self.flights[ticket] = _Flight(prompt, place in replicas)
            self.waiting[ticket] = self.version()
            if place in mine:
                try:
                    seed = (self.worker.seed, draw.word)
                    asked = self.engine.requests([prompt], [place], n=self.worker.n, seed=seed)
                    flight.requests = {(ticket, one.key[1]): replace(one, key=(ticket, one.key[1])) for one in asked}
                    flight.samples = {key: self._saved.pop(key, Sample()) for key in flight.requests}
                except UserError as error:
                    failure = error
        raise_together(failure, self.everyone, error=UserError)

    def arrived(self, *, wait: bool) -> Arrived | None:
        begin = time.monotonic()
        while True:
            if wait:
                self.go_on()
            if self._runs and self.quantum:
                self._finish()
            elif self._runs:
                self._keep(self.engine.router.so_far()[0])
            complete, ended, late = self._meet(time.monotonic() - begin >= self.timeout_s)
            if complete or not wait:
                break
            if late:
                raise StreamError(f"waited {self.timeout_s:g} s for a group of samples, and none is complete")
            if ended and self._runs:  # servers were lost
                self._finish()
            elif not self.quantum:
                time.sleep(self.look_s)
        self.waited_s += time.monotonic() - begin
        return self._taken(complete) if complete else None

    def go_on(self) -> None:
        if self.flights and not self._runs:
            self._begin([request for flight in self.flights.values() for request in flight.open()])

    def pause(self, *, holds: bool = True) -> None:
        """End the round, if one runs; holds: the trainer has the weights last published; collective."""
        if self._runs:
            self._finish(interrupt=not self.quantum, holds=holds)

    def close(self) -> None:
        """End at the end of the run; the router's end cancels what is in progress."""
        if self._runs and not self.engine.router.so_far()[1]:
            log.warning("the generation of %d groups is cancelled", len(self.flights))
        self.flights, self._runs = {}, False

    def _taken(self, complete: Mapping[int, int]) -> Arrived:
        """Remove and return complete groups, given the versions of their oldest tokens; collective."""
        flights = [self.flights.pop(ticket) for ticket in complete]
        requests, samples, failures = list[SampleRequest](), dict[Key, Sample](), dict[Key, RequestFailure]()
        for place, flight in enumerate(flights):
            for (_, number), request in flight.requests.items():
                key = (place, number)
                requests.append(replace(request, key=key))
                if request.key in flight.failures:
                    failures[key] = flight.failures[request.key]
                else:
                    samples[key] = flight.samples[request.key]
        rows = self.worker.replica.gather_rows(self.engine.rows(requests, samples, failures, trains=True))
        own = [place for place, flight in enumerate(flights) if flight.in_replica]
        return Arrived(list(complete), list(complete.values()), rows, own)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _begin(self, open_requests: Sequence[SampleRequest]) -> None:
        """Start a round of samples that are not whole."""
        partials = {one.key: self.flights[one.key[0]].samples[one.key] for one in open_requests}
        if self.quantum:
            ends = [len(partials[one.key].token_ids) + self.quantum for one in open_requests]
            open_requests = [
                replace(one, limit=min(one.most(self.engine.sampling), end))
                for one, end in zip(open_requests, ends, strict=True)
            ]
        self.engine.begin(open_requests, partials)
        self._runs = True

    def _finish(self, *, interrupt: bool = False, holds: bool = True) -> None:
        """Wait for the end of the round on all ranks and keep its samples; collective."""
        begin = time.monotonic()
        running = not interrupt
        while running:
            own = not self.engine.router.so_far(self.beat_s)[1]
            late = own and time.monotonic() - begin >= self.timeout_s
            running, is_late = self.everyone.max(torch.tensor([int(own), int(late)])).bool().tolist()
            if is_late:
                raise StreamError(
                    f"waited {self.timeout_s:g} s for generation ahead, which has not ended on every rank"
                )
        lost: list[SampleRequest] = []

        def end() -> None:
            result = self.engine.end(interrupt=interrupt)
            self._keep(result)
            lost[:] = [] if interrupt else [self.flights[key[0]].requests[key] for key in result.unserved]

        def again() -> None:
            if lost:
                self._begin(lost)
                end()

        failure: Exception | None = None
        try:
            end()
        except (RunError, UserError) as error:
            failure = error
        raise_together(failure, self.everyone, error=StreamError)
        self.engine.settle(lambda: len(lost), again, holds=holds)
        self._runs = False

    def _keep(self, result: GenerationResult) -> None:
        """Keep the samples of a round in their groups."""
        for key, sample in (result.samples | result.unserved).items():
            flight = self.flights.get(key[0])  # None: it was taken during the round
            if flight is not None and key not in flight.failures:
                is_whole = sample.is_whole(flight.requests[key], self.engine.sampling)
                flight.samples[key] = sample if is_whole else replace(sample, finish="partial", routing=b"")
        for key, failure in result.failures.items():
            if (flight := self.flights.get(key[0])) is not None:
                flight.failures[key] = failure

    def _meet(self, late: bool) -> tuple[dict[int, int], bool, bool]:
        """Return (complete groups by ticket, all ranks' rounds have ended, some rank is late); collective.

        Each group has the version of its oldest token.
        """
        table = torch.zeros(len(self.flights) + 1, 2, dtype=torch.int64)
        for place, flight in enumerate(self.flights.values()):
            if flight.requests:
                table[place] = torch.tensor([int(not flight.open()), flight.oldest(self.version())])
        ended = not self._runs or self.engine.router.so_far()[1]
        table[-1] = torch.tensor([int(ended), int(late)])
        *rows, (all_ended, is_late) = self.everyone.sum(table).tolist()
        of_tickets = dict(zip(self.flights, rows, strict=True))
        self.waiting = {ticket: oldest for ticket, (is_complete, oldest) in of_tickets.items() if not is_complete}
        complete = {ticket: oldest for ticket, (is_complete, oldest) in of_tickets.items() if is_complete}
        return complete, all_ended == self.everyone.size, bool(is_late)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return this rank's samples as flat tables; collective."""
        self.pause()
        rows = [(key, sample) for flight in self.flights.values() for key, sample in flight.samples.items()]
        failed = {key for flight in self.flights.values() for key in flight.failures}
        routing = b"".join(one.routing for _, one in rows)
        heads = [
            (*key, len(one.token_ids), _FINISHES.index("failed" if key in failed else one.finish), len(one.routing))
            for key, one in rows
        ]
        return {
            "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 5),
            "token_ids": torch.tensor([token for _, one in rows for token in one.token_ids], dtype=torch.int64),
            "logprobs": torch.tensor([value for _, one in rows for value in one.logprobs], dtype=torch.float64),
            "versions": torch.tensor([version for _, one in rows for version in one.versions], dtype=torch.int64),
            "routing": torch.frombuffer(bytearray(routing), dtype=torch.uint8) if routing else torch.zeros(0).byte(),
        }

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Restore the samples of `state`, for the groups that `add` begins; a failed one begins anew."""
        if not tensors:
            return
        ids, logprobs, versions = (tensors[name].tolist() for name in ("token_ids", "logprobs", "versions"))
        routing, at, at_routing = tensors["routing"].numpy().tobytes(), 0, 0
        for ticket, number, count, finish, size in tensors["heads"].tolist():
            here, word = slice(at, at + count), _FINISHES[finish]
            if word != "failed":
                own = routing[at_routing : at_routing + size]
                sample = Sample(ids[here], logprobs[here], versions[here], word, own)  # type: ignore[arg-type]
                self._saved[ticket, number] = sample
            at, at_routing = at + count, at_routing + size


@dataclass
class RolloutStream:
    """Rollout source and weight sync; rounds of the flow end for evaluations and weight updates."""

    flow: ServerFlow
    sync: WeightSync
    patience_s: float = 10.0  # at most in `newest`

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return samples of an evaluation, or greedy ones."""
        assert greedy or draws is not None, "samples for training come by the flow"
        self.flow.pause()
        return self.flow.worker.generate(prompts, step=step, greedy=greedy, draws=draws)

    def metrics(self) -> Metrics:
        """Return and reset the metrics of generations; `rollout/ahead_wait_s` is the time that training waited."""
        waited, self.flow.waited_s = self.flow.waited_s, 0.0
        return self.flow.worker.metrics() | {"rollout/ahead_wait_s": waited}

    @property
    def weight_version(self) -> int:
        return self.sync.weight_version

    def resume_at(self, version: int) -> None:
        self.sync.resume_at(version)

    def publish(self) -> Metrics:
        """Send the weights between two rounds."""
        begin = time.perf_counter()
        self.flow.pause(holds=False)
        self.flow.waited_s += time.perf_counter() - begin
        return self.sync.publish()

    def newest(self, count: int = 4) -> Rollout | None:
        """Return up to `count` responses of each rank with tokens of the current weights; collective.

        Their other tokens are off the loss mask. None: in `patience_s` no rank had any.
        """
        flow, begin = self.flow, time.monotonic()
        while True:
            samples, is_over = self._just_sampled()
            late = time.monotonic() - begin >= self.patience_s
            flags = torch.tensor([not (samples or is_over), late, not is_over])
            waits, is_late, runs = flow.everyone.max(flags.int()).tolist()
            if is_late or not waits:
                break
            time.sleep(flow.look_s)
        if not runs:  # a router tells the samples of a round that has ended only to who ends it
            flow.pause()
            samples, _ = self._just_sampled()
        flow.waited_s += time.monotonic() - begin
        if not flow.everyone.max(torch.tensor(len(samples))):
            return None
        version = self.weight_version
        longest = sorted(samples, key=lambda key: -samples[key].versions.count(version))[:count]
        requests = [flow.flights[key[0]].requests[key] for key in longest]
        own = flow.engine.rows(requests, {key: samples[key] for key in longest}, {}, trains=True)
        rows = flow.worker.replica.gather_rows(own)
        assert rows.token_versions is not None
        rows.loss_mask = rows.loss_mask & (rows.token_versions == version)
        return rows

    def _just_sampled(self) -> tuple[dict[Key, Sample], bool]:
        """Return this rank's responses that end with a token of now, and if no more come."""
        flow = self.flow
        result, is_over = flow.engine.router.so_far() if flow._runs else (GenerationResult(), True)
        known = {key: sample for flight in flow.flights.values() for key, sample in flight.samples.items()}
        known |= {key: sample for key, sample in result.samples.items() if key in known}
        return {key: one for key, one in known.items() if one.versions[-1:] == [self.weight_version]}, is_over
