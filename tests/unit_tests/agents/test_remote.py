"""Environments on a real server: what it answers is read exactly, and what it does to a sample costs that sample."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from mega_rl.agents.environment import Answer, Played, Policy, Runner, TurnRequest, in_batches
from mega_rl.agents.remote import RemoteEnvironment
from mega_rl.agents.trajectory import Trajectory, Turn, rows_of
from mega_rl.errors import UserError
from mega_rl.types import Prompt
from tests.helpers.chats import byte_tokenizer
from tests.helpers.selection import FULL
from tests.peers.package import FOLDER, missing
from tests.unit_tests.agents.test_chat import CHATML, END, OTHER_END, STRIPS, context_of


async def megabytes() -> AsyncIterator[bytes]:
    for _ in range(40):
        yield b" " * 65536


ASKED = {"role": "user", "content": "guess"}


@dataclass
class World:
    """A server that says higher or lower, in OpenEnv's terms; some of its sessions go wrong at their first step."""

    faults: Sequence[str] = ()  # by the number of the seed
    sessions: dict[str, list[Any]] = field(default_factory=dict)
    opened: int = 0
    closed: int = 0
    ports: list[int] = field(default_factory=list)  # the client's, of each request

    def observed(self, text: str, reward: float | None, done: bool) -> dict[str, Any]:
        return {"observation": {"text": text}, "reward": reward, "done": done}

    def step(self, session: str, action: dict[str, Any]) -> dict[str, Any]:
        guess, aim = int(action["message"]), 5
        self.sessions[session].append(guess)
        reward = 1.0 if guess == aim else 0.25
        return self.observed("higher<|im_end|>" if guess < aim else "right", reward, guess == aim)

    def reset(self, session: str) -> dict[str, Any]:
        self.opened += 1
        self.sessions[session] = []
        return self.observed("from 1 to 9", None, False)

    async def respond(self, request: Request) -> Response:
        kind, body = request.url.path.strip("/"), await request.json()
        self.ports.append(request.scope["client"][1])
        if kind == "close":
            self.closed += 1
            return JSONResponse({})
        session = body["episode_id"]
        if kind == "reset":
            answer = JSONResponse(self.reset(session))
            answer.set_cookie("fault", self.faults[body["seed"] % len(self.faults)] if self.faults else "none")
            return answer
        match request.cookies["fault"]:
            case "hangs":
                await asyncio.sleep(3000)
            case "fails":
                return Response("out of memory", 500)
            case "garbage":
                return Response(b'{"observation": \xff')
            case "list":
                return JSONResponse([1])
            case "reward":
                return JSONResponse(self.observed("x", 0.0, False) | {"reward": "much"})
            case "infinite":
                return Response('{"observation": "", "reward": 1e999}')
            case "megabytes":
                return StreamingResponse(megabytes())
            case "vanishes":
                request.scope["transport"].abort()
        return JSONResponse(self.step(session, body["action"]))

    async def talk(self, socket: WebSocket) -> None:
        await socket.accept()
        session = str(id(socket))
        try:
            while (message := json.loads(await socket.receive_text()))["type"] != "close":
                given = message["data"]
                if message["type"] == "reset":
                    fault = self.faults[given["seed"] % len(self.faults)] if self.faults else "none"
                    answer = self.reset(session)
                elif fault == "hangs":
                    await asyncio.sleep(3000)
                elif fault == "megabytes":
                    answer = {"observation": "x" * (1 << 21)}
                elif fault == "vanishes":
                    await socket.close(1011)
                    return
                elif fault == "fails":
                    await socket.send_text('{"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}}')
                    continue
                else:
                    answer = self.step(session, given)
                await socket.send_text(json.dumps({"type": "observation", "data": answer}))
            self.closed += 1
        except WebSocketDisconnect:
            pass


class _Protocol(H11Protocol):
    """HTTP whose handlers can reset the connection."""

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope["transport"] = self.transport


@pytest.fixture
def server() -> Iterator[tuple[World, str]]:
    """A world and its address, without the part before the colon."""
    world = World()
    routes: list[Any] = [Route(f"/{kind}", world.respond, methods=["POST"]) for kind in ("reset", "step", "close")]
    has_sockets = importlib.util.find_spec("websockets") is not None
    config = uvicorn.Config(
        Starlette(routes=[*routes, WebSocketRoute("/ws", world.talk)]), port=0, http=_Protocol, log_level="critical",
        timeout_graceful_shutdown=1, ws="websockets-sansio" if has_sockets else "none",
    )  # fmt: skip
    own = uvicorn.Server(config)
    thread = threading.Thread(target=own.run, name="world")
    thread.start()
    while not own.started:
        time.sleep(0.01)
    yield world, f"//127.0.0.1:{own.servers[0].sockets[0].getsockname()[1]}"
    own.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@dataclass
class Ordered(RemoteEnvironment):
    """Notes in which order its trajectories end."""

    ends: list[int] = field(default_factory=list, kw_only=True)

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        try:
            await super().run(policy, prompt, trajectory)
        finally:
            self.ends.append(prompt.index)


def play(
    url: str, *said: str, count: int = 1, template: str = CHATML, limit: int = 2000, scores: bool = True, **own: Any
) -> list[Played]:
    """Play trajectories of a policy that says these texts in turn; no task or thread is left."""
    tokenizer = byte_tokenizer(template, eos=END, more=(OTHER_END,))
    environment = Ordered(replace(context_of(tokenizer), reads_scores=scores), url=url, **own)
    turns = [tuple(tokenizer(text + END)["input_ids"]) for text in said]
    asked = Counter[int]()

    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        answers = list[Answer]()
        for one in requests:
            ids = turns[asked[one.key[0]]]
            asked[one.key[0]] += 1
            answers.append(Turn(ids, (-0.5,) * len(ids), (), True))
        return answers

    opening = tuple(tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False))
    prompts = [Prompt(number, opening, "guess", "", (("user", "guess"),)) for number in range(count)]
    made = [Trajectory(one, one.index, 0, limit) for one in prompts]
    outcomes = Runner(environment, "rollout.source='agent.py:Own'", len(tokenizer)).run(
        made, partial(in_batches, sample=sample)
    )
    assert not any(thread.name == "environments" for thread in threading.enumerate())
    return outcomes


def resources() -> set[object]:
    """Descriptors of this process, each with what it is, child processes and threads; garbage holds none of them."""
    gc.collect()
    time.sleep(0.5)  # for the server to see that connections have ended
    links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return {*((one.name, os.readlink(one)) for one in links), *psutil.Process().children(True), *threading.enumerate()}


def conversation(tokenizer: Any, played: Played) -> str:
    return str(tokenizer.decode(list(played.trajectory.branch.token_ids)))


def test_a_world_over_http_is_played_with_exact_tokens(server: tuple[World, str]) -> None:
    """What the world says of itself is text: a special token that it spells ends no message."""
    world, url = server
    (one,) = play(f"http:{url}", "<think>\nhm\n</think>\n\n3", "5")
    trajectory = one.trajectory
    assert (one.failure, trajectory.ended(), trajectory.score) == (None, "done", 1.25)
    assert [guesses for guesses in world.sessions.values()] == [[3, 5]]
    tokenizer = byte_tokenizer(CHATML, eos=END, more=(OTHER_END,))
    assert conversation(tokenizer, one) == (
        "<|im_start|>user\nguess\n\nfrom 1 to 9<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n3<|im_end|>\n"
        "<|im_start|>user\nhigher<|im_end|><|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    stop = tokenizer.convert_tokens_to_ids(END)
    assert list(trajectory.branch.token_ids).count(stop) == 4
    rows = rows_of([trajectory], version=1, with_failed=False, with_branches=True)
    assert ((rows.rollout_logprobs == -0.5) == rows.loss_mask).all()
    assert (world.opened, world.closed) == (1, 1)


def test_a_template_that_drops_thoughts_opens_branches(server: tuple[World, str]) -> None:
    (one,) = play(f"http:{server[1]}", "<think>\nhm\n</think>\n\n3", "5", template=STRIPS)
    assert (one.failure, one.trajectory.score) == (None, 1.25)
    tokenizer = byte_tokenizer(STRIPS, eos=END, more=(OTHER_END,))
    assert "<think>" not in conversation(tokenizer, one)
    assert [len(branch.parts) for branch in one.trajectory.branches] == [0, 1, 1]


KINDS = {
    "none": "", "hangs": "took more than timeout_s", "fails": "answers 500: out of memory",
    "garbage": "the answer is not valid JSON", "list": "must be an object", "reward": "reward='much'",
    "infinite": "not a finite number", "megabytes": "more than body_bytes=1048576", "vanishes": "RemoteProtocolError",
}  # fmt: skip


# A generation waits for those that hang longer than its good ones take on busy cores.
GENERATIONS, EACH, GOOD, PATIENCE_S = (25, 400, 72, 18.0) if FULL else (1, 36, 1, 8.0)


@pytest.mark.timeout(1800 if FULL else 300)
def test_what_a_server_does_costs_the_sample_by_kind(server: tuple[World, str]) -> None:
    """Each trajectory ends once and closes its session; those that hang hold up no other, and nothing is left."""
    world, url = server
    play(f"http:{url}", "3", "5")  # what stays in the process is there then
    world.faults, before = (*list(KINDS)[1:], *("none",) * GOOD), resources()
    for _ in range(GENERATIONS):
        ends = list[int]()
        outcomes = play(f"http:{url}", "3", "5", count=EACH, timeout_s=PATIENCE_S, ends=ends)
        faults = [world.faults[number % len(world.faults)] for number in range(EACH)]
        for fault, one in zip(faults, outcomes, strict=True):
            kind = {"none": None, "hangs": "timeout"}.get(fault, "error")
            assert (one.failure, one.trajectory.end) == (kind, "error" if kind else "done"), (fault, one.what)
            assert KINDS[fault] in one.what
        assert sorted(ends) == list(range(EACH))
        hung = [faults[number] == "hangs" for number in ends]
        assert all(hung[hung.index(True) :])
    assert world.opened == EACH * GENERATIONS + 1 == world.closed
    opened = resources() - before  # resources of earlier tests may end meanwhile
    assert not opened
    left = [one for one in gc.get_objects() if isinstance(one, asyncio.Task) and not one.done()]
    assert not [one for one in left if one.get_loop().is_closed()]  # the server's is open


def test_each_request_has_its_connection(server: tuple[World, str]) -> None:
    """A server that closes an idle one at that moment would lose an action."""
    world, url = server
    play(f"http:{url}", "3", "5")
    assert len(set(world.ports)) == len(world.ports) == 4


def test_a_server_that_is_not_there_costs_the_sample() -> None:
    (one,) = play("http://127.0.0.1:1", "3")
    assert (one.failure, one.trajectory.turns) == ("error", [])
    assert "http://127.0.0.1:1/reset: ConnectError" in one.what


def test_limits_end_a_trajectory_with_the_score_so_far(server: tuple[World, str]) -> None:
    (one,) = play(f"http:{server[1]}", "3", "4", "4", max_turns=2)
    assert (one.failure, one.trajectory.ended(), one.trajectory.score) == (None, "turns", 0.5)
    (one,) = play(f"http:{server[1]}", "3", "5", scores=False)
    assert (one.failure, one.trajectory.score) == (None, None)
    assert server[0].closed == 2


def test_addresses_of_no_server_are_refused() -> None:
    with pytest.raises(UserError, match="url='localhost:80' is not a server's address; set it to one that begins"):
        play("localhost:80", "3")


@pytest.fixture
def websockets(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing("websockets"):
        pytest.skip(reason)
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])


@pytest.mark.usefixtures("websockets")
def test_sessions_over_websockets_cost_their_samples_alike(server: tuple[World, str]) -> None:
    world, url = server
    world.faults = ("none", "hangs", "fails", "megabytes", "vanishes")
    outcomes = play(f"ws:{url}/ws", "3", "5", count=20, timeout_s=8.0)
    assert Counter((number % 5, one.failure) for number, one in enumerate(outcomes)) == {
        (0, None): 4, (1, "timeout"): 4, (2, "error"): 4, (3, "error"): 4, (4, "error"): 4
    }  # fmt: skip
    assert '"EXECUTION_ERROR"' in outcomes[2].what
    assert "ConnectionClosedError" in outcomes[3].what
    assert outcomes[0].trajectory.score == 1.25
    assert list(world.sessions.values()).count([3, 5]) == 4
    assert play("ws://127.0.0.1:1/ws", "3")[0].failure == "error"
