"""Program that judges a candidate inside a sandbox: the tests in this process, the candidate in a child.

It reads an order from standard input, starts the candidate's program in an interpreter of its own, and talks with it in
JSON over pipes. The candidate's process never holds the tests, an expected value or the token, and has no descriptor of
this one's: it answers calls. What it returns is data, so that no `__eq__` of its own decides anything.

An order: {"token", "mode": "call", "code", "entry", "arguments"} or {"token", "mode": "tests", "code", "tests",
"entry"}. The last line of standard output is the token, a space, and JSON: {"value": ...}, {"passed": true} or
{"error": text}.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import os
import subprocess
import sys
import types

from mega_rl.sandbox.inside.values import Value, decode, encode

CANDIDATE = ""  # text of `candidate`, put here by `mega_rl.sandbox.orders`
MOST_MESSAGE = 4 << 20  # bytes of one message of the candidate
PR_SET_DUMPABLE = 4
UNARY = ("len", "iter", "next", "str", "repr", "bool", "int", "float", "abs", "neg", "enter")
OF_A_CONTAINER = ("getitem", "setitem", "delitem", "contains", "exit")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge")


class CandidateChannel:
    """The candidate's process: requests to it, and the functions of the tests that it may call back."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-s", *(["-S"] if sys.flags.no_site else []), "-c", CANDIDATE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=True,
        )
        self._functions: list[Value] = []
        self.names: list[str] = self.ask("load", code)

    def ask(self, op: str, *parts: Value) -> Value:
        """Return the candidate's answer; an exception of its own is raised here by the name of a builtin one."""
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
                raise _exception(str(value[0]))(str(value[1]))
            else:
                return decode(value, self._referred)

    def call(self, target: Value, arguments: Value, keywords: Value) -> Value:
        """Return what a function of the candidate returns; lists, dicts and sets that it changed change here."""
        value, after = self.ask("call", target, list(arguments), dict(keywords))
        for place, own in enumerate(arguments):
            new = after[place]
            if isinstance(own, list) and isinstance(new, list):
                own[:] = new
            elif isinstance(own, (dict, set)) and type(own) is type(new):
                own.clear()
                own.update(new)
        return value

    def encode(self, value: Value) -> Value:
        """Return a value's form in JSON. Raises TypeError for an object of the tests that is no data."""
        return encode(value, self._refer)

    def _refer(self, value: Value) -> Value:
        if isinstance(value, Remote):
            return {"object": object.__getattribute__(value, "_number")}
        if not callable(value):
            raise TypeError("a test passes an object of " + type(value).__name__ + ", which is no data")
        self._functions.append(value)
        return {"function": len(self._functions) - 1}

    def _referred(self, kind: str, parts: Value) -> Value:
        if kind != "object":
            raise ValueError("the candidate sent no value")
        return Remote(self, int(parts))

    def _call_back(self, number: int, arguments: Value) -> None:
        """Call a function of the tests for the candidate."""
        with CallBack(self):
            value = self._functions[number](*decode(arguments, self._referred))
            self._send(["returned", self.encode(value)])

    def _send(self, message: Value) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def send_raised(self, error: BaseException) -> None:
        """Send what a function of the tests raised."""
        self._send(["raised", type(error).__name__, str(error)[:500]])


def _exception(name: str) -> Value:
    """Return the builtin exception of a name; RuntimeError for what is none, or ends the process."""
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


class CallBack:
    """Context of a function of the tests: the candidate gets what it raises."""

    def __init__(self, channel: CandidateChannel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._channel.send_raised(error)
        return isinstance(error, Exception)


class Remote:
    """An object of the candidate.

    It never equals data, nor is compared or calculated with data: the operator of the candidate would decide, and learn
    the expected value. Two objects of the candidate go together as it says.
    """

    def __init__(self, channel: CandidateChannel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Value, **keywords: Value) -> Value:
        return object.__getattribute__(self, "_channel").call(self, arguments, keywords)

    def __getattr__(self, name: str) -> Value:
        return object.__getattribute__(self, "_channel").ask("get", self, name)

    def __setattr__(self, name: str, value: Value) -> None:
        object.__getattribute__(self, "_channel").ask("set", self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and operate(self, "__eq__", other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int(object.__getattribute__(self, "_number"))


def operate(remote: Remote, name: str, *arguments: Value) -> Value:
    """Return what an operator of the candidate gives."""
    return object.__getattribute__(remote, "_channel").ask("operate", remote, name, list(arguments))


def operator(name: str, *, between_objects: bool) -> Value:
    """Return the method of an operator."""

    def method(remote: Remote, *arguments: Value) -> Value:
        if between_objects and not isinstance(arguments[0], Remote):
            return NotImplemented
        return operate(remote, name, *arguments)

    return method


for _plain in UNARY + OF_A_CONTAINER + BINARY:
    _name = "__" + _plain + "__"
    setattr(Remote, _name, operator(_name, between_objects=_plain in BINARY))


def run_tests(channel: CandidateChannel, text: str, entry: str) -> None:
    """Run tests over the candidate's names. Raises what a test raises."""
    reads = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} | {entry}
    space: dict[str, Value] = {"__name__": "tests"}
    for name in channel.names:
        if name in reads:
            space[name] = channel.ask("name", name)
    solution = types.ModuleType("solution")
    solution.__dict__["__getattr__"] = lambda name: channel.ask("name", name)
    sys.modules["solution"] = solution
    before = dict(space)
    exec(compile(text, "tests", "exec"), space)
    own = [name for name, value in space.items() if name not in before and isinstance(value, types.FunctionType)]
    if "check" in own and entry and not _calls(text, "check"):
        space["check"](space[entry])
    for name in own:
        if name.startswith("test") and not space[name].__code__.co_argcount and not _calls(text, name):
            space[name]()


def _calls(text: str, name: str) -> bool:
    """Return whether a statement of the text itself, in no function, calls a name."""
    outer = [node for node in ast.parse(text).body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    nodes = [node for statement in outer for node in ast.walk(statement)]
    return any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == name for node in nodes)


def call_entry(channel: CandidateChannel, entry: str, arguments: Value) -> Value:
    """Return what the candidate's function returns, or the method of that name of its class Solution."""
    if entry in channel.names:
        function = channel.ask("name", entry)
    elif "Solution" in channel.names:
        function = getattr(channel.ask("name", "Solution")(), entry)
    else:
        raise NameError("the program defines no " + entry)
    return channel.encode(function(*arguments))


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
        channel = CandidateChannel(order["code"])
        if order["mode"] == "call":
            verdict.content = {"value": call_entry(channel, order["entry"], order["arguments"])}
        else:
            run_tests(channel, order["tests"], order["entry"])
            verdict.content = {"passed": True}


if __name__ == "__main__":
    main()
