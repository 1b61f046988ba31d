"""Rewards over HTTP, from a real server that answers, hesitates, fails and lies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from mega_rl.rewards.call import plan
from mega_rl.rewards.pool import FunctionRewards
from mega_rl.rewards.role import TextScorer
from mega_rl.rewards.score import Item, Response, RewardError
from mega_rl.rewards.service import Poster, Service, service_scores
from mega_rl.types import Prompt
from tests.helpers.threads import ThreadGroup
from tests.unit_tests.rewards.reward_cases import PROMPTS, READER, rollout_of

KEY = "s3cret-key"


@dataclass
class Answer:
    """What the server says to one post."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0  # before anything is said
    drip_s: float = 0.0  # before each byte of the body
    cut: bool = False  # the connection ends before the body does


@dataclass
class Post:
    """What the server was sent."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the responses to score."""
        items: list[dict[str, Any]] = self.body["items"]
        return items


def scores(*values: object) -> Answer:
    return Answer(json.dumps({"scores": values}).encode())


def lengths(post: Post) -> Answer:
    """The length of each response."""
    return scores(*(len(item["response"]) for item in post.items))


class FakeService:
    """A reward service on a port of its own; `answer` says what becomes of the n-th post (from 0)."""

    def __init__(self, answer: Callable[[int, Post], Answer]) -> None:
        self.posts: list[Post] = []
        self.in_flight = self.most_in_flight = 0
        self._answer = answer
        self._lock = threading.Lock()
        self.gone = threading.Event()  # a client left before its answer was written
        self._over = threading.Event()  # ends what waits and drips
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                service._handle(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/score"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        content = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        post = Post(request.path, dict(request.headers), content)
        with self._lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            number = len(self.posts)
            self.posts.append(post)
        try:
            answer = self._answer(number, post)
            self._over.wait(answer.wait_s)
            self._say(request, answer)
        except OSError:
            self.gone.set()
        finally:
            with self._lock:
                self.in_flight -= 1

    def _say(self, request: BaseHTTPRequestHandler, answer: Answer) -> None:
        request.send_response(answer.status)
        request.send_header("Content-Length", str(len(answer.body) + answer.cut))
        for name, value in answer.headers.items():
            request.send_header(name, value)
        request.end_headers()
        if not answer.drip_s:
            request.wfile.write(answer.body)
            return
        for byte in answer.body:
            if self._over.wait(answer.drip_s):
                return
            request.wfile.write(bytes([byte]))
            request.wfile.flush()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(answer: Callable[[int, Post], Answer]) -> Iterator[FakeService]:
    service = FakeService(answer)
    try:
        yield service
    finally:
        service.close()


def client(url: str, *, key: str = "", **settings: Any) -> FunctionRewards:
    chosen = {"batch_size": 4, "concurrency": 2, "timeout_s": 5.0, "retries": 3, "pause_s": 0.01} | settings
    sizes = {name: chosen.pop(name) for name in ("batch_size", "concurrency")}
    poster = Poster(Service(url, key), section="reward.source", **chosen)
    return FunctionRewards([plan(service_scores(poster), **sizes)])


def some(count: int) -> list[Item]:
    return [
        (Prompt(index=i, token_ids=(1,), text=f"p{i}", answer=str(-i)), Response("x" * i, i + 1, "stop"))
        for i in range(count)
    ]


def failing(answer: Callable[[int, Post], Answer], *, count: int = 2, **settings: Any) -> tuple[str, Any, float]:
    """(the error's message, the service, seconds that it took)."""
    with serving(answer) as service:
        start = time.monotonic()
        with pytest.raises(RewardError) as caught:
            client(service.url, **settings).score(some(count))
        assert f"reward service {service.url}: " in str(caught.value)
        return str(caught.value), service, time.monotonic() - start


def test_what_is_sent_and_what_comes_back() -> None:
    messages = (("system", "é"), ("user", "q"))
    prompt = Prompt(index=5, token_ids=(1,), text="q", answer="a", messages=messages)
    items = [(prompt, Response("r\n", num_tokens=7, finish="length")), *some(1)]
    with serving(lambda number, post: scores(1, None)) as service:
        assert client(service.url).score(items) == [1.0, None]
    (post,) = service.posts
    assert post.items == [
        {
            "prompt": "q",
            "response": "r\n",
            "answer": "a",
            "messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "q"}],
            "finish": "length",
            "num_tokens": 7,
        },
        {"prompt": "p0", "response": "", "answer": "0", "messages": [], "finish": "stop", "num_tokens": 1},
    ]
    assert post.headers["Content-Type"] == "application/json"
    assert post.headers["Accept-Encoding"] == "identity"
    assert "Authorization" not in post.headers


def test_parts_come_back_by_name_and_turns_are_sent() -> None:
    (prompt, _), *_ = some(1)
    several = Response("a\nb", num_tokens=2, finish="stop", turns=("a", "b"), transcript="a tool b")
    with serving(lambda number, post: Answer(b'{"scores": [{"right": 1, "form": 0.5}]}')) as service:
        assert client(service.url).score([(prompt, several)]) == [{"form": 0.5, "right": 1.0}]
    (item,) = service.posts[0].items
    assert (item["response"], item["turns"], item["transcript"]) == ("a\nb", ["a", "b"], "a tool b")


def test_the_key_travels_and_is_never_shown() -> None:
    with serving(lambda number, post: Answer(post.headers["Authorization"].encode(), status=403)) as service:
        rewards = client(service.url, key=KEY)
        with pytest.raises(RewardError) as caught:
            rewards.score(some(1))
    assert service.posts[0].headers["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(caught.value)
    assert "HTTP 403: 'Bearer ***'" in str(caught.value)
    assert KEY not in repr(Service("http://localhost/", KEY))


@pytest.mark.parametrize(
    "first", [*(Answer(b"busy", status=status) for status in (408, 429, 500, 503)), Answer(b"{", cut=True)]
)
def test_what_passes_is_tried_again(first: Answer) -> None:
    with serving(lambda number, post: first if number < 2 else lengths(post)) as service:
        assert client(service.url).score(some(3)) == [0.0, 1.0, 2.0]
    assert len(service.posts) == 3
    assert service.posts[0].items == service.posts[2].items


def test_tries_come_to_an_end() -> None:
    message, service, _ = failing(lambda number, post: Answer(b"no\n GPU", status=500), retries=2)
    assert "all 3 tries failed; the last failure: HTTP 500: 'no GPU'" in message
    assert "for 2 responses, the first to prompt 'p0'" in message
    assert len(service.posts) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422, 204, 302])
def test_other_answers_are_final(status: int) -> None:
    message, service, _ = failing(lambda number, post: Answer(b"", status=status, headers={"Location": "/other"}))
    assert f"HTTP {status}: ''" in message
    assert len(service.posts) == 1


@pytest.mark.parametrize("asked", ["40 s", "1"])
def test_retry_after_is_kept(asked: str) -> None:
    """In seconds; anything else is no request to wait."""
    times: list[float] = []

    def answer(number: int, post: Post) -> Answer:
        times.append(time.monotonic())
        return lengths(post) if number else Answer(status=429, headers={"Retry-After": asked})

    with serving(answer) as service:
        assert client(service.url).score(some(1)) == [0.0]
    waited = times[1] - times[0]
    assert waited < 3
    assert waited > 0.9 or asked == "40 s"


@pytest.mark.parametrize(
    "answer", [Answer(wait_s=30.0), Answer(b" " * 1000, drip_s=0.05)], ids=["silent", "byte by byte"]
)
def test_the_deadline_holds(answer: Answer) -> None:
    message, service, seconds = failing(lambda number, post: answer, timeout_s=0.4)
    assert "no scores in reward.source.timeout_s=0.4; the last answer: no answer" in message
    assert len(service.posts) == 1
    assert 0.35 < seconds < 3


def test_the_first_batch_that_fails_ends_the_others() -> None:
    def answer(number: int, post: Post) -> Answer:
        return Answer(status=404) if post.items[0]["prompt"] == "p4" else Answer(wait_s=30.0)

    message, service, seconds = failing(answer, count=40, timeout_s=20.0)
    assert "the first to prompt 'p4'" in message
    assert len(service.posts) <= 3  # two in flight, of ten; one may begin as the others are called off
    assert seconds < 5


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (
            b"<html>",
            "an answer without a list \"scores\" of 2 scores: '<html>'; for 2 responses, the first to prompt 'p0'",
        ),
        (b"[" * 100_000, 'an answer without a list "scores" of 2 scores: \'[['),
        (b"\x1f\x8b\xff", "an answer without a list"),
        (b"[1, 2]", "an answer without a list \"scores\" of 2 scores: '[1, 2]'"),
        (b'{"scores": 1}', 'an answer without a list "scores"'),
        (b'{"scores": [1]}', "an answer without a list"),
    ],
    ids=range(6),
)
def test_answers_that_are_no_scores(body: bytes, what: str) -> None:
    message, service, _ = failing(lambda number, post: Answer(body))
    assert what in message
    assert len(message) < 1500
    assert len(service.posts) == 1  # a second try would hide it


@pytest.mark.parametrize(("status", "what"), [(200, "an answer of more than 1048704 bytes"), (400, "HTTP 400: 'xxx")])
def test_an_answer_without_end_is_not_read_to_its_end(status: int, what: str) -> None:
    message, service, _ = failing(lambda number, post: Answer(b"x" * (64 << 20), status=status))
    assert what in message
    assert service.gone.wait(10)  # before all of it was written


def test_no_proxy_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(lambda number, post: lengths(post)) as service:
        assert client(service.url).score(some(1)) == [0.0]


def test_ranks_post_their_share_and_all_hear() -> None:
    """Scores and failures: of the replica of the rank that posts, and of the others."""

    def play(url: str, everyone: ThreadGroup, groups: list[ThreadGroup]) -> list[Any]:
        def work(rank: Any) -> Any:
            replica: Any = groups[rank.rank // 2].rank(rank.rank % 2)
            worker = TextScorer(client(url), reader=READER, replica=replica, everyone=rank, timeout_s=60)
            return worker.score(rollout_of(), PROMPTS).totals

        return everyone.run(work)

    with serving(lambda number, post: lengths(post)) as service:
        actual = play(service.url, ThreadGroup(4), [ThreadGroup(2), ThreadGroup(2)])
    posted = sorted([item["response"] for item in post.items] for post in service.posts)
    assert posted == [["50,51", ""], ["50,51", ""], ["52,53,54"], ["52,53,54"]]  # two for each replica
    assert all(torch.equal(each, torch.tensor([5.0, 8.0, 0.0])) for each in actual)
    with serving(lambda number, post: Answer(status=404) if number else lengths(post)) as service:
        actual = play(service.url, ThreadGroup(4), [ThreadGroup(2), ThreadGroup(2)])
    assert all(isinstance(each, RewardError) and "HTTP 404" in str(each) for each in actual)
