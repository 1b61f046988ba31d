"""Imports of one package with a few names and literals of its bytecode replaced.

Only code objects of the named package change, in memory and after Python's own .pyc cache, so nothing else in the
process and nothing on disk is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn


def rewrite_code(code: CodeType, names: Mapping[str, str], literals: Mapping[str, str]) -> CodeType:
    """A copy of `code` in which attribute and import names and exact string constants are replaced, nested code too.

    Docstrings and longer strings that merely contain a literal stay as they are.
    """

    def constant(value: object) -> object:
        if isinstance(value, str):
            return literals.get(value, value)
        if isinstance(value, tuple):
            return tuple(constant(item) for item in value)
        if isinstance(value, CodeType):
            return rewrite_code(value, names, literals)
        return value

    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(constant(value) for value in code.co_consts),
    )


class RewritingLoader(SourceFileLoader):
    """Loads a source file, rewrites its code and calls `after_exec` with the finished module."""

    def __init__(
        self,
        fullname: str,
        path: str,
        *,
        names: Mapping[str, str],
        literals: Mapping[str, str],
        after_exec: Callable[[ModuleType], None],
    ) -> None:
        super().__init__(fullname, path)
        self._names = names
        self._literals = literals
        self._after_exec = after_exec

    def get_code(self, fullname: str) -> CodeType | None:
        """Rewritten code of the module."""
        code = super().get_code(fullname)
        return None if code is None else rewrite_code(code, self._names, self._literals)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then whoever waits for it."""
        super().exec_module(module)
        self._after_exec(module)


class RewritingFinder:
    """sys.meta_path entry that loads `package` and everything below it through `RewritingLoader`.

    `extra_names` are further names to replace in single modules, by the module's name.
    """

    def __init__(
        self,
        package: str,
        *,
        names: Mapping[str, str],
        literals: Mapping[str, str],
        after_exec: Callable[[ModuleType], None],
        extra_names: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        assert package not in sys.modules, f"{package} is imported already: its code can no longer be rewritten"
        self._package = package
        self._names = names
        self._extra_names = extra_names or {}
        self._literals = literals
        self._after_exec = after_exec

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a module of the package, None for all others."""
        if fullname != self._package and not fullname.startswith(f"{self._package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        spec.loader = RewritingLoader(
            fullname,
            spec.loader.path,
            names={**self._names, **self._extra_names.get(fullname, {})},
            literals=self._literals,
            after_exec=self._after_exec,
        )
        return spec


NEED_TRITON = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")
STANDIN = "_triton_for_megatron_on_cpu"


class AbsentKernel:
    """A kernel that cannot be started."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__qualname__

    def __getitem__(self, grid: object) -> NoReturn:
        raise RuntimeError(f"{self.name} is a Triton kernel, and Triton is not installed")


def stand_in_for_triton() -> dict[str, dict[str, str]]:
    """Make the stand-in importable; returns the names to replace in each of `NEED_TRITON`."""
    triton, language = ModuleType(STANDIN), ModuleType(f"{STANDIN}.language")
    vars(triton).update(jit=AbsentKernel, language=language)
    vars(language).update(constexpr=int)  # an annotation of the kernels' parameters
    sys.modules.update({STANDIN: triton, f"{STANDIN}.language": language})
    names = {"triton": STANDIN, "triton.language": f"{STANDIN}.language"}
    return dict.fromkeys(NEED_TRITON, names)
