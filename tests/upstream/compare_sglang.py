"""Compare releases of SGLang in what our client and servers use of them: `make compare-sglang`.

Reads each release's source, without installing or importing it: routes and their order, fields of requests and of
sampling parameters, arguments of the server, and files whose formats ours repeat. Prints a Markdown table against the
pinned release; exit code 1 where something that we use is gone, or comes after a call that we do not make.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mega_rl.rollout.sglang.server.installation import SGLANG_VERSION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".sglang"
OURS = ROOT / "mega_rl" / "rollout" / "sglang"
REQUESTS = (
    "GenerateReqInput", "AbortReq", "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput",
    "InitWeightsUpdateGroupReqInput", "DestroyWeightsUpdateGroupReqInput", "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput",
)  # fmt: skip
# What ours write or read in the same format.
FORMATS = {
    "weight_sync/tensor_bucket.py": "buckets of weights",
    "utils/patch_torch.py": "CUDA IPC handles",
    "sampling/sampling_params.py": "sampling parameters",
    "utils/common.py": "names that weights may unpickle",
}


@dataclass(frozen=True)
class Release:
    """What a release offers of that which we use."""

    routes: frozenset[str]
    orders: frozenset[tuple[str, str]]  # (route, another that must have been called before it)
    fields: frozenset[str]  # "GenerateReqInput.input_ids"
    arguments: frozenset[str]
    formats: dict[str, str]


def source(version: str) -> zipfile.Path:
    """Return the folder sglang/srt in the wheel of a release, fetched from the package index unless it is here."""
    wheels = list(FOLDER.glob(f"sglang-{version}-*.whl"))
    if not wheels:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        platform = ["--python-version", "3.12", "--platform", "manylinux_2_34_x86_64", "--platform", "any"]
        subprocess.run([*fetch, *platform, "--dest", str(FOLDER), f"sglang=={version}"], check=True)
        wheels = list(FOLDER.glob(f"sglang-{version}-*.whl"))
    return zipfile.Path(wheels[0], "sglang/srt/")


def read(version: str) -> Release:
    """Return what a release offers."""
    srt = source(version)
    server, requests, updates = (ast.parse((srt / name).read_text("utf-8")) for name in (
        "entrypoints/http_server.py", "managers/io_struct.py", "managers/scheduler_components/weight_updater.py",
    ))  # fmt: skip
    routes = {
        call.args[0].value
        for node in ast.walk(server)
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant)
    }
    classes = {node.name: node for node in requests.body if isinstance(node, ast.ClassDef)}
    fields = {f"{name}.{field}" for name in REQUESTS for field in _fields(classes, name)}
    arguments = {
        field
        for file in (srt / "arg_groups" / "fields").iterdir()
        if file.name.endswith(".py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
        for field in _own_fields(node)
    }
    formats = {name: (srt / name).read_text("utf-8") for name in FORMATS}
    (formats["utils/common.py"],) = re.findall(r"class SafeUnpickler.*?\n(?=\S)", formats["utils/common.py"], re.S)
    return Release(frozenset(map(str, routes)), orders(updates), frozenset(fields), frozenset(arguments), formats)


def orders(module: ast.Module) -> frozenset[tuple[str, str]]:
    """Return (route, another before it) where a handler returns as long as the other's has not set an attribute."""
    handlers = {f"/{node.name}": list(ast.walk(node)) for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    sets = {
        route: {ast.unparse(target) for node in nodes if isinstance(node, ast.Assign) for target in node.targets}
        for route, nodes in handlers.items()
    }
    wants = {
        route: {
            ast.unparse(node.test).removesuffix(" is None")
            for node in nodes
            if isinstance(node, ast.If) and isinstance(node.body[0], ast.Return)
        }
        for route, nodes in handlers.items()
    }
    return frozenset((late, early) for late in wants for early in sets if wants[late] & (sets[early] - wants[early]))


def _fields(classes: dict[str, ast.ClassDef], name: str) -> Iterator[str]:
    if name in classes:
        yield from _own_fields(classes[name])
        for base in classes[name].bases:
            yield from _fields(classes, getattr(base, "id", ""))


def _own_fields(node: ast.ClassDef) -> Iterator[str]:
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            yield entry.target.id


def used() -> frozenset[str]:
    """Return every text in our code, among them all routes, fields and arguments that it uses."""
    trees = [ast.parse(path.read_text("utf-8")) for path in OURS.rglob("*.py")]
    texts = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(text for text in texts if isinstance(text, str))


def row(pinned: Release, version: str) -> tuple[str, bool]:
    """Return (line of the table, whether all that we use is there)."""
    other, ours = read(version), used()
    gone = [
        *sorted((pinned.routes - other.routes) & ours),
        *sorted(field for field in pinned.fields - other.fields if field.partition(".")[2] in ours),
        *sorted(f"--{name}" for name in pinned.arguments - other.arguments if f"--{name.replace('_', '-')}" in ours),
    ]
    before = sorted({early for late, early in other.orders if late in ours})
    gone += [f"weights come after {early}" for early in before if early not in ours]
    new = len(other.routes - pinned.routes), len(other.fields - pinned.fields), len(other.arguments - pinned.arguments)
    changed = [
        f"{FORMATS[name]} ({_lines(before, after)} lines)"
        for name, before in pinned.formats.items()
        if (after := other.formats[name]) != before
    ]
    words = (", ".join(cell) or "nothing" for cell in (gone, before, changed))
    return f"| {version} | {' | '.join(words)} | {' / '.join(map(str, new))} |", not gone


def _lines(before: str, after: str) -> int:
    """Return the number of lines that came or went."""
    return sum(line[0] in "+-" for line in difflib.ndiff(before.splitlines(), after.splitlines()))


def main() -> int:
    """Print the table."""
    FOLDER.mkdir(exist_ok=True)
    pinned = read(SGLANG_VERSION)
    rows = [row(pinned, version) for version in sys.argv[1:] or [SGLANG_VERSION]]
    print("| SGLang | gone of what we use | weights come after | changed formats | new routes / fields / arguments |")
    print("|---|---|---|---|---|")
    print("\n".join(line for line, _ in rows))
    return 0 if all(whole for _, whole in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
