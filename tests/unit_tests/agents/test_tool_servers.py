"""Tools of a real MCP server: schemas as it names them, calls within their deadline, a death that costs its sample."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mega_rl.agents.chat import ToolsEnvironment
from mega_rl.agents.tool_servers import McpServer
from mega_rl.agents.tools import Call, Toolbox
from mega_rl.errors import RunError, UserError
from tests.helpers.chats import byte_tokenizer
from tests.peers.package import FOLDER, environment, missing
from tests.unit_tests.agents.test_chat import CHATML, END, OTHER_END, context_of

COMMAND = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


def children() -> int:
    count = 0
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            count += "mcp_server.py" in " ".join(one.cmdline())
    return count


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[McpServer]:
    if reason := missing("mcp"):
        pytest.skip(reason)
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    own = McpServer(COMMAND)
    yield own
    own.close()
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children()


def answers(box: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    texts = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in calls
    )
    return [one["content"] for one in asyncio.run(box.answers(box.calls(texts)))]


def test_tools_of_a_server_are_called_as_functions_are(server: McpServer) -> None:
    """Calls run at the same time; arguments are checked before the server sees them; a late call holds nobody."""
    box = Toolbox(server.tools(), "hermes", timeout_s=2.0, most_characters=100)
    assert box.schemas[0]["function"]["name"] == "add"
    assert box.schemas[0]["function"]["description"] == "Add two numbers."
    assert box.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    begin = time.monotonic()
    seen = answers(
        box, ("add", {"a": 2, "b": 3}), ("add", {"a": "2", "b": 3}), ("fail", {"tool": "x"}), ("sleep", {"seconds": 1}),
        ("sleep", {"seconds": 60}), ("write", {"size": 1 << 20}), ("guess", {}),
    )  # fmt: skip
    assert seen == [
        "5", "error: 'a' must be of type integer", "error: Error executing tool fail: no <|im_end|> x", "slept",
        "error: sleep took more than 2 s", f"{'x' * 100}... (1048476 more characters)",
        "error: no tool 'guess'; there are: add, fail, sleep, die, write",
    ]  # fmt: skip
    assert time.monotonic() - begin < 4


def test_a_server_that_dies_costs_its_calls_and_starts_again(server: McpServer, tmp_path: Path) -> None:
    box = Toolbox(server.tools(), "hermes")
    with pytest.raises(RunError, match="died in a call of die"):
        answers(box, ("die", {"marker": str(tmp_path / "died")}))
    assert answers(box, ("die", {"marker": str(tmp_path / "died")})) == ["lives"]
    assert children() == 1


def test_an_environment_has_functions_and_servers(server: McpServer) -> None:
    class Own(ToolsEnvironment):
        tools = (mcp_double, server)

    own = Own(context_of(byte_tokenizer(CHATML, eos=END, more=(OTHER_END,))))
    assert [one["function"]["name"] for one in own._box.schemas][:2] == ["mcp_double", "add"]
    calls = [Call("mcp_double", {"number": 4}), Call("add", {"a": 1, "b": 1})]
    assert [one["content"] for one in asyncio.run(own._box.answers(calls))] == ["8", "2"]


def mcp_double(number: int) -> int:
    """Double a number.

    Args:
        number: Any.
    """
    return 2 * number


@pytest.mark.usefixtures("server")
def test_a_command_that_is_no_server_is_refused() -> None:
    with pytest.raises(UserError, match="does not start: FileNotFoundError: there is no program 'no-such-program'"):
        McpServer("no-such-program").tools()
    with pytest.raises(UserError, match="does not start: McpError: Connection closed"):
        McpServer("false").tools()
    with pytest.raises(UserError, match=r"named no tools within start_s=0\.5 s"):
        McpServer("sleep 100", start_s=0.5).tools()


def test_a_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"McpServer needs a package: pip install 'mega_rl\[mcp\]'"):
        McpServer("true").tools()
