"""Measure the package's structure. `python -m tests.house` prints the measures next to those before and budgets.

`--lower` writes lower ceilings to house_ceilings.json, where a measure has fallen.

tests/unit_tests/test_architecture.py holds the measures to limits. A function's lines are those of its definition with
its docstring; nesting counts `if`, `for`, `while`, `with`, `try` and `match` inside one another, an `elif` as its `if`.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
BANNED_NAMES = frozenset({"found", "told"})  # variables and arguments name the thing
# A comment can be read without the line next to it, so it begins with none of these.
DANGLING = frozenset({"of", "that", "where", "which", "by", "as", "whose", "what"})
TICS = re.compile(
    r"\b(alone|goes? on|going on|beside|likewise|so many|at the most|of its own|under way|by right"
    r"|Return what|Yield what)\b"
)
BEFORE = Path(__file__).with_name("house_before.json")  # measures before the house was rebuilt, on 2026-11-26
CEILINGS = Path(__file__).with_name("house_ceilings.json")  # measures that may only fall
# Budgets in lines: area -> (most lines, folders and files of the area, before and after the moves).
BUDGETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "agents": (3200, ("agents",)),
    "rollout": (6400, ("rollout",)),
    "converters": (7300, ("converters",)),
    "verify": (4200, ("verify",)),
    "rewards and sandbox": (3300, (
        "rewards", "sandbox", "workers/reward", "workers/scoring", "workers/code", "workers/answers.py",
        "assemble/rewards.py", "trainer/assemble/rewards.py",
    )),
    "trainer, roles, assembly": (4600, ("trainer", "workers")),
    "checkpoint and storage": (4800, ("checkpoint", "storage", "converters/safetensors", "disk.py", "untrusted.py")),
    "config": (3200, ("config",)),
    "operations": (4200, ("operations", "launcher", "health", "tracking/health", "schedulers", "cli/launch")),
    "plan": (2400, ("plan",)),
    "engines, models, ddp, parallel, accelerator": (
        9900, ("engines", "models", "ddp", "parallel", "accelerator"),
    ),
    "cli": (2100, ("cli",)),
    "data, hub, datafiles": (2900, ("data/", "hub", "datafiles")),
    "tracking": (2900, ("tracking", "metrics", "progress", "report", "records")),
    "algorithms": (2000, ("algorithms",)),
    "preflight": (750, ("preflight", "plan/preflight")),
    "quickstart and bench": (1400, ("cli/quickstart", "verify/learn")),
    "single files": (1100, ("",)),
}  # fmt: skip


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
    nodes: dict[str, int]  # of the syntax tree, by file
    classes: dict[str, str]  # "dataclass", "protocol", "named tuple" or "class", by "folder/file.py: Class"
    imports: dict[str, frozenset[str]]  # files of the package that each file imports
    busy_dataclasses: dict[str, int]  # fields of dataclasses with methods that do work
    wrappers: dict[str, list[str]]  # classes that have a field of a protocol and one of its methods, by protocol
    dangling_comments: int  # comments that begin with a word of DANGLING
    tics: int  # words of TICS in docstrings and comments
    long_headlines: int  # docstrings whose first line has more than 16 words

    @property
    def package_nodes(self) -> int:
        """Return the nodes of the syntax trees of all files."""
        return sum(self.nodes.values())

    @property
    def files_per_kloc(self) -> float:
        """Return the files with code per 1,000 lines."""
        return 1000 * len(self.files) / self.package_lines

    @property
    def classes_per_kloc(self) -> float:
        """Return the classes per 1,000 lines."""
        return 1000 * len(self.classes) / self.package_lines

    @property
    def slivers(self) -> dict[str, int]:
        """Return the lines of modules below 60 lines that exactly one other module imports."""
        importers = Counter(target for targets in self.imports.values() for target in targets)
        return {
            name: lines
            for name, lines in self.files.items()
            if lines < 60 and importers[name] == 1 and not name.endswith("__.py")
        }

    def of_top_folders(self, measure: Mapping[str, int]) -> dict[str, int]:
        """Return a measure of files, summed by top-level folder; single files count as "."."""
        sums: Counter[str] = Counter()
        for name, value in measure.items():
            sums[name.split("/")[0] if "/" in name else "."] += value
        return dict(sums)

    def of_areas(self) -> dict[str, int]:
        """Return the lines of each area of BUDGETS; a file belongs to the area with the longest matching prefix."""
        prefixes = {prefix: area for area, (_, own) in BUDGETS.items() for prefix in own}
        sums: Counter[str] = Counter()
        for name, lines in self.files.items():
            fitting = [prefix for prefix in prefixes if name.startswith(prefix) and (prefix or "/" not in name)]
            sums[prefixes[max(fitting, key=len)]] += lines
        return dict(sums)

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
    trees = nodes_of(package)
    for name, nodes in trees.items():
        text = (package / name).read_text(encoding="utf-8")
        files[name] = text.count("\n")
        counts += _words(text, nodes)
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
        vague_names=vague_names(trees),
        own_lazy_imports=counts["lazy"],
        any_annotations=counts["any"],
        type_ignores=counts["ignores"],
        broad_excepts=counts["broad"],
        public_functions=counts["public"],
        documented_functions=counts["documented"],
        nodes={name: len(nodes) for name, nodes in trees.items()},
        classes={f"{name}: {node.name}": _kind(node) for name, node in _classes(trees)},
        imports={name: frozenset(_imported(nodes, name, package.name, trees)) for name, nodes in trees.items()},
        busy_dataclasses=_busy_dataclasses(trees),
        wrappers=_wrappers(trees),
        dangling_comments=counts["dangling"],
        tics=counts["tics"],
        long_headlines=counts["headlines"],
    )


def nodes_of(folder: Path) -> dict[str, list[ast.AST]]:
    """Return the nodes of the syntax tree of every module below `folder`."""
    return {
        path.relative_to(folder).as_posix(): list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in sorted(folder.rglob("*.py"))
    }


def _classes(trees: Mapping[str, Sequence[ast.AST]]) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield (file, class) of every class."""
    for name, nodes in trees.items():
        yield from ((name, node) for node in nodes if isinstance(node, ast.ClassDef))


def _words(text: str, nodes: Sequence[ast.AST]) -> Counter[str]:
    """Return the counts of words that plain English avoids, in comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, *_FUNCTIONS)
    docstrings = [doc for node in nodes if isinstance(node, documented) and (doc := ast.get_docstring(node))]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT]
    return Counter(
        {
            "dangling": sum(comment.split(" ")[0] in DANGLING for comment in comments),
            "tics": sum(len(TICS.findall(words)) for words in (*comments, *docstrings)),
            "headlines": sum(len(doc.split("\n")[0].split()) > 16 for doc in docstrings),
        }
    )


def _kind(node: ast.ClassDef) -> str:
    """Return the kind of a class, as `House.classes` names it."""
    bases = " ".join(map(ast.unparse, node.bases))
    if any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return "dataclass"
    return "protocol" if "Protocol" in bases else "named tuple" if "NamedTuple" in bases else "class"


def _imported(nodes: Sequence[ast.AST], name: str, package: str, trees: Mapping[str, object]) -> Iterator[str]:
    """Yield the files of the package that a file imports, at its top or inside of functions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            path = module.removeprefix(f"{package}.").replace(".", "/") if module.startswith(f"{package}.") else ""
            yield from (
                file for file in (f"{path}.py", f"{path}/__init__.py") if path and file in trees and file != name
            )


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [
        one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation)
    ]


def _busy_dataclasses(trees: Mapping[str, Sequence[ast.AST]]) -> dict[str, int]:
    """Return the fields of dataclasses that have a method other than properties and class methods."""
    counts = {}
    for name, node in _classes(trees):
        if _kind(node) != "dataclass":
            continue
        decorated = {
            one.name: " ".join(map(ast.unparse, one.decorator_list)) for one in node.body if isinstance(one, _FUNCTIONS)
        }
        if any(
            "property" not in how and "method" not in how and not (method.startswith("__") and method != "__call__")
            for method, how in decorated.items()
        ):
            counts[f"{name}: {node.name}"] = len([f for f in _fields(node) if "init=False" not in ast.unparse(f)])
    return counts


def _wrappers(trees: Mapping[str, Sequence[ast.AST]]) -> dict[str, list[str]]:
    """Return the classes that hold an object of a protocol and have a method of its name that calls the object's."""
    protocols = {
        node.name: {one.name for one in node.body if isinstance(one, _FUNCTIONS)}
        for _, node in _classes(trees)
        if _kind(node) == "protocol"
    }
    wrappers: dict[str, list[str]] = defaultdict(list)
    for name, node in _classes(trees):
        held = {
            (own.target.id, protocol)
            for own in _fields(node)
            for protocol in _names_in(own.annotation) & protocols.keys()
            if isinstance(own.target, ast.Name)
        }
        methods = [one for one in node.body if isinstance(one, _FUNCTIONS)] if held else []
        calls = {
            (call.func.value.attr, call.func.attr)
            for method in methods
            for call in ast.walk(method)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == method.name
            and isinstance(call.func.value, ast.Attribute)
        }
        for own_field, protocol in sorted(held):
            if any(field == own_field and method in protocols[protocol] for field, method in calls):
                wrappers[protocol].append(f"{name}: {node.name}")
    return dict(wrappers)


def vague_names(trees: Mapping[str, Sequence[ast.AST]]) -> dict[str, int]:
    """Return how often each module that does so binds a name of BANNED_NAMES."""
    counts = {name: sum(map(_binds_banned_name, nodes)) for name, nodes in trees.items()}
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


def numbers(house: House) -> dict[str, float]:
    """Return the measures that the table compares, by name."""
    lengths = sorted(lines for lines in house.files.values() if lines)
    of_functions = sorted(function.lines for function in house.functions)
    kinds = Counter(house.classes.values())
    kloc = house.package_lines / 1000
    return {
        "lines": house.package_lines,
        "nodes of the syntax tree": house.package_nodes,
        "files": len(house.files),
        "top-level folders": len(house.of_top_folders(house.files)) - 1,
        "folders": len(house.folders),
        "lines of a file: median": median(lengths),
        "lines of a file: 90 % have at most": lengths[len(lengths) * 9 // 10],
        "lines of a file: most": lengths[-1],
        "lines of a function: median": median(of_functions),
        "lines of a function: most": of_functions[-1],
        "functions": len(of_functions),
        "classes": len(house.classes),
        "dataclasses and named tuples": kinds["dataclass"] + kinds["named tuple"],
        "protocols": kinds["protocol"],
        "files per 1,000 lines": round(house.files_per_kloc, 2),
        "functions per 1,000 lines": round(len(of_functions) / kloc, 1),
        "classes per 1,000 lines": round(house.classes_per_kloc, 2),
        "modules below 60 lines with one importer": len(house.slivers),
        "modules that import more than 25 of the package": sum(len(own) > 25 for own in house.imports.values()),
        "dataclasses that work and have more than 12 fields": sum(n > 12 for n in house.busy_dataclasses.values()),
        "most wrappers around one protocol": max(map(len, house.wrappers.values()), default=0),
        "functions of more than 8 parameters": sum(function.parameters > 8 for function in house.functions),
        "modules that read the environment": len(house.environment_readers),
        "lazy imports of the package itself": house.own_lazy_imports,
        "comments that begin with of, that, where": house.dangling_comments,
        "words that plain English avoids": house.tics,
        "docstrings with a first line over 16 words": house.long_headlines,
        "lines of tests": _lines(PACKAGE.parent / "tests", "*.py"),
        "words of docs": sum(len(path.read_text("utf-8").split()) for path in (PACKAGE.parent / "docs").rglob("*.md")),
        **{f"area: {area}": lines for area, lines in house.of_areas().items()},
    }


def ceilings(house: House) -> dict[str, float]:
    """Return the measures that may only fall, by name."""
    return {
        "lines": house.package_lines,
        "nodes": house.package_nodes,
        "files per 1,000 lines": round(house.files_per_kloc, 2),
        "classes per 1,000 lines": round(house.classes_per_kloc, 2),
        "own lazy imports": house.own_lazy_imports,
        "Any annotations": house.any_annotations,
        "type: ignore": house.type_ignores,
        "broad excepts": house.broad_excepts,
        "dangling comments": house.dangling_comments,
        "words that plain English avoids": house.tics,
        "long first lines of docstrings": house.long_headlines,
        **{f"lines of {name}": value for name, value in house.of_top_folders(house.files).items()},
        **{f"nodes of {name}": value for name, value in house.of_top_folders(house.nodes).items()},
    }


# At most this much, by the name of the measure.
LIMITS: dict[str, float] = {
    "lines": 67_900,  # 60,000, and 2,200 for models of today, 2,500 for post-training, 3,200 for agents
    "top-level folders": 17,
    "files per 1,000 lines": 6,
    "classes per 1,000 lines": 8,
    "lines of a file: most": 600,
    "lines of a function: most": 60,
    "modules that import more than 25 of the package": 0,
    "dataclasses that work and have more than 12 fields": 0,
    "most wrappers around one protocol": 3,
    "lines of tests": 70_000,
    "words of docs": 47_000,
    **{f"area: {area}": budget for area, (budget, _) in BUDGETS.items()},
}


def table(now: Mapping[str, float], before: Mapping[str, float]) -> list[str]:
    """Return a line for each measure: before, now, budget, and a mark where the budget is exceeded."""
    rows: list[tuple[str, ...]] = [("measure", "before", "now", "at most", "")]
    for name in dict.fromkeys((*now, *before)):
        limit = LIMITS.get(name)
        values = [f"{value:,g}" if value is not None else "" for value in (before.get(name), now.get(name), limit)]
        rows.append((name, *values, "over" if limit is not None and now.get(name, 0) > limit else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _lines(folder: Path, pattern: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob(pattern))


def lowered(old: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the ceilings of every measure that still exists, each at most as high as before."""
    return {name: min(value, old.get(name, value)) for name, value in sorted(now.items())}


if __name__ == "__main__":
    house = measure()
    print("\n".join(table(numbers(house), json.loads(BEFORE.read_text("utf-8")))))
    if "--lower" in sys.argv:
        limits = lowered(json.loads(CEILINGS.read_text("utf-8")), ceilings(house))
        CEILINGS.write_text(json.dumps(limits, indent=1) + "\n", encoding="utf-8")
