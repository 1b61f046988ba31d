"""What the documents mention exists, and they are finished."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mega_rl
from mega_rl.config.keys import FIELDS, SECTIONS, is_mapping
from tests.helpers import makefile
from tests.release import doc_commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "benchmarks" / "README.md",
        *ROOT.glob("examples/*/README.md"),
    ]
)

FENCE = re.compile(r"^```\w*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
# Diffs, and programs with what they print: test_worked_examples.py applies and runs these.
EXECUTED = re.compile(r"^```diff\n.*?^```|^```python\n[^`]*^```\n+```text\n.*?^```", flags=re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
MODULE = re.compile(r"(?<![\w/.])mega_rl(?:\.[A-Za-z_]\w*)+")
OUR_FILE = re.compile(r"(?<![\w/.-])(?:mega_rl|tests|scripts|docs|benchmarks)/[\w./-]*\w")
MAKE = re.compile(r"(?<![\w-])make ([a-z-]+)")
SETTING = re.compile(rf"(?<![\w./])(?:{'|'.join(s for s in SECTIONS if '.' not in s)})(?:\.[a-z]\w*)+(?![\w.]|/)")
FILE_SUFFIXES = ("json", "jsonl", "yaml", "py", "md", "safetensors", "parquet")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:home|root|tmp|Users|mnt|opt|usr|work|workspace|scratch)(?:/|\b)")

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def code(document: Path) -> Iterator[str]:
    """Pieces of a document that are meant literally: fenced blocks and inline code."""
    text = document.read_text(encoding="utf-8")
    yield from FENCE.findall(text)
    yield from INLINE_CODE.findall(FENCE.sub("", text))


def slug(heading: str) -> str:
    """The anchor that a heading gets on code-hosting sites."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def names_in(file: Path) -> frozenset[str]:
    """Names that a module defines or imports at its top level, or for type checkers."""
    names: set[str] = set()
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node in [*body, *(inner for outer in body if isinstance(outer, ast.If) for inner in outer.body)]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(names)


def exists(dotted: str) -> bool:
    """Whether `mega_rl.a.b` is a package, a module, or a top-level name of one; nothing is imported.

    Of the interface itself, `Class.method` counts, too.
    """
    place, *rest = dotted.split(".")
    folder = ROOT / place
    while rest and (folder / rest[0]).is_dir():
        folder = folder / rest.pop(0)
    if not rest:
        return True
    if len(rest) == 2 and rest[0] in mega_rl.__all__:
        return hasattr(getattr(mega_rl, rest[0]), rest[1])
    file = folder / f"{rest[0]}.py"
    if file.is_file():
        return len(rest) == 1 or (len(rest) == 2 and rest[1] in names_in(file))
    return len(rest) == 1 and rest[0] in names_in(folder / "__init__.py")


@documents
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links to files, and to headings of files."""
    for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_every_document_is_linked() -> None:
    """From the README, if by way of others."""
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        document = ahead.pop()
        if document in seen or document not in DOCUMENTS:
            continue
        seen.add(document)
        targets = LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
        ahead += [(document.parent / path).resolve() for path in (t.partition("#")[0] for t in targets) if path]
    assert set(DOCUMENTS) - seen == set()


@documents
def test_modules_and_files_exist(document: Path) -> None:
    text = EXECUTED.sub("", document.read_text(encoding="utf-8"))
    assert [name for name in MODULE.findall(text) if not exists(name)] == []
    mentioned = {name for piece in code(document) for name in OUR_FILE.findall(piece)}
    assert [name for name in sorted(mentioned) if not (ROOT / name).exists()] == []


@documents
def test_make_targets_exist(document: Path) -> None:
    assert {name for piece in code(document) for name in MAKE.findall(piece)} <= makefile.targets()


@documents
def test_settings_exist(document: Path) -> None:
    text = EXECUTED.sub("", document.read_text(encoding="utf-8"))
    pieces = [*FENCE.findall(text), *INLINE_CODE.findall(FENCE.sub("", text))]
    mentioned = {name for piece in pieces for name in SETTING.findall(piece)}
    settings = {name for name in mentioned if name.rpartition(".")[2] not in FILE_SUFFIXES}
    entries = {name for name in settings if (mapping := name.rpartition(".")[0]) in FIELDS and is_mapping(mapping)}
    assert settings - entries <= FIELDS.keys() | SECTIONS.keys()


@documents
def test_no_path_of_a_machine(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if MACHINE_PATH.search(line)] == []


def test_the_layers_are_those_that_are_checked() -> None:
    """The layers in docs/architecture.md are the contract in pyproject.toml."""
    contract = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    assert contract
    layers = re.findall(r'"([^"]+)"', contract[1])
    blocks = FENCE.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert layers in [block.splitlines() for block in blocks]


def test_the_contracts_are_those_that_are_checked() -> None:
    """docs/architecture.md has a row for every contract but the layers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = [contract["name"] for contract in project["tool"]["importlinter"]["contracts"]]
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| contract \| why \|\n\|---\|---\|\n(.*?)\n\n", text, re.M | re.S)
    assert rows
    listed = [line.split("|")[1].strip() for line in rows[1].splitlines()]
    assert sorted([*listed, "Imports point down"]) == sorted(names)


def test_the_picture_of_the_packages_is_of_now() -> None:
    """`make docs` has been run."""
    drawn = runpy.run_path(str(ROOT / "scripts" / "package_map.py"))["draw"]()
    assert (ROOT / "docs" / "package_map.svg").read_text(encoding="utf-8") == drawn


def test_the_folders_are_those_of_the_package() -> None:
    """The list in docs/architecture.md leaves nothing out."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^  ([a-z_]+)(?:/|\.py) ", text, flags=re.MULTILINE))
    package = ROOT / "mega_rl"
    actual = {path.stem for path in package.glob("*.py")} - {"__init__"}
    actual |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert listed == actual


def test_the_patches_are_described() -> None:
    """docs/cpu.md lists the patches, the upstream symbols and the releases that they are for."""
    from mega_rl.parallel.accelerator.patches import patches

    text = (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([\w.:]+)` \| ([\d., ]+) \|", text, re.M)
    assert rows == [(patch.name, patch.symbol, ", ".join(patch.series)) for patch in patches()]


def test_decisions_are_numbered_and_short() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\d{4}) .*\n((?:(?!## ).*\n)*)", text, flags=re.MULTILINE)
    numbers = [int(number) for number, _ in sections]
    assert len(numbers) > 20
    assert numbers == sorted(set(numbers))
    assert [number for number, body in sections if len(body.split()) > 120] == []


def test_config_page_is_what_the_settings_say() -> None:
    """`make docs` has been run."""
    from mega_rl.config.render import config_markdown

    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == config_markdown()


def test_python_in_the_readme_runs() -> None:
    """The reward function of the example is one."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert block
    names: dict[str, Any] = {}
    exec(compile(block[1], "README.md", "exec"), names)
    assert [names["short_and_right"]("37+45=", text, "280") for text in ("280", "270")] == [1.0, 0.0]


def test_the_chinese_readme_says_the_same() -> None:
    """Equal code blocks, links, generated parts, and tables with the same rows, columns and code words."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    assert len(english.splitlines()) <= 150
    assert FENCE.findall(chinese) == FENCE.findall(english)
    links = [sorted(set(LINK.findall(FENCE.sub("", text)))) for text in (english, chinese)]
    assert [link for link in links[0] if "README" not in link] == [link for link in links[1] if "README" not in link]
    marked = re.compile(r"<!-- (?:code|benchmark): .*?-->.*?<!-- end of .*?-->", re.S)
    assert marked.findall(chinese) == marked.findall(english)
    rows, theirs = ([line for line in text.splitlines() if line.startswith("|")] for text in (english, chinese))
    assert [line.count("|") for line in theirs] == [line.count("|") for line in rows]
    for own, other in zip(theirs, rows, strict=True):
        assert sorted(INLINE_CODE.findall(own)) == sorted(INLINE_CODE.findall(other)), own


def test_the_check_of_commands_knows_those_of_the_pages() -> None:
    """`make doc-commands` runs what the pages have; its tables name nothing else."""
    documented = [
        command
        for page in doc_commands.PAGES
        for command in doc_commands.commands((ROOT / page).read_text(encoding="utf-8"))
    ]
    assert doc_commands.unknown(documented) == []
    assert "make quickstart" in documented
