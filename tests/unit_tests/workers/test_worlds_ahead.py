"""Environments on servers, with tools of a server, and programs behind the gateway, two steps ahead of training."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from mega_rl.agents import gateway
from mega_rl.agents.chat import ToolsEnvironment
from mega_rl.agents.environment import Environment
from mega_rl.agents.gateway import Gateway
from mega_rl.agents.remote import RemoteEnvironment
from mega_rl.agents.tool_servers import McpServer
from mega_rl.data.chat import ChatTemplate
from mega_rl.parallel.comm import SingleRank
from mega_rl.types import Prompt
from mega_rl.workers.rollout import RolloutContext
from tests.helpers.chats import byte_tokenizer
from tests.helpers.fleet import SAMPLING, STOP, Numbered, StreamRun
from tests.peers.package import FOLDER, missing
from tests.unit_tests.agents.families import FAMILIES
from tests.unit_tests.agents.test_remote import World
from tests.unit_tests.agents.test_tool_servers import children, server
from tests.unit_tests.workers.test_agent_stream import assert_exact, content
from tests.unit_tests.workers.test_stream import assert_once, erratic, trained

LONGEST, K, STEPS, PER_STEP = 240, 2, 4, 2
_CALLS = ('{"name":"add","arguments":{"a":1,"b":2}}', '{"name":"fail","arguments":{"tool":"x"}}')
# What the fleet's eight tokens say: the end of a turn, calls of tools, which end them too, and words.
WORDS = ("<|im_end|>", *(f"<tool_call>{one}</tool_call>" for one in _CALLS), "yes", "no", "go", "so", "he")
TOKENIZER = byte_tokenizer(FAMILIES["chatml"].template, eos="<|im_end|>", first=WORDS)
mcp_server = server  # its fixture


class Chats(Numbered):
    """Prompts that are one message, with the tools of an environment."""

    def __init__(self, schemas: Any) -> None:
        self.schemas = schemas

    def prompt_of(self, number: int, row: int) -> Prompt:
        asked = [{"role": "user", "content": f"p{row}"}]
        ids = TOKENIZER.apply_chat_template(asked, tools=self.schemas, add_generation_prompt=True, return_dict=False)
        return Prompt(row, tuple(ids), f"p{row}", "", (("user", f"p{row}"),))


class Guesses(World):
    """Sessions of three actions, whose answers are a function of what was said."""

    async def respond(self, request: Any) -> Any:
        await asyncio.sleep(0.02)
        return await super().respond(request)

    def step(self, session: str, action: dict[str, Any]) -> dict[str, Any]:
        said = self.sessions[session]
        said.append(action["message"])
        return self.observed(f"heard {len(action['message'])}", 0.5, len(said) == 3)


@pytest.fixture
def world() -> Iterator[tuple[Guesses, str]]:
    own = Guesses()
    routes = [Route(f"/{kind}", own.respond, methods=["POST"]) for kind in ("reset", "step", "close")]
    served = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=served.run, name="world")
    thread.start()
    while not served.started:
        time.sleep(0.01)
    yield own, f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}"
    served.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def context() -> RolloutContext:
    one, sampling = SingleRank(), replace(SAMPLING, max_new_tokens=LONGEST, stop_token_ids=(STOP,))
    return RolloutContext(TOKENIZER, None, sampling, 2, 7, one, one, lambda: 1, ChatTemplate(TOKENIZER))


def across_updates(run: StreamRun) -> Callable[[tuple[int, int], int], int]:
    """Pace of servers at which trajectories go on over a weight update, however long their environments take.

    One that begins ahead of its step has one token until then, and no step before the last ends without such a one.
    """
    usual, begun = erratic(0)["pace"], set[tuple[int, int]]()

    def pace(key: tuple[int, int], look: int) -> int:
        step = key[0] // PER_STEP
        is_ahead, is_first = run.policy.weight_version <= step, key not in begun
        if is_ahead:
            begun.add(key)
            return int(is_first)
        is_last = key == (PER_STEP * (step + 1) - 1, 1) and step < STEPS - 1
        if is_last and not any(ticket // PER_STEP > step for ticket, _ in begun):
            return 0
        return usual(key, look)

    return pace


def played(environment: Environment, *, free: bool, schemas: Any = None, seed: int = 0) -> StreamRun:
    fleet = {**(erratic(seed) if free else {}), "sampling": context().sampling}
    run = StreamRun(
        K, SingleRank(), free=free, steps=STEPS, per_step=PER_STEP, quantum=math.ceil(LONGEST / K), fleet=fleet,
        environment=environment,
    )  # fmt: skip
    if free and not seed:
        run.flow.engine.pace = across_updates(run)  # type: ignore[attr-defined]
    run.collector.order = Chats(schemas)  # type: ignore[assignment]
    run.flow.timeout_s = 60.0
    run.flow.players.runner = replace(run.flow.players.runner, vocab_size=len(TOKENIZER))  # type: ignore[union-attr]
    return run


def cut_short(environment: Environment) -> StreamRun:
    """Return a run after its first step, whose other trajectories play their first turn."""
    run = played(environment, free=True)
    run.flow.engine.pace = lambda key, number: 5 * (key[0] < PER_STEP)  # type: ignore[attr-defined]
    run.run(1)
    assert sum(len(flight.playing) for flight in run.flow.flights.values()) >= 2 * PER_STEP
    return run


def ended(*runs: StreamRun) -> None:
    """End runs and wait for their environments."""
    for run in runs:
        run.flow.close()
    deadline = time.monotonic() + 20
    while any(thread.name == "environments" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "environments play on"
        time.sleep(0.01)


def check(run: StreamRun, turns: int) -> None:
    """Each trajectory trained once, exactly, and none has failed."""
    assert Counter(ticket for step in trained(run) for ticket in step) == Counter(range(STEPS * PER_STEP))
    assert_once(run)
    assert_exact(run)
    for batch in run.taken:
        rows = batch.samples.rollout
        assert rows.failed is None or not rows.failed.any()
        assert Counter(zip(rows.prompt_index.tolist(), rows.sample_index.tolist(), strict=True)).keys() == {
            (prompt, sample) for prompt in range(PER_STEP) for sample in range(2)
        }
    batches = [batch.samples.rollout for batch in run.taken]
    assert max(int(rows.turn.max()) for rows in batches) >= turns
    of_rows = [own[mask] for rows in batches for own, mask in zip(rows.token_versions, rows.loss_mask, strict=True)]
    assert not run.free or max(len(own.unique()) for own in of_rows) > 1, "no trajectory was sampled by two versions"


@pytest.mark.parametrize("free", [False, True])
def test_worlds_over_http_play_ahead(world: tuple[Guesses, str], free: bool) -> None:
    """Every session is closed, also those that the end of the run cuts; a resumed run equals it when locked."""
    own, url = world
    run = played(RemoteEnvironment(context(), url=url), free=free).run(2)
    saved = run.saved()
    check(run.run(), turns=3)
    again = played(RemoteEnvironment(context(), url=url), free=free, seed=1).resume(saved).run()
    assert_exact(again)
    if not free:
        assert content(again) == content(run)[2:]
    ended(run, again, cut_short(RemoteEnvironment(context(), url=url)))
    assert own.opened == own.closed > 0


@pytest.mark.parametrize("free", [False, True])
def test_tools_of_a_server_play_ahead(mcp_server: McpServer, free: bool) -> None:
    """One process of the server for all trajectories; its answers are given, not trained."""

    class Own(ToolsEnvironment):
        tools: ClassVar[Any] = (mcp_server,)

    environment = Own(context())
    run = played(environment, free=free, schemas=environment._box.schemas).run()
    check(run, turns=2)
    given = [
        TOKENIZER.decode([token for token, turn in zip(ids[: int(length)], turns, strict=False) if not turn])
        for batch in run.taken
        for ids, turns, length in zip(
            batch.samples.rollout.tokens.tolist(), batch.samples.rollout.turn.tolist(), batch.samples.rollout.lengths,
            strict=True,
        )
    ]  # fmt: skip
    assert any("<|im_start|>tool\n3<|im_end|>" in text for text in given)
    assert any("error: Error executing tool fail" in text for text in given)
    assert children() == 1
    ended(run)


class Raw(Gateway):
    """A program of the raw protocol, in this process."""

    async def play(self, url: str, key: str, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60.0) as client:
            for _ in range(3):
                answer = await client.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": messages})
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                await asyncio.sleep(0.02)
                messages += [message, {"role": "user", "content": f"heard {len(message['content'])}"}]


PROGRAM = """
import json, openai
client, messages = openai.OpenAI(), json.load(sys.stdin)["messages"]
for _ in range(3):
    message = client.chat.completions.create(model="m", messages=messages).choices[0].message
    messages += [message, {"role": "user", "content": f"heard {len(message.content)}"}]
"""


@pytest.mark.parametrize("kind", ["locked", "free", "openai"])
def test_programs_behind_the_gateway_play_ahead(kind: str, tmp_path: Path) -> None:
    """Their conversations are one row each, before and after a resume; no server, program or thread is left."""
    if kind == "openai" and (reason := missing("openai")):
        pytest.skip(reason)
    (tmp_path / "agent.py").write_text(f"import sys\nsys.path.append({str(FOLDER)!r})\n{PROGRAM}", encoding="utf-8")
    program = shlex.join([sys.executable, "-P", str(tmp_path / "agent.py")])

    def made() -> Gateway:
        return Gateway(context(), program=program) if kind == "openai" else Raw(context())

    runs = [run := played(made(), free=kind == "free").run(2)]
    saved = run.saved()
    check(run.run(), turns=3)
    rows = [batch.samples.rollout for batch in run.taken]
    assert all(len(one.tokens) == PER_STEP * 2 for one in rows)
    if kind != "openai":
        runs.append(again := played(made(), free=kind == "free", seed=1).resume(saved).run())
        assert_exact(again)
        assert kind == "free" or content(again) == content(run)[2:]
    ended(*runs, cut_short(made()))
    assert not gateway._servers
    if kind == "openai":
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not [line for line in lines if str(tmp_path / "agent.py").encode() in line]
