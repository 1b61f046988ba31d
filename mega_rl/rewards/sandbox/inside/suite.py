"""Tests as Python text, run over a candidate's names; asserts are counted."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import sys
import types

from mega_rl.rewards.sandbox.inside.values import Value

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
            raise NotImplementedError(name)

        if name.startswith("__"):
            raise AttributeError(name)
        return function

    def keep_changes(self, keep: bool) -> None:
        pass
