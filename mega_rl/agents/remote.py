"""Environments on servers, over HTTP or a WebSocket: reset, steps with turns as actions, rewards."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import httpx

from mega_rl.agents.chat import Conversation
from mega_rl.agents.environment import Policy
from mega_rl.agents.trajectory import Trajectory
from mega_rl.data.columns import Message
from mega_rl.errors import RunError, UserError
from mega_rl.types import Prompt
from mega_rl.untrusted import parse_object, read_body, shorten

CONNECT_S = 60.0  # a busy server takes its time
CLOSE_S = 10.0  # for a server to take leave
# A server closes an idle connection after some seconds, and an action that it gets at that moment is lost.
_LIMITS = httpx.Limits(max_keepalive_connections=0)
_OBSERVED: Message = {"role": "user", "content": "!"}


class Step(NamedTuple):
    """A server's answer to a reset or an action."""

    observation: Any  # an object, or text
    reward: float | None
    done: bool


class _World(Protocol):
    """A session with a server."""

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a reset, a step or a close. Raises RunError."""


@dataclass
class RemoteEnvironment(Conversation):
    """Base of an environment on a server: observations become messages of the user, turns become actions."""

    url: str = field(default="", kw_only=True)  # "http://10.0.0.7:8000"; OpenEnv's sessions: "ws://10.0.0.7:8000/ws"
    body_bytes: int = field(default=1 << 20, kw_only=True)  # longest answer of the server

    def __post_init__(self) -> None:
        """Check the address and prove the chat template. Raises UserError."""
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UserError(f"url={self.url!r} is not a server's address; set it to one that begins with http or ws")
        if self.url.startswith("ws"):
            _websockets()
        self.prove(_OBSERVED)

    def action(self, text: str) -> Mapping[str, Any]:
        """Return the action of a turn, whose text has no thoughts and no special tokens."""
        return {"message": text}

    def message(self, observation: Any) -> str:
        """Return the text that the policy reads of an observation; "" for none."""
        if isinstance(observation, dict) and len(observation) == 1:
            (observation,) = observation.values()
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    def reset(self, prompt: Prompt, trajectory: Trajectory) -> Mapping[str, Any]:
        """Return the fields of a reset; samples of a prompt have one seed."""
        return {"seed": prompt.index}

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        """Take turns until the server says done; with reward.source=environment its rewards add up to the score."""
        history = self.opened(prompt)
        async with self._connect(f"{prompt.index}-{trajectory.sample_index}-{id(trajectory):x}") as world:
            step = await _step(world, "reset", self.reset(prompt, trajectory))
            if text := self.message(step.observation):
                last = history[-1]
                if isinstance(last, dict) and last["role"] == "user":
                    history[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
                else:
                    history.append({"role": "user", "content": text})
                trajectory.open(self._turns.opening(history))
            while not step.done:
                turn = await policy.turn()
                written = self.context.tokenizer.decode(list(turn.token_ids), skip_special_tokens=True)
                step = await _step(world, "step", self.action(written.rpartition("</think>")[2].strip()))
                if self.context.reads_scores and step.reward is not None:
                    trajectory.score = (trajectory.score or 0.0) + step.reward
                if step.done or not self.can_follow(turn):
                    return
                self.tell(trajectory, history, turn, [{"role": "user", "content": self.message(step.observation)}])

    def _connect(self, session: str) -> AbstractAsyncContextManager[_World]:
        """Open a session, and close it in the end. Raises RunError."""
        return self._socket() if self.url.startswith("ws") else self._http(session)

    @asynccontextmanager
    async def _http(self, session: str) -> AsyncIterator[_World]:
        async with connection() as http:
            world = _HttpWorld(self.url.rstrip("/"), session, self.body_bytes, http)
            try:
                yield world
            finally:
                http.timeout = httpx.Timeout(CLOSE_S)
                with suppress(RunError):  # a server need not know of closing
                    await world.ask("close", {})

    @asynccontextmanager
    async def _socket(self) -> AsyncIterator[_World]:
        websockets = _websockets()
        try:
            connection = await websockets.connect(
                self.url, max_size=self.body_bytes, open_timeout=CONNECT_S, close_timeout=CLOSE_S, proxy=None
            )
        except (OSError, TimeoutError, websockets.WebSocketException) as error:
            raise RunError(f"{self.url}: {type(error).__name__}: {shorten(str(error), 200)}") from None
        async with connection:
            world = _SocketWorld(self.url, connection, websockets.WebSocketException)
            try:
                yield world
            finally:
                with suppress(RunError):
                    await world.send("close", None)


@dataclass
class _HttpWorld:
    """POST /reset, /step and /close; cookies and the episode's id tell sessions apart."""

    url: str
    session: str
    body_bytes: int
    http: httpx.AsyncClient

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        body = {"episode_id": self.session, **({"action": data} if kind == "step" else data)}
        return await asked(self.http, f"{self.url}/{kind}", body, self.body_bytes)


@dataclass
class _SocketWorld:
    """Messages of OpenEnv's sessions: each connection has its environment."""

    url: str
    connection: Any
    failure: type[Exception]

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        await self.send(kind, data)
        try:
            text = await self.connection.recv()
        except (OSError, self.failure) as error:
            raise RunError(f"{self.url}: {kind}: {type(error).__name__}: {shorten(str(error), 200)}") from None
        answer = _parsed(text, f"{self.url}: {kind}")
        if answer.get("type") != "observation" or not isinstance(answer.get("data"), dict):
            raise RunError(f"{self.url}: {kind}: the server answers {shorten(json.dumps(answer), 200)}")
        return cast(dict[str, Any], answer["data"])

    async def send(self, kind: str, data: Mapping[str, Any] | None) -> None:
        try:
            await self.connection.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        except (OSError, self.failure) as error:
            raise RunError(f"{self.url}: {kind}: {type(error).__name__}: {shorten(str(error), 200)}") from None


def connection() -> httpx.AsyncClient:
    """Return a client with cookies of its own and a connection for each request."""
    timeout, plain = httpx.Timeout(None, connect=CONNECT_S), {"Accept-Encoding": "identity"}  # nothing to unpack
    return httpx.AsyncClient(verify=_tls(), timeout=timeout, limits=_LIMITS, trust_env=False, headers=plain)


async def post(http: httpx.AsyncClient, url: str, body: Mapping[str, Any], most: int) -> tuple[int, bytes]:
    """Return (status, answer) of a server; most: bytes of the answer. Raises RunError."""
    try:
        async with http.stream("POST", url, json=body) as response:
            content = await read_body(response, most)
    except httpx.HTTPError as error:
        raise RunError(f"{url}: {type(error).__name__}: {shorten(str(error), 200)}") from None
    if len(content) > most:
        raise RunError(f"{url} answers more than body_bytes={most}")
    return response.status_code, content


async def asked(http: httpx.AsyncClient, url: str, body: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the object that a server answers; the arguments are those of `post`. Raises RunError."""
    status, whole = await post(http, url, body, most)
    if status != 200:
        raise RunError(f"{url} answers {status}: {shorten(whole[:500].decode('utf-8', 'replace'), 200)}")
    return _parsed(whole, url)


async def _step(world: _World, kind: str, data: Mapping[str, Any]) -> Step:
    """Return the answer to a reset or an action. Raises RunError."""
    answer = await world.ask(kind, data)
    reward, done = answer.get("reward"), answer.get("done", False)
    if "observation" not in answer:
        raise RunError(f"the server's answer to {kind} has no observation")
    if not isinstance(done, bool) or not (reward is None or isinstance(reward, int | float)):
        raise RunError(
            f"the server's answer to {kind} has reward={reward!r}, done={done!r}; legal: a number, a boolean"
        )
    return Step(answer["observation"], None if reward is None else float(reward), done)


def _parsed(text: bytes | str, where: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise RunError(f"{where}: the answer is {error}") from None


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # takes some 20 ms


def _websockets() -> Any:
    try:
        import websockets
    except ImportError:
        raise UserError("an address that begins with ws needs a package: pip install 'mega_rl[openenv]'") from None
    return websockets
