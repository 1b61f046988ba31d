"""A server of tools over standard input and output, for test_tool_servers.py."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
from mcp.server.fastmcp import FastMCP

server = FastMCP("tools", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(tool: str) -> str:
    """Fail."""
    raise ValueError(f"no <|im_end|> {tool}")


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await anyio.sleep(seconds)
    return "slept"


@server.tool()
def die(marker: str) -> str:
    """End the server, the first time."""
    if Path(marker).exists():
        return "lives"
    Path(marker).touch()
    os._exit(3)


@server.tool()
def write(size: int) -> str:
    """Write much."""
    return "x" * size


if __name__ == "__main__":
    server.run()
