"""A scripted stand-in for an SGLang server: real sockets on loopback, right answers unless a test wants otherwise.

Its tokens are a function of the seed and the position, as SGLang's are of its weights too, so a test knows what each
sample must be, however often it was tried, moved or continued.
"""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from mega_rl.rollout.sglang.generation.samples import Sample, SampleRequest, Sampling
from mega_rl.rollout.sglang.http.endpoint import Endpoint
from mega_rl.rollout.sglang.http.keys import Keys

VOCABULARY = 50
STOP = 2
VERSION = 1
KEYS = Keys("api-key-of-the-fake", "admin-key-of-the-fake")

Json = dict[str, Any]


def token_at(seed: int, position: int) -> int:
    """Return the token of a request with this seed at a position of its sequence; a third of the seeds stop early."""
    if seed % 3 == 0 and position == 8 + seed % 5:
        return STOP
    return 3 + (seed * 31 + position * 7) % (VOCABULARY - 3)


def right_tokens(request: SampleRequest, sampling: Sampling) -> list[int]:
    """The whole response."""
    tokens: list[int] = []
    while len(tokens) < sampling.max_new_tokens and (not tokens or tokens[-1] not in sampling.stop_token_ids):
        tokens.append(token_at(request.seed, len(request.prompt) + len(tokens)))
    return tokens


def is_right(sample: Sample, request: SampleRequest, sampling: Sampling) -> bool:
    """Return whether a whole sample is the one that its seed gives."""
    tokens = right_tokens(request, sampling)
    finish = "stop" if tokens[-1] in sampling.stop_token_ids else "length"
    logprobs = [-0.125 * token for token in tokens]
    return (sample.token_ids, sample.logprobs, sample.finish) == (tokens, logprobs, finish)


def right_answer(body: Json, *, version: int = VERSION, num_tokens: int | None = None) -> Json:
    """The answer to a body of /generate; cut at `num_tokens`, as an abort would."""
    params = body["sampling_params"]
    context, stops = body["input_ids"], set(params["stop_token_ids"])
    tokens: list[int] = []
    finish: Json = {"type": "length", "length": params["max_new_tokens"]}
    while len(tokens) < params["max_new_tokens"]:
        if num_tokens is not None and len(tokens) >= num_tokens:
            finish = {"type": "abort", "message": "Abort in the decode batch"}
            break
        tokens.append(token_at(params.get("sampling_seed", 0), len(context) + len(tokens)))
        if tokens[-1] in stops:
            finish = {"type": "stop", "matched": tokens[-1]}
            break
    meta = {
        "id": body["rid"],
        "finish_reason": finish,
        "prompt_tokens": len(context),
        "completion_tokens": len(tokens),
        "weight_version": str(version),
        "weight_versions": [{"version": str(version), "start": 0, "end": len(tokens)}],
        "output_token_logprobs": [[-0.125 * token, token, None] for token in tokens],
    }
    return {"output_ids": tokens, "meta_info": meta}


class Exchange:
    """One request to the server, and what a script may do about it."""

    def __init__(self, server: FakeServer, body: Json, writer: asyncio.StreamWriter, number: int) -> None:
        self.server = server
        self.body = body
        self.writer = writer
        self.number = number  # of the tries of this sample at this server, from 0
        self.aborted = asyncio.Event()

    @property
    def is_probe(self) -> bool:
        return "probe" in self.body["rid"]

    @property
    def prompt(self) -> int:
        """Number of the prompt, by its first token as `requests` of a test make it; -1 of a probe."""
        return -1 if self.is_probe else int(self.body["rid"].split("-")[1])

    def answer(self) -> Json:
        """The right answer."""
        return right_answer(self.body, version=self.server.version)

    async def send(self, content: bytes, *, status: int = 200, length: int | None = None) -> None:
        """An HTTP answer, whose header may claim another length."""
        size = len(content) if length is None else length
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        self.writer.write(head.encode() + content)
        await self.writer.drain()

    async def send_json(self, value: Any) -> None:
        await self.send(json.dumps(value).encode())

    async def raw(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    def reset(self) -> None:
        """End the connection with RST instead of FIN."""
        _reset(self.writer)

    async def forever(self) -> None:
        """Sleep until the server is closed."""
        await asyncio.sleep(3600)


Script = Callable[[Exchange], Awaitable[None]]


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def right(exchange: Exchange) -> None:
    """The script of a good server: `seconds_per_token` each, and an abort ends it with what it has."""
    server = exchange.server
    whole = exchange.answer()
    seconds = server.seconds_per_token * len(whole["output_ids"])
    if seconds and not exchange.is_probe:
        began = time.monotonic()
        try:
            await asyncio.wait_for(exchange.aborted.wait(), seconds)
        except TimeoutError:
            pass
        else:
            had = int((time.monotonic() - began) / server.seconds_per_token)
            whole = right_answer(exchange.body, version=server.version, num_tokens=had)
    await exchange.send_json(whole)


class FakeServer:
    """`with FakeServer(script) as server:`; a script gets every /generate, probes included."""

    def __init__(self, script: Script = right, *, index: int = 0, seconds_per_token: float = 0.0) -> None:
        self.script = script
        self.version = VERSION
        self.seconds_per_token = seconds_per_token
        self.wedged = False  # /health_generate hangs, /health still answers 200
        self.seen: list[Json] = []  # bodies of /generate, without probes
        self.probes = 0
        self.paths: list[tuple[str, str]] = []  # (path, authorization)
        self.in_flight = 0
        self.most_in_flight = 0
        self.connections = 0  # open now
        self._dead = False
        self._open: set[asyncio.StreamWriter] = set()
        self._exchanges: dict[str, Exchange] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        port = self._listener.sockets[0].getsockname()[1]
        self.endpoint = Endpoint(index, f"http://127.0.0.1:{port}", KEYS)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._do(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def kill(self) -> None:
        """Reset every connection and stop to listen, as after kill -9."""

        async def kill() -> None:
            self.die()

        self._do(kill())

    def die(self) -> None:
        """`kill`, from within a script."""
        self._dead = True
        self._listener.close()
        for writer in list(self._open):
            _reset(writer)

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _end_tasks(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._dead:  # a connection that was accepted just before
            _reset(writer)
            return
        self._open.add(writer)
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client hung up, or the test is over
        finally:
            self.connections -= 1
            self._open.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        _, path, _ = head.split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        self.paths.append((path, headers.get("authorization", "")))
        body = json.loads(content) if content else {}
        exchange = Exchange(self, body, writer, 0)
        if path == "/generate":
            await self._generate(exchange, reader)
        elif path == "/abort_request":
            for rid, other in self._exchanges.items():
                if body.get("abort_all") or rid == body.get("rid"):
                    other.aborted.set()
            await exchange.send(b"")
        elif path == "/health_generate" and self.wedged:
            await exchange.forever()
        else:
            await exchange.send(b"")
        return not writer.is_closing()

    async def _generate(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        body = exchange.body
        if exchange.is_probe:
            self.probes += 1
        else:
            sample = body["rid"].rsplit("-", 1)[0]
            exchange.number = sum(one["rid"].rsplit("-", 1)[0] == sample for one in self.seen)
            self.seen.append(copy.deepcopy(body))
        self._exchanges[body["rid"]] = exchange
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            # As SGLang does: a client that hangs up ends its request.
            script = asyncio.ensure_future(self.script(exchange))
            gone = asyncio.ensure_future(_hung_up(reader))
            await asyncio.wait({script, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in (script, gone):
                task.cancel()
            await asyncio.gather(script, gone, return_exceptions=True)
        finally:
            self.in_flight -= 1
            del self._exchanges[body["rid"]]


async def _hung_up(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof():
        await asyncio.sleep(0.02)
