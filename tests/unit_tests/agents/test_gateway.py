"""Programs that know only an API's URL and a key play trajectories whose ids are those that were sampled."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from mega_rl.agents import gateway
from mega_rl.agents.environment import Answer, Environment, Played, Runner, TurnRequest, in_batches
from mega_rl.agents.gateway import Gateway
from mega_rl.agents.trajectory import Trajectory, Turn, rows_of
from mega_rl.data.chat import ChatTemplate
from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.trainer.rows import check_rows
from mega_rl.types import Prompt
from tests.helpers.chats import byte_tokenizer
from tests.peers.package import FOLDER, missing
from tests.unit_tests.agents.families import FAMILIES, TOOLS

CHATML = byte_tokenizer(FAMILIES["chatml"].template, eos="<|im_end|>")
STOP = CHATML.convert_tokens_to_ids("<|im_end|>")
ASK = {"role": "user", "content": "say hello"}
CALL = '<tool_call>\n{"name": "tool", "arguments": {"text": "ab"}}\n</tool_call>'
Script = Callable[["Own", str, str], Awaitable[None]]


@dataclass
class Own(Gateway):
    """A gateway whose program is a function of the test."""

    script: Script | None = None

    async def play(self, url: str, key: str, prompt: Prompt) -> None:
        if self.script is None:
            await super().play(url, key, prompt)
        else:
            await self.script(self, url, key)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(CHATML(text, add_special_tokens=False)["input_ids"])


def shown(messages: list[Any], tools: Any = None) -> tuple[int, ...]:
    return tuple(CHATML.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False))


def play(script: Script | None, *answers: Any, seconds: float = 0.0, count: int = 1, **own: Any) -> list[Played]:
    """Play trajectories with these answers, texts or ids, by turn; no thread, task or server is left."""
    limit = own.pop("limit", 4000)

    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        time.sleep(seconds)
        return [turn(one) for one in requests]

    turns = [0] * count

    def turn(request: TurnRequest) -> Turn:
        place, turns[request.key[0]] = turns[request.key[0]], turns[request.key[0]] + 1
        given = answers[place % len(answers)]
        ids = ((*ids_of(given), STOP) if isinstance(given, str) else given)[: request.limit]
        return Turn(ids, (-0.5,) * len(ids), (), ids[-1] == STOP)

    context = SimpleNamespace(
        tokenizer=CHATML, template=ChatTemplate(CHATML), sampling=SimpleNamespace(stop_token_ids=(STOP,))
    )
    environment: Environment = Own(context, script, **own)
    prompt = Prompt(3, shown([ASK]), "p", "", messages=(("user", "say hello"),))
    made = [Trajectory(prompt, number, 0, limit) for number in range(count)]
    runner = Runner(environment, "rollout.source='agent.py:Own'", vocab_size=len(CHATML))
    outcomes = runner.run(made, partial(in_batches, sample=sample))
    assert not gateway._servers
    assert not any(thread.name == "environments" for thread in threading.enumerate())
    return outcomes


class Client:
    """A client of the raw protocol."""

    def __init__(self, url: str, key: str, timeout: float = 30.0) -> None:
        self.http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=timeout)

    async def post(self, messages: list[Any], **body: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"model": "m", "messages": messages, **body})

    async def chat(self, messages: list[Any], **body: Any) -> dict[str, Any]:
        response = await self.post(messages, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())


def test_calls_become_turns_of_one_branch() -> None:
    """The first request is the prompt; the row is the template's text of the whole conversation."""
    messages: list[Any] = [ASK]

    async def script(own: Own, url: str, key: str) -> None:
        client = Client(url, key)
        first = await client.chat(messages, tools=TOOLS, temperature=0.3)
        (call,) = first["choices"][0]["message"]["tool_calls"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"]) == {"text": "ab"}
        messages.append(first["choices"][0]["message"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ab<|im_end|>"})
        last = await client.post(messages, tools=TOOLS, top_p=0.5)
        assert last.headers["x-mega-rl-ignored"] == "top_p"
        assert last.json()["choices"][0]["message"] == {"role": "assistant", "content": "it says ab"}

    (played,) = play(script, f"I call\n{CALL}", "it says ab")
    (_, branch), trajectory = played.trajectory.branches, played.trajectory
    assert (played.failure, trajectory.drifted, trajectory.ended()) == (None, 0, "done")
    assert branch.opening == shown([ASK], TOOLS)
    assert trajectory.turns[0].token_ids == (*ids_of(f"I call\n{CALL}"), STOP)
    after = CHATML.decode(branch.parts[1])
    assert after == "\n<|im_start|>tool\nab<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert list(branch.parts[1]).count(STOP) == 1  # what a tool writes ends no message


def test_a_row_may_open_as_its_program_does_but_not_as_another_prompt() -> None:
    prompts = [Prompt(number, (number, 5), "p", "") for number in range(2)]
    made = [Trajectory(one, number, 0, 40) for number, one in enumerate(prompts)]
    for one, opening in zip(made, ((7, 8, 9), (1, 5)), strict=True):
        one.open(opening)
        one.add((11, 12), (-0.5, -0.5), stopped=True)
    check_rows(rows_of(made, version=1, with_failed=False, with_branches=True), prompts, SingleRank(), samples=1)
    made[0].branch.opening = (1, 5)
    rows = rows_of(made, version=1, with_failed=False, with_branches=True)
    with pytest.raises(RunError, match="answers another prompt"):
        check_rows(rows, prompts, SingleRank(), samples=1)


def test_the_prompt_itself_is_the_first_branch() -> None:
    async def script(own: Own, url: str, key: str) -> None:
        messages: list[Any] = [ASK]
        for word in ("a", "b"):
            answer = await Client(url, key).chat(messages)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": word}]

    (played,) = play(script, "one", "two")
    (branch,) = played.trajectory.branches
    talk = [ASK, {"role": "assistant", "content": "one"}, {"role": "user", "content": "a"}]
    assert branch.token_ids == (*shown(talk), *ids_of("two"), STOP)


def test_another_history_opens_a_branch_and_keeps_the_ids_of_answers() -> None:
    odd = (*ids_of("h"), *ids_of("e"), STOP)  # a tokenizer writes "he" as one
    assert len(ids_of("he")) == 1

    async def script(own: Own, url: str, key: str) -> None:
        client = Client(url, key)
        answer = (await client.chat([ASK]))["choices"][0]["message"]
        await client.chat([{"role": "system", "content": "short"}, ASK, answer, {"role": "user", "content": "go"}])
        await client.chat([ASK, {"role": "assistant", "content": "my own"}, {"role": "user", "content": "go"}])
        await client.chat([ASK, answer, {"role": "user", "content": "on"}])
        await client.chat([ASK, answer, {"role": "user", "content": "again"}])  # from the same place: a fork
        await client.chat([{"role": "user", "content": "another talk"}])

    (played,) = play(script, odd, "x")
    trajectory, branches = played.trajectory, played.trajectory.branches
    assert (trajectory.drifted, len(branches), len(trajectory.turns)) == (2, 5, 6)
    begin = shown([{"role": "system", "content": "short"}, ASK])
    assert branches[1].opening == (*begin, *odd, *ids_of("\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"))
    talk = [ASK, {"role": "assistant", "content": "my own"}, {"role": "user", "content": "go"}]
    assert branches[2].opening == shown(talk)
    assert [len(one.parts) for one in branches] == [3, 1, 1, 3, 1]
    assert (branches[3].shared, branches[3].parts[0]) == (1, branches[0].parts[0])


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"n": 2}, 400, "n=2 is not supported"),
        ({"logprobs": True}, 400, "logprobs=True is not supported"),
        ({"stop": ["\n"]}, 400, "stop="),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": [ASK, {"role": "assistant", "content": "Sure,"}]}, 400, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "'image_url'"),
        ({"messages": "hello"}, 400, "TypeError"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 413, "at most body_bytes=4000"),
        ({"max_tokens": -1}, 400, "whole number"),
        ({"tools": [{"function": {"name": 3}}]}, 400, "name of a tool"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": {"x": {"enum": 3}}}}}]},
            400,
            "not a JSON schema",
        ),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused(body: dict[str, Any], status: int, text: str) -> None:
    async def script(own: Own, url: str, key: str) -> None:
        response = await Client(url, key).http.post("/v1/chat/completions", json={"messages": [ASK], **body})
        assert (response.status_code, response.headers["x-should-retry"]) == (status, "false")
        assert text in response.json()["error"]["message"]
        await Client(url, key).chat([ASK])

    (played,) = play(script, "x", body_bytes=4000)
    assert (played.failure, len(played.trajectory.turns)) == (None, 1), played.what


def test_an_error_of_the_run_is_no_mistake_of_the_program() -> None:
    """The program gets 500, whatever it makes of that, and its trajectory fails by name."""

    async def script(own: Own, url: str, key: str) -> None:
        answer = (await Client(url, key).chat([ASK]))["choices"][0]["message"]
        response = await Client(url, key).post([ASK, answer, ASK])
        assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")

    (played,) = play(script, (len(CHATML) + 7, STOP))
    assert (played.failure, played.trajectory.ended()) == ("error", "error")
    assert played.what.startswith(f"raised ValueError: token id {len(CHATML) + 7} is outside"), played.what


def test_clients_see_one_model() -> None:
    async def script(own: Own, url: str, key: str) -> None:
        client = Client(url, key).http
        listed, one = [(await client.get(f"/v1/models{more}")).json() for more in ("", "/anything")]
        assert (listed["object"], listed["data"], one["id"]) == ("list", [one], "policy")
        assert (await Client(url, "none").http.get("/v1/models")).status_code == 401
        await Client(url, key).chat([ASK])

    (played,) = play(script, "x")
    assert played.failure is None, played.what


def test_a_key_dies_with_its_trajectory() -> None:
    """A call of the first trajectory is under way at its end; a later one with its key gets 401."""
    keys: list[str] = []
    statuses: list[int] = []

    async def script(own: Own, url: str, key: str) -> None:
        keys.append(key)
        if len(keys) == 1:
            await Client(url, key).chat([ASK])
            late = asyncio.create_task(Client(url, key).post([ASK]))
            late.add_done_callback(lambda task: statuses.append(task.result().status_code))
            while not gateway._servers[asyncio.get_running_loop()].sessions[key].calls:
                await asyncio.sleep(0.01)
            return
        for wrong in ("none", f"{key}x"):
            assert (await Client(url, wrong).post([ASK])).status_code == 401
        await Client(url, key).chat([ASK])
        while len(statuses) < 1:
            await asyncio.sleep(0.01)
        statuses.append((await Client(url, keys[0]).post([ASK])).status_code)

    outcomes = play(script, "x", seconds=0.2, count=2)
    assert statuses == [401, 401]
    assert [(one.failure, len(one.trajectory.turns)) for one in outcomes] == [(None, 1), (None, 1)], outcomes


def test_a_client_that_goes_away_leaves_no_call() -> None:
    async def script(own: Own, url: str, key: str) -> None:
        (session,) = gateway._servers[asyncio.get_running_loop()].sessions.values()
        with pytest.raises(httpx.ReadTimeout):
            await Client(url, key, timeout=0.15).chat([ASK])
        deadline = time.monotonic() + 5
        while session.calls and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not session.calls
        await Client(url, key).chat([ASK])

    (played,) = play(script, "x", seconds=0.4)
    assert (played.failure, len(played.trajectory.turns)) == (None, 1), played.what


def test_limits_end_a_program_without_a_failure() -> None:
    async def script(own: Own, url: str, key: str) -> None:
        client = Client(url, key)
        answer = await client.chat([ASK], max_completion_tokens=3)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)
        refused = await client.post([ASK])
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "limit_turns"
        refused.raise_for_status()

    (played,) = play(script, "many words", max_turns=1)
    assert (played.failure, played.trajectory.ended()) == (None, "turns"), played.what


def test_both_apis_stream_what_they_return_whole() -> None:
    tools = [{"name": "tool", "description": "Repeat a text.", "input_schema": TOOLS[0]["function"]["parameters"]}]
    whole: list[Any] = []

    async def script(own: Own, url: str, key: str) -> None:
        client = Client(url, key)
        lines = (await client.post([ASK], tools=TOOLS, stream=True)).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert lines[-2:] == ["data: [DONE]", ""]
        assert chunks[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "tool"
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        body = {"model": "m", "max_tokens": 500, "messages": [ASK], "tools": tools}
        whole.append((await client.http.post("/v1/messages", json=body)).json())
        streamed = (await client.http.post("/v1/messages", json={**body, "stream": True})).text
        events = [json.loads(part.partition("data: ")[2]) for part in streamed.split("\n\n")[:-1]]
        kinds = ["message_start", *["content_block_start", "content_block_delta", "content_block_stop"] * 3]
        assert [one["type"] for one in events] == [*kinds, "message_delta", "message_stop"]

    (played,) = play(script, f"<think>\nhm\n</think>\n\nI call\n{CALL}")
    assert played.failure is None, played.what
    thoughts, text, call = whole[0]["content"]
    assert (thoughts["thinking"], text["text"], call["input"]) == ("hm", "I call", {"text": "ab"})
    assert whole[0]["stop_reason"] == "tool_use"
    assert {one.opening for one in played.trajectory.branches[1:]} == {shown([ASK], TOOLS)}  # one prompt for both


PROGRAMS = {
    "openai": """
import openai
client, messages = openai.OpenAI(), [{"role": "user", "content": "say hello"}]
answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
(call,) = answer.tool_calls
messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "ab"}]
stream = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
assert "".join(part.choices[0].delta.content or "" for part in stream) == "it says ab"
""",
    "anthropic": """
import anthropic
client, messages = anthropic.Anthropic(), [{"role": "user", "content": "say hello"}]
tools = [{"name": "tool", "description": TOOLS[0]["function"]["description"],
          "input_schema": TOOLS[0]["function"]["parameters"]}]
answer = client.messages.create(model="m", max_tokens=900, messages=messages, tools=tools)
call = answer.content[-1]
messages += [{"role": "assistant", "content": answer.content},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "ab"}]}]
with client.messages.stream(model="m", max_tokens=900, messages=messages, tools=tools) as stream:
    assert stream.get_final_text() == "it says ab"
""",
}


@pytest.mark.parametrize("package", PROGRAMS)
def test_an_unchanged_program_plays(package: str, tmp_path: Path) -> None:
    if reason := missing(package):
        pytest.skip(reason)
    begin = f"import sys\nsys.path.append({str(FOLDER)!r})\nTOOLS = {TOOLS!r}\n"
    (tmp_path / "agent.py").write_text(begin + PROGRAMS[package], encoding="utf-8")
    program = shlex.join([sys.executable, "-P", str(tmp_path / "agent.py")])
    (played,) = play(None, f"I call\n{CALL}", "it says ab", program=program)
    assert played.failure is None, played.what
    (_, branch) = played.trajectory.branches
    assert (played.trajectory.drifted, len(branch.parts)) == (0, 3)
    assert branch.opening == shown([ASK], TOOLS)


def test_a_program_that_fails_is_named_with_its_last_words() -> None:
    program = shlex.join([sys.executable, "-c", "import sys, json; sys.exit(json.load(sys.stdin)['text'] + ' broke')"])
    (played,) = play(None, "x", program=program)
    assert played.failure == "error"
    assert "ended with exit code 1: p broke" in played.what


def test_a_program_may_write_without_end() -> None:
    """The run reads on, and keeps the end of it."""
    code = "import sys; [print('x' * 9999) for _ in range(2000)]; print('the\\nlast words'); sys.exit(3)"
    (played,) = play(None, "x", program=shlex.join([sys.executable, "-c", code]))
    assert "ended with exit code 3: last words" in played.what
    assert len(played.what) < 400


def test_a_program_ends_with_its_trajectory(tmp_path: Path) -> None:
    """Its children, too."""
    code = f"import subprocess, time; subprocess.Popen(['sleep', '{(mark := 7131.25)}']); time.sleep(99)"
    (played,) = play(None, "x", program=shlex.join([sys.executable, "-c", code]), timeout_s=2.0)
    assert played.failure == "timeout"
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if line.startswith(b"sleep\0" + str(mark).encode())]
