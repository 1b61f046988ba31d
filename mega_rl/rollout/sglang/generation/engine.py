"""Rollout engine over SGLang servers: prompts in, rows out; lost servers are restarted and refitted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mega_rl.agents.environment import Answer, TurnQueue, TurnRequest, TurnSampling, give_answer
from mega_rl.agents.trajectory import Turn, response_rows
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together, run_on_all
from mega_rl.protocols import Ranks
from mega_rl.rollout.sampling import check_positions, is_greedy, response_limit, turn_keys
from mega_rl.rollout.sglang.generation.router import SLACK_S, Answered
from mega_rl.rollout.sglang.generation.samples import (
    GenerationResult,
    Key,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
    State,
)
from mega_rl.types import Draws, Metrics, Prompt, Rollout

log = logging.getLogger(__name__)

_NAMED_FAILURES = 3  # in an error message
NUMBER_BITS = 32  # room for a turn's number in the key of its request


class RoutedLayers(NamedTuple):
    """Layers in which a server routes tokens to experts."""

    mixtures: Sequence[bool]  # whether each layer is a mixture; the others report nothing useful
    top_k: int  # experts of a token


@dataclass(frozen=True)
class SglangRolloutSettings:
    """Settings of one rank's generations over SGLang servers."""

    sampling: Sampling
    max_positions: int  # the model's: prompt and response together
    timeout_s: float  # from a sample's first try to its last
    concurrency: int  # requests of this rank in flight at all servers together; the others wait their turn
    restarts: int  # times that servers are brought back for one generation
    max_failed_share: float  # largest share of a generation's samples over all ranks that stays out of the loss
    routed: RoutedLayers | None = None  # samples for training report the experts of their tokens
    token_versions: bool = False  # responses may continue under later weights, and tokens carry their version


class RequestRouter(Protocol):
    """`ServerRouter`, or what answers in its place."""

    def open(
        self, sampling: Sampling, *, version: int, deadline_s: Callable[[int], float], mixed_versions: bool = False
    ) -> None: ...

    def ask(self, request: SampleRequest, answer: Answered, so_far: Sample | None = None) -> Callable[[], object]: ...

    def result(self, *, interrupt: bool = False) -> GenerationResult: ...

    def taken(self) -> GenerationResult: ...

    def states(self) -> dict[int, tuple[State, str]]: ...


class SglangRolloutEngine:
    """Rollout engine over a `ServerRouter`; every rank is a client for its own prompts' samples.

    `open` to `end` talk to servers and do no collective, so a generation may run next to training. `settle` is
    collective: where a rank lost servers, all ranks bring them back and send them the weights before they get requests.
    """

    def __init__(
        self,
        router: RequestRouter,
        *,
        everyone: Ranks,
        weight_version: Callable[[], int],
        bring_back: Callable[..., None],
        settings: SglangRolloutSettings,
    ) -> None:
        """
        weight_version: of the weights last published.
        bring_back: restarts these servers if they are dead, and with `refit` sends them the weights; collective.
        """
        self.router, self.everyone, self._settings = router, everyone, settings
        self.sampling, self.routed = settings.sampling, settings.routed
        self._version, self._bring_back = weight_version, bring_back
        self._since = GenerationResult()  # counts since the last `metrics`

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
        draws: Draws | None = None,
    ) -> Rollout:
        """Return n samples per prompt; collective over all ranks.

        Raises UserError for prompts that are empty, hold foreign tokens or leave no room for a response; RunError on
        all ranks for failed samples, and when the restarts are used up.
        """
        sampling, trains = self._sampling(greedy, draws), not greedy and draws is None
        requests, samples, failures = list[SampleRequest](), dict[Key, Sample](), dict[Key, RequestFailure]()

        def unserved() -> list[SampleRequest]:
            there = {key for key, sample in samples.items() if sample.finish != "partial"} | failures.keys()
            return [request for request in requests if request.key not in there]

        def ask() -> None:
            if not requests:
                requests.extend(self.requests(prompts, prompt_index, n=n, seed=seed, draws=draws))
            rest = unserved()
            answers = {request.key: Future[Sample | RequestFailure]() for request in rest}
            within_s, mixed = self.deadline_s(len(rest)), self._settings.token_versions
            self.router.open(sampling, version=self._version(), deadline_s=lambda _: within_s, mixed_versions=mixed)
            try:
                for request in rest:
                    self.router.ask(request, answers[request.key].set_result, samples.pop(request.key, None))
                if wait(answers.values(), within_s + SLACK_S).not_done:
                    raise RunError(f"a generation continued {SLACK_S:g} s after its deadline")
            finally:
                self.end()
            for key, answer in answers.items():
                if isinstance(outcome := answer.result(), Sample):
                    samples[key] = outcome
                else:
                    failures[key] = outcome

        run_on_all(ask, self.everyone)
        self.settle(lambda: len(unserved()), lambda: ask() if unserved() else None)
        return self.rows(requests, samples, failures, trains=trains)

    def requests(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        draws: Draws | None = None,
    ) -> list[SampleRequest]:
        """Return n requests per prompt, with their seeds and limits. Raises UserError as `generate`."""
        usual, most = self._settings.sampling.max_new_tokens, self._settings.max_positions
        limit = response_limit(prompts, draws, max_new_tokens=usual, max_positions=most)
        return [
            SampleRequest(
                (index, number), tuple(prompt.token_ids), seed=sampling_seed(seed, index, number), limit=limit
            )
            for prompt, index in zip(prompts, prompt_index, strict=True)
            for number in range(n)
        ]

    # -- a generation that may run next to training --------------------------------------------------------------------

    def open(self) -> None:
        """Start a generation of samples for training, whose requests come by `router.ask`."""
        mixed, sampling = self._settings.token_versions, self._sampling(False, None)
        self.router.open(sampling, version=self._version(), deadline_s=self.deadline_s, mixed_versions=mixed)

    def end(self, *, interrupt: bool = False) -> None:
        """End the generation; interrupt: requests at servers are answered with what there is."""
        self._since.add(self.router.result(interrupt=interrupt))

    # -- turns ---------------------------------------------------------------------------------------------------------

    def turns(self, asked: TurnQueue, how: TurnSampling) -> None:
        """Answer each turn as its own request, with "lost" where no server is left."""
        routed = self.routed if not how.greedy and how.draws is None else None
        router = self.router
        sampling = replace(self._sampling(how.greedy, how.draws), return_routing=routed is not None)
        router.open(sampling, version=self._version(), deadline_s=self.deadline_s)
        try:
            while (taken := asked.take()) is not None:
                for turn, future in taken:
                    answer = partial(answer_turn, future, len(turn.token_ids), routed)
                    drop = router.ask(self.turn_request(turn, how.seed), answer)
                    future.add_done_callback(partial(_drop_cancelled, drop))
        finally:
            self.end()

    def turn_request(self, turn: TurnRequest, seed: tuple[int, ...]) -> SampleRequest:
        """Return the request of a turn, with its seed. Raises UserError for one that does not fit the model."""
        ids, (prompt, sample, number), limit = turn
        check_positions(len(ids), limit, max_positions=self._settings.max_positions)
        of_turn = sampling_seed(seed, prompt, sample, number)
        return SampleRequest((prompt, sample << NUMBER_BITS | number), ids, seed=of_turn, limit=limit)

    def _sampling(self, greedy: bool, draws: Draws | None) -> Sampling:
        """Return the sampling of a generation, in training that of the settings."""
        if draws is None or is_greedy(greedy, draws):
            routing = self._settings.routed is not None and not greedy and draws is None
            return replace(self._settings.sampling, greedy=is_greedy(greedy, draws), return_routing=routing)
        return replace(self._settings.sampling, temperature=draws.temperature, top_p=draws.top_p, top_k=draws.top_k)

    def rows(
        self,
        requests: Sequence[SampleRequest],
        samples: Mapping[Key, Sample],
        failures: Mapping[Key, RequestFailure],
        *,
        trains: bool,
    ) -> Rollout:
        """Return one row per request; collective. Raises RunError on all ranks if too many failed."""
        any_failed = _settle_failures(failures, len(requests), self.everyone, self._settings.max_failed_share)
        return rollout_of(
            requests,
            samples,
            weight_version=self._version(),
            with_failed=any_failed,
            with_token_versions=self._settings.token_versions and trains,
            routed=self._settings.routed if trains else None,
        )

    def settle(self, lost: Callable[[], int], again: Callable[[], None], *, holds: bool = True, times: int = 0) -> int:
        """Bring lost servers back and call `again` on all ranks while requests are `lost`; collective.

        holds: the trainer has the weights last published; else servers get the next, and what is lost waits for them.
        times: that servers were brought back in this step; returned with those of this call.

        Raises RunError when the restarts are used up.
        """
        before = times
        while True:
            states = self.router.states()
            out = torch.tensor([int(state is not State.READY) for state, _ in states.values()])
            some = self.everyone.max(out).tolist() if states else ()  # on some rank
            dead = [i for i, is_out in zip(states, some, strict=True) if is_out]
            unserved = int(self.everyone.sum(torch.tensor(lost())))
            spent = times == self._settings.restarts
            waits = spent and before and len(dead) < len(states)  # others live: it comes back in the next step
            if not unserved and (not dead or times > before or waits):
                break
            reasons = "; ".join(f"server {i}: {why}" for i, (state, why) in states.items() if state is not State.READY)
            if spent:
                raise RunError(
                    f"{unserved} samples are without an answer and servers {dead} have been brought back "
                    f"{times} times (rollout.sglang.restarts={self._settings.restarts}): {reasons}"
                )
            if dead or not states:
                log.warning("servers %s are out of rotation: %s", dead or "all", reasons)
                self._bring_back(dead, refit=holds)
            times += 1
            if not holds:
                break
            run_on_all(again, self.everyone)
        return times

    def deadline_s(self, count: int) -> float:
        """Return the seconds that `count` samples may take: `timeout_s` for each round of `concurrency`."""
        return self._settings.timeout_s * max(1, math.ceil(count / self._settings.concurrency))

    def metrics(self) -> Metrics:
        """Return the metrics of generations since the last call, also of one that runs; collective."""
        self._since.add(self.router.taken())
        result, self._since = self._since, GenerationResult()
        own = {
            "sglang/requests": result.requests,
            "sglang/retries": result.retries,
            "sglang/failed_tries": result.failed_tries.total(),
            "sglang/tokens": result.tokens,
        }
        sums = self.everyone.sum(torch.tensor(list(own.values()), dtype=torch.float64)).tolist()
        seconds = float(self.everyone.max(torch.tensor(result.seconds, dtype=torch.float64)))
        numbers = {**dict(zip(own, sums, strict=True)), "sglang/seconds": seconds}
        return numbers | ({"sglang/tokens_per_second": numbers["sglang/tokens"] / seconds} if seconds else {})


def answer_turn(
    future: Future[Answer], read: int, routed: RoutedLayers | None, outcome: Sample | RequestFailure
) -> None:
    """Answer a turn after `read` tokens; a partial one is lost."""
    if isinstance(outcome, Sample) and outcome.finish != "partial":
        try:
            turn = turn_of(outcome, read, routed)
        except RunError as error:  # of this thread's caller, whose trajectory fails
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        give_answer(future, turn)
        return
    if isinstance(outcome, RequestFailure):
        log.warning("a turn has no answer: %s", outcome.message)
    give_answer(future, "turn" if isinstance(outcome, RequestFailure) else "lost")


def _drop_cancelled(drop: Callable[[], object], future: Future[Answer]) -> None:
    if future.cancelled():
        drop()


def _settle_failures(failures: Mapping[Key, RequestFailure], asked: int, world: Ranks, share: float) -> bool:
    """Return whether any rank has failed samples; raise RunError on all if more than a share; collective."""
    counts = world.sum(torch.tensor([len(failures), asked])).tolist()
    if not counts[0]:
        return False
    if counts[0] / counts[1] > share:
        own = [f"sample {key}: {failure.message}" for key, failure in failures.items()]
        rule = f"more than rollout.sglang.max_failed_share={share:g}, whose samples stay out of the loss"
        text = f"{counts[0]} of {counts[1]} samples have no answer ({rule}): " + "; ".join(own[:_NAMED_FAILURES])
        raise_together(RunError(text) if own else None, world, error=RunError)
    return True


def sampling_seed(seed: Sequence[int], prompt_index: int, sample_index: int, turn: int = 0) -> int:
    """Return a 31-bit seed that depends only on the arguments, not on rank or server."""
    key = turn_keys(seed, *(torch.tensor(word) for word in (prompt_index, sample_index, turn)))
    return int(key) & (2**31 - 1)


def rollout_of(
    requests: Sequence[SampleRequest],
    samples: Mapping[Key, Sample],
    *,
    weight_version: int,
    with_failed: bool,
    with_token_versions: bool,
    routed: RoutedLayers | None = None,
) -> Rollout:
    """Return one row per request in order: prompt and response, right-padded with 0, on the host.

    A request without a sample is a row without a response. A row's version is its oldest token's; `weight_version`
    where it has none. routed: samples carry the experts of their tokens; None: they do not. Unknown, -1, are those of
    padding, of a response's last token, which was never an input, and of a request that was aborted at its last token.

    Raises RunError for a sample whose experts are not those of `routed`.
    """

    def response(request: SampleRequest) -> Turn | None:
        sample = samples.get(request.key)
        return None if sample is None else turn_of(sample, len(request.prompt), routed)

    return response_rows(
        ((request.prompt, request.key, response(request)) for request in requests),
        version=weight_version,
        with_failed=with_failed,
        with_versions=with_token_versions,
        routed=(0, 0) if routed is None else (sum(routed.mixtures), routed.top_k),
    )


def turn_of(sample: Sample, read: int, routed: RoutedLayers | None) -> Turn:
    """Return a response to `read` tokens as a turn. Raises RunError for other experts than `routed`."""
    ids = tuple(sample.token_ids)
    routing = _experts(sample, read + len(ids) - 1, routed) if routed and sample.routing else None
    columns = (tuple(sample.logprobs), tuple(sample.versions), sample.finish == "stop")
    return Turn(ids, *columns, routing=routing, kept=tuple(sample.kept) if any(sample.kept) else ())


def _experts(answer: Sample, inputs: int, routed: RoutedLayers) -> Tensor:
    """Return [inputs, L, K] int16, experts of the tokens in L mixtures. Raises RunError."""
    experts = torch.frombuffer(bytearray(answer.routing), dtype=torch.int32)
    if len(experts) != inputs * len(routed.mixtures) * routed.top_k:
        raise RunError(
            f"a server reported {len(experts)} experts for the {inputs} inputs of a sample, and the "
            f"model has {len(routed.mixtures)} layers with {routed.top_k} experts of each token: it serves another "
            "model, or its routed experts have another form; set rollout.sglang.return_routing=false"
        )
    mixtures = [layer for layer, mixed in enumerate(routed.mixtures) if mixed]
    return experts.view(-1, len(routed.mixtures), routed.top_k)[:, mixtures].to(torch.int16)
