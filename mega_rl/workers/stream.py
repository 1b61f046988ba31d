"""Generation next to training, up to k steps ahead: groups of samples in progress, and their weight updates."""

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
class _Group:
    """Samples of one prompt; requests and samples only on the rank that asks for them."""

    draw: Draw
    prompt: Prompt
    in_replica: bool  # this rank's replica asks for them
    requests: list[SampleRequest] = field(default_factory=list)  # keys are (ticket, number of the sample)
    samples: dict[Key, Sample] = field(default_factory=dict)  # whole, or as far as they came
    failures: dict[Key, RequestFailure] = field(default_factory=dict)

    def open(self) -> list[SampleRequest]:
        """Return the requests whose samples are neither whole nor failed."""
        done = {key for key, sample in self.samples.items() if sample.finish != "partial"} | self.failures.keys()
        return [request for request in self.requests if request.key not in done]

    def oldest(self, current: int) -> int:
        """Return the version of the oldest token; `current` without a token."""
        return min((min(sample.versions, default=current) for sample in self.samples.values()), default=current)


@dataclass
class RolloutStream:
    """Rollout source, flow and weight sync of servers that generate while the trainer trains.

    Generation goes in rounds, between two weight updates. With `quantum` a round ends by itself, when each response
    has that many more tokens or its end, and an update waits for it: versions, arrival and so the run are a function
    of the seed. With 0 an update interrupts the round, and arrival goes by the clock. An interrupted response
    continues under the new weights, its prefix computed again, so that each token has the log-prob of one version.
    """

    worker: RolloutWorker  # for evaluations, between rounds
    engine: SglangRolloutEngine
    sync: WeightSync
    everyone: Ranks
    quantum: int
    timeout_s: float  # deadline of one wait
    # Every `check_interval` steps servers answer prompts with the trainer's weights, and `compare` raises or returns
    # their `rollout/logprob_diff_*`.
    compare: Callable[[Rollout], Metrics] | None = None  # collective
    check_interval: int = 10
    check_prompts: int = 1  # one for each rank
    check_draws: Draws = field(default_factory=lambda: Draws(n=1, temperature=1.0))
    beat_s: float = 5.0  # the ranks meet this often while a round ends, within the deadline of a collective
    look_s: float = 0.05  # and this often while a step waits for groups
    _groups: dict[int, _Group] = field(default_factory=dict, init=False)  # by ticket, in progress or not yet returned
    _saved: dict[Key, Sample] = field(default_factory=dict, init=False)  # of a checkpoint
    _waiting: dict[int, int] = field(default_factory=dict, init=False)
    _oldest: dict[int, int] = field(default_factory=dict, init=False)  # of complete groups, at the last meeting
    _runs: bool = field(default=False, init=False)  # a round
    _waited_s: float = field(default=0.0, init=False)
    _checked: Metrics = field(default_factory=dict, init=False)

    # -- rollout source: evaluations -----------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return samples of an evaluation, or greedy ones."""
        assert greedy or draws is not None, "samples for training come by `arrived`"
        self._pause()
        return self.worker.generate(prompts, step=step, greedy=greedy, draws=draws)

    def metrics(self) -> Metrics:
        """Return and reset the metrics of generations; `rollout/ahead_wait_s` is the time that training waited."""
        checked, self._checked = self._checked, {}
        waited, self._waited_s = self._waited_s, 0.0
        return self.worker.metrics() | checked | {"rollout/ahead_wait_s": waited}

    # -- weight sync ---------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        return self.sync.weight_version

    def resume_at(self, version: int) -> None:
        self.sync.resume_at(version)

    def publish(self) -> Metrics:
        """Send the weights between two rounds."""
        begin = time.perf_counter()
        self._pause()
        self._waited_s += time.perf_counter() - begin
        return self.sync.publish()

    # -- flow ----------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Mapping[int, int]:
        return self._waiting

    def add(self, draw: Draw, prompts: Mapping[int, Prompt]) -> None:
        """Begin groups with the next round. Raises UserError on all ranks, as the engine's `requests`."""
        mine = set(own_share(draw.size, self.worker.data_parallel, self.worker.replica))
        replicas = set(share(draw.size, self.worker.data_parallel))
        failure: Exception | None = None
        for ticket, prompt in prompts.items():
            place = ticket - draw.first
            group = self._groups[ticket] = _Group(draw, prompt, place in replicas)
            if place in mine:
                try:
                    seed = (self.worker.seed, draw.word)
                    asked = self.engine.requests([prompt], [place], n=self.worker.n, seed=seed)
                except UserError as error:
                    failure = error
                    continue
                group.requests = [replace(one, key=(ticket, one.key[1])) for one in asked]
                group.samples = {one.key: self._saved.pop(one.key, Sample()) for one in group.requests}
            self._waiting[ticket] = self.weight_version
        raise_together(failure, self.everyone, error=UserError)

    def arrived(self, *, wait: bool) -> Arrived | None:
        begin = time.perf_counter()
        end = time.monotonic() + self.timeout_s
        while True:
            if wait and not self._runs:
                self._begin()
            if self._runs and self.quantum:
                self._finish()
            elif self._runs:
                self._keep(self.engine.so_far())
            complete, ended, late = self._meet(time.monotonic() >= end)
            if complete or not wait:
                break
            if late:
                raise StreamError(f"waited {self.timeout_s:g} s for a group of samples, and none is complete")
            if ended and self._runs:  # servers were lost
                self._finish()
            elif not self.quantum:
                time.sleep(self.look_s)
        self._waited_s += time.perf_counter() - begin
        return self._taken(complete) if complete else None

    def go_on(self, step: int, prompts: Sequence[Prompt]) -> None:
        if self.compare is not None and step % self.check_interval == 0:
            sampled = self.generate(prompts[: self.check_prompts], step=step, draws=self.check_draws)
            compared = self.compare(sampled)
            self._checked = {name: one for name, one in compared.items() if name.startswith("rollout/logprob_diff")}
        if self._groups and not self._runs:
            self._begin()

    def close(self) -> None:
        """End at the end of the run; the router's end cancels what is in progress."""
        if self._runs and not self.engine.has_ended(0.0):
            log.warning("the generation of %d groups is cancelled", len(self._groups))
        self._groups, self._runs = {}, False

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return this rank's samples as flat tables; collective."""
        self._pause()
        rows = [(key, sample) for group in self._groups.values() for key, sample in group.samples.items()]
        failed = {key for group in self._groups.values() for key in group.failures}
        heads = [
            (*key, len(one.token_ids), _FINISHES.index("failed" if key in failed else one.finish), len(one.routing))
            for key, one in rows
        ]
        return {
            "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 5),
            "token_ids": torch.tensor([token for _, one in rows for token in one.token_ids], dtype=torch.int64),
            "logprobs": torch.tensor([value for _, one in rows for value in one.logprobs], dtype=torch.float64),
            "versions": torch.tensor([version for _, one in rows for version in one.versions], dtype=torch.int64),
            "routing": torch.tensor(list(b"".join(one.routing for _, one in rows)), dtype=torch.uint8),
        }

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Restore the samples of `state`, for the groups that `add` begins; a failed one begins anew."""
        if not tensors:
            return
        ids, logprobs, versions = (tensors[name].tolist() for name in ("token_ids", "logprobs", "versions"))
        routing, at, at_routing = bytes(tensors["routing"].tolist()), 0, 0
        for ticket, number, count, finish, size in tensors["heads"].tolist():
            here = slice(at, at + count)
            word = _FINISHES[finish]
            if word != "failed":
                own = routing[at_routing : at_routing + size]
                sample = Sample(ids[here], logprobs[here], versions[here], word, own)  # type: ignore[arg-type]
                self._saved[ticket, number] = sample
            at, at_routing = at + count, at_routing + size

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _begin(self, only: Mapping[Key, Sample] | None = None) -> None:
        """Start a round of all samples that are not whole; only: of these."""
        asked, partials = list[SampleRequest](), dict[Key, Sample]()
        for group in self._groups.values():
            for request in group.open():
                if only is None or request.key in only:
                    partials[request.key] = partial = group.samples[request.key]
                    most = request.limit or 0
                    limit = min(most, len(partial.token_ids) + self.quantum) if self.quantum else most
                    asked.append(replace(request, limit=limit))
        self.engine.begin(asked, partials)
        self._runs = True

    def _pause(self) -> None:
        """End the round, if one runs; collective."""
        if self._runs:
            self._finish(interrupt=not self.quantum)

    def _finish(self, *, interrupt: bool = False) -> None:
        """Wait for the end of the round on all ranks and keep its samples; collective."""
        begin = time.monotonic()
        while not interrupt:
            running = not self.engine.has_ended(self.beat_s)
            late = running and time.monotonic() - begin >= self.timeout_s
            runs, is_late = self.everyone.max(torch.tensor([int(running), int(late)])).tolist()
            if is_late:
                raise StreamError(
                    f"waited {self.timeout_s:g} s for the generation next to training, and it has not ended on every "
                    "rank"
                )
            if not runs:
                break
        lost: dict[Key, Sample] = {}

        def end() -> None:
            result = self.engine.end(interrupt=interrupt)
            self._keep(result)
            lost.clear()
            lost.update({} if interrupt else result.unserved)

        def again() -> None:
            if lost:
                self._begin(only=lost)
                end()

        failure: Exception | None = None
        try:
            end()
        except (RunError, UserError) as error:
            failure = error
        self._runs = False
        raise_together(failure, self.everyone, error=StreamError)
        self.engine.settle(lambda: len(lost), again)
        self._runs = False

    def _keep(self, result: GenerationResult) -> None:
        """Keep the samples of a round in their groups."""
        for key, sample in (result.samples | result.unserved).items():
            group = self._groups.get(key[0])
            if group is not None and key not in group.failures:
                request = next(one for one in group.requests if one.key == key)
                whole = self.engine.is_whole(request, sample)
                group.samples[key] = sample if whole else replace(sample, finish="partial", routing=b"")
        for key, failure in result.failures.items():
            if (group := self._groups.get(key[0])) is not None:
                group.failures[key] = failure

    def _meet(self, late: bool) -> tuple[list[int], bool, bool]:
        """Return (tickets of complete groups, the round has ended everywhere, some rank is late); collective."""
        table = torch.zeros(len(self._groups) + 1, 2, dtype=torch.int64)
        current = self.weight_version
        for place, group in enumerate(self._groups.values()):
            if group.requests:
                table[place] = torch.tensor([int(not group.open()), group.oldest(current)])
        ended = not self._runs or self.engine.has_ended(0.0)
        table[-1] = torch.tensor([int(ended), int(late)])
        table = self.everyone.sum(table)
        all_ended, is_late = table[-1].tolist()
        rows = dict(zip(self._groups, table[:-1].tolist(), strict=True))
        self._waiting = {ticket: oldest for ticket, (complete, oldest) in rows.items() if not complete}
        self._oldest = {ticket: oldest for ticket, (complete, oldest) in rows.items() if complete}
        return list(self._oldest), all_ended == self.everyone.size, bool(is_late)

    def _taken(self, tickets: Sequence[int]) -> Arrived:
        """Remove and return complete groups; collective."""
        groups = [self._groups.pop(ticket) for ticket in tickets]
        requests, samples, failures = list[SampleRequest](), dict[Key, Sample](), dict[Key, RequestFailure]()
        for place, group in enumerate(groups):
            for request in group.requests:
                key = (place, request.key[1])
                requests.append(replace(request, key=key))
                if request.key in group.failures:
                    failures[key] = group.failures[request.key]
                else:
                    samples[key] = group.samples[request.key]
        rows = self.worker.replica.gather_rows(self.engine.rows(requests, samples, failures, trains=True))
        own = [place for place, group in enumerate(groups) if group.in_replica]
        return Arrived(list(tickets), [self._oldest[ticket] for ticket in tickets], rows, own)
