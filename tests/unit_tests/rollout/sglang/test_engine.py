"""The engine over a scripted fleet: servers come back before their samples do, and every sample is there once."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mega_rl.agents.environment import Environment, Policy, Runner, TurnQueue, TurnRequest, TurnSampling
from mega_rl.agents.trajectory import Trajectory
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.control import Endpoint
from mega_rl.rollout.sglang.generation.engine import (
    RoutedLayers,
    SglangRolloutEngine,
    SglangRolloutSettings,
    sampling_seed,
)
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.generation.samples import (
    GenerationResult,
    Key,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
    State,
)
from mega_rl.types import Draw, Draws, Prompt
from mega_rl.workers.rollout import RolloutWorker
from mega_rl.workers.stream import ServerFlow
from tests.helpers.fake_sglang import KEYS, Answers, Exchange, FakeServer, generated, right, right_tokens

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=4, stop_token_ids=(1,))
PROMPTS = [Prompt(index=10 + i, token_ids=(3, 4 + i), text="", answer="") for i in range(3)]
Script = Callable[[list[SampleRequest], Mapping[Key, Sample]], Answers]


def served(requests: Sequence[SampleRequest], *, version: int = 1) -> Answers:
    """An answer to every request: its seed tells them apart."""
    result = Answers()
    for request in requests:
        result.samples[request.key] = Sample([request.seed % 40 + 2, 1], [-0.5, -0.25], [version] * 2, "stop")
    result.requests, result.tokens, result.seconds = len(requests), 2 * len(requests), 0.5
    return result


class ScriptedFleet:
    """Answers one generation after the other as the script says; `all_ready` once servers were brought back."""

    def __init__(self, *script: Script) -> None:
        self.script, self.size = list(script), len(PROMPTS) * 2  # requests of the next generation
        self.asked: list[tuple[list[Key], int, Sampling]] = []
        self.servers = [(State.READY, ""), (State.READY, "")]

    def states(self) -> dict[int, tuple[State, str]]:
        return dict(enumerate(self.servers))

    def open(self, sampling: Sampling, *, version: int, **_: Any) -> None:
        self.asked.append(([], version, sampling))
        self.requests, self.given = list[SampleRequest](), dict[Key, tuple[Callable[..., None], Sample]]()

    def ask(self, request: SampleRequest, answer: Callable[..., None], so_far: Sample | None = None) -> None:
        """Let the script answer all requests once the last one has come."""
        self.asked[-1][0].append(request.key)
        self.requests.append(request)
        self.given[request.key] = answer, so_far or Sample()
        if len(self.requests) < self.size:
            return
        script = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.answer = script(self.requests, {key: before for key, (_, before) in self.given.items()})
        self.size = len(self.answer.unserved) or self.size
        for table in (self.answer.samples, self.answer.failures, self.answer.unserved):
            for key, outcome in table.items():
                self.given[key][0](outcome)

    def result(self, *, interrupt: bool = False) -> GenerationResult:
        return self.answer

    def taken(self) -> GenerationResult:
        return GenerationResult()


def engine_over(fleet: Any, *, share: float = 0.0, restarts: int = 2, **given: Any) -> Any:
    brought_back: list[list[int]] = []
    serve = given.pop("bring_back", lambda index: fleet.servers.__setitem__(index, (State.READY, "")))

    def bring_back(lost: Sequence[int], *, refit: bool) -> None:
        brought_back.append(list(lost))
        for index in lost:
            serve(index)

    engine = SglangRolloutEngine(
        fleet,
        everyone=SingleRank(),
        weight_version=given.pop("weight_version", lambda: 1),
        bring_back=bring_back,
        settings=SglangRolloutSettings(
            sampling=SAMPLING,
            max_positions=given.pop("max_positions", 64),
            timeout_s=30.0,
            concurrency=4,
            restarts=restarts,
            max_failed_share=share,
            **given,
        ),
    )
    return engine, brought_back


def generate(engine: SglangRolloutEngine, **given: Any) -> Any:
    return engine.generate(PROMPTS, [5, 6, 7], n=2, seed=(0, 3), **given)


@pytest.mark.parametrize("near_serves", [True, False])
def test_other_hosts_serve_while_none_here_does(near_serves: bool) -> None:
    """Servers on loopback of another host are closed ports: nobody may be brought back for them."""

    async def together(exchange: Exchange) -> None:
        while near_serves and exchange.server.most_in_flight < 4:  # the near one's share, not that of all
            await asyncio.sleep(0.005)
        await right(exchange)

    with socket.socket() as closed, FakeServer(together, index=0) as server:
        closed.bind(("127.0.0.1", 0))
        dead = Endpoint(1, f"http://127.0.0.1:{closed.getsockname()[1]}", KEYS)
        fleet = ServerRouter(
            [server.endpoint, dead], vocab_size=50, max_concurrency={0: 4} if near_serves else {1: 4}, retries=1,
            request_timeout_s=20.0,
        )  # fmt: skip
        with closing(fleet):
            for index in range(2):
                fleet.mark(index, State.READY, version=1)
            if not near_serves:
                fleet.mark(1, State.DOWN)
            engine, brought_back = engine_over(fleet)
            if near_serves:
                for _ in range(2):
                    assert len(generate(engine).tokens) == 6
                assert [state for state, _ in fleet.states().values()] == [State.READY] * 2
                assert server.most_in_flight == 4
            else:
                requests = [SampleRequest((i, 0), (3, 4), i) for i in range(6)]
                result = generated(fleet, requests, SAMPLING, version=1, deadline=time.monotonic() + 20)
                assert len(result.samples) == 6
            assert brought_back == []


def test_requests_carry_their_limit() -> None:
    """A response is whole at the evaluation's limit, by default at the run's."""
    asked: list[SampleRequest] = []

    def answer(requests: list[SampleRequest], _: Mapping[Key, Sample]) -> Answers:
        asked.extend(requests)
        return served(requests)

    engine, _ = engine_over(ScriptedFleet(answer), max_positions=6)
    sample = Sample([9, 9], [-0.5, -0.5], [1, 1])
    generate(engine, draws=Draws(n=2, temperature=1.0, max_new_tokens=2))
    assert asked[-1].most(SAMPLING) == 2
    assert sample.is_whole(asked[-1], SAMPLING)
    generate(engine)
    assert asked[-1].most(SAMPLING) == 4
    assert not sample.is_whole(asked[-1], SAMPLING)
    engine.router.size = 1
    longer = [replace(PROMPTS[0], token_ids=(3, 4, 5))]
    engine.generate(longer, [0], n=1, seed=(0,), draws=Draws(n=1, temperature=1.0, max_new_tokens=3))
    said = "the longest prompt has 3 tokens and its response up to 4: .*max_position_embeddings=6"
    with pytest.raises(UserError, match=said):
        engine.generate(longer, [0], n=1, seed=(0,))


def test_rows_are_ordered_and_have_own_seeds() -> None:
    fleet = ScriptedFleet(lambda requests, _: served(requests))
    engine, _ = engine_over(fleet)
    rows = generate(engine)
    assert rows.prompt_index.tolist() == [5, 5, 6, 6, 7, 7]
    assert rows.sample_index.tolist() == [0, 1] * 3
    seeds = [sampling_seed((0, 3), prompt, sample) for prompt in (5, 6, 7) for sample in (0, 1)]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert rows.tokens[:, 2].tolist() == [seed % 40 + 2 for seed in seeds]
    assert sampling_seed((0, 4), 5, 0) != seeds[0]  # another step
    assert engine.metrics() == {
        "sglang/requests": 6.0,
        "sglang/retries": 0.0,
        "sglang/failed_tries": 0.0,
        "sglang/tokens": 12.0,
        "sglang/seconds": 0.5,
        "sglang/tokens_per_second": 24.0,
    }
    assert not any(engine.metrics().values())


@pytest.mark.parametrize("greedy", [False, True])
def test_samples_that_train_are_asked_for_their_experts(greedy: bool) -> None:
    def answer(requests: Sequence[SampleRequest], _: Any) -> Any:
        result = served(requests)
        for request in requests:
            sample = result.samples[request.key]
            inputs = len(request.prompt) + len(sample.token_ids) - 1
            experts = torch.full((inputs, 2, 1), 3, dtype=torch.int32)
            result.samples[request.key] = replace(sample, routing=experts.numpy().tobytes())
        return result

    fleet = ScriptedFleet(answer)
    engine, _ = engine_over(fleet, routed=RoutedLayers((False, True), top_k=1))
    rows = generate(engine, greedy=greedy)
    assert [sampling.return_routing for _, _, sampling in fleet.asked] == [not greedy]
    assert (rows.routing is None) == greedy
    if not greedy:
        assert rows.routing.shape == (*rows.tokens.shape, 1, 1)
        known = rows.routing[..., 0, 0] == 3
        assert torch.equal(known.sum(1), rows.lengths - 1)


def test_lost_servers_return_before_samples_are_requested() -> None:
    partial = Sample([9], [-0.125], [1], "partial")

    def loses_two(requests: list[SampleRequest], _: Any) -> Answers:
        result = served(requests[:4])
        result.unserved = {requests[4].key: partial, requests[5].key: Sample()}
        fleet.servers[1] = (State.DOWN, "it has ended")
        return result

    seen: list[Any] = []

    def serves(requests: list[SampleRequest], partials: Mapping[Key, Sample]) -> Answers:
        seen.append(dict(partials))
        assert fleet.servers[1][0] is State.READY, "asked before the server was back"
        return served(requests)

    fleet = ScriptedFleet(loses_two, serves)
    engine, brought_back = engine_over(fleet)
    rows = generate(engine)
    assert brought_back == [[1]]
    assert [keys for keys, _, _ in fleet.asked[1:]] == [[(7, 0), (7, 1)]]
    assert seen == [{(7, 0): partial, (7, 1): Sample()}]
    assert rows.prompt_index.tolist() == [5, 5, 6, 6, 7, 7]
    assert bool((rows.lengths == 4).all())


def test_servers_that_do_not_stay_end_the_run() -> None:
    def loses_all(requests: list[SampleRequest], partials: Mapping[Key, Sample]) -> Answers:
        result = Answers(unserved=dict(partials))
        fleet.servers[0] = (State.DOWN, "it has ended")
        return result

    fleet = ScriptedFleet(loses_all)
    engine, brought_back = engine_over(fleet, restarts=2)
    with pytest.raises(RunError, match=r"6 samples are without an answer.*server 0: it has ended"):
        generate(engine)
    assert brought_back == [[0], [0]]


def fails_one(requests: list[SampleRequest], _: Any) -> Answers:
    result = served(requests[1:])
    result.failures[requests[0].key] = RequestFailure("bad_answer", "server 0: the answer is cut")
    return result


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.0, r"1 of 6 samples .*rollout\.sglang\.max_failed_share=0, .*is cut"),
        (0.1, r"more than rollout\.sglang\.max_failed_share=0\.1"),
        (0.2, ""),
    ],
)
def test_failed_sample_ends_the_run_or_is_masked(share: float, said: str) -> None:
    engine, _ = engine_over(ScriptedFleet(fails_one), share=share)
    if said:
        with pytest.raises(RunError, match=said):
            generate(engine)
        return
    rows = generate(engine)
    assert rows.failed.tolist() == [True] + [False] * 5
    assert not rows.loss_mask[0].any()
    assert int(rows.lengths[0]) == 2


def test_turns_are_requests_with_seeds_and_limits_of_their_own() -> None:
    """The first turn of a sample is its response; a turn that lost its servers says so, and they come back."""
    with FakeServer() as server, closing(router_over(server)) as fleet:
        engine, brought_back = engine_over(fleet, bring_back=lambda _: fleet.mark(0, State.READY, version=1))
        asked = [
            TurnRequest((3, 4), (5, 1, 0), 4),
            TurnRequest((3, 4, 9, 7), (5, 1, 1), 2),
            TurnRequest((3,), (5, 2, 0), 4),
        ]
        answers = turns(engine, asked)
        alone = SampleRequest((5, 1), (3, 4), sampling_seed((0, 3), 5, 1))
        assert answers[0].token_ids == tuple(right_tokens(alone, SAMPLING))
        assert answers[0] == replace(answers[0], versions=(1,) * len(answers[0].token_ids), stopped=False)
        seen = {tuple(one["input_ids"]): one["sampling_params"] for one in server.seen}
        assert {ids: one["max_new_tokens"] for ids, one in seen.items()} == {one[0]: one[2] for one in asked}
        assert len({one["sampling_seed"] for one in seen.values()}) == 3
        fleet.mark(0, State.DOWN, "gone")
        waiting, times = turns(engine, asked[:1]), list[int]()
        assert waiting == ["lost"]
        engine.settle(lambda: len(waiting), lambda: times.append(len(waiting.pop())))
        assert (brought_back, times) == ([[0]], [4])
        assert engine.metrics()["sglang/requests"] == 3.0
        with pytest.raises(UserError, match="max_position_embeddings=64"):
            turns(engine, [TurnRequest((3,) * 63, (5, 1, 0), 4)])


@pytest.mark.parametrize("greedy", [False, True])
def test_turns_that_train_have_the_experts_of_all_inputs(greedy: bool) -> None:
    """Of the mixture, the second layer; a server that reports another form of them fails the turn."""
    layers = 2

    async def routed(exchange: Exchange) -> None:
        answer = exchange.answer()
        assert exchange.body.get("return_routed_experts", False) == (not greedy)
        inputs = len(exchange.body["input_ids"]) + len(answer["output_ids"]) - 1
        experts = torch.arange(inputs * layers, dtype=torch.int32).numpy().tobytes()
        answer["meta_info"]["routed_experts"] = base64.b64encode(experts).decode()
        await exchange.send_json(answer)

    request = TurnRequest((3, 4, 5), (5, 1, 0), 4)
    with FakeServer(routed) as server, closing(router_over(server)) as fleet:
        engine, _ = engine_over(fleet, routed=RoutedLayers((False, True), top_k=1))
        (turn,) = turns(engine, [request], greedy=greedy)
        if greedy:
            assert turn.routing is None
            return
        assert turn.routing.tolist() == [[[2 * place + 1]] for place in range(3 + len(turn.token_ids) - 1)]
        layers = 3
        with pytest.raises(RunError, match="it serves another model, or its routed experts have another form"):
            turns(engine, [request])


def test_a_turn_returns_while_others_are_sampled() -> None:
    """One request of four hangs until the others' trajectories have had all of their turns."""
    ends, rest_has_ended = list[tuple[int, int]](), threading.Event()

    async def script(exchange: Exchange) -> None:
        while exchange.prompt == 0 and not rest_has_ended.is_set():
            await asyncio.sleep(0.005)
        await right(exchange)

    class Own(Environment):
        async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
            for number in range(3):
                await policy.turn(limit=2)
                ends.append((trajectory.prompt_index, number))
                if len(ends) == 9:
                    rest_has_ended.set()

    with FakeServer(script) as server, closing(router_over(server)) as fleet:
        engine, _ = engine_over(fleet)
        made = [Trajectory(PROMPTS[0], number, 0, 40) for number in range(4)]
        runner = Runner(Own(), "rollout.source='agent.py:Own'", vocab_size=50)
        outcomes = runner.run(made, partial(engine.turns, how=TurnSampling((0, 3))))
    assert [one.failure for one in outcomes] == [None] * 4
    assert ends[9:] == [(0, number) for number in range(3)]


def test_the_turns_that_are_left_end_with_their_trajectories() -> None:
    """A request whose trajectory has ended is cut off, and the next generation of the router begins at once."""

    async def never(exchange: Exchange) -> None:
        await (right(exchange) if len(exchange.body["input_ids"]) > 1 else exchange.forever())

    with FakeServer(never) as server, closing(router_over(server)) as fleet:
        engine, _ = engine_over(fleet)
        asked = TurnQueue()
        hangs, ends = (asked.put(TurnRequest(ids, (5, len(ids), 0), 4)) for ids in ((3,), (3, 4)))
        ends.add_done_callback(lambda _: asked.close())
        engine.turns(asked, TurnSampling((0, 3)))
        assert ends.done()
        assert not hangs.done()
        assert len(turns(engine, [TurnRequest((3, 4), (5, 1, 0), 4)])) == 1


def test_a_cancelled_turn_is_aborted_at_its_server() -> None:
    """By its own id; the server's other request and a later turn of the same number are answered."""

    async def slow(exchange: Exchange) -> None:
        if len(exchange.body["input_ids"]) > 1 or exchange.body["sampling_params"]["max_new_tokens"] == 2:
            await right(exchange)
            return
        waiting[0].cancel()
        await exchange.aborted.wait()
        aborted.append(exchange.body["rid"])
        waiting.append(asked.put(TurnRequest((3,), (5, 0, 0), 2)))
        waiting[-1].add_done_callback(lambda _: waiting[1].add_done_callback(lambda _: asked.close()))
        await exchange.forever()

    with FakeServer(slow) as server, closing(router_over(server)) as fleet:
        server.looks_s = 3600.0  # the client hangs up, too, and the server may see that before the abort
        engine, _ = engine_over(fleet)
        asked, aborted = TurnQueue(), list[str]()
        waiting = [asked.put(TurnRequest(ids, (5, 0, len(ids) - 1), 4)) for ids in ((3,), (3, 4))]
        late = threading.Timer(30.0, asked.close)  # a test without an abort fails, too
        late.start()
        engine.turns(asked, TurnSampling((0, 3)))
        late.cancel()
        assert len(aborted) == 1
        assert [len(one.result().token_ids) for one in waiting[1:]] == [4, 2]  # type: ignore[union-attr]
        assert len({one["rid"] for one in server.seen}) == len(server.seen)


def turns(engine: SglangRolloutEngine, requests: Sequence[TurnRequest], *, greedy: bool = False) -> list[Any]:
    """Return the answers of all, that are asked for at once."""
    asked, left = TurnQueue(), list(requests)

    def ended(_: Any) -> None:
        left.pop()
        if not left:
            asked.close()

    answers = [asked.put(one) for one in requests]
    for one in answers:
        one.add_done_callback(ended)
    engine.turns(asked, TurnSampling((0, 3), greedy))
    return [one.result() for one in answers]


def router_over(server: FakeServer) -> ServerRouter:
    router = ServerRouter([server.endpoint], vocab_size=50, max_concurrency=4, retries=1, request_timeout_s=20.0)
    router.mark(0, State.READY, version=1)
    return router


class DyingFleet(ScriptedFleet):
    """A server that dies with each request, when the round has begun."""

    def open(self, *_: Any, **__: Any) -> None: ...

    def ask(self, request: SampleRequest, answer: Any, so_far: Sample) -> Callable[[], object]:
        def die() -> None:
            self.servers[0] = (State.DOWN, "it is killed")
            answer(so_far)

        threading.Timer(0.01, die).start()
        return lambda: None

    def result(self, *, interrupt: bool = False) -> GenerationResult:
        return GenerationResult()


def test_restarts_count_over_interrupted_rounds() -> None:
    """Rounds that an update may interrupt: the limit is that of a step, not begun again with each round."""
    fleet = DyingFleet(lambda *_: GenerationResult())
    del fleet.servers[1]
    engine, brought_back = engine_over(fleet, restarts=3, token_versions=True)
    worker = RolloutWorker(engine, SingleRank(), SingleRank(), 1, seed=0)
    flow = ServerFlow(worker, engine, SingleRank(), lambda: 1, 0, timeout_s=20.0)
    flow.add(Draw(0, 1, 0), {0: PROMPTS[0]})
    for times in (1, 2):
        with pytest.raises(RunError, match=r"brought back 3 times \(rollout\.sglang\.restarts=3\)"):
            flow.arrived(wait=True)
        assert brought_back == [[0]] * 3 * times
        fleet.servers[0] = (State.READY, "")
        flow.pause()
        flow.go_on()  # the next step's


def test_a_server_that_nobody_lacks_waits_for_the_next_step() -> None:
    """Earlier rounds have used the restarts of this step up, and another server has answered all."""
    fleet = ScriptedFleet(lambda *_: GenerationResult())
    engine, brought_back = engine_over(fleet, restarts=2)
    fleet.servers[1] = (State.DOWN, "gone")
    assert engine.settle(lambda: 0, lambda: None, times=2) == 2
    assert brought_back == []
    with pytest.raises(RunError, match="1 samples are without an answer"):
        engine.settle(lambda: 1, lambda: None, times=2)
    assert engine.settle(lambda: 0, lambda: None) == 1
    assert brought_back == [[1]]
