"""Find functions and classes in a user's Python file by "path/to/file.py:name". Imports no torch."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mega_rl.errors import HungError, UserError, no_such

_PREFIX = "mega_rl_user_"  # names of modules in users' files begin so


def load_from_file(spec: str, *, key: str, kind: str) -> Any:
    """Return the object that "path/to/file.py:name" names. A file runs once, and again after it has changed.

    key: the setting that has `spec`. kind: its word for the object, "function" or "class". Raises UserError for a
    missing file or name and a file that fails to import.
    """
    setting = f"{key}={spec!r}"
    if problem := _bad_place(spec, kind, ()):
        raise UserError(f"{setting}: {problem}")
    path, _, name = spec.rpartition(":")
    file = Path(path)
    module = _load(file.resolve(), file.stat().st_mtime_ns)
    if isinstance(module, UserError):
        raise UserError(f"{setting}: {path} {module}") from module.__cause__
    names = vars(module)
    if name not in names:
        is_a = inspect.isfunction if kind == "function" else callable
        own = (other for other, value in names.items() if is_a(value) and value.__module__ == module.__name__)
        raise UserError(f"{setting}: {path} defines no {name!r}; it has {_listed(own, kind)}")
    return names[name]


def missing_function(spec: str, *, builtin: Sequence[str]) -> str | None:
    """Return the problem if `spec` names no built-in or user function, else None; runs no file."""
    if spec in builtin:
        return None
    path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if (problem := _bad_place(spec, "function", builtin)) and (name or not Path(path).is_file()):
        return problem
    try:
        tree = ast.parse(Path(path).read_bytes(), filename=path)
    except (SyntaxError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{path} is not valid Python{where}"
    functions = [entry.name for entry in tree.body if isinstance(entry, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not name:
        example = next((other for other in functions if other[0] != "_"), "function")
        return f"{problem}:{example}; {path} has {_listed(functions, 'function')}"
    made = {ast.Name: "id", ast.alias: "name", ast.ClassDef: "name"}  # a name that is assigned, imported or a class
    names = {getattr(node, made[type(node)]) for node in ast.walk(tree) if type(node) in made}
    names |= {node.asname for node in ast.walk(tree) if isinstance(node, ast.alias)}
    known = name in names or name in functions
    return None if known else f"{path} defines no {name!r}; it has {_listed(functions, 'function')}"


def _bad_place(spec: str, kind: str, builtin: Sequence[str]) -> str | None:
    """Return why a text is not "path/to/file.py:name" of a file that exists; None if it is."""
    path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    if not path.endswith(".py"):
        return f"legal: {', '.join(builtin)}{' or ' if builtin else ''}path/to/file.py:{kind}"
    if not Path(path).is_file():
        return f"{path}: {no_such('file', Path(path))}"
    return None if name else f"name the {kind} too, as {path}"


def _listed(names: Iterable[str], kind: str) -> str:
    return ", ".join(name for name in names if name[0] != "_") or f"no {kind}"


@lru_cache
def _load(file: Path, changed: int) -> ModuleType | UserError:
    """Run the user's code in `file` as a new module; return it, or its import error.

    changed: when the file did, so that it runs again.
    """
    module_spec = importlib.util.spec_from_file_location(f"{_PREFIX}{file.stem}", file)
    assert module_spec is not None, f"{file} ends in .py"
    assert module_spec.loader is not None, f"{file} ends in .py"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickling look their module up
    before, folder = set(sys.modules), str(file.parent)
    sys.path.append(folder)  # it may import its neighbours, after everything installed
    try:
        with users_code("fails to import"):
            module_spec.loader.exec_module(module)
    except UserError as error:
        del sys.modules[module_spec.name]
        return error
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:  # the next file's folder may have neighbours of the same names
            if file.parent in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
                del sys.modules[name]
    return module


@contextmanager
def users_code(failure: str) -> Iterator[None]:
    """Turn any exception of a user's code into a UserError that begins with `failure`, cause kept.

    The interrupt of code that hangs, a HungError, stays what it is.
    """
    try:
        yield
    except HungError:
        raise
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{failure}: {kind}{error}") from error


def place_in_users_code(error: BaseException) -> str | None:
    """Return where a user's own file raised an error, "agent.py:31 in generate".

    Libraries that the file called belong to it. None for an error of this package, even where a user's file called it.
    """
    frames = [
        (str(frame.f_globals.get("__name__")), frame, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    for module, frame, line in reversed(frames):
        if module.startswith(_PREFIX):
            return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        if module.partition(".")[0] == "mega_rl":
            return None
    return None
