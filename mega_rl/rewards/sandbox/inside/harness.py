"""Program that judges a candidate inside a sandbox: tests here, the candidate in a child.

It reads an order from standard input, starts the candidate's program in another interpreter, and talks with it in
JSON over pipes. The candidate's process never holds the tests, an expected value or the token, and has no descriptor of
this one's: it answers calls. What it returns is data of builtin types, so that none of its `__eq__` decides anything.

An order: {"token", "mode": "call", "code", "entry", "arguments"}, {"token", "mode": "tests", "code", "suite": {"tests",
"entry", "names", "modules"}}, or {"token", "mode": "stub", "suites"}. The last line of standard output is
the token, a space, and JSON: {"value": ...}, {"passed": true} or {"error": text}.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys

from mega_rl.rewards.sandbox.inside.suite import Stub, Suite
from mega_rl.rewards.sandbox.inside.values import Value, decode, encode

CANDIDATE = ""  # text of `candidate`, put here by `mega_rl.rewards.sandbox.suites`
MOST_MESSAGE = 4 << 20  # bytes of one message of the candidate
PR_SET_DUMPABLE = 4
STUB_S = 1.0  # for the tests of one row over a stub


class CandidateChannel:
    """Channel to the candidate's process, which may call back functions of the tests."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-s", *(["-S"] if sys.flags.no_site else []), "-c", CANDIDATE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=True,
        )
        self._functions: list[Value] = []
        self._changes: list[tuple[Value, Value]] = []  # arguments of calls, and how they are afterwards
        self._keeps_changes = False
        self._names: dict[str, bool] = self.ask("load", code)  # whether each can be called

    def has(self, name: str) -> bool:
        """Return whether the candidate defines a name."""
        return name in self._names

    def ask(self, op: str, *parts: Value) -> Value:
        """Return the candidate's answer; raises its exception as the builtin one of that name.

        StopIteration would end a loop of the tests, so it is RuntimeError.
        """
        self._send([op, *(self.encode(part) for part in parts)])
        while True:
            assert self._process.stdout is not None
            line = self._process.stdout.readline(MOST_MESSAGE)
            if not line.endswith(b"\n"):
                raise SystemExit("the candidate's process ended, or sent too much")
            kind, value = json.loads(line)
            if kind == "callback":
                self._call_back(*value)
            elif kind == "raised":
                error = _exception(str(value[0]))
                ends_loop = issubclass(error, (StopIteration, StopAsyncIteration))
                raise (RuntimeError if ends_loop else error)(str(value[1]))
            else:
                return decode(value, _refused)

    def call(self, name: str, /, *arguments: Value, **keywords: Value) -> Value:
        """Return the result of a candidate's function; arguments that it changed change here.

        Within an assert they change at its end.
        """
        value, after = self.ask("call", name, list(arguments), keywords)
        self._changes += zip(arguments, after)  # noqa: B905
        if not self._keeps_changes:
            self.keep_changes(False)
        return value

    def keep_changes(self, keep: bool) -> None:
        """Change the arguments of calls so far; keep: of later calls, next time."""
        changes, self._changes, self._keeps_changes = self._changes, [], keep
        for own, new in changes:
            if isinstance(own, list) and isinstance(new, list):
                own[:] = new
            elif isinstance(own, (dict, set)) and type(own) is type(new):
                own.clear()
                own.update(new)

    def name(self, name: str) -> Value:
        """Return the candidate's value of a name, or a function that calls it."""
        return functools.partial(self.call, name) if self._names.get(name) else self.ask("name", name)

    def encode(self, value: Value) -> Value:
        """Return a value's form in JSON. Raises TypeError for an object of the tests."""
        return encode(value, self._refer)

    def _refer(self, value: Value) -> Value:
        if hasattr(value, "__next__"):
            return {"iterator": [self.encode(part) for part in value]}
        if not callable(value):
            raise TypeError("a test passes an object of " + type(value).__name__ + ", which is no data")
        self._functions.append(value)
        return {"function": len(self._functions) - 1}

    def _call_back(self, number: int, arguments: Value) -> None:
        """Call a function of the tests for the candidate, which gets what it raises."""
        try:
            value = self._functions[number](*decode(arguments, _refused))
            self._send(["returned", self.encode(value)])
        except Exception as error:  # noqa: BLE001 - a function of the tests may raise anything
            self._send(["raised", type(error).__name__, str(error)[:500]])

    def _send(self, message: Value) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()


def _refused(kind: str, parts: Value) -> Value:
    raise ValueError("the candidate sent no value")


def _exception(name: str) -> Value:
    """Return the builtin exception of a name; RuntimeError for what is none, or ends the process."""
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def judge_stub(suite: dict[str, Value], token: str) -> Value:
    """Return the verdict of tests over the stub, within a second."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.setitimer(signal.ITIMER_REAL, STUB_S)
        with VerdictWriter(token) as verdict:
            Suite(Stub()).run(**suite)
            verdict.content = {"passed": True}
    os.close(writer)
    with os.fdopen(reader) as file:
        words = file.read().partition(token)[2]
    os.waitpid(child, 0)
    return json.loads(words or '{"error": "timeout"}')


def call_entry(channel: CandidateChannel, entry: str, arguments: Value) -> Value:
    """Call the candidate's function, or the method of that name on its `Solution` class."""
    if not channel.has(entry) and not channel.has("Solution"):
        raise NameError("the program defines no " + entry)
    return channel.encode(channel.call(entry if channel.has(entry) else "Solution." + entry, *arguments))


class VerdictWriter:
    """Context of one order: at its end the verdict is written, and the process ends."""

    def __init__(self, token: str) -> None:
        self.content: dict[str, Value] = {"error": "no verdict"}
        self._token = token
        self._output = os.dup(1)
        os.dup2(2, 1)  # what tests print

    def __enter__(self) -> VerdictWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.content = {"error": (type(error).__name__ + ": " + str(error))[:500]}
        os.write(self._output, ("\n" + self._token + " " + json.dumps(self.content) + "\n").encode())
        os._exit(0)


def main() -> None:
    """Judge one order."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the candidate is the same user: no look into this process
    order = json.loads(sys.stdin.buffer.read())
    with VerdictWriter(order["token"]) as verdict:
        if order["mode"] == "stub":
            verdict.content = {"value": [judge_stub(suite, order["token"]) for suite in order["suites"]]}
        elif order["mode"] == "call":
            channel = CandidateChannel(order["code"])
            verdict.content = {"value": call_entry(channel, order["entry"], order["arguments"])}
        else:
            Suite(CandidateChannel(order["code"])).run(**order["suite"])
            verdict.content = {"passed": True}


if __name__ == "__main__":
    main()
