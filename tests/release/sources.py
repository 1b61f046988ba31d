"""The files of the repository, as a release is built from them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_SOURCES = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.egg-info", "runs", "build", "dist", ".*_cache")


def repository_files() -> list[Path] | None:
    """Return the files that git has or would take, relative to the root; None in a tree without git."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()})


def copy_sources(folder: Path) -> Path:
    """Copy the repository's files, and nothing that earlier builds have left, to a new `folder`; returns it."""
    files = repository_files()
    if files is None:
        shutil.copytree(ROOT, folder, ignore=NOT_SOURCES)
        return folder
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)
    return folder
