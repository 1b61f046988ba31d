"""Address, key and retried requests of HTTP services for scores and programs. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from mega_rl.config.rules.rollout import is_loopback
from mega_rl.errors import UserError
from mega_rl.rewards.sandbox import MIB, Execution, Limits, SandboxError, Status
from mega_rl.rewards.score import RewardError, shortened
from mega_rl.untrusted import read_body

TRIED_AGAIN = (408, 429)  # also the server's faults: 500 and above
MAX_PAUSE_S = 30.0  # between tries, unless the service asks for more
REFUSAL_BYTES = 4096  # read of an answer that is not a 200
ANSWER_BYTES = 1 << 20  # longest answer without outputs and scores, which may each have:
SCORE_BYTES = 64


@dataclass(frozen=True)
class Service:
    """Address of a service, and its key, which repr does not show."""

    url: str  # http://127.0.0.1:8000/score
    key: str = field(default="", repr=False)  # bearer token; empty sends none


def find_service(url: str, key_file: str, section: str = "reward.source") -> Service:
    """Return the service of the settings url and key_file ("" for none) of a section.

    Raises UserError: no address, or a password in it; a key that others can read, or that would travel unencrypted.
    """
    try:
        parts = urlsplit(url)
        host, named = parts.hostname, parts.username is not None or parts.password is not None
        legal = parts.scheme in ("http", "https") and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:
        host, named, legal = None, False, False
    if not host or named or not legal:
        raise UserError(
            f"{section}.url: legal: http://host:port/path or https://host/path, without user and password, since "
            f"addresses are logged; use {section}.key_file"
        )
    if not key_file:
        return Service(url)
    if parts.scheme == "http" and not is_loopback(host):
        raise UserError(
            f"{section}.url={url!r} with {section}.key_file: the key would travel unencrypted to {host}; use "
            "https://, or a tunnel that ends on 127.0.0.1"
        )
    path = Path(key_file)
    try:
        mode, key = path.stat().st_mode, path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        mode, key = 0, ""
    if mode & 0o077 or not key or not key.isprintable() or " " in key:
        raise UserError(
            f"{section}.key_file: {path}: must hold one key of printable ASCII characters without spaces, and be "
            f"readable by its owner alone: chmod 600 {path}"
        )
    return Service(url, key)


class PostError(Exception):
    """A request has failed for good; the message says how, without the key."""


class Poster:
    """Posts JSON to one address.

    A request is posted again, after a growing random pause, when the connection fails or the status is 408, 429 or from
    500 on, so the service may see it more than once. Each request has its own connection, goes through no proxy and
    follows no redirect.
    """

    def __init__(self, service: Service, *, section: str, timeout_s: float, retries: int, pause_s: float = 0.5) -> None:
        """
        section: the settings that errors name, "reward.source".
        timeout_s: bounds a request with all its tries and pauses.
        pause_s: the first pause, which then doubles.
        """
        try:
            self._url = httpx.URL(service.url)
        except httpx.InvalidURL as error:
            raise UserError(f"{section}.url={service.url!r}: {error}") from None
        self._key = service.key
        self._limit = f"{section}.timeout_s={timeout_s:g}"
        self._timeout_s = timeout_s
        self._tries = 1 + retries
        self._pause_s = pause_s
        self._jitter = random.Random()  # not the global one: the run's random numbers do not depend on a service
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if self._url.scheme == "https" else False

    @property
    def address(self) -> str:
        """Return the service's address without its query, where some keep secrets."""
        return str(self._url.copy_with(query=None, fragment=None))

    async def post(self, body: bytes, *, limit: int) -> bytes:
        """Return the body, at most `limit` bytes, of a 200. Raises PostError."""
        said = ["no answer"]
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._tried(body, limit, said)
        except TimeoutError:
            raise PostError(f"no scores in {self._limit}; the last answer: {said[-1]}") from None

    async def _tried(self, body: bytes, limit: int, said: list[str]) -> bytes:
        """Return the body of a 200; what other answers said goes to `said`. Raises PostError."""
        for number in range(self._tries):
            try:
                status, asked, content = await self._exchange(body, limit)
                said.append(f"HTTP {status}: {self.readable(content)}")
            except httpx.TransportError as error:
                status, asked, content = 0, "", b""
                said.append(f"{type(error).__name__}: {error or 'the connection ended'}")
            if status == 200 and len(content) <= limit:
                return content
            if status == 200:
                raise PostError(f"an answer of more than {limit} bytes")
            if status and status not in TRIED_AGAIN and status < 500:
                raise PostError(said[-1])
            pause_s = min(MAX_PAUSE_S, self._pause_s * 2**number) * self._jitter.uniform(0.5, 1.0)
            if number + 1 < self._tries:
                await asyncio.sleep(max(pause_s, float(asked[:9]) if asked.isdigit() else 0.0))
        raise PostError(f"all {self._tries} tries failed; the last failure: {said[-1]}")

    async def _exchange(self, body: bytes, limit: int) -> tuple[int, str, bytes]:
        """Return (status, Retry-After, body) of the answer; the body is cut soon after its length limit."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # nothing to unpack, no bombs
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # No proxy and no netrc: texts and key go only to the service. A limit per read would let a slow drip live.
        client = httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None)
        async with client, client.stream("POST", self._url, content=body, headers=headers) as response:
            content = await read_body(response, limit if response.status_code == 200 else REFUSAL_BYTES)
            return response.status_code, response.headers.get("Retry-After", ""), content

    def readable(self, content: bytes) -> str:
        """Return the start of an answer as text, without the key."""
        text = " ".join(content.decode(errors="replace").split())
        return shortened(text.replace(self._key, "***") if self._key else text)


def service_scores(poster: Poster) -> Callable[..., Awaitable[list[object]]]:
    """Return a reward function of several responses: {"items": [{"prompt", ...}]} out, {"scores": [...]} in.

    It raises RewardError, which ends the run, for an answer that is not one score for each response.
    """
    names = ("prompt", "response", "answer", "messages", "finish", "num_tokens", "turns", "transcript")

    async def scores(  # the parameters are those of a user's function
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[object],
        messages: Sequence[object],
        finishes: Sequence[str],
        num_tokens: Sequence[int],
        turns: Sequence[Sequence[str]],
        transcripts: Sequence[str],
    ) -> list[object]:
        columns = (prompts, responses, answers, messages, finishes, num_tokens, turns, transcripts)
        items = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        for item in items:
            if item["transcript"] == item["response"]:  # the policy wrote all of it, in one turn
                del item["turns"], item["transcript"]
        where = f"reward service {poster.address}"
        whose = f"for {len(items)} responses, the first to prompt {shortened(prompts[0])}"
        try:
            content = await poster.post(
                json.dumps({"items": items}).encode(), limit=ANSWER_BYTES + SCORE_BYTES * len(items)
            )
            answer = json.loads(content)
        except PostError as error:
            raise RewardError(f"{where}: {error}; {whose}") from None
        except (ValueError, RecursionError):
            answer = None
        given = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(given, list) or len(given) != len(items):
            said = poster.readable(content)
            raise RewardError(f'{where}: an answer without a list "scores" of {len(items)} scores: {said}; {whose}')
        return given

    return scores


RETRIES = 3
WAIT_S = 30.0  # for the service to take a request up, before the program's time


@dataclass(frozen=True)
class RemoteSandbox:
    """Runs programs at a service that speaks the protocol of SandboxFusion (sandbox/server/sandbox_api.py)."""

    poster: Poster
    limits: Limits

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        body = {
            "code": program,
            "language": "python",
            "compile_timeout": timeout_s,
            "run_timeout": timeout_s,
            "memory_limit_MB": self.limits.memory_bytes // MIB,
            "stdin": stdin.decode(errors="replace"),
            "files": {},
            "fetch_files": [],
        }
        limit = ANSWER_BYTES + 12 * self.limits.output_bytes  # two outputs, each byte up to six in JSON
        try:
            content = asyncio.run(self.poster.post(json.dumps(body).encode(), limit=limit))
        except PostError as error:
            raise SandboxError(f"sandbox service {self.poster.address}: {error}") from None
        try:
            return self._outcome(json.loads(content)["run_result"])
        except (ValueError, RecursionError, TypeError, KeyError):
            raise self._failure(
                f"no run_result that finished with a return_code or was late: {self.poster.readable(content)}"
            ) from None

    def check(self) -> None:
        """Run a program. Raises SandboxError unless it ends as it must."""
        outcome = self.run("print(6 * 7)", b"", timeout_s=min(20.0, self.limits.timeout_s))
        if not outcome.succeeded or outcome.stdout != b"42\n":
            raise self._failure(f"{outcome.status}, output {shortened(outcome.stdout)} of print(6 * 7)")

    def _outcome(self, run: Mapping[str, object]) -> Execution:
        """Return a run's end. Raises TypeError or KeyError for the service's failures."""
        is_late, code = run["status"] == "TimeLimitExceeded", run.get("return_code")
        if not is_late and (run["status"] != "Finished" or type(code) is not int):
            raise TypeError
        stdout, stderr = (str(run.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
        end: Status = "timeout" if is_late else "finished"
        if max(len(stdout), len(stderr)) > self.limits.output_bytes:
            end = "output"
        return Execution(end, code if type(code) is int and end == "finished" else None, stdout, stderr)

    def _failure(self, what: str) -> SandboxError:
        return SandboxError(f"sandbox service {self.poster.address} answered {what}")
