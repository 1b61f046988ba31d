"""A gateway: an agent program that calls OpenAI's or Anthropic's API plays a trajectory, unchanged.

A server on loopback runs as long as trajectories do; the key of each is its program's API key. Calls become turns: a
request that extends what was sampled continues its branch, another history opens one. An answer that the program sends
back is known again and stands for the ids that were sampled.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mega_rl.agents.environment import Environment, Policy
from mega_rl.agents.templates import Ids, TurnTemplate
from mega_rl.agents.tools import STYLES, ToolFunction
from mega_rl.agents.trajectory import Branch, LimitReached, Trajectory, Turn
from mega_rl.agents.wire import (
    Asked,
    Reply,
    anthropic_events,
    as_anthropic,
    as_openai,
    asked_in,
    from_anthropic,
    openai_events,
    tool_call,
)
from mega_rl.data.chat import ChatTemplate, TemplateRefusal
from mega_rl.data.columns import Message
from mega_rl.environment import of_other_programs
from mega_rl.errors import RunError, UserError
from mega_rl.processes import PIPE, STDOUT, Child
from mega_rl.types import Prompt
from mega_rl.untrusted import parse_object, shorten

POLL_S = 0.02
CLOSE_S = 5.0  # for the server's connections to end
MOST_CALLS = 64  # calls that one key may have in flight
LAST_BYTES = 2000  # end of a program's output, for the message of its failure
_PATHS = ("/v1/chat/completions", "/chat/completions", "/v1/messages")
_MODEL = {
    "id": "policy", "object": "model", "type": "model", "display_name": "policy", "owned_by": "mega_rl",
    "created": 0, "created_at": "1970-01-01T00:00:00Z",
}  # fmt: skip
_MODELS = {"object": "list", "data": [_MODEL], "has_more": False, "first_id": "policy", "last_id": "policy"}
_IGNORED = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")  # those of the run hold
# Parameters that no run can honour, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "stop": ([], ""), "stop_sequences": ([],),
    "logit_bias": ({},), "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},),
}  # fmt: skip
# What begins the calls of a turn, in any style.
_CALLS = re.compile(
    r"<tool_call>|<\|python_tag\|>|<｜tool▁calls?▁begin｜>|\[TOOL_CALLS\]|<\|(?:channel|start)\|>|^\s*\{"
)
_ERRORS = {401: "authentication_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}


@dataclass
class Gateway(Environment):
    """Base of an environment that an unchanged program plays over HTTP: `program` or `play`."""

    context: Any  # a `RolloutContext`
    program: str = field(default="", kw_only=True)  # command: "python agent.py"
    body_bytes: int = field(default=1 << 20, kw_only=True)  # longest request
    style: ClassVar[str] = "hermes"  # how the model writes calls, a key of `agents.tools.STYLES`

    def __post_init__(self) -> None:
        """Check the parts that calls need. Raises UserError."""
        if self.style not in STYLES:
            raise UserError(f"style={self.style!r} of tool calls is unknown; legal: {', '.join(STYLES)}")
        assert self.template

    async def play(self, url: str, key: str, prompt: Prompt) -> None:
        """Run `program` with the prompt as JSON on its standard input."""
        words = shlex.split(self.program)
        if not words:
            raise UserError("program is empty; set it to a command, or define the method play")
        env = of_other_programs()
        hosts = ",".join(filter(None, ("127.0.0.1", env.get("NO_PROXY") or env.get("no_proxy"))))
        env |= {"NO_PROXY": hosts, "no_proxy": hosts, "OPENAI_BASE_URL": f"{url}/v1"}
        env |= {"ANTHROPIC_BASE_URL": url, "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps({"index": prompt.index, "text": prompt.text, "messages": messages}).encode())
            given.seek(0)
            command = [shutil.which(words[0]) or words[0], *words[1:]]
            streams, written = (given.fileno(), PIPE, STDOUT), b""
            with Child(self.program, command, dies_by=signal.SIGKILL, streams=streams, env=env) as child:
                os.set_blocking(child.stdout.fileno(), False)
                has_ended = False
                while not has_ended:
                    await asyncio.sleep(POLL_S)
                    has_ended = child.exit_code is not None
                    written = (written + _waiting(child.stdout.fileno()))[-LAST_BYTES:]
            if child.exit_code:
                last = written.decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise RunError(f"{self.program}: {child.end_in_words()}: {shorten(last, 200)}")

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        """Serve a key until `play` returns, which ends the calls that are left."""
        loop = asyncio.get_running_loop()
        if loop not in _servers:
            _servers[loop] = _Server()
        server, key = _servers[loop], secrets.token_urlsafe(32)
        session = server.sessions[key] = _Session(self, policy, trajectory)
        try:
            await self.play(server.url, key, prompt)
        finally:
            await server.drop(key)
            if session.error is not None:
                raise session.error
            if session.reached is not None:  # what the program made of the refusal is not a failure
                raise LimitReached(session.reached.end)

    @cached_property
    def template(self) -> ChatTemplate:
        """Return the run's chat template, with one date for the whole run. Raises UserError."""
        template = self.context.template
        if template is None:
            raise UserError("a gateway needs a chat template: data.chat.template=true, and a tokenizer that has one")
        return cast(ChatTemplate, replace(template, date=template.date or date.today()))

    def read(self, turn: Turn, tools: Mapping[str, ToolFunction], first_id: str) -> tuple[Message, str]:
        """Return a turn as (message, thoughts); calls that cannot be read stay text."""
        text = self.context.tokenizer.decode(list(turn.token_ids), clean_up_tokenization_spaces=False)
        thoughts, _, text = text.rpartition("</think>")
        calls = list(STYLES[self.style](text)) if tools and turn.stopped else []
        if any(call.problem or not call.name for call in calls):
            calls = []
        calls = [tools[one.name].fit(one) if one.name in tools else one for one in calls]
        content = self._special.sub("", _CALLS.split(text)[0] if calls else text).strip()
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                tool_call(f"{first_id}{place % 1000:03d}", one.name, one.arguments) for place, one in enumerate(calls)
            ]
        return message, self._special.sub("", thoughts).strip().removeprefix("<think>").strip()

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.context.tokenizer.added_tokens_decoder.values()
        return re.compile("|".join(re.escape(one.content) for one in added if one.special) or "(?!)")


class _Refusal(Exception):
    """A request that gets no turn."""

    def __init__(self, status: int, text: str, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.status, self.code = status, code


async def _refuse(request: Request, refusal: Exception) -> Response:
    """Return the answer, in the terms of both APIs; clients do not ask again."""
    assert isinstance(refusal, _Refusal)
    kind = _ERRORS.get(refusal.status, "invalid_request_error")
    fault = {"type": kind, "code": refusal.code, "param": None, "message": shorten(str(refusal), 500)}
    return JSONResponse({"type": "error", "error": fault}, refusal.status, {"x-should-retry": "false"})


class _Answered(NamedTuple):
    """A place in a branch: the parts up to an answer."""

    branch: Branch
    parts: int

    @property
    def token_ids(self) -> Ids:
        return cast(Turn, self.branch.parts[self.parts - 1]).token_ids


@dataclass(eq=False)
class _Session:
    """The calls of one trajectory."""

    gateway: Gateway
    policy: Policy
    trajectory: Trajectory
    reached: LimitReached | None = None
    error: BaseException | None = None  # raised by a call, and no mistake of the program
    calls: set[asyncio.Task[Reply]] = field(default_factory=set)
    _answered: dict[tuple[str, ...], _Answered] = field(default_factory=dict)  # keys: tools and messages
    _sampled: dict[str, Ids] = field(default_factory=dict)  # newest ids of an answer, by its message
    _has_begun: bool = False  # the first branch is in use

    async def answer(self, asked: Asked) -> Reply:
        """Sample the turn that a request asks for. Raises _Refusal and TemplateRefusal."""
        tools, messages, limit = asked
        keys = [_key([one.schema for one in tools.values()]), *map(_key, messages)]
        try:
            branch = self._branch(list(tools.values()), messages, keys)
            read, first_id = len(branch.token_ids), f"c{branch.number % 100:02d}{len(branch.parts) % 1000:03d}"
            turn = await self.policy.turn(branch, limit=limit)
        except LimitReached as reached:
            self.reached = reached
            code = "context_length_exceeded" if reached.end == "length" else f"limit_{reached.end}"
            raise _Refusal(400, f"the trajectory has ended: {reached.end}", code) from None
        message, thoughts = self.gateway.read(turn, tools, first_id)
        self.trajectory.tool_calls += len(message.get("tool_calls", ()))
        self._answered[(*keys, _key(message))] = _Answered(branch, len(branch.parts))
        self._sampled[_key(message)] = turn.token_ids
        end = "length" if not turn.stopped else "tool_calls" if "tool_calls" in message else "stop"
        return Reply(message, thoughts, end, read, len(turn.token_ids))

    def _branch(self, tools: list[ToolFunction], messages: list[Message], keys: list[str]) -> Branch:
        """Return the branch whose next turn answers the messages."""
        template = TurnTemplate(
            self.gateway.template, self.gateway.context.sampling.stop_token_ids, [one.schema for one in tools]
        )
        last = max((place for place, one in enumerate(messages, 1) if one["role"] == "assistant"), default=0)
        known, new = self._answered.get(tuple(keys[: last + 1])), messages[last:]
        if known is not None and all(one["role"] in ("user", "tool") for one in new):
            try:
                ids = template.between(new, known.token_ids[-1])
            except TemplateRefusal:  # the template changes earlier turns, or the turn was cut off
                known = None
            else:
                branch, parts = known
                if len(branch.parts) > parts:  # another call has gone on from there
                    branch = self.trajectory.fork(branch, parts)
                self.trajectory.give(ids, branch)
                return branch
        history = [
            one if one["role"] != "assistant" else self._ids(keys[: place + 1]) or one
            for place, one in enumerate(messages, 1)
        ]
        opening, first = template.opening(history), self.trajectory.branches[0]
        if first.opening == opening and not self._has_begun:
            self._has_begun = True
            return first
        self.trajectory.drifted += last > 0
        return self.trajectory.open(opening)

    def _ids(self, keys: list[str]) -> Ids | None:
        """Return the turn that was sampled for the last message, best after the same messages."""
        known = self._answered.get(tuple(keys))
        return self._sampled.get(keys[-1]) if known is None else known.token_ids


class _Server:
    """The HTTP server of one event loop."""

    def __init__(self) -> None:
        self.sessions: dict[str, _Session] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [Route(path, self._respond, methods=["POST"]) for path in _PATHS]
        routes += [Route(path, self._models) for path in ("/v1/models", "/models", "/v1/models/{name}")]
        app = Starlette(routes=routes, exception_handlers={_Refusal: _refuse})
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, log_level="warning", access_log=False,
            timeout_keep_alive=3600, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    async def drop(self, key: str) -> None:
        """Forget a key, cancel its calls, and close the server after the last key."""
        session, is_last = self.sessions.pop(key), not self.sessions
        left = set(session.calls)
        for call in left:
            call.cancel()
        if is_last:
            del _servers[asyncio.get_running_loop()]
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        if is_last:
            self._server.should_exit = True
            await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._socket.close()

    async def _models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse(_MODEL if "name" in request.path_params else _MODELS)

    async def _respond(self, request: Request) -> Response:
        is_anthropic = request.url.path.endswith("/messages")
        session = self._session(request)
        try:
            body, asked = await _body(request, session.gateway.body_bytes)
            reply = await self._reply(request, session, asked)
        except ClientDisconnect:
            return Response(status_code=400)
        ignored = ", ".join(name for name in _IGNORED if body.get(name) is not None)
        headers = {"x-mega-rl-ignored": ignored} if ignored else {}
        model = str(body.get("model", "policy"))
        whole = (as_anthropic if is_anthropic else as_openai)(reply, model)
        if not body.get("stream"):
            return JSONResponse(whole, headers=headers)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        events = anthropic_events(whole) if is_anthropic else openai_events(whole, with_usage=with_usage)
        return Response(events, media_type="text/event-stream", headers=headers)

    def _session(self, request: Request) -> _Session:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self.sessions.get(key)
        if session is None:
            raise _Refusal(401, "no trajectory has this key; it ends with its trajectory", "invalid_api_key")
        return session

    async def _reply(self, request: Request, session: _Session, asked: Asked) -> Reply:
        """Sample the answer; the call ends with its client's connection or its key. Raises _Refusal."""
        if len(session.calls) >= MOST_CALLS:
            raise _Refusal(429, f"at most {MOST_CALLS} calls of a key at the same time", "too_many_calls")
        call, gone = asyncio.ensure_future(session.answer(asked)), asyncio.ensure_future(_gone(request))
        session.calls.add(call)
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            gone.cancel()
            await asyncio.wait({call, gone})
            session.calls.discard(call)
        if call.cancelled():
            raise _Refusal(401, "the call has ended with its trajectory", "cancelled")
        error = call.exception()
        if isinstance(error, (TemplateRefusal, UserError)):
            raise _Refusal(400, f"{type(error).__name__}: {error}")
        if error is not None and not isinstance(error, _Refusal):
            session.error = session.error or error
            raise _Refusal(500, "the run failed to answer; its log says why", "internal_error")
        return call.result()


_servers: dict[asyncio.AbstractEventLoop, _Server] = {}


async def _body(request: Request, most: int) -> tuple[dict[str, Any], Asked]:
    """Return the body in the terms of OpenAI's API, and what it asks for. Raises _Refusal."""
    size, body = 0, b""
    async for part in request.stream():  # to its end, so that the client reads the answer
        size += len(part)
        body = body + part if size <= most else b""
    if size > most:
        raise _Refusal(413, f"the request has {size} bytes; at most body_bytes={most}", "request_too_large")
    try:
        given = parse_object(body)
        if request.url.path.endswith("/messages"):
            given = from_anthropic(given)
        for name, legal in _REFUSED.items():
            if given.get(name) is not None and given[name] not in legal:
                raise _Refusal(400, f"{name}={shorten(str(given[name]))} is not supported; leave it out", "unsupported")
        return given, asked_in(given)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Refusal(400, f"{type(error).__name__}: {error}") from error


def _waiting(pipe: int) -> bytes:
    """Return the bytes that a pipe holds, without waiting for more."""
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
