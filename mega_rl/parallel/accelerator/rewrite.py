"""Imports of one package with a few names and literals of its bytecode replaced.

Only code objects of the named package change, in memory and after Python's own .pyc cache, so nothing else in the
process and nothing on disk is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn


def rewrite_code(code: CodeType, names: Mapping[str, str], literals: Mapping[str, str]) -> CodeType:
    """Return a copy of `code` with attribute and import names and exact string constants replaced, nested code too.

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


@dataclass(frozen=True)
class RewritingFinder:
    """sys.meta_path entry that loads `package` and everything below it with rewritten code."""

    package: str
    names: Mapping[str, str]
    literals: Mapping[str, str]
    after_exec: Callable[[ModuleType], None]  # called with each finished module
    # further names to replace in single modules, by the module's name
    extra_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.package not in sys.modules, f"{self.package} is imported already: its code can no longer change"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the package, None for all others."""
        if fullname != self.package and not fullname.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path, self)
        return spec


class _Loader(SourceFileLoader):
    """Loader of a source file, which rewrites its code as a finder says."""

    def __init__(self, fullname: str, path: str, finder: RewritingFinder) -> None:
        super().__init__(fullname, path)
        self._finder = finder

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the rewritten code of the module."""
        code, finder = super().get_code(fullname), self._finder
        names = {**finder.names, **finder.extra_names.get(fullname, {})}
        return None if code is None else rewrite_code(code, names, finder.literals)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then whoever waits for it."""
        super().exec_module(module)
        self._finder.after_exec(module)


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
