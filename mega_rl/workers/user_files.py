"""Functions and classes in a user's Python file, by "path/to/file.py:name"."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mega_rl.errors import HungError, UserError

_PREFIX = "mega_rl_user_"  # of the names of modules in users' files


def load_from_file(spec: str, *, key: str, kind: str) -> Any:
    """Return what "path/to/file.py:name" names, running the file; `key` is the setting that has it.

    kind: the word for it, "function" or "class". Raises UserError for a missing file or name and a file that fails to
    import.
    """
    setting = f"{key}={spec!r}"
    path, _, name = spec.rpartition(":")
    file = Path(path)
    if file.suffix != ".py" or not name:
        raise UserError(f"{setting}: must be path/to/file.py:{kind}")
    if not file.is_file():
        raise UserError(f"{setting}: there is no file {path}")
    names = vars(_load(file, setting))
    if name not in names:
        plural = {"function": "functions", "class": "classes"}[kind]
        others = sorted(name for name, value in names.items() if name[0] != "_" and _is_a(kind, value))
        raise UserError(f"{setting}: {path} has no {name!r}; its {plural} are {', '.join(others) or 'none'}")
    return names[name]


def _is_a(kind: str, value: object) -> bool:
    return inspect.isfunction(value) if kind == "function" else inspect.isclass(value)


# Modules that users' files imported from their own folders: the next file may have others of the same names.
_neighbours: set[str] = set()


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let imports find the modules of a folder, after everything installed and until the block ends."""
    for name in _neighbours:
        sys.modules.pop(name, None)
    _neighbours.clear()
    before, entry = set(sys.modules), str(folder.resolve())
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
        _neighbours.update(name for name, file in files.items() if folder.resolve() in Path(file).parents)


def _load(file: Path, setting: str) -> ModuleType:
    """Return the module in `file`, as a new module of its own name. It is the user's own code and runs as such."""
    module_spec = importlib.util.spec_from_file_location(f"{_PREFIX}{file.stem}", file)
    assert module_spec is not None, f"{file} ends in .py"
    assert module_spec.loader is not None, f"{file} ends in .py"
    module = importlib.util.module_from_spec(module_spec)
    try:
        with _importable(file.parent), users_code(f"{setting}: {file} fails to import"):
            sys.modules[module_spec.name] = module  # dataclasses and pickling look their module up
            module_spec.loader.exec_module(module)
    except UserError:
        del sys.modules[module_spec.name]
        raise
    return module


@contextmanager
def users_code(failure: str) -> Iterator[None]:
    """Run a user's own code, which may raise anything: as a UserError that begins with `failure`, cause kept.

    The interrupt of code that hangs, a HungError, stays what it is.
    """
    try:
        yield
    except HungError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{failure}: {type(error).__name__}: {error}") from error


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
