"""Write docs/package_map.svg: the packages in their import layers, each with its purpose and what it imports.

Layers are the contract in pyproject.toml, purposes the first sentence of each package's docstring, imports those of its
modules. `make docs` runs it; a test compares the file.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mega_rl"
PICTURE = ROOT / "docs" / "package_map.svg"
WIDTH, MARGIN, LINE, GAP = 1100, 12, 15, 8  # pixels
COLUMN = 5.9  # pixels of a character at 11 px, on average
STYLE = """
  text { font: 11px sans-serif; fill: #222 }
  .name { font-weight: bold; font-size: 14px }
  .imports { fill: #777 }
  rect { fill: #f4f7fb; stroke: #b8c7dc }
"""


def layers() -> list[list[str]]:
    """Return the packages of each layer, highest layer first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if each["name"] == "Imports point down"]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def files_of(name: str) -> list[Path]:
    """Return the modules of a package, or the one module of that name."""
    folder = PACKAGE / name.replace(".", "/")
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def purpose(name: str) -> str:
    """Return the first line of the package's docstring, or of the module's."""
    folder = PACKAGE / name.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("`", "")


def imports(name: str) -> list[str]:
    """Return the other packages that this one imports while it runs, in the order of the layers."""
    used: set[str] = set()
    for file in files_of(name):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body.clear()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mega_rl"):
                used |= {f"{node.module}.{alias.name}." for alias in node.names}
            elif isinstance(node, ast.Import):
                used |= {f"{alias.name}." for alias in node.names}
    others = [other for layer in layers() for other in layer if other != name]
    return [other for other in others if any(module.startswith(f"mega_rl.{other}.") for module in used)]


def box(name: str, *, left: float, top: float, width: float) -> tuple[list[str], int]:
    """Return (elements of a package's box but for its frame, number of lines)."""
    columns = int((width - 2 * MARGIN) / COLUMN)
    below = imports(name)
    about = textwrap.wrap(purpose(name), columns)
    uses = textwrap.wrap("imports " + ", ".join(below) if below else "imports nothing of ours", columns)
    lines = [("name", name), *(("", line) for line in about), *(("imports", line) for line in uses)]
    texts = [
        f'<text x="{left + MARGIN:.0f}" y="{top + LINE * (number + 1) + 3:.0f}" class="{kind}">{escape(line)}</text>'
        for number, (kind, line) in enumerate(lines)
    ]
    return texts, len(lines)


def draw() -> str:
    """Return the picture as SVG."""
    elements: list[str] = []
    top = 0.0
    for layer in layers():
        width = (WIDTH - GAP * (len(layer) - 1)) / len(layer)
        boxes = [box(name, left=i * (width + GAP), top=top, width=width) for i, name in enumerate(layer)]
        height = LINE * max(lines for _, lines in boxes) + 12
        for i, (texts, _) in enumerate(boxes):
            left = i * (width + GAP)
            elements += [f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height}" rx="4"/>', *texts]
        top += height + GAP
    size = f'viewBox="0 0 {WIDTH} {top - GAP:.0f}" width="{WIDTH}"'
    title = "<title>Packages of mega_rl: each imports only from layers below its own</title>"
    body = "\n".join(elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{title}\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
