"""Routing over replicas: who gets what, how much at a time, and what an interrupted generation keeps."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mega_rl.errors import UserError
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.generation.samples import (
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
    State,
)
from tests.helpers.fake_sglang import (
    KEYS,
    STOP,
    VERSION,
    VOCABULARY,
    Answers,
    Exchange,
    FakeServer,
    Generation,
    Script,
    generated,
    is_right,
    right,
)
from tests.helpers.sglang import wait_until

HUNG_S = 120.0  # of a generation that no test expects to be late
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=12, stop_token_ids=(STOP,))


def requests(num: int, n: int = 1) -> list[SampleRequest]:
    return [SampleRequest((p, s), (3 + p % 40, 4, 5), p * n + s) for p in range(num) for s in range(n)]


@contextmanager
def fleet_of(
    *scripts: Script, seconds_per_token: float = 0.0, **settings: Any
) -> Iterator[tuple[ServerRouter, list[FakeServer]]]:
    given = {"max_concurrency": 4, "retries": 1, "request_timeout_s": 20.0, "grace_s": 2.0, **settings}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(FakeServer(script, index=i, seconds_per_token=seconds_per_token))
            for i, script in enumerate(scripts)
        ]
        fleet = ServerRouter([one.endpoint for one in servers], vocab_size=VOCABULARY, **given)
        stack.enter_context(closing(fleet))
        for index in range(len(servers)):
            fleet.mark(index, State.READY, version=VERSION)
        yield fleet, servers


def generate(fleet: ServerRouter, asked: list[SampleRequest], *, version: int = VERSION, **more: Any) -> Answers:
    sampling = more.pop("sampling", SAMPLING)
    return generated(fleet, asked, sampling, version=version, deadline=time.monotonic() + HUNG_S, **more)


async def slow(exchange: Exchange) -> None:
    await asyncio.sleep(0.05)
    await right(exchange)


def test_requests_spread_evenly_and_never_exceed_the_concurrency() -> None:
    asked = requests(60)
    with fleet_of(slow, slow, slow) as (fleet, servers):
        result = generate(fleet, asked)
        assert all(is_right(result.samples[request.key], request, SAMPLING) for request in asked)
        assert [server.most_in_flight for server in servers] == [4, 4, 4]
        assert max(abs(len(server.seen) - 20) for server in servers) <= 6
        assert result.tokens == sum(len(sample.token_ids) for sample in result.samples.values())


def test_samples_of_a_prompt_meet_its_prefix() -> None:
    with fleet_of(slow, slow, max_concurrency=32) as (fleet, servers):
        generate(fleet, requests(8, n=4))
        homes = [{tuple(body["input_ids"]) for body in server.seen} for server in servers]
        assert not homes[0] & homes[1]
        assert [len(server.seen) for server in servers] == [16, 16]


def test_what_a_request_asks_for() -> None:
    with fleet_of(right) as (fleet, (server,)):
        generate(fleet, [SampleRequest((5, 2), (7, 8), 1234)])
        body = dict(server.seen[-1])
        assert body.pop("rid").split("-")[1:] == ["5", "2", "1"]
        assert body == {
            "input_ids": [7, 8],
            "extra_key": "1",
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": 12,
                "stop_token_ids": [STOP],
                "ignore_eos": False,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": -1,
                "sampling_seed": 1234,
            },
        }
        generate(fleet, requests(1), sampling=replace(SAMPLING, greedy=True, top_k=5))
        params = server.seen[-1]["sampling_params"]
        assert (params["temperature"], params["top_p"]) == (0.7, 1e-6)
        assert not {"top_k", "sampling_seed"} & set(params)
        assert {path: key for path, key in server.paths} == {"/generate": f"bearer {KEYS.api_key}"}


def test_only_ready_replicas_of_the_version_get_traffic() -> None:
    with fleet_of(right, right, right) as (fleet, servers):
        fleet.mark(0, State.STALE)
        fleet.mark(1, State.DOWN, "killed")
        assert len(generate(fleet, requests(10)).samples) == 10
        assert [len(server.seen) for server in servers] == [0, 0, 10]
        assert [state for state, _ in fleet.states().values()] == [State.STALE, State.DOWN, State.READY]
        result = generate(fleet, requests(10), version=2)
        assert (len(result.unserved), result.requests) == (10, 0)
        for server in servers:
            server.version = 2
        fleet.mark(0, State.READY, version=2)
        assert len(generate(fleet, requests(10), version=2).samples) == 10
        assert [len(server.seen) for server in servers] == [10, 0, 10]


def test_suspect_server_that_generates_is_used_again() -> None:
    async def recovers(exchange: Exchange) -> None:
        if len(exchange.server.seen) <= 4 and not exchange.is_probe:
            await exchange.send(b"", status=500)
        else:
            await right(exchange)

    with fleet_of(recovers, retries=4) as (fleet, (server,)):
        result = generate(fleet, requests(12))
        assert len(result.samples) == 12
        assert server.probes == 1
        assert fleet.states() == {0: (State.READY, "")}


def test_an_interrupted_open_generation_answers_with_tokens_and_continues() -> None:
    """Each request is answered once, whole or as far as it came; the next generation gets what there is."""
    asked, answers = requests(12), list[tuple[SampleRequest, Sample]]()

    def answer(request: SampleRequest, outcome: Sample | RequestFailure) -> None:
        assert isinstance(outcome, Sample)
        answers.append((request, outcome))

    with fleet_of(right, right, seconds_per_token=0.5, max_concurrency=3) as (fleet, servers):
        fleet.open(SAMPLING, version=VERSION, deadline_s=lambda count: HUNG_S)
        for request in asked:
            fleet.ask(request, partial(answer, request), Sample())
        while sum(server.generating() for server in servers) < 4:
            time.sleep(0.01)
        first = fleet.result(interrupt=True)
        assert Counter(request.key for request, _ in answers) == {request.key: 1 for request in asked}
        assert sum(0 < len(one.token_ids) < 12 and one.finish == "partial" for _, one in answers) >= 3
        for server in servers:
            server.seconds_per_token = 0.0
        kept, answers = answers, []
        fleet.open(SAMPLING, version=VERSION, deadline_s=lambda count: HUNG_S)
        for request, one in kept:
            fleet.ask(request, partial(answer, request), one)
        while len(answers) < 12:
            time.sleep(0.01)
        second = fleet.result()
        assert all(is_right(one, request, SAMPLING) for request, one in answers)
        assert first.tokens + second.tokens == sum(len(one.token_ids) for _, one in answers)


def test_interrupted_generation_keeps_tokens_and_continues() -> None:
    asked = requests(12)
    with fleet_of(right, right, seconds_per_token=0.5, max_concurrency=3) as (fleet, servers):
        generation = Generation(fleet, asked, SAMPLING, version=VERSION, deadline=time.monotonic() + HUNG_S)
        while sum(server.generating() for server in servers) < 4:
            time.sleep(0.01)
        first = generation.result(interrupt=True)
        assert first.interrupted
        assert not first.failures
        assert first.samples.keys() | first.unserved.keys() == {request.key for request in asked}
        assert sum(0 < len(sample.token_ids) < 12 for sample in first.unserved.values()) >= 3, "nothing was waited for"
        assert all(sample.finish == "partial" for sample in first.unserved.values())
        assert {key for path, key in servers[0].paths if path == "/abort_request"} == {f"bearer {KEYS.admin_key}"}
        rest = [request for request in asked if request.key in first.unserved]
        for server in servers:
            server.seconds_per_token = 0.0
        second = generate(fleet, rest, partials=first.unserved)
        both = {**first.samples, **second.samples}
        assert all(is_right(both[request.key], request, SAMPLING) for request in asked)
        tokens = sum(len(sample.token_ids) for sample in both.values())
        assert first.tokens + second.tokens == tokens, "no token was generated twice"


def test_slow_sample_continues_after_its_first_try() -> None:
    request = SampleRequest((0, 0), (3, 4, 5), 1)
    with fleet_of(right, seconds_per_token=0.1, request_timeout_s=2.0, retries=1) as (fleet, (server,)):
        result = generate(fleet, [request])
        assert is_right(result.samples[0, 0], request, SAMPLING)
        assert result.failed_tries == {"timeout": 1}
        assert len(server.seen[1]["input_ids"]) > 3 + 5, "what the first try had is not asked for again"
        assert server.seen[1]["sampling_params"]["max_new_tokens"] < 12


def test_request_aborted_by_the_server_continues() -> None:
    from tests.helpers.fake_sglang import right_answer

    async def gives_up(exchange: Exchange) -> None:
        await exchange.send_json(
            right_answer(exchange.body, num_tokens=4) if exchange.number == 0 else exchange.answer()
        )

    request = SampleRequest((0, 0), (3, 4, 5), 1)
    with fleet_of(gives_up) as (fleet, (server,)):
        result = generate(fleet, [request])
        assert is_right(result.samples[0, 0], request, SAMPLING)
        assert result.failed_tries == {"aborted": 1}
        assert result.tokens == 12
        assert len(server.seen[1]["input_ids"]) == 7


def test_partial_responses_of_old_weights_begin_anew() -> None:
    request = SampleRequest((0, 0), (3, 4, 5), 1)
    whole = Sample()
    with fleet_of(right) as (fleet, _):
        whole = generate(fleet, [request]).samples[0, 0]
    before = Sample(whole.token_ids[:5], whole.logprobs[:5], [VERSION] * 5)
    for mixed in (False, True):
        with fleet_of(right) as (fleet, (server,)):
            server.version = 2
            fleet.mark(0, State.READY, version=2)
            given = {"version": 2, "partials": {(0, 0): before}, "mixed_versions": mixed}
            sample = generate(fleet, [request], **given).samples[0, 0]
            assert (sample.token_ids, sample.logprobs) == (whole.token_ids, whole.logprobs)
            assert sample.versions == ([VERSION] * 5 + [2] * 7 if mixed else [2] * 12)
            assert len(server.seen[0]["input_ids"]) == (8 if mixed else 3)


@pytest.mark.parametrize("prompt", [(), (3, VOCABULARY), (-1,)])
def test_prompt_that_kills_servers_is_not_sent(prompt: tuple[int, ...]) -> None:
    with fleet_of(right) as (fleet, (server,)):
        with pytest.raises(UserError, match=r"prompt 4 .*tokenizer"):
            generate(fleet, [SampleRequest((4, 0), prompt, 1)])
        assert not server.seen


def test_closing_ends_a_generation_under_way() -> None:
    async def never(exchange: Exchange) -> None:
        await exchange.forever()

    with fleet_of(never) as (fleet, _):
        Generation(fleet, requests(4), SAMPLING, version=VERSION, deadline=time.monotonic() + 60)
        began = time.monotonic()
        fleet.close()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("killed", [False, True])
def test_server_that_leaves_is_drained(killed: bool) -> None:
    """Its requests in flight end there, and elsewhere if it ends; it gets no other, and its connections close."""
    asked = requests(24)
    with fleet_of(right, right, seconds_per_token=0.1, max_concurrency=3) as (fleet, servers):
        generation = Generation(fleet, asked, SAMPLING, version=VERSION, deadline=time.monotonic() + HUNG_S)
        while servers[0].generating() < 3:
            time.sleep(0.01)
        fleet.mark(0, State.LEFT)
        before = len(servers[0].seen)
        if killed:
            servers[0].kill()
        servers[1].seconds_per_token = 0.0
        result = generation.result()
        assert all(is_right(result.samples[request.key], request, SAMPLING) for request in asked)
        assert len(servers[0].seen) == before, "it got a new request"
        assert list(fleet.states()) == [1]
        assert bool(result.failed_tries) == killed
        wait_until("no connection", lambda: not (servers[0].connections or fleet._draining), timeout_s=5.0)
        assert result.tokens == sum(len(sample.token_ids) for sample in result.samples.values()) or killed


def test_server_that_joins_waits_for_its_weights() -> None:
    with fleet_of(right) as (fleet, (first,)), FakeServer(index=5) as late:
        fleet.place(late.endpoint)
        assert len(generate(fleet, requests(10)).samples) == 10
        assert (len(first.seen), len(late.seen)) == (10, 0)
        fleet.mark(5, State.READY, version=VERSION)
        fleet.mark(0, State.LEFT)
        assert len(generate(fleet, requests(10)).samples) == 10
        assert (len(first.seen), len(late.seen)) == (10, 10)
        fleet.mark(5, State.LEFT)
        assert len(generate(fleet, requests(10)).unserved) == 10
