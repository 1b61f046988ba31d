"""Orders to the harness inside a sandbox; names and checks of tests that are Python text."""

from __future__ import annotations

import ast
import builtins
import functools
import json
import secrets
import symtable
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mega_rl.rewards.sandbox import Sandbox

_HARNESS = Path(__file__).with_name("harness.py").read_text("utf-8")


def judge(sandbox: Sandbox, timeout_s: float, mode: str, **content: object) -> dict[str, object]:
    """Give the harness an order; return its verdict.

    content: what `harness` says that the mode needs. The verdict, {"value"}, {"passed"} or {"error"}, is the
    last line behind the order's token, of a run that succeeded; without it the verdict is an error.
    """
    token = secrets.token_hex(16)
    order = json.dumps({"token": token, "mode": mode, **content}).encode()
    outcome = sandbox.run(_HARNESS, order, timeout_s=timeout_s)
    if not outcome.succeeded:
        return {"error": outcome.status if outcome.status != "finished" else f"exit code {outcome.return_code}"}
    last = outcome.stdout.rstrip(b"\n").rpartition(b"\n")[2]
    given, _, text = last.partition(b" ")
    try:
        verdict = json.loads(text) if given.decode("ascii", "replace") == token else None
    except (ValueError, RecursionError):
        verdict = None
    return verdict if isinstance(verdict, dict) else {"error": "no verdict"}


MODULES = sys.stdlib_module_names | {"np", "numpy", "pd", "pandas", "scipy", "sympy", "torch"}
SUITES_A_RUN = 128  # suites tried over a stub in one sandbox; a few milliseconds each


class UnknownTestsError(ValueError):
    """A row's tests have an unknown form, or check nothing; the message lists the forms."""


@functools.lru_cache(maxsize=4096)
def suite_of(tests: str, entry: str) -> Mapping[str, object]:
    """Return {"tests", "entry", "names", "modules"}: names are the program's, modules come from the interpreter.

    The row decides, never the program: `entry`, and what the tests read, do not bind or import, and no builtin or
    module has. Tests that read nothing else are about the one builtin that they call. Raises UnknownTestsError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree, table = ast.parse(tests), symtable.symtable(tests, "tests", "exec")
            compile(tree, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownTestsError(f"the tests are not Python: {error}") from None
    nodes = list(ast.walk(tree))
    called = {getattr(one.func, "attr", getattr(one.func, "id", "")) for one in nodes if isinstance(one, ast.Call)}
    if not any(isinstance(node, ast.Assert) for node in nodes) and not any(
        name.startswith("assert") for name in called
    ):
        raise UnknownTestsError("the tests have no assert")
    tables = [table]
    for one in tables:
        tables += one.get_children()
    symbols = [(one is table, symbol) for one in tables for symbol in one.get_symbols()]
    bindings = [(top, one) for top, one in symbols if one.is_assigned() or one.is_imported()]
    bound = {one.get_name() for top, one in bindings if top or one.is_declared_global()}
    read = {one.get_name() for top, one in symbols if one.is_referenced() and (top or one.is_global())} - bound
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    plain = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    modules = (read & MODULES) - plain - {entry}
    names = {name for name in read - modules if not (hasattr(builtins, name) or name.startswith("__"))}
    if entry and not ("check" in bound and hasattr(builtins, entry)):  # `check` gets it as an argument
        names.add(entry)
    if not names and not entry and "solution" not in tests:
        names = called & read
        if len(names) != 1:
            raise UnknownTestsError("the tests call no function of the program; name it in entry_point")
    if classes := [name for name in sorted(names) if name[:1].isupper() and not name.isupper()]:
        raise UnknownTestsError(f"the tests use {classes[0]}, a class of the program, whose objects are no data")
    return {"tests": tests, "entry": entry, "names": sorted(names), "modules": sorted(modules)}


def unfit(sandbox: Sandbox, suites: Sequence[Mapping[str, object]], timeout_s: float) -> Iterator[str]:
    """Yield for each suite why it cannot judge a program, or "".

    Each is tried over a stub, which has every name, as a function that raises. Raises SandboxError.
    """
    for start in range(0, len(suites), SUITES_A_RUN):
        part = suites[start : start + SUITES_A_RUN]
        verdicts = judge(sandbox, timeout_s, "stub", suites=part).get("value")
        if isinstance(verdicts, list):
            yield from map(_reason, verdicts)
        elif len(part) == 1:  # it takes all of the sandbox's time or memory, so it does not pass
            yield ""
        else:
            for one in part:
                yield from unfit(sandbox, [one], timeout_s)


def _reason(verdict: Mapping[str, object]) -> str:
    kind, _, text = str(verdict.get("error", "")).partition(": ")
    if verdict.get("passed") is True:
        return "pass a program whose every function raises: they check nothing"
    if kind == "ModuleNotFoundError":
        return f"need {text.removeprefix('No module named ')}; reward.sandbox.interpreter may name a Python that has it"
    return text if kind == "UnfitTestsError" else ""
