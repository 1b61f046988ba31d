"""Environments of NeMo Gym, over HTTP: resources servers that seed a session, answer tools and verify the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from mega_rl.agents.chat import TOOL_ANSWER, ToolsEnvironment
from mega_rl.agents.environment import Policy
from mega_rl.agents.remote import asked, connection, post
from mega_rl.agents.tools import Call, ToolFunction
from mega_rl.agents.trajectory import LimitReached, Trajectory
from mega_rl.data.columns import Message
from mega_rl.errors import RunError, UserError
from mega_rl.types import Prompt
from mega_rl.untrusted import shorten


@dataclass
class NemoGym(ToolsEnvironment):
    """Base of an environment on a resources server of NeMo Gym; each row has its tools."""

    url: str = field(default="", kw_only=True)  # of the resources server, "http://10.0.0.7:8000"
    body_bytes: int = field(default=1 << 20, kw_only=True)  # longest answer of the server

    def __post_init__(self) -> None:
        """Check the address and the style, and prove the chat template with a tool. Raises UserError."""
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"url={self.url!r} is not a server's address; set it to one that begins with http")
        self._toolbox([])
        self.prove(TOOL_ANSWER, [_schema({"name": "tool", "parameters": {"type": "object", "properties": {}}})])

    @staticmethod
    def rows(given: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield rows of NeMo Gym as those of a data source: prompt and tools beside their columns."""
        for row in given:
            params = row["responses_create_params"]
            said = params["input"]
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            prompt = [{"role": one["role"], "content": one["content"]} for one in messages]
            tools = [_schema(one) for one in params.get("tools") or ()]
            yield {**row, "prompt": prompt, "answer": ""} | ({"tools": tools} if tools else {})

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        """Seed a session, answer calls, and let the server verify the end; at a limit, too."""
        row = {key: value for key, value in (prompt.row or {}).items() if key not in ("prompt", "answer", "tools")}
        if "responses_create_params" not in row:
            raise ValueError("the row has no responses_create_params; take NemoGym.rows and reward.source=environment")
        given = row["responses_create_params"].get("tools") or []
        async with connection() as http:
            called = partial(self._called, http, asyncio.Lock())
            box = self._toolbox([ToolFunction(partial(called, one["name"]), _schema(one)) for one in given])
            own, output, reached = copy(self), list[dict[str, Any]](), None
            own.prove(TOOL_ANSWER, box.schemas)  # the row's tools; the proof is made once for each list
            await asked(http, f"{self.url}/seed_session", row, self.body_bytes)
            try:
                async for calls, answers in own.exchanges(box, policy, prompt, trajectory):
                    output += _items(calls, answers, len(output))
                ids = list(trajectory.turns[-1].token_ids)
                text = self.context.tokenizer.decode(ids, skip_special_tokens=True).rpartition("</think>")[2].strip()
                content = [{"type": "output_text", "text": text, "annotations": []}]
                said = {"id": "msg", "role": "assistant", "status": "completed", "content": content}
                output.append({"type": "message", **said})
            except LimitReached as error:
                reached = error
            response = {
                "id": f"resp_{prompt.index}", "object": "response", "model": "policy", "created_at": int(time.time()),
                "output": output, "tools": given, "tool_choice": "auto", "parallel_tool_calls": True,
            }  # fmt: skip
            verified = await asked(http, f"{self.url}/verify", {**row, "response": response}, self.body_bytes)
        reward = verified.get("reward")
        if verified.get("mask_sample") or not isinstance(reward, int | float):
            raise RunError(f"{self.url}/verify gives reward={reward!r}: {shorten(str(verified.get('failure_reason')))}")
        if self.context.reads_scores:
            trajectory.score = float(reward)
        if reached is not None:
            raise reached

    async def _called(self, http: httpx.AsyncClient, lock: asyncio.Lock, tool: str, /, **arguments: Any) -> str:
        """Return a tool's answer, an error's text included; calls of a turn are made in their order."""
        async with lock:
            _, answer = await post(http, f"{self.url}/{tool}", arguments, self.body_bytes)
        return answer.decode("utf-8", "replace")


def _items(calls: Sequence[Call], answers: Sequence[Message], first: int) -> Iterator[dict[str, Any]]:
    """Yield calls and their answers as items of a response; first: number of the first call's id."""
    for place, (call, answer) in enumerate(zip(calls, answers, strict=True), first):
        made = {"call_id": f"call_{place}", "status": "completed"}
        yield {"type": "function_call", "name": call.name, "arguments": json.dumps(call.arguments), **made}
        yield {"type": "function_call_output", "id": f"out_{place}", "output": answer["content"], **made}


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of the Responses API as chat templates take it."""
    kept = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in kept if key in tool}}
