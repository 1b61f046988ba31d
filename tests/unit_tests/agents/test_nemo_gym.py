"""A resources server in NeMo Gym's form: sessions by cookie, a route per tool, /verify with a whole response.

The form is that of its `SimpleResourcesServer` and `simple_agent` (github.com/NVIDIA-NeMo/Gym, releases 0.4 to 0.7).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mega_rl.agents.environment import Answer, Played, Runner, TurnRequest, in_batches
from mega_rl.agents.nemo_gym import NemoGym
from mega_rl.agents.trajectory import Trajectory, Turn
from mega_rl.errors import UserError
from mega_rl.types import Prompt
from tests.helpers.chats import byte_tokenizer
from tests.peers.package import FOLDER, missing
from tests.unit_tests.agents.test_chat import CHATML, END, OTHER_END, context_of

COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
PARAMS = {
    "input": [{"role": "system", "content": "Count."}, {"role": "user", "content": "From 3 to 6."}],
    "tools": [
        {"type": "function", "name": "increment", "description": "Add.", "parameters": COUNT, "strict": True},
        {
            "type": "function",
            "name": "read",
            "description": "Tell.",
            "parameters": {"type": "object", "properties": {}},
        },
    ],
}
ROW = {"responses_create_params": PARAMS, "initial_count": 3, "expected_count": 6}


@dataclass
class Counters:
    """A server of counters, one for each session; it pays for the right end."""

    counts: dict[str, int] = field(default_factory=dict)
    verified: list[dict[str, Any]] = field(default_factory=list)
    masks: bool = False

    async def respond(self, request: Request) -> Response:
        body, kind = await request.json(), request.url.path.strip("/")
        session = request.cookies.get("session") or f"s{len(self.counts)}"
        if kind == "seed_session":
            self.counts[session] = body["initial_count"]
            answer = JSONResponse({})
            answer.set_cookie("session", session)
            return answer
        if kind == "increment":
            if body["count"] > 9:
                return JSONResponse({"detail": "too much"}, 422)
            await asyncio.sleep(0.05)  # a call that does not wait for the one before it comes first
            self.counts[session] += body["count"]
            return JSONResponse({"success": True})
        if kind == "read":
            return JSONResponse({"count": self.counts[session]})
        self.verified.append(body)
        reward = float(body["expected_count"] == self.counts[session])
        return JSONResponse({**body, "reward": reward, "mask_sample": self.masks, "failure_reason": "judge is down"})


@pytest.fixture
def server() -> Iterator[tuple[Counters, str]]:
    counters = Counters()
    routes = [
        Route(f"/{one}", counters.respond, methods=["POST"]) for one in ("seed_session", "increment", "read", "verify")
    ]
    own = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=own.run)
    thread.start()
    while not own.started:
        time.sleep(0.01)
    yield counters, f"http://127.0.0.1:{own.servers[0].sockets[0].getsockname()[1]}"
    own.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(url: str, *said: str, count: int = 1, row: Any = ROW, scores: bool = True, **own: Any) -> list[Played]:
    """Play a row over a policy that says these texts in turn."""
    tokenizer = byte_tokenizer(CHATML, eos=END, more=(OTHER_END,))
    environment = NemoGym(replace(context_of(tokenizer), reads_scores=scores), url=url, **own)
    (given,) = NemoGym.rows([row])
    shown = tokenizer.apply_chat_template(
        given["prompt"], tools=given["tools"], add_generation_prompt=True, return_dict=False
    )
    messages = tuple((one["role"], one["content"]) for one in given["prompt"])
    prompts = [Prompt(number, tuple(shown), "", "", messages, given) for number in range(count)]
    turns, asked = [tuple(tokenizer(text + END)["input_ids"]) for text in said], Counter[int]()

    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        answers = list[Answer]()
        for one in requests:
            ids = turns[asked[one.key[0]]]
            asked[one.key[0]] += 1
            answers.append(Turn(ids, (-0.5,) * len(ids), (), True))
        return answers

    made = [Trajectory(one, one.index, 0, 2000) for one in prompts]
    return Runner(environment, "rollout.source='agent.py:Own'", len(tokenizer)).run(
        made, partial(in_batches, sample=sample)
    )


def test_calls_reach_the_session_and_its_end_is_verified(server: tuple[Counters, str]) -> None:
    """Calls of a turn are made in their order, and the server sees them with their answers."""
    counters, url = server
    said = (call("increment", count=1) + call("increment", count=2) + call("read"), "<think>\nhm\n</think>\n\nSix.")
    outcomes = play(url, *said, count=5)
    assert [(one.failure, one.trajectory.ended(), one.trajectory.score) for one in outcomes] == [
        (None, "done", 1.0)
    ] * 5
    assert list(counters.counts.values()) == [6] * 5
    body = counters.verified[0]
    assert body | {"response": None} == ROW | {"response": None}
    output = body["response"]["output"]
    assert [one["type"] for one in output] == [*["function_call", "function_call_output"] * 3, "message"]
    assert [one["output"] for one in output[1::2]] == ['{"success":true}', '{"success":true}', '{"count":6}']
    assert [one["call_id"] for one in output[:6:2]] == [one["call_id"] for one in output[1::2]]
    assert output[-1]["content"][0]["text"] == "Six."
    trajectory = outcomes[0].trajectory
    assert (trajectory.tool_calls, [isinstance(part, Turn) for part in trajectory.branch.parts]) == (
        3,
        [True, False, True],
    )


def test_the_response_is_one_of_openais_package(server: tuple[Counters, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing("openai"):
        pytest.skip(reason)
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    play(server[1], call("increment", count=3), "Six.")
    responses = importlib.import_module("openai.types.responses")
    responses.Response.model_validate(server[0].verified[0]["response"])


def test_tools_that_refuse_and_wrong_calls_are_answered(server: tuple[Counters, str]) -> None:
    (one,) = play(server[1], call("increment", count=10) + call("increment", count="x"), "I give up.")
    assert (one.failure, one.trajectory.score) == (None, 0.0)
    output = server[0].verified[0]["response"]["output"]
    assert [item["output"] for item in output[1:4:2]] == [
        '{"detail":"too much"}', "error: 'count' must be of type integer"
    ]  # fmt: skip


def test_limits_are_verified_and_masked_samples_fail(server: tuple[Counters, str]) -> None:
    counters, url = server
    (one,) = play(url, call("increment", count=3), max_turns=1)
    assert (one.failure, one.trajectory.ended(), one.trajectory.score) == (None, "turns", 1.0)
    assert [item["type"] for item in counters.verified[0]["response"]["output"]] == [
        "function_call",
        "function_call_output",
    ]
    assert play(url, "no", scores=False)[0].trajectory.score is None
    counters.masks = True
    (one,) = play(url, "no")
    assert (one.failure, "reward=0.0: judge is down" in one.what) == ("error", True)


def test_rows_and_addresses_are_checked(server: tuple[Counters, str]) -> None:
    with pytest.raises(UserError, match="url='ws://x' is not a server's address"):
        play("ws://x", "no")
    (row,) = NemoGym.rows([{"responses_create_params": {"input": "Count."}, "expected_count": 1}])
    assert row["prompt"] == [{"role": "user", "content": "Count."}]
    assert "tools" not in row
    (one,) = play("http://127.0.0.1:1", "no")
    assert (one.failure, "ConnectError" in one.what) == ("error", True)
