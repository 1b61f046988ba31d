"""MkDocs hook: pages of the site for files outside docs/, so that links which work in the repository work in the site.

README.md is the first page. Every other file outside docs/ that a page links to becomes a page below `repository/`:
Markdown and pictures as they are, source as a listing, a folder as the list of its files.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)([^)\s]*\))")
ELSEWHERE = re.compile(r"^[a-z]+:|^/")
FOREIGN = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json"}

log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md and all that pages link to outside docs/."""
    pending = ["README.md", *(DOCS + file.src_uri for file in files.documentation_pages())]
    seen: set[str] = set()
    while pending:
        path = pending.pop()
        if path in seen or not (ROOT / path).exists():  # MkDocs itself warns of links that lead nowhere
            continue
        seen.add(path)
        if not path.startswith(DOCS):
            files.append(File.generated(config, _uri(path), content=_content(path)))
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            pending += [_resolve(path, target) for target in _targets(text)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository into links between pages of the site."""
    source = _path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if ELSEWHERE.match(target):
            return match[0]
        return before + posixpath.relpath(_uri(_resolve(source, target)), folder or ".") + after

    pieces = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    return "".join(piece if piece.startswith("```") else LINK.sub(rewrite, piece) for piece in pieces)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn, which fails a strict build, of a page that loads anything from another host."""
    foreign = FOREIGN.search(output)
    if foreign:
        log.warning("%s loads something from another host: %s", page.file.src_uri, foreign[0])
    return output


def _targets(text: str) -> list[str]:
    return [match[2] for match in LINK.finditer(FENCE.sub("", text)) if not ELSEWHERE.match(match[2])]


def _resolve(source: str, target: str) -> str:
    """Return the path in the repository of a link's target; both paths are relative to its root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _uri(path: str) -> str:
    """Return the source of the page for a path of the repository, relative to docs/."""
    if path == "README.md":
        return "index.md"
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return f"repository/{path}" if path.endswith((".md", ".svg")) else f"repository/{path}.md"


def _path(uri: str) -> str:
    """Return the path in the repository of a page with Markdown of the repository: undo `_uri`."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("repository/") if uri.startswith("repository/") else DOCS + uri


def _content(path: str) -> str:
    """Return a page's Markdown, of a file or a folder outside docs/, or a picture."""
    place = ROOT / path
    if path.endswith((".md", ".svg")):
        return place.read_text(encoding="utf-8")
    if place.is_dir():
        names = sorted(each.name for each in place.iterdir() if not each.name.startswith("__"))
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    listing = place.read_text(encoding="utf-8")
    return f"# {path}\n\n````{LANGUAGES.get(place.suffix, 'text')}\n{listing}````\n"
