"""Groups in progress over many weight updates, and their requests: responses, and turns of trajectories.

A request is open until its sample is whole. That of a single response is there from the start of its group; a turn's
comes when its environment asks for it. While a round runs, servers get the open requests.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import xxhash
from torch import Tensor

from mega_rl.agents.environment import GRACE_S, MOST_BLOCKED, Answer, LivePlay, Played, Runner, TurnRequest, Turns
from mega_rl.agents.trajectory import Trajectory
from mega_rl.errors import RunError
from mega_rl.rollout.sglang.generation.engine import NUMBER_BITS, SglangRolloutEngine, answer_turn
from mega_rl.rollout.sglang.generation.samples import Key, RequestFailure, Sample, SampleRequest
from mega_rl.types import Prompt

_FINISHES = ("partial", "stop", "length", "failed")  # in a checkpoint


def number_of(key: Key) -> int:
    """Return the number of a request's sample within its group."""
    return key[1] >> NUMBER_BITS


def _digest(token_ids: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(array("q", token_ids).tobytes()) >> 1


@dataclass(eq=False)
class InFlight:
    """Group in progress: samples of one prompt."""

    prompt: Prompt
    in_replica: bool  # this rank's replica asks for them
    is_mine: bool  # this rank does
    seed: tuple[int, ...] = ()
    place: int = 0  # the prompt's in its draw
    # On the rank that asks; keys: (ticket, number of the sample and of its turn, as of `SglangRolloutEngine`).
    requests: dict[Key, SampleRequest] = field(default_factory=dict)
    samples: dict[Key, Sample] = field(default_factory=dict)  # whole, or as far as they came
    failures: dict[Key, RequestFailure] = field(default_factory=dict)
    # At servers: the version of their weights when they got the request, and a function that drops it.
    out: dict[Key, tuple[int, Callable[[], object]]] = field(default_factory=dict)
    room: dict[int, int] = field(default_factory=dict)  # tokens that each sample may still get in this round
    playing: dict[int, Trajectory] = field(default_factory=dict)  # those that have not ended, by number
    played: dict[int, Played] = field(default_factory=dict)

    def open(self) -> list[SampleRequest]:
        """Return the requests whose samples are neither whole nor failed."""
        done = {key for key, sample in self.samples.items() if sample.finish != "partial"} | self.failures.keys()
        return [request for key, request in self.requests.items() if key not in done]

    def oldest(self, current: int) -> int:
        """Return the version of the oldest token, also of one that a server may have; else `current`."""
        known = [min(one.versions, default=current) for one in self.samples.values()]
        return min([*known, *(version for version, _ in self.out.values()), current])


@dataclass(eq=False)
class OpenRequests:
    """The requests of all groups in progress. Threads of training, environments and servers call it."""

    engine: SglangRolloutEngine
    groups: dict[int, InFlight]  # key: ticket
    quantum: int  # tokens that a sample gets in a round at most, in all its requests; 0: no limit
    version: Callable[[], int]  # of the weights last published
    changed: threading.Condition = field(default_factory=threading.Condition)  # guards all
    runs: bool = False  # a round
    drifted: int = 0  # kept samples whose environment asked with other tokens, since the last report
    _kept: dict[Key, tuple[Sample, int]] = field(default_factory=dict)  # for requests to come; digests of their tokens
    _waits: dict[Key, Future[Answer]] = field(default_factory=dict)  # environments for whole turns

    def ask(self, request: SampleRequest, waits: Future[Answer] | None = None) -> None:
        """Open a request, which continues what is kept of it after the same tokens."""
        with self.changed:
            key, group = request.key, self.groups[request.key[0]]
            kept, context = self._kept.pop(key, (Sample(), None))
            if context is not None and context != _digest(request.prompt):
                kept, self.drifted = Sample(), self.drifted + 1
            group.requests[key], group.samples[key] = request, kept
            if waits is not None:
                self._waits[key] = waits
                waits.add_done_callback(partial(self._drop, request))
            if kept.finish != "partial":
                self._answer(request, kept)
            elif self.runs:
                self._send(request)
            self.changed.notify_all()

    def leave(self, trajectory: Trajectory, *, keep: bool) -> None:
        """Cancel a trajectory's open turns; keep: all that it has of turns, for its next start."""
        ticket, number = trajectory.prompt_index, trajectory.sample_index
        with self.changed:
            group = self.groups.get(ticket)
            if group is None or group.playing.get(number) is not trajectory:
                return
            for key, request in [*group.requests.items()]:
                if number_of(key) != number:
                    continue
                if keep and key not in group.failures:
                    self._kept[key] = group.samples[key], _digest(request.prompt)
                if key in self._waits:
                    self._waits[key].cancel()  # which drops it
                elif keep:
                    del group.requests[key], group.samples[key]
                    group.failures.pop(key, None)
            if not keep:
                self._kept = {
                    key: one for key, one in self._kept.items() if (key[0], number_of(key)) != (ticket, number)
                }

    # -- rounds --------------------------------------------------------------------------------------------------------

    def start(self, *, anew: bool = True) -> None:
        """Begin a round; not `anew`: continue one whose servers were lost."""
        self.engine.open()
        with self.changed:
            self.runs = True
            for group in self.groups.values():
                if anew:
                    group.room = dict.fromkeys(map(number_of, group.requests), self.quantum)
                    group.room |= dict.fromkeys(group.playing, self.quantum)
                for request in group.open():
                    self._send(request)

    def stop(self, *, interrupt: bool) -> None:
        """End the round; interrupt: what is at servers is cut short."""
        with self.changed:
            self.runs = False
        self.engine.end(interrupt=interrupt)

    def lost(self) -> list[SampleRequest]:
        """Return the requests that a round had to continue, and that no server has."""
        with self.changed:
            return [
                request
                for group in self.groups.values()
                for request in group.open()
                if request.key not in group.out and (not self.quantum or group.room.get(number_of(request.key), 0))
            ]

    def are_quiet(self, wait_s: float) -> bool:
        """Return whether no server has a request and each trajectory waits for a turn, within `wait_s`."""

        def quiet() -> bool:
            groups = self.groups.values()
            return not any(group.out for group in groups) and all(
                group.playing.keys() <= {number_of(request.key) for request in group.open()}
                for group in groups
                if group.playing
            )

        with self.changed:
            return self.changed.wait_for(quiet, wait_s)

    def _send(self, request: SampleRequest) -> None:
        key, group = request.key, self.groups[request.key[0]]
        sample, number = group.samples[key], number_of(key)
        limit, have = request.most(self.engine.sampling), len(sample.token_ids)
        if self.quantum:
            limit = min(limit, have + group.room.get(number, 0))
            if limit <= have:
                return
            group.room[number] -= limit - have
        answered = partial(self._answered, request, limit)
        group.out[key] = self.version(), self.engine.router.ask(replace(request, limit=limit), answered, sample)

    def _answered(self, request: SampleRequest, limit: int, outcome: Sample | RequestFailure) -> None:
        with self.changed:
            key, group = request.key, self.groups.get(request.key[0])
            if group is None or group.requests.get(key) is not request:
                return  # dropped
            group.out.pop(key, None)
            is_over = isinstance(outcome, RequestFailure) or outcome.is_whole(request, self.engine.sampling)
            if isinstance(outcome, RequestFailure):
                group.failures[key] = outcome
            else:
                group.room[number_of(key)] = group.room.get(number_of(key), 0) + limit - len(outcome.token_ids)
                group.samples[key] = outcome if is_over else replace(outcome, finish="partial", routing=b"")
            if is_over:
                self._answer(request, outcome)
            for other in group.open() if is_over and self.runs and self.quantum else ():  # they may have lacked room
                if number_of(other.key) == number_of(key) and other.key not in group.out:
                    self._send(other)
            self.changed.notify_all()

    def _answer(self, request: SampleRequest, outcome: Sample | RequestFailure) -> None:
        waits = self._waits.pop(request.key, None)
        if waits is not None:
            answer_turn(waits, len(request.prompt), self.engine.routed, outcome)

    def _drop(self, request: SampleRequest, waits: Future[Answer]) -> None:
        """Drop a turn that its environment does not wait for any more."""
        with self.changed:
            group = self.groups.get(request.key[0])
            if waits.cancelled() and group is not None and group.requests.get(request.key) is request:
                del group.requests[request.key], group.samples[request.key]
                self._waits.pop(request.key, None)
                _, drop = group.out.pop(request.key, (0, bool))
                drop()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return this rank's samples as flat tables."""
        with self.changed:
            rows = [
                (key, group.samples[key], _digest(request.prompt), key in group.failures)
                for group in self.groups.values()
                for key, request in group.requests.items()
            ]
            rows += [(key, *kept, False) for key, kept in self._kept.items() if key[0] in self.groups]
        samples = [sample for _, sample, *_ in rows]
        routing = b"".join(one.routing for one in samples)
        heads = [
            (*key, len(one.token_ids), _FINISHES.index("failed" if failed else one.finish), len(one.routing), context)
            for key, one, context, failed in rows
        ]
        return {
            "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 6),
            "token_ids": torch.tensor([token for one in samples for token in one.token_ids], dtype=torch.int64),
            "logprobs": torch.tensor([value for one in samples for value in one.logprobs], dtype=torch.float64),
            "versions": torch.tensor([version for one in samples for version in one.versions], dtype=torch.int64),
            "kept": torch.tensor([kept for one in samples for kept in one.kept], dtype=torch.bool),
            "routing": torch.frombuffer(bytearray(routing), dtype=torch.uint8) if routing else torch.zeros(0).byte(),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the samples of `state` for the requests that come; a failed one begins anew."""
        names = ("token_ids", "logprobs", "versions", "kept")
        ids, logprobs, versions, kept = (tensors[name].tolist() for name in names)
        routing, at, at_routing = tensors["routing"].numpy().tobytes(), 0, 0
        for ticket, number, count, finish, size, context in tensors["heads"].tolist():
            here, word = slice(at, at + count), _FINISHES[finish]
            if word != "failed":
                own = routing[at_routing : at_routing + size]
                columns = (ids[here], logprobs[here], versions[here])
                sample = Sample(*columns, word, own, kept[here])  # type: ignore[arg-type]
                self._kept[ticket, number] = sample, context
            at, at_routing = at + count, at_routing + size


@dataclass(eq=False)
class Players(Turns):
    """This rank's trajectories, which play as long as the run."""

    runner: Runner
    ended: Callable[[Played], Played]  # called with each outcome as it comes; returns the one that counts
    requests: OpenRequests
    samples: int  # number for each prompt
    limit: int  # tokens, as of `Trajectory`
    _play: LivePlay | None = None
    _blocked: int = 0  # environments, since groups came the last time

    def begin(self, ticket: int) -> None:
        """Play the samples of a group."""
        group, self._blocked = self.requests.groups[ticket], 0
        for number in range(self.samples):
            self._start(group, Trajectory(group.prompt, ticket, number, self.limit))

    @property
    def stalled(self) -> bool:
        """Return whether a trajectory blocks the loop."""
        return self._play is not None and self._play.stalled

    def look(self) -> None:
        """Start all others again if a trajectory blocks the loop. Raises RunError where that does not help."""
        play = self._play
        if play is None or not self.stalled:
            return
        with self.requests.changed:
            play.abandoned, self._play, left = True, None, dict(play.playing)
        place, what = self.runner.blocked(play)
        self._blocked += 1
        if place not in left or self._blocked > MOST_BLOCKED:
            raise RunError(f"{self.runner.name}: environments {what}")
        for number, one in left.items():
            self.requests.leave(one, keep=True)
            if number == place:
                self._ended(self.runner.failed(one, what))
            else:
                self._start(self.requests.groups[one.prompt_index], replace(one, branches=[], end=None))

    def close(self) -> None:
        """Cancel what plays."""
        if self._play is not None:
            self._play.abandoned = True
            self._play.running.wait(GRACE_S)

    def put(self, turn: TurnRequest) -> Future[Answer]:
        (ticket, sample, number), answer = turn.key, Future[Answer]()
        group = self.requests.groups[ticket]
        request = self.requests.engine.turn_request(turn._replace(key=(group.place, sample, number)), group.seed)
        self.requests.ask(replace(request, key=(ticket, request.key[1])), answer)
        return answer

    def end(self, trajectory: Trajectory) -> None:
        self.requests.leave(trajectory, keep=False)

    def _start(self, group: InFlight, trajectory: Trajectory) -> None:
        if self._play is None:
            self._play = self.runner.live(self, self._ended)
        with self.requests.changed:
            group.playing[trajectory.sample_index] = trajectory
            self._play.begin(trajectory)

    def _ended(self, played: Played) -> Played:
        played = self.ended(played)
        with self.requests.changed:
            group, number = self.requests.groups.get(played.trajectory.prompt_index), played.trajectory.sample_index
            if group is not None:
                del group.playing[number]
                group.played[number] = played
            self.requests.changed.notify_all()
        return played
