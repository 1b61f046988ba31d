"""A scripted server that answers wrongly, late, cut or not at all: each sample ends exactly once and in time."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
import pytest

from mega_rl.rollout.sglang.generation import replica, samples
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.generation.samples import SampleRequest, Sampling, State
from tests.helpers.fake_sglang import (
    STOP,
    VERSION,
    VOCABULARY,
    Answers,
    Exchange,
    FakeServer,
    Script,
    generated,
    is_right,
    right,
)
from tests.helpers.selection import FULL
from tests.unit_tests.rollout.sglang.mutants import MUTANTS, STALE_MUTANTS

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=6, stop_token_ids=(STOP,))
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_concurrency": 8,
    "retries": 1,
    "request_timeout_s": 4.0,
    "stall_timeout_s": 1.0,
    "grace_s": 0.2,
}
BUSY_S = 8.0  # a busy machine may add this to a generation's time, and all stay below the deadline of most, 20 s
BAD = 0  # the prompt that scripts deal badly with


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between tries, a tenth as long as they are."""
    monkeypatch.setattr(samples, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(replica, "_PROBE_WAIT_S", 0.02)


def requests(num_prompts: int = 2, n: int = 1) -> list[SampleRequest]:
    """Samples of 6 tokens that meet no stop token."""
    return [
        SampleRequest(key=(prompt, sample), prompt=(3 + prompt % 40, 4, 5), seed=1 + 3 * (prompt * n + sample))
        for prompt in range(num_prompts)
        for sample in range(n)
    ]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No thread and no descriptor more than before; what is left is named.

    A socket that a cycle of objects holds, say the traceback of a cancelled task, is closed when Python collects it.
    """
    threads, process = set(threading.enumerate()), psutil.Process()
    descriptors = process.num_fds()
    yield
    end = time.monotonic() + 5
    while (left := set(threading.enumerate()) - threads) or process.num_fds() > descriptors:
        if time.monotonic() > end:
            sockets = [(c.fd, c.laddr, c.raddr, c.status) for c in process.net_connections()]
            pytest.fail(f"left: {left}, {sockets}, {[file.path for file in process.open_files()]}")
        gc.collect()
        time.sleep(0.02)


def generate(
    scripts: Sequence[Script],
    asked: Sequence[SampleRequest],
    *,
    within_s: float,
    deadline_s: float = 20.0,
    prepare: Callable[[list[FakeServer]], None] | None = None,
    **settings: Any,
) -> tuple[Answers, list[tuple[State, str]]]:
    """A generation over servers with these scripts and their states; checks what holds whatever fails."""
    with nothing_left_behind(), ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(script, index=i)) for i, script in enumerate(scripts)]
        if prepare:
            prepare(servers)
        with closing(ServerRouter([one.endpoint for one in servers], **{**SETTINGS, **settings})) as fleet:
            for index in range(len(servers)):
                fleet.mark(index, State.READY, version=VERSION)
            began = time.monotonic()
            result = generated(fleet, asked, SAMPLING, version=VERSION, deadline=began + deadline_s)
            seconds, states = time.monotonic() - began, fleet.states()
            assert not asyncio.run_coroutine_threadsafe(_other_tasks(), fleet._loop).result(5)
            assert [one.in_flight for one in fleet._replicas.values()] == [0] * len(servers)
    check_exactly_once(result, asked)
    assert seconds < within_s + BUSY_S, f"{seconds:.2f} s, {result}"
    return result, states


async def _other_tasks() -> set[str]:
    await asyncio.sleep(0)
    return {repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()}


def check_exactly_once(result: Answers, asked: Sequence[SampleRequest]) -> None:
    ended = Counter([*result.samples, *result.failures, *result.unserved])
    assert ended == Counter(request.key for request in asked)
    for request in asked:
        if request.key in result.samples:
            assert is_right(result.samples[request.key], request, SAMPLING)
    assert result.tokens >= sum(len(sample.token_ids) for sample in result.samples.values())


def mutate(change: Callable[[Any], Any]) -> Script:
    async def script(exchange: Exchange) -> None:
        changed = change(exchange.answer())
        await exchange.send(changed if isinstance(changed, bytes) else json.dumps(changed).encode())

    return script


def at_first(script: Script, *, tries: int = 1) -> Script:
    """`script` for the first tries of the bad prompt, then as a good server."""

    async def then_right(exchange: Exchange) -> None:
        bad = exchange.prompt == BAD and exchange.number < tries
        await (script if bad else right)(exchange)

    return then_right


def always(script: Script) -> Script:
    """`script` for each try of the bad prompt; all others are served well."""
    return at_first(script, tries=10**6)


@pytest.mark.parametrize("name", ["half a body", "list of one", "another request's id", "log-prob null"])
def test_a_bad_answer_is_tried_again_then_reported(name: str) -> None:
    bad, kind = mutate(MUTANTS[name]), "bad_answer"

    async def script(exchange: Exchange) -> None:
        recovers = exchange.prompt == 2 and exchange.number == 0
        await (bad if exchange.prompt == BAD or recovers else right)(exchange)

    result, _ = generate([script], requests(3), within_s=5.0)
    failure = result.failures.pop((BAD, 0))
    assert failure.kind == kind
    assert "server 0" in failure.message
    assert "(0, 0)" in failure.message
    assert set(result.samples) == {(1, 0), (2, 0)}
    assert result.failed_tries == {kind: 3}
    assert (result.requests, result.retries) == (5, 2)


def test_a_server_with_other_weights_is_taken_out() -> None:
    change, kind = STALE_MUTANTS["older version"], "other_weights"
    result, states = generate([mutate(change), right], requests(4), within_s=3.0)
    assert len(result.samples) == 4
    assert [state for state, _ in states.values()] == [State.STALE, State.READY]
    assert kind in states[0][1]
    assert set(result.failed_tries) == {kind}
    alone, _ = generate([mutate(change)], requests(4), within_s=3.0)
    assert len(alone.unserved) == 4


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "rejected"),
        (413, "rejected"),
        (422, "rejected"),
        (429, "overloaded"),
        (500, "server_error"),
        (503, "server_error"),
        (204, "server_error"),
        (302, "server_error"),
    ],
)
def test_refused_sample_delays_no_other(status: int, kind: str) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.send(b'{"error": {"message": "no"}}' if status != 204 else b"", status=status)

    result, _ = generate([always(refuse)], requests(4), within_s=8.0)
    assert result.failures[BAD, 0].kind == kind
    assert len(result.samples) == 3
    tries = 1 if kind == "rejected" else 3  # retries + servers + 1
    assert result.failed_tries == {kind: tries}
    if kind != "rejected":
        result, _ = generate([at_first(refuse)], requests(4), within_s=4.0)
        assert len(result.samples) == 4


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_server_that_refuses_all_is_left(status: int) -> None:
    async def refuse(exchange: Exchange) -> None:
        # A server that says what it was sent must not bring our keys into our messages.
        await exchange.send(exchange.server.paths[-1][1].replace("bearer ", "").encode(), status=status)

    result, _ = generate([refuse, right], requests(6), within_s=4.0)
    assert len(result.samples) == 6
    assert set(result.failed_tries) == {"refused"}
    alone, states = generate([refuse], requests(2), within_s=6.0)
    assert len(alone.unserved) == 2
    reason = states[0][1]
    assert f"HTTP {status}" in reason
    assert "key-of-the-fake" not in reason
    assert states[0][0] is State.DOWN


HEAD = b"HTTP/1.1 200 OK\r\n"


def sends(prefix: bytes, end: str, *, body: int | None = None) -> Script:
    """Send a part of an answer, `body` bytes of its content, then hang, drip the rest, close or reset."""

    async def script(exchange: Exchange) -> None:
        content = json.dumps(exchange.answer()).encode()
        head = prefix if body is None else HEAD + b"Content-Length: %d\r\n\r\n" % len(content)
        await exchange.raw(head + content[: body or 0])
        rest = b"X-More: yes\r\n" * 1000 if body is None else content
        for byte in rest if end == "drips" else b"":
            await exchange.raw(bytes([byte]))
            await asyncio.sleep(0.1)
        if end == "hangs":
            await exchange.forever()
        if end == "resets":
            await asyncio.sleep(0.05 if body else 0.0)
            exchange.reset()
        if end == "closes":
            exchange.writer.close()

    return script


hangs = sends(b"", "hangs")
SLOW = [
    hangs,
    sends(HEAD + b"Content-Le", "hangs"),
    sends(b"", "hangs", body=0),
    sends(b"", "hangs", body=100),
    sends(b"", "drips", body=0),
    sends(HEAD, "drips"),
]
if not FULL:
    SLOW = SLOW[3:]


@pytest.mark.parametrize("slow", SLOW, ids=range(len(SLOW)))
def test_lost_sample_is_requested_again(slow: Script) -> None:
    """The server lives: others are served and its own check says so."""
    result, _ = generate([at_first(slow)], requests(4), within_s=2.5, request_timeout_s=2.0)
    assert len(result.samples) == 4
    assert result.failed_tries == {"timeout": 1}


@pytest.mark.parametrize("slow", SLOW, ids=range(len(SLOW)))
def test_no_request_outlives_its_deadline(slow: Script) -> None:
    result, _ = generate([always(slow)], requests(4), within_s=2.0, request_timeout_s=1.0)
    assert (result.failures[BAD, 0].kind, len(result.samples)) == ("timeout", 3)


@pytest.mark.parametrize("slow", SLOW, ids=range(len(SLOW)))
def test_a_wedged_server_that_answers_pings_is_left(slow: Script) -> None:
    """/health says 200; generation hangs, of samples and probes alike."""

    def wedge(servers: list[FakeServer]) -> None:
        servers[0].wedged = True

    settings = {"request_timeout_s": 10.0, "stall_timeout_s": 0.2}
    result, states = generate([slow, right], requests(6), within_s=3.0, prepare=wedge, **settings)
    assert len(result.samples) == 6
    assert set(result.failed_tries) == {"stalled"}
    assert states[0][0] in (State.SUSPECT, State.DOWN)
    alone, states = generate([slow], requests(4), within_s=4.0, prepare=wedge, **settings)
    assert len(alone.unserved) == 4
    assert states[0][0] is State.DOWN


def test_the_generation_has_a_deadline_of_its_own() -> None:
    result, _ = generate([always(hangs)], requests(4), within_s=1.5, deadline_s=1.0, request_timeout_s=60.0)
    failure = result.failures[BAD, 0]
    assert (failure.kind, len(result.samples)) == ("deadline", 3)
    assert re.search(r"deadline came first: server 0 at http://\S+ had not answered try 1$", failure.message)


closes, resets_mid_body = sends(b"", "closes"), sends(b"", "resets", body=100)
BROKEN = [
    closes,
    sends(b"", "resets"),
    sends(b"", "closes", body=0),
    sends(b"", "resets", body=0),
    sends(b"", "closes", body=100),
    resets_mid_body,
    sends(HEAD + b"Content-Le", "closes"),
    sends(b"SSH-2.0-OpenSSH_9.6\r\n\r\n", ""),
    sends(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n", ""),
    sends(HEAD + b"X-More: " + b"y" * 2**20 + b"\r\n\r\n", ""),
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_server_loses_its_traffic_to_another(broken: Script) -> None:
    result, _ = generate([broken, right], requests(12), within_s=4.0)
    assert len(result.samples) == 12
    assert set(result.failed_tries) == {"disconnected"}
    alone, states = generate([broken], requests(12), within_s=5.0)
    assert len(alone.unserved) == 12
    assert "disconnected" in states[0][1]


def dies(prefix: bytes) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(prefix)
        exchange.server.die()

    return script


async def _die_after_an_answer(exchange: Exchange) -> None:
    if exchange.body["rid"] != exchange.server.seen[0]["rid"]:  # one is answered, even if two came at once
        await exchange.forever()
    await right(exchange)
    await asyncio.sleep(0.02)  # the answer is read
    exchange.server.die()


@pytest.mark.parametrize(
    "die", [dies(b""), dies(HEAD), dies(HEAD + b"Content-Length: 9\r\n\r\n{"), _die_after_an_answer]
)
def test_death_in_any_phase_loses_no_sample(die: Script) -> None:
    result, _ = generate([die, right], requests(20), within_s=4.0)
    assert len(result.samples) == 20
    assert set(result.failed_tries) <= {"disconnected", "refused"}
    alone, states = generate([die], requests(20), within_s=4.0, retries=0)
    # A sample that the death has cut off, and that is then refused, has used up its tries.
    assert len(alone.samples) + len(alone.unserved) + len(alone.failures) == 20
    assert {failure.kind for failure in alone.failures.values()} <= {"disconnected", "refused"}
    assert len(alone.unserved) >= 12, "no more than were answered before the end"
    assert states[0][0] is State.DOWN


def test_a_server_that_was_never_there() -> None:
    def kill(servers: list[FakeServer]) -> None:
        servers[0].kill()

    result, _ = generate([right, right], requests(20), within_s=2.0, prepare=kill)
    assert len(result.samples) == 20
    assert set(result.failed_tries) == {"refused"}
    one_by_one, _ = generate([right, right], requests(20), within_s=4.0, max_concurrency=1, prepare=kill)
    assert one_by_one.failed_tries == {"refused": 1}, "no second request to where nobody listens"
    alone, states = generate([right], requests(20), within_s=4.0, prepare=kill)
    assert (len(alone.unserved), states[0][0]) == (20, State.DOWN)


def test_an_answer_sent_twice_counts_once() -> None:
    async def twice(exchange: Exchange) -> None:
        await right(exchange)
        await right(exchange)

    result, _ = generate([twice], requests(40), within_s=4.0, max_concurrency=2)
    assert len(result.samples) == result.requests == 40
    assert not result.failed_tries


def test_answers_swapped_between_samples_are_refused() -> None:
    """Two good answers, each to the other's question."""
    waiting: list[Exchange] = []

    async def swap(exchange: Exchange) -> None:
        if exchange.is_probe or exchange.number > 0:
            await right(exchange)
            return
        waiting.append(exchange)
        while len(waiting) < 2:
            await asyncio.sleep(0.01)
        other = waiting[1 - waiting.index(exchange)]
        await exchange.send_json(other.answer())

    result, _ = generate([swap], requests(2), within_s=4.0)
    assert result.failed_tries == {"bad_answer": 2}
    assert len(result.samples) == 2


def test_chaos() -> None:
    """600 samples, three servers: one is killed, one hangs, and of the rest's answers one in ten is bad in 8 ways."""
    rng = random.Random(0)
    names = ["half a body", "no log-probs", "id beyond the vocabulary", "log-prob NaN", "another request's id"]
    faults: list[Script] = [mutate(MUTANTS[name]) for name in names]

    async def refuse(exchange: Exchange) -> None:
        await exchange.send(b"", status=503)

    faults += [refuse, resets_mid_body, closes]
    fired: Counter[int] = Counter()

    async def flaky(exchange: Exchange) -> None:
        await asyncio.sleep(0.02)
        fault = rng.randrange(80)
        if fault < len(faults) and not exchange.is_probe:
            fired[fault] += 1
            await faults[fault](exchange)
        else:
            await right(exchange)

    async def killed(exchange: Exchange) -> None:
        if len(exchange.server.seen) > 50:
            exchange.server.die()
        await flaky(exchange)

    async def hung(exchange: Exchange) -> None:
        if len(exchange.server.seen) > 50:
            exchange.server.wedged = True
            await exchange.forever()
        await flaky(exchange)

    settings = {"max_concurrency": 16, "retries": 6, "request_timeout_s": 60.0, "stall_timeout_s": 2.0}
    asked = requests(150, n=4)
    result, states = generate([killed, flaky, hung], asked, within_s=200.0, deadline_s=200.0, **settings)
    assert len(result.samples) == 600, result.failed_tries
    assert min(fired.values()) > 0
    assert len(fired) == 8
    assert [state is State.READY for state, _ in states.values()] == [False, True, False]
