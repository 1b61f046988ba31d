"""Compares what the package uses of Megatron-Core between releases, symbol by symbol: `make compare-megatron`.

    python -m tests.upstream.symbols BASE NEWER...

Each argument is a folder that holds an unpacked release: "megatron" and its metadata. Nothing of it is imported:
releases are read as text, so one that this Python cannot run can be compared too. The table has a row for every class
and function that `mega_rl` imports, calls on an imported class, overrides or patches, and for the settings it passes.

What "changed" means is for a person to read: `--diff SYMBOL` prints the change.
"""

from __future__ import annotations

import argparse
import ast
import difflib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mega_rl"
CONFIGS = (
    "megatron.core.transformer.transformer_config:MLATransformerConfig",
    "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
    "megatron.core.optimizer.optimizer_config:OptimizerConfig",
)
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Symbol:
    """A class, function or constant of a release."""

    module: str
    name: str  # "Class.method" for a method
    node: Definition
    text: str  # of the whole file

    @property
    def source(self) -> str:
        """Source text without docstrings and comments: what is left decides whether a symbol changed."""
        return ast.unparse(_without_docstrings(ast.parse(ast.unparse(self.node))))

    @property
    def signature(self) -> str:
        """Arguments of a function or of a class's constructor; the fields of a dataclass; "" of anything else."""
        node = self.node
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
            fields = [f"{ast.unparse(f.target)}" for f in node.body if isinstance(f, ast.AnnAssign)]
            return ast.unparse(_plain(methods[-1].args)) if methods else ", ".join(fields)
        return ast.unparse(_plain(node.args)) if isinstance(node, ast.FunctionDef) else ""


@dataclass
class Use:
    """How the package uses a symbol."""

    ways: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)


class Release:
    """The source of one release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = next(folder.glob("megatron_core-*.dist-info/METADATA"))
        lines = metadata.read_text(encoding="utf-8").splitlines()
        self.version = next(line.split()[1] for line in lines if line.startswith("Version: "))

    @cache  # noqa: B019 - a handful of objects that live as long as the process
    def module(self, name: str) -> tuple[str, ast.Module] | None:
        """(text, tree) of a module; None where there is none."""
        path = self.folder.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not path.is_file():
            return None
        text = path.read_text(encoding="utf-8")
        return text, ast.parse(text)

    def find(self, module: str, name: str) -> Symbol | None:
        """The definition behind "name" of a module, through imports and, for methods, through base classes."""
        source = self.module(module)
        if source is None:
            return None
        text, tree = source
        first, _, rest = name.partition(".")
        for statement in _statements(tree.body):
            if first in _defined(statement):
                assert isinstance(statement, Definition)
                return self._method(module, statement, rest, text) if rest else Symbol(module, name, statement, text)
        origin = _imported_from(tree, module, first, is_package=self.is_package(module))
        if origin is None or self.module(origin[0]) is None:
            return None
        return self.find(origin[0], f"{origin[1]}.{rest}" if rest else origin[1])

    def is_package(self, module: str) -> bool:
        """Whether a module is a folder."""
        return self.folder.joinpath(*module.split(".")).is_dir()

    def _method(self, module: str, owner: Definition, name: str, text: str) -> Symbol | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for statement in _statements(owner.body):
            if name in _defined(statement):
                assert isinstance(statement, Definition)
                return Symbol(module, f"{owner.name}.{name}", statement, text)
        bases = (self.find(module, f"{base.id}.{name}") for base in owner.bases if isinstance(base, ast.Name))
        return next((base for base in bases if base is not None), None)

    def fields(self, config: str) -> dict[str, str]:
        """Default of each field of a dataclass and of its bases, by name."""
        module, _, name = config.partition(":")
        symbol = self.find(module, name)
        if symbol is None or not isinstance(symbol.node, ast.ClassDef):
            return {}
        defaults: dict[str, str] = {}
        for base in symbol.node.bases:
            if isinstance(base, ast.Name):
                defaults |= self.fields(f"{symbol.module}:{base.id}")
        for statement in symbol.node.body:
            if isinstance(statement, ast.AnnAssign):
                value = statement.value
                defaults[ast.unparse(statement.target)] = "" if value is None else ast.unparse(value)
        return defaults


def uses(base: Release) -> dict[tuple[str, str], Use]:
    """What the package imports, calls, overrides and patches, by (module, name)."""
    actual: dict[tuple[str, str], Use] = defaultdict(Use)

    def add(module: str, name: str, way: str, path: Path) -> None:
        symbol = base.find(module, name)
        if symbol is not None:
            actual[symbol.module, symbol.name].ways.add(way)
            actual[symbol.module, symbol.name].files.add(path.relative_to(PACKAGE).as_posix())

    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = _imports(tree)
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for local, (module, name) in names.items():
            if base.module(f"{module}.{name}") is not None:  # a module: what is taken from it
                for attribute in _attributes_of(tree, local):
                    add(f"{module}.{name}", attribute, "called", path)
                continue
            add(module, name, "imported", path)
            for attribute in sorted(attributes):
                add(module, f"{name}.{attribute}", "called", path)
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for parent in (b.id for b in owner.bases if isinstance(b, ast.Name) and b.id in names):
                for method in (m.name for m in owner.body if isinstance(m, ast.FunctionDef)):
                    add(names[parent][0], f"{names[parent][1]}.{method}", "overridden", path)
    for module, name in _patched():
        add(module, name, "patched", PACKAGE / "parallel" / "accelerator" / "patches.py")
    return dict(actual)


def compare(base: Release, newer: Release, module: str, name: str) -> str:
    """Word for what became of a symbol."""
    old, new = base.find(module, name), newer.find(module, name)
    assert old is not None
    if new is None:
        return "missing"
    if old.source == new.source:
        return "same"
    if old.signature == new.signature:
        return "changed inside"
    gone = [a for a in _names(old.signature) if a not in _names(new.signature)]
    more = [a for a in _names(new.signature) if a not in _names(old.signature)]
    parts = [*(f"-{a}" for a in gone), *(f"+{a}" for a in more)]
    return f"signature {' '.join(parts[:8])}{' ...' if len(parts) > 8 else ''}" if parts else "signature: defaults"


def settings(base: Release, newer: Release) -> Iterator[str]:
    """Lines on fields of upstream's configs that the package sets, and that a newer release lacks or defaults anew."""
    words = {
        node.value if isinstance(node, ast.Constant) else node.arg
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }
    for config in CONFIGS:
        old, new = base.fields(config), newer.fields(config)
        name = config.partition(":")[2]
        gone = sorted(f for f in old if f in words and f not in new)
        anew = sorted(f for f in old if f in new and f not in words and old[f] != new[f])
        changes = ", ".join(f"{f} {old[f]} -> {new[f]}" for f in anew)
        yield f"- {name}: {sum(f in words for f in old)} of its fields are set; gone: {', '.join(gone) or 'none'}; "
        yield f"  other defaults of fields that are not set: {changes or 'none'}"


def _patched() -> Iterator[tuple[str, str]]:
    from mega_rl.parallel.accelerator.patches import patches

    for symbol in sorted({patch.symbol for patch in patches()}):
        module, _, name = symbol.partition(":")
        yield module, name


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """(module, name) of everything that a file imports from Megatron-Core, by its name in the file."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "megatron"
        for alias in node.names
    }


def _attributes_of(tree: ast.Module, name: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under `if` and `try` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _imported_from(tree: ast.Module, module: str, name: str, *, is_package: bool) -> tuple[str, str] | None:
    for statement in _statements(tree.body):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    parents = module.split(".")[: len(module.split(".")) - statement.level + is_package]
                    origin = statement.module or ""
                    return (".".join([*parents, origin]) if statement.level else origin), alias.name
    return None


def _plain(arguments: ast.arguments) -> ast.arguments:
    """The arguments without annotations."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return arguments


def _names(signature: str) -> list[str]:
    try:
        node = ast.parse(f"lambda {signature}: 0", mode="eval").body
    except SyntaxError:
        return signature.split(", ")
    assert isinstance(node, ast.Lambda)
    return [argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            ] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            _plain(node.args)
    return tree


def report(releases: list[Release]) -> Iterator[str]:
    """The comparison as Markdown."""
    base, *newer = releases
    yield "| symbol | use | " + " | ".join(release.version for release in newer) + " |"
    yield "|---|---|" + "---|" * len(newer)
    rows = uses(base)
    for (module, name), use in sorted(rows.items()):
        cells = [compare(base, release, module, name) for release in newer]
        if any(cell != "same" for cell in cells):
            where = ", ".join(sorted(use.files)[:3])
            yield f"| `{module}:{name}` | {', '.join(sorted(use.ways))}: {where} | {' | '.join(cells)} |"
    for release in newer:
        counts: dict[str, int] = defaultdict(int)
        for module, name in rows:
            counts[compare(base, release, module, name).split()[0].strip(":")] += 1
        yield ""
        yield f"{release.version}: {len(rows)} symbols; " + ", ".join(f"{n} {w}" for w, n in sorted(counts.items()))
        yield from settings(base, release)


def main() -> None:
    """Print the comparison, or one symbol's change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="unpacked releases, the oldest first")
    parser.add_argument("--diff", metavar="MODULE:NAME", help="print how one symbol changed instead")
    arguments = parser.parse_args()
    releases = [Release(folder) for folder in arguments.folders]
    if arguments.diff:
        module, _, name = arguments.diff.partition(":")
        texts = [symbol.source if symbol else "" for symbol in (r.find(module, name) for r in releases)]
        lines = difflib.unified_diff(texts[0].splitlines(), texts[-1].splitlines(), lineterm="")
        print("\n".join(lines))
        return
    print("\n".join(report(releases)))


if __name__ == "__main__":
    main()
