"""Names in a user's Python file, read from its text: nothing of it runs, and no torch is imported."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from mega_rl.errors import no_such

Definition = ast.FunctionDef | ast.ClassDef


def in_file(spec: str) -> tuple[Path, str] | None:
    """Return file and name of "path/to/file.py:name", the name empty where it is missing; None of another text."""
    path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    return (Path(path), name) if path.endswith(".py") else None


def missing_name(spec: str, *, builtin: Sequence[str], kind: str) -> str | None:
    """Return why `spec` is neither a built-in name nor path/to/file.py:name of something defined there; None if it is.

    kind: the word for it in the file, "function" or "class".
    """
    if spec in builtin:
        return None
    place = in_file(spec)
    if place is None:
        return f"legal: {', '.join(builtin)} or path/to/file.py:{kind}"
    path, name = place
    if not path.is_file():
        return f"{path}: {no_such('file', path)}"
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{path} is not valid Python{where}"
    names = {name for statement in tree.body for name in _bound(statement)}
    if name in names:
        return None
    nodes = (ast.FunctionDef, ast.AsyncFunctionDef) if kind == "function" else (ast.ClassDef, ast.FunctionDef)
    public = [entry.name for entry in tree.body if isinstance(entry, nodes) and entry.name[0] != "_"]
    if name:
        return f"{path} defines no {name!r}; it has {', '.join(public or sorted(names)) or 'nothing'}"
    example = public[0] if public else kind
    return f"name the {kind} too, as {path}:{example}; {path} has {', '.join(public) or f'no {kind}'}"


def definition(spec: str) -> Definition | None:
    """Return the function or class that "path/to/file.py:name" names; None where the file has none such."""
    place = in_file(spec)
    if place is None:
        return None
    path, name = place
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError):
        return None
    return next((entry for entry in reversed(tree.body) if isinstance(entry, Definition) and entry.name == name), None)


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement of a module binds to something callable."""
    if isinstance(statement, Definition | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()
