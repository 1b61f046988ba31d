"""Program that judges a candidate inside a sandbox: tests here, the candidate in a child. It needs only Python 3.8.

The child is forked before anything is read, and the two talk in JSON over pipes. The candidate's process never holds
the tests, an expected value or the token, and has no descriptor of this one's: it answers calls. What it returns is
data of builtin types, so that none of its `__eq__` decides anything.

An order: {"token", "mode": "call", "code", "entry", "arguments"}, {"token", "mode": "tests", "code", "suite": {"tests",
"entry", "names", "modules"}}, or {"token", "mode": "stub", "suites"}. The last line of standard output is
the token, a space, and JSON: {"value": ...}, {"passed": true} or {"error": text}.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import types
from itertools import islice
from typing import Any

Value = Any  # code and tests use any type

# Name of a form, the type that it has, and its parts as JSON; lists and dicts that hold values come by themselves.
FORMS = (
    ("bytes", (bytes, bytearray), lambda value: bytes(value).hex(), bytes.fromhex),
    ("range", range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    ("complex", complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
)
COLLECTIONS = (("tuple", tuple), ("set", set), ("frozenset", frozenset), ("iterator", None))
MOST_ITEMS = 1_000_000  # an iterator's


def encode(value: Value) -> Value:
    """Return a value's form in JSON: builtin types, iterators, arrays of NumPy. Raises TypeError for other objects.

    A subclass of a builtin type has that type's form. A list is a list; a type that JSON lacks is an object with one
    entry, as {"tuple": [1, 2]}.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encode(part) for part in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    for name, collection in COLLECTIONS[:3]:
        if isinstance(value, collection):
            return {name: [encode(part) for part in value]}
    for name, form, parts, _ in FORMS:
        if isinstance(value, form):
            return {name: parts(value)}
    if not isinstance(value, type) and hasattr(value, "__next__"):
        return {"iterator": [encode(part) for part in islice(value, MOST_ITEMS)]}
    if not isinstance(value, type) and hasattr(value, "tolist"):
        return encode(value.tolist())
    raise TypeError("an object of " + type(value).__name__ + " is not data")


def decode(value: Value) -> Value:
    """Return a value from its form in JSON, whatever the other side writes. Raises ValueError or TypeError."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {decode(key): decode(part) for key, part in parts}
    for name, _, _, made in FORMS:
        if kind == name:
            return made(parts)
    for name, collection in COLLECTIONS:
        if kind == name:
            return (collection or iter)([decode(part) for part in parts])
    raise ValueError("no form of a value: " + str(kind))


class CandidateServer:
    """The candidate's code in its process, which answers requests.

    Nothing here is a secret or decides anything: the code may read and change all of it.
    """

    def __init__(self, requests: Value, answers: Value) -> None:
        self._requests, self._answers = requests, answers
        self._module = types.ModuleType("solution")  # the code's own tests behind `__name__ == "__main__"` stay out

    def serve(self) -> None:
        """Answer requests until there are no more."""
        operations: dict[str, Value] = {
            "load": self._load,
            "name": lambda name: getattr(self._module, name),
            "call": self._call,
        }
        for line in self._requests:
            op, *parts = json.loads(line)
            with self:
                self._send("value", encode(operations[op](*map(decode, parts))))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Answer with what the code raises, SystemExit and all."""
        if error is not None:
            names = [parent.__name__ for parent in type(error).__mro__ if hasattr(builtins, parent.__name__)]
            self._send("raised", [names[0], str(error)[:500]])
        return True

    def _load(self, code: str) -> dict[str, bool]:
        """Run the code; return the names that it defines, and whether each can be called."""
        sys.modules["solution"] = self._module
        exec(compile(code, "program.py", "exec"), self._module.__dict__)
        return {name: callable(value) for name, value in self._module.__dict__.items() if not name.startswith("__")}

    def _call(self, name: str, arguments: list[Value], keywords: dict[str, Value]) -> list[Value]:
        """Return the result, and arguments that may have changed; name: maybe "Solution.method"."""
        kind, _, method = name.rpartition(".")
        target = getattr(getattr(self._module, kind)(), method) if kind else getattr(self._module, name)
        result = target(*arguments, **keywords)
        return [result, [part if isinstance(part, (list, dict, set)) else None for part in arguments]]

    def _send(self, kind: str, value: Value) -> None:
        self._answers.write(json.dumps([kind, value]) + "\n")
        self._answers.flush()


def start_candidate() -> tuple[Value, Value]:
    """Fork the candidate's process, without standard input and output; return the pipes to it and from it."""
    requests, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(requests[1])
        os.close(answers[0])
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        CandidateServer(os.fdopen(requests[0]), os.fdopen(answers[1], "w")).serve()
        os._exit(0)
    os.close(requests[0])
    os.close(answers[1])
    return os.fdopen(requests[1], "w"), os.fdopen(answers[0], "rb")


ALIASES = {"np": "numpy", "pd": "pandas"}


class UnfitTestsError(Exception):
    """Tests that check nothing, or that no harness can run."""


class Suite(ast.NodeTransformer):
    """A row's tests over a channel to the candidate; counts asserts and functions that ran."""

    def __init__(self, channel: Value) -> None:
        self.entered: set[int] = set()  # first lines of functions
        self._channel, self._asserts = channel, 0
        self._failed = False  # an assert, whatever the tests made of its error

    def visit_Assert(self, node: Value) -> Value:
        self.generic_visit(node)
        node.test = self._watched(node.test, "True")
        return node

    def visit_Call(self, node: Value) -> Value:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return self._watched(node, "False") if name.startswith("assert") else node

    def visit_FunctionDef(self, node: Value) -> Value:
        self.generic_visit(node)
        line = min(part.lineno for part in [node, *node.decorator_list])
        node.body[:0] = ast.parse("__suite__.entered.add(" + str(line) + ")").body
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def _watched(self, node: Value, decides: str) -> Value:
        """Return the expression of an assert, or of a call of assert..., between `begin` and `end`."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            node.values = [self._watched(value, decides) for value in node.values]
            return node
        call: Value = ast.parse("__suite__.end(__suite__.begin(), None, " + decides + ")", mode="eval").body
        call.args[1] = node
        return call

    def begin(self) -> None:
        """Hold back changes of arguments: they must not reach the assert's other side."""
        self._channel.keep_changes(True)

    def end(self, begun: None, value: Value, decides: bool) -> Value:
        """Count an assert; return its value, which is asked for its truth once."""
        self._channel.keep_changes(False)
        self._asserts += 1
        if decides:
            value = bool(value)
            self._failed = self._failed or not value
        return value

    def run(self, tests: str, entry: str, names: list[str], modules: list[str]) -> None:
        """Run the text, then its functions and classes of tests that have not run yet.

        Raises UnfitTestsError for tests that check nothing, and what a test raises.
        """
        space: dict[str, Value] = {"__name__": "__main__", "__suite__": self}
        for name in modules:
            with contextlib.suppress(ImportError):
                space[name] = importlib.import_module(ALIASES.get(name, name))
        space.update((name, self._channel.name(name)) for name in names if self._channel.has(name))
        given = dict(space)
        solution = types.ModuleType("solution")
        solution.__dict__.update(__getattr__=self._channel.name, __all__=[])  # `import *`: the names are there already
        sys.modules["solution"] = solution
        if "unittest" in tests:
            importlib.import_module("unittest").__dict__["main"] = lambda *parts, **rest: None  # classes run below
        exec(compile(ast.fix_missing_locations(self.visit(ast.parse(tests))), "tests", "exec"), space)
        for name, value in list(space.items()):
            if given.get(name) is value:
                continue
            if isinstance(value, type) and value.__module__ == "__main__":
                self._run_class(value)
            elif isinstance(value, types.FunctionType) and value.__code__.co_firstlineno not in self.entered:
                if name.startswith("test"):
                    self._run_function(name, value)
                elif name == "check":
                    self._run_function(name, value, *([self._channel.name(entry)] if entry else []))
        if self._failed:
            raise AssertionError("an assert failed, and the tests went on")
        if not self._asserts:
            raise UnfitTestsError("run no assert")

    def _run_class(self, kind: type) -> None:
        """Run the methods of a TestCase, or of a class Test... as pytest does."""
        unittest: Value = sys.modules.get("unittest")
        if unittest is not None and issubclass(kind, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
            if not result.wasSuccessful():
                raise AssertionError(str(result.failures + result.errors)[-400:])
        elif kind.__name__.startswith("Test"):
            for name in [name for name in dir(kind) if name.startswith("test")]:
                own: Value = kind()
                if hasattr(own, "setup_method"):
                    own.setup_method(*[None] * len(inspect.signature(own.setup_method).parameters))
                self._run_function(kind.__name__ + "." + name, getattr(own, name))

    def _run_function(self, name: str, function: Value, *arguments: Value) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UnfitTestsError("have a generator " + name + ", whose asserts nobody runs")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError:
            fix = "; name the function in entry_point" if name == "check" else ""
            raise UnfitTestsError("have a function " + name + ", which takes other arguments" + fix) from None
        value = function(*arguments)
        if inspect.iscoroutine(value):
            importlib.import_module("asyncio").run(value)


class Stub:
    """Candidate whose every name is a function that raises; tests that it passes check nothing."""

    def has(self, name: str) -> bool:
        return True

    def name(self, name: str) -> Value:
        def function(*arguments: Value, **keywords: Value) -> None:
            if any(map(callable, arguments)):
                raise UnfitTestsError("pass a function to the program, which gets data")
            raise NotImplementedError(name)

        if name.startswith("__"):
            raise AttributeError(name)
        return function

    def keep_changes(self, keep: bool) -> None:
        pass


MOST_MESSAGE = 4 << 20  # bytes of one message of the candidate
PR_SET_DUMPABLE = 4
STUB_S = 1.0  # for the tests of one row over a stub


class CandidateChannel:
    """Channel to the candidate's process."""

    def __init__(self, requests: Value, answers: Value, code: str) -> None:
        self._requests, self._answers = requests, answers
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
        self._requests.write(json.dumps([op, *map(encode, parts)]) + "\n")
        self._requests.flush()
        line = self._answers.readline(MOST_MESSAGE)
        if not line.endswith(b"\n"):
            raise SystemExit("the candidate's process ended, or sent too much")
        kind, value = json.loads(line)
        if kind == "value":
            return decode(value)
        error = _exception(str(value[0]))
        ends_loop = issubclass(error, (StopIteration, StopAsyncIteration))
        raise (RuntimeError if ends_loop else error)(str(value[1]))

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
    return encode(channel.call(entry if channel.has(entry) else "Solution." + entry, *arguments))


class VerdictWriter:
    """Context of one order: at its end the verdict is written, and the process ends."""

    def __init__(self, token: str) -> None:
        self.content: dict[str, Value] = {"error": "no verdict"}
        self._token = token
        self._output = os.dup(1)
        os.dup2(2, 1)  # tests print to the log

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
    candidate = start_candidate()
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the candidate is the same user: no look into this process
    order = json.loads(sys.stdin.buffer.read())
    with VerdictWriter(order["token"]) as verdict:
        if order["mode"] == "stub":
            verdict.content = {"value": [judge_stub(suite, order["token"]) for suite in order["suites"]]}
        elif order["mode"] == "call":
            channel = CandidateChannel(*candidate, order["code"])
            verdict.content = {"value": call_entry(channel, order["entry"], order["arguments"])}
        else:
            Suite(CandidateChannel(*candidate, order["code"])).run(**order["suite"])
            verdict.content = {"passed": True}


if __name__ == "__main__":
    main()
