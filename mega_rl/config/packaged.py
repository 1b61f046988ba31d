"""Recipes and tables that come with the package, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from mega_rl.config.values import shown
from mega_rl.errors import UserError

FOLDER = Path(__file__).parent / "recipes"
SUFFIX = ".yaml"


def names() -> list[str]:
    """Return the names of all packaged recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def file_of(name: str) -> Path:
    """Return the file of the packaged recipe of this name. Raises UserError, naming all, if there is none."""
    file = _packaged(name)
    if file is None:
        raise UserError(f"no packaged recipe {shown(name)}; {_suggestion(name)}")
    return file


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of each row of a table of this folder, a file with tabs between cells."""
    return [line.split("\t") for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines()]


def locate(recipe: Path) -> Path:
    """Return the file that `--config` means: a path of a user's own file first, then a packaged recipe's name.

    Raises UserError, naming the packaged recipes, where it is neither.
    """
    if recipe.is_file():
        return recipe
    file = _packaged(str(recipe))
    if file is not None:
        return file
    if recipe.exists():
        return recipe  # a folder or a device: the reader says what is wrong with it
    raise UserError(
        f"recipe {shown(str(recipe))} does not exist, as a file or as a packaged recipe; {_suggestion(str(recipe))}"
    )


def summary(recipe: Path) -> str:
    """Return the first sentence of a recipe's head comment, "" without one."""
    head: list[str] = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#  "):
            break
        head.append(line.removeprefix("# "))
    sentence, stop, _ = " ".join(head).partition(". ")
    return f"{sentence}." if stop else sentence


def _packaged(name: str) -> Path | None:
    """Return the file of the packaged recipe of this name, written with `.yaml` or without; None if there is none."""
    stem = name.removesuffix(SUFFIX)
    return FOLDER / f"{stem}{SUFFIX}" if stem in names() else None


def _suggestion(name: str) -> str:
    """Return the packaged recipe nearest to a name or path that is none, and the list of all."""
    near = difflib.get_close_matches(Path(name).name.removesuffix(SUFFIX), names(), n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"{guess}packaged recipes: {', '.join(names())}"
