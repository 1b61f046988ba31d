"""Measurements of the package's structure: `python -m tests.house` prints them as a table.

tests/unit_tests/test_architecture.py holds them to limits. A function's lines are those of its definition with its
docstring; nesting counts `if`, `for`, `while`, `with`, `try` and `match` inside one another, an `elif` as its `if`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).parents[1] / "mega_rl"
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A docstring begins with an imperative verb or a noun of the field, so with none of these.
BANNED_FIRST_WORDS = frozenset((
    "what", "whether", "how", "where", "which", "who", "whom", "whose", "of", "nothing", "none", "nobody", "both", "so",
    "everything", "it", "as", "those", "these", "until", "ours",
))  # fmt: skip
BANNED_NAMES = frozenset({"found", "told"})  # of variables and arguments: name the thing


@dataclass(frozen=True)
class Function:
    """A function or method; `name` is "folder/file.py: function"."""

    name: str
    lines: int
    parameters: int  # without self and cls
    nesting: int


@dataclass(frozen=True)
class House:
    """Measurements of a package; paths are relative to it."""

    files: dict[str, int]  # lines
    functions: list[Function]
    methods: dict[str, int]  # by class, "folder/file.py: Class"
    folders: dict[str, int]  # files that are not __init__ or __main__
    class_names: dict[str, list[str]]  # files of each class name
    environment_readers: list[str]
    foreign_changes: list[str]
    config_takers: list[str]  # functions with a parameter of type Config
    vague_docstrings: dict[str, int]  # by file: those that begin with a word of BANNED_FIRST_WORDS
    vague_names: dict[str, int]  # by file: variables and arguments of BANNED_NAMES
    own_lazy_imports: int  # of this package, inside functions
    any_annotations: int
    type_ignores: int
    broad_excepts: int
    public_functions: int
    documented_functions: int

    @property
    def package_lines(self) -> int:
        """Return the lines of all files."""
        return sum(self.files.values())


def measure(package: Path = PACKAGE) -> House:
    """Return the measurements of every module below `package`."""
    files: dict[str, int] = {}
    functions: list[Function] = []
    methods: dict[str, int] = {}
    class_names: dict[str, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    readers, changers, config_takers = [], [], []
    docstrings: dict[str, int] = {}
    for path in sorted(package.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()
        nodes = list(ast.walk(ast.parse(text)))
        files[name] = text.count("\n")
        counts["ignores"] += text.count("# type: ignore")
        if any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes):
            readers.append(name)
        if vague := sum(map(_is_vague, nodes)):
            docstrings[name] = vague
        if _changes_foreign_modules(nodes, package.name):
            changers.append(name)
        for node in nodes:
            if isinstance(node, _FUNCTIONS):
                functions.append(_function(name, node))
                if _takes_config(node):
                    config_takers.append(f"{name}: {node.name}")
                counts["public"] += not node.name.startswith("_")
                counts["documented"] += not node.name.startswith("_") and ast.get_docstring(node) is not None
            elif isinstance(node, ast.ClassDef):
                methods[f"{name}: {node.name}"] = sum(isinstance(one, _FUNCTIONS) for one in node.body)
                class_names[node.name].append(name)
            elif isinstance(node, ast.Name) and node.id == "Any":
                counts["any"] += 1
            elif isinstance(node, ast.ExceptHandler):
                counts["broad"] += node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        counts["lazy"] += len(set(_own_lazy_imports(nodes, package.name)))
    folders = Counter(Path(name).parent.as_posix() for name in files if not Path(name).name.startswith("__"))
    return House(
        files=files,
        functions=functions,
        methods=methods,
        folders=dict(folders),
        class_names=dict(class_names),
        environment_readers=readers,
        foreign_changes=changers,
        config_takers=config_takers,
        vague_docstrings=docstrings,
        vague_names=vague_names(package),
        own_lazy_imports=counts["lazy"],
        any_annotations=counts["any"],
        type_ignores=counts["ignores"],
        broad_excepts=counts["broad"],
        public_functions=counts["public"],
        documented_functions=counts["documented"],
    )


def vague_names(folder: Path) -> dict[str, int]:
    """Return how often each module below `folder` that does so binds a name of BANNED_NAMES."""
    counts = {
        path.relative_to(folder).as_posix(): sum(map(_binds_banned_name, ast.walk(ast.parse(path.read_text("utf-8")))))
        for path in sorted(folder.rglob("*.py"))
    }
    return {name: count for name, count in counts.items() if count}


def _is_vague(node: ast.AST) -> bool:
    """Return whether a node has a docstring that begins with a word of BANNED_FIRST_WORDS."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    first = re.match(r"\w+", ast.get_docstring(node) or "")
    return first is not None and first[0].lower() in BANNED_FIRST_WORDS


def _binds_banned_name(node: ast.AST) -> bool:
    if isinstance(node, ast.arg):
        return node.arg in BANNED_NAMES
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED_NAMES


def _takes_config(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a parameter of a function is a whole Config."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(a.annotation is not None and "Config" in _names_in(a.annotation) for a in arguments)


def _names_in(annotation: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def _function(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return Function(
        name=f"{file}: {node.name}",
        lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        parameters=len([name for name in names if name not in ("self", "cls")]),
        nesting=_nesting(node.body),
    )


def _nesting(body: Sequence[ast.stmt]) -> int:
    """Return how deep the blocks of a body lie in one another; functions inside it count for themselves."""
    deepest = 0
    for node in body:
        if not isinstance(node, _BLOCKS):
            continue
        parts: list[Sequence[ast.stmt]] = [getattr(node, name, []) for name in ("body", "finalbody")]
        parts += [part.body for part in (*getattr(node, "handlers", []), *getattr(node, "cases", []))]
        otherwise = getattr(node, "orelse", [])
        is_elif = isinstance(node, ast.If) and len(otherwise) == 1 and isinstance(otherwise[0], ast.If)
        below = max(_nesting(part) for part in (*parts, [] if is_elif else otherwise))
        deepest = max(deepest, 1 + below, _nesting(otherwise) if is_elif else 0)
    return deepest


def _own_lazy_imports(nodes: Sequence[ast.AST], package: str) -> Iterator[tuple[int, str]]:
    for function in nodes:
        if isinstance(function, _FUNCTIONS):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                    yield node.lineno, node.module or ""


def _changes_foreign_modules(nodes: Sequence[ast.AST], package: str) -> bool:
    """Return whether a module assigns to attributes of modules or classes that it imports from elsewhere."""
    foreign: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            foreign |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != package:
            foreign |= {name.asname or name.name for name in node.names}
    for node in nodes:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        if any(_root(target) in foreign for target in targets if isinstance(target, ast.Attribute)):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and _root(node.args[0]) in foreign:
            return True
        if isinstance(node, ast.Assign) and any(ast.unparse(target).startswith("sys.modules[") for target in targets):
            return True
    return False


def _root(node: ast.AST) -> str:
    """Return the name at the root of `a.b.c`, empty for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def table(house: House) -> list[str]:
    """Return the measurements, a line each."""
    lengths = [lines for lines in house.files.values() if lines]
    longest = sorted(house.functions, key=lambda f: -f.lines)
    repeated = [name for name, places in house.class_names.items() if len(places) > 1]
    rows = {
        "files, lines": f"{len(house.files)}, {sum(lengths)}",
        "lines of a file: median, most": f"{median(lengths):g}, {max(lengths)}",
        "files over 400 lines": sum(lines > 400 for lines in lengths),
        "files of a folder: most": max(house.folders.values()),
        "lines of a function: median, most": f"{median(f.lines for f in house.functions):g}, {longest[0].lines}",
        "functions over 60 lines": sum(f.lines > 60 for f in house.functions),
        "functions nested deeper than 3": sum(f.nesting > 3 for f in house.functions),
        "functions of more than 8 parameters": sum(f.parameters > 8 for f in house.functions),
        "classes of more than 12 methods": sum(count > 12 for count in house.methods.values()),
        "class names used twice": len(repeated),
        "modules that read the environment": len(house.environment_readers),
        "modules that change foreign modules": len(house.foreign_changes),
        "vague docstrings, vague names": f"{sum(house.vague_docstrings.values())}, {sum(house.vague_names.values())}",
        "lazy imports of the package itself": house.own_lazy_imports,
        "Any, type: ignore, broad except": f"{house.any_annotations}, {house.type_ignores}, {house.broad_excepts}",
        "public functions with docstring": f"{house.documented_functions} of {house.public_functions}",
    }
    width = max(map(len, rows))
    return [f"{name:{width}}  {value}" for name, value in rows.items()]


if __name__ == "__main__":
    print("\n".join(table(measure())))
