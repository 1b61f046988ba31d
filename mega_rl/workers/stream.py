"""Generation next to training, up to k steps ahead: groups in progress, and weight updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import raise_together, run_on_all
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks, RolloutSource, WeightSync
from mega_rl.rollout.sglang.generation.engine import NUMBER_BITS, SglangRolloutEngine
from mega_rl.rollout.sglang.generation.samples import Key, RequestFailure, Sample, SampleRequest, State
from mega_rl.types import Arrived, Draw, Draws, Metrics, Prompt, Rollout
from mega_rl.workers.flights import InFlight, OpenRequests, Players, number_of
from mega_rl.workers.rollout import EnvironmentRollouts, RolloutWorker, own_share

log = logging.getLogger(__name__)


class StreamError(RunError):
    """Generation next to training failed or was late."""


@dataclass
class ServerFlow:
    """Flow of groups over servers that generate while the trainer trains.

    Generation goes in rounds, between two weight updates. With `quantum` a round ends by itself, when each response
    has that many more tokens or its end, and an update waits for it: versions, arrival and so the run are a function
    of the seed. With 0 an update interrupts the round, and arrival goes by the clock. An interrupted response
    continues under the new weights, its prefix computed again, so that each token has the log-prob of one version.

    With `in_turns` the engine takes turns with training. Rounds run while a step waits for groups, with `quantum` one
    at its begin in any case. With 0 a round ends when the step has its groups and the devices' state changes.
    """

    worker: RolloutWorker
    engine: SglangRolloutEngine
    everyone: Ranks
    version: Callable[[], int]  # of the weights last published
    quantum: int
    timeout_s: float  # deadline of one wait
    beat_s: float = 5.0  # the ranks meet this often while a round ends, within the deadline of a collective
    look_s: float = 0.05  # and this often while a step waits for groups
    rollouts: EnvironmentRollouts | None = None  # samples are trajectories of its environment
    # Answers requests until the round is over; None: servers.
    sample: Callable[[Callable[[], bool]], None] | None = None
    in_turns: bool = False
    waiting: dict[int, int] = field(default_factory=dict, init=False)
    waited_s: float = field(default=0.0, init=False)  # time that training has waited
    restarts: int = field(default=0, init=False)  # of servers, in this step
    flights: dict[int, InFlight] = field(default_factory=dict, init=False)  # by ticket, in progress or not yet returned

    def __post_init__(self) -> None:
        self.requests = OpenRequests(self.engine, self.flights, self.quantum, self.version)
        self.players: Players | None = None
        if self.rollouts is not None:
            limit = self.engine.sampling.max_new_tokens
            self.players = Players(self.rollouts.runner, self.rollouts.ended, self.requests, self.worker.n, limit)

    # -- groups --------------------------------------------------------------------------------------------------------

    def add(self, draw: Draw, prompts: Mapping[int, Prompt]) -> None:
        """Begin groups with the next round. Raises UserError on all ranks, as the engine's `requests`."""
        mine = set(own_share(draw.size, self.worker.data_parallel, self.worker.replica))
        replicas = set(share(draw.size, self.worker.data_parallel))
        seed, failure, asked = (self.worker.seed, draw.word), None, list[SampleRequest]()
        for ticket, prompt in prompts.items():
            place = ticket - draw.first
            self.flights[ticket] = InFlight(prompt, place in replicas, place in mine, seed, place)
            self.waiting[ticket] = self.version()
        own = {ticket: flight for ticket, flight in self.flights.items() if ticket in prompts and flight.is_mine}
        if self.players is not None:
            for ticket in own:
                self.players.begin(ticket)
        else:
            try:
                places = [flight.place for flight in own.values()]
                asked = self.engine.requests([one.prompt for one in own.values()], places, n=self.worker.n, seed=seed)
            except UserError as error:
                failure = error
        for one in asked:
            self.requests.ask(replace(one, key=(draw.first + one.key[0], one.key[1] << NUMBER_BITS)))
        raise_together(failure, self.everyone, error=UserError)

    def arrived(self, *, wait: bool) -> Arrived | None:
        begin = time.monotonic()
        while True:
            if wait or (self.in_turns and self.quantum):
                self._begin()
            if self.quantum:
                self._finish()
            complete, lost, late = self._meet(time.monotonic() - begin >= self.timeout_s)
            if complete or not wait:
                break
            if late:
                raise StreamError(f"waited {self.timeout_s:g} s for a group of samples, and none is complete")
            if lost:
                self._finish(interrupt=True)
            elif not self.quantum:
                self.requests.are_quiet(self.look_s)
        self.waited_s += time.monotonic() - begin
        return self._taken(complete) if complete else None

    def go_on(self) -> None:
        self.restarts = 0
        if not self.in_turns:
            self._begin()

    def pause(self, *, holds: bool = True) -> None:
        """End the round, if one runs; holds: the trainer has the weights last published; collective."""
        self._finish(interrupt=not self.quantum, holds=holds)

    def close(self) -> None:
        """End at the end of the run; the router's end cancels what is in progress."""
        if self.players is not None:
            self.players.close()
        if not self.requests.are_quiet(0.0):
            log.warning("the generation of %d groups is cancelled", len(self.flights))
        self.flights.clear()

    def _taken(self, complete: Mapping[int, int]) -> Arrived:
        """Remove and return complete groups, given the versions of their oldest tokens; collective."""
        flights = [self.flights.pop(ticket) for ticket in complete]
        own = [place for place, flight in enumerate(flights) if flight.in_replica]
        if self.rollouts is not None:
            played = [one for flight in flights for one in flight.played.values()]
            places = {ticket: place for place, ticket in enumerate(complete)}
            for one in played:
                one.trajectory.prompt_index = places[one.trajectory.prompt_index]
            rows = self.rollouts.rollout(played, with_versions=True)
            return Arrived(list(complete), list(complete.values()), rows, own)
        requests, samples, failures = list[SampleRequest](), dict[Key, Sample](), dict[Key, RequestFailure]()
        for place, flight in enumerate(flights):
            for request in flight.requests.values():
                key = (place, number_of(request.key))
                requests.append(replace(request, key=key))
                if request.key in flight.failures:
                    failures[key] = flight.failures[request.key]
                else:
                    samples[key] = flight.samples[request.key]
        rows = self.worker.replica.gather_rows(self.engine.rows(requests, samples, failures, trains=True))
        return Arrived(list(complete), list(complete.values()), rows, own)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self.flights and not self.requests.runs:
            self.requests.start()

    def _finish(self, *, interrupt: bool = False, holds: bool = True) -> None:
        """End the round, if one runs, unless `interrupt` when it has ended on all ranks; collective."""
        begin = time.monotonic()
        running = not interrupt

        def is_over() -> bool:
            """Return whether this rank has nothing to sample, or an environment blocks."""
            return self.requests.are_quiet(0.0) or (self.players is not None and self.players.stalled)

        while running:
            if self.sample is not None and self.requests.runs:
                run_on_all(partial(self.sample, is_over), self.everyone)
            own = not self.requests.are_quiet(self.beat_s)
            if self.players is not None:
                run_on_all(self.players.look, self.everyone)
            late = own and time.monotonic() - begin >= self.timeout_s
            running, is_late = self.everyone.max(torch.tensor([int(own), int(late)])).bool().tolist()
            if is_late:
                raise StreamError(
                    f"waited {self.timeout_s:g} s for generation ahead, which has not ended on every rank"
                )
        if not self.requests.runs:
            return
        lost: list[SampleRequest] = []

        def end(*, cut: bool) -> None:
            self.requests.stop(interrupt=cut)
            lost[:] = [] if interrupt else self.requests.lost()

        def again() -> None:
            if lost:
                self.requests.start(anew=False)
                end(cut=not self.requests.are_quiet(self.timeout_s))

        failure: Exception | None = None
        try:
            end(cut=interrupt)
        except (RunError, UserError) as error:
            failure = error
        raise_together(failure, self.everyone, error=StreamError)
        self.restarts = self.engine.settle(lambda: len(lost), again, holds=holds, times=self.restarts)

    def _meet(self, late: bool) -> tuple[dict[int, int], bool, bool]:
        """Return (complete groups by ticket, a rank's servers are lost, some rank is late); collective.

        Each group has the version of its oldest token.
        """
        if self.players is not None:
            run_on_all(self.players.look, self.everyone)
        table = torch.zeros(len(self.flights) + 1, 2, dtype=torch.int64)
        with self.requests.changed:
            for place, flight in enumerate(self.flights.values()):
                if flight.is_mine:
                    is_complete = not flight.playing and not flight.open()
                    table[place] = torch.tensor([int(is_complete), flight.oldest(self.version())])
        table[-1] = torch.tensor([int(self.requests.runs and len(self.requests.lost()) > 0), int(late)])
        *rows, (lost, is_late) = self.everyone.sum(table).tolist()
        of_tickets = dict(zip(self.flights, rows, strict=True))
        self.waiting = {ticket: oldest for ticket, (is_complete, oldest) in of_tickets.items() if not is_complete}
        complete = {ticket: oldest for ticket, (is_complete, oldest) in of_tickets.items() if is_complete}
        return complete, bool(lost), bool(is_late)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return this rank's samples as flat tables; collective."""
        self.pause()
        return self.requests.state()

    def restore(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Restore the samples of `state`, for the groups that `add` begins."""
        if tensors:
            self.requests.restore(tensors)


@dataclass
class RolloutStream:
    """Rollout source and weight sync; rounds of the flow end for evaluations and weight updates."""

    flow: ServerFlow
    sync: WeightSync
    source: RolloutSource  # samples evaluations and greedy responses
    keeps: bool = False  # requests go on over an update with their KV cache
    patience_s: float = 10.0  # at most in `newest`

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        """Return samples of an evaluation, or greedy ones."""
        assert greedy or draws is not None, "samples for training come by the flow"
        self.flow.pause()
        return self.source.generate(prompts, step=step, greedy=greedy, draws=draws)

    def metrics(self) -> Metrics:
        """Return and reset the metrics of generations; `rollout/ahead_wait_s` is the time that training waited."""
        flow, requests = self.flow, self.flow.requests
        metrics = self.source.metrics() | {"rollout/ahead_wait_s": flow.waited_s}
        flow.waited_s = 0.0
        if flow.players is not None:
            drifted, requests.drifted = requests.drifted, 0
            metrics["agent/replays_drifted"] = float(flow.everyone.sum(torch.tensor(drifted)))
        return metrics

    @property
    def weight_version(self) -> int:
        return self.sync.weight_version

    def resume_at(self, version: int) -> None:
        self.sync.resume_at(version)

    def publish(self) -> Metrics:
        """Send the weights between two rounds, or within one if it keeps responses and no server is lost."""
        begin = time.perf_counter()
        if not (self.keeps and self.has_all()):
            self.flow.pause(holds=False)
        self.flow.waited_s += time.perf_counter() - begin
        return self.sync.publish()

    def publish_within(self, send: Callable[[WeightSync], Metrics]) -> Metrics:
        """Publish by `send` while a step trains; generation continues."""
        metrics = send(self)
        self.flow.go_on()
        return metrics

    def has_all(self) -> bool:
        """Return whether all ranks have all servers; collective."""
        out = [state is not State.READY for state, _ in self.flow.engine.router.states().values()]
        return not self.flow.everyone.max(torch.tensor(int(any(out))))

    def newest(self, count: int = 4) -> Rollout | None:
        """Return up to `count` responses of each rank with tokens of the current weights; collective.

        Other tokens, also those on KV cache of older weights, are off the loss mask. None: in `patience_s` no rank has
        any.
        """
        flow, begin = self.flow, time.monotonic()
        while True:
            samples, is_over = self._just_sampled()
            late = time.monotonic() - begin >= self.patience_s
            lacks = torch.tensor([not (samples or is_over), late, bool(samples)])
            waits, is_late, there = flow.everyone.max(lacks.int()).tolist()
            if is_late or not waits:
                break
            time.sleep(flow.look_s)
        flow.waited_s += time.monotonic() - begin
        if not there:
            return None
        version = self.weight_version
        longest = sorted(samples, key=lambda one: -one[1].versions.count(version))[:count]
        own = flow.engine.rows([one for one, _ in longest], {one.key: got for one, got in longest}, {}, trains=True)
        rows = flow.worker.replica.gather_rows(own)
        assert rows.token_versions is not None
        assert rows.kept is not None
        rows.loss_mask = rows.loss_mask & (rows.token_versions == version) & ~rows.kept
        return rows

    def _just_sampled(self) -> tuple[list[tuple[SampleRequest, Sample]], bool]:
        """Return this rank's responses that end with a token of the current weights; and if no more come."""
        requests, version = self.flow.requests, self.weight_version
        with requests.changed:
            is_over = not requests.runs or requests.are_quiet(0.0)
            every = [(request, flight.samples[key]) for flight in self.flow.flights.values()
                     for key, request in flight.requests.items()]  # fmt: skip
        fresh = [one for one in every if one[1].versions[-1:] == [version]]
        return [(request, one) for request, one in fresh if not any(one.kept[-1:])], is_over
