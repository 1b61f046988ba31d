"""MCP servers as a source of tools, over a command's standard input and output."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from mega_rl.agents.tools import ToolFunction
from mega_rl.environment import of_other_programs, python_module
from mega_rl.errors import RunError, UserError
from mega_rl.processes import Running
from mega_rl.untrusted import shorten

_CLOSED = -32000  # the package's error code for a server that is gone


@dataclass(eq=False)
class McpServer:
    """Tools of an MCP server: one process per rank, started again after its death."""

    command: str  # "python server.py"
    start_s: float = 30.0  # seconds in which the server starts and names its tools
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False, repr=False)
    _session: asyncio.Future[Any] | None = field(default=None, init=False, repr=False)
    _over: asyncio.Event | None = field(default=None, init=False, repr=False)

    def tools(self) -> list[ToolFunction]:
        """Start the server and return its tools. Raises UserError."""
        _mcp()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Running(self._loop.run_forever, name=f"tools of {self.command}")
        asked = asyncio.run_coroutine_threadsafe(self._listed(), self._loop)
        try:
            listed = asked.result(self.start_s)
        except TimeoutError:
            self.close()
            raise UserError(f"McpServer({self.command!r}) named no tools within start_s={self.start_s:g} s") from None
        except RunError as error:
            self.close()
            raise UserError(str(error)) from error
        return [ToolFunction(partial(self._called, one["function"]["name"]), one) for one in listed]

    def close(self) -> None:
        """End the server; a later call starts it again."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def _listed(self) -> list[dict[str, Any]]:
        session, (_, types, _), tools, cursor = await self._opened(), _mcp(), list[dict[str, Any]](), None
        while True:
            page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
            given = page.model_dump(by_alias=True, mode="json")
            tools += [
                {"name": one["name"], "description": one.get("description") or "", "parameters": one["inputSchema"]}
                for one in given["tools"]
            ]
            if not (cursor := given.get("nextCursor")):
                return [{"type": "function", "function": one} for one in tools]

    async def _called(self, tool: str, /, **arguments: Any) -> str:
        """Return a tool's answer, from another event loop. Raises RunError: the server is gone."""
        assert self._loop is not None, "tools() starts the loop"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(tool, arguments), self._loop))

    async def _answer(self, tool: str, arguments: dict[str, Any]) -> str:
        session, opened, (*_, failure) = await self._opened(), self._session, _mcp()
        try:
            answered = await session.call_tool(tool, arguments)
        except failure as error:
            if cast(Any, error).error.code != _CLOSED:
                return f"error: {error}"
            if self._session is opened:  # no other call has started it again
                self._end()
            raise RunError(f"McpServer({self.command!r}) died in a call of {tool}") from None
        given = answered.model_dump(by_alias=True, mode="json")
        text = "\n".join(one.get("text", f"[{one['type']}]") for one in given["content"])
        return f"error: {text}" if given["isError"] else text

    async def _opened(self) -> Any:
        """Return the session with the server, which it starts if there is none. Raises RunError."""
        if self._session is None:
            self._session, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            holder = asyncio.ensure_future(self._hold(self._session, self._over))
            holder.add_done_callback(partial(self._ended, self._session))
        return await asyncio.shield(self._session)

    async def _hold(self, opened: asyncio.Future[Any], over: asyncio.Event) -> None:
        """Run the server until it is over or dies."""
        mcp, *_ = _mcp()
        program, *arguments = shlex.split(self.command) or [""]
        path = shutil.which(program)
        if path is None:
            raise FileNotFoundError(f"there is no program {program!r}")
        python, *words = python_module(
            "mega_rl.processes", str(os.getpid()), str(int(signal.SIGKILL)), path, *arguments
        )
        given = mcp.StdioServerParameters(command=python, args=words, env=of_other_programs())
        async with mcp.stdio_client(given, errlog=sys.__stderr__) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            opened.set_result(session)
            await over.wait()

    def _end(self) -> None:
        if self._over is not None:
            self._over.set()
        self._session = self._over = None

    def _ended(self, opened: asyncio.Future[Any], holder: asyncio.Task[None]) -> None:
        """Note that a server has ended, and why, for those who wait for it."""
        error = None if holder.cancelled() else holder.exception()
        if self._session is opened:
            self._end()
        if not opened.done():
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            reason = "ended" if error is None else f"{type(error).__name__}: {shorten(str(error), 200)}"
            opened.set_exception(RunError(f"McpServer({self.command!r}) does not start: {reason}"))
            opened.exception()  # nobody need wait


def _mcp() -> tuple[Any, Any, type[Exception]]:
    """Return the package, its types and its error. Raises UserError."""
    try:
        import mcp
        import mcp.types
    except ImportError:
        raise UserError("McpServer needs a package: pip install 'mega_rl[mcp]'") from None
    return mcp, mcp.types, getattr(mcp, "McpError", None) or mcp.MCPError  # before and after version 2
