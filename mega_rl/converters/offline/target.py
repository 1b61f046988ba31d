"""The folder that the ranks of a conversion write together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mega_rl.converters.offline.world import World
from mega_rl.errors import UserError
from mega_rl.storage.output_folder import output_folder


@contextmanager
def new_folder(world: World, target: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder that all ranks write and that becomes the target at the end; everything inside is collective."""
    with ExitStack() as stack:
        yield Path(world.first(lambda: str(stack.enter_context(output_folder(target, overwrite=overwrite)))))
        world.first(stack.close)


def check_apart(target: Path, source: Path) -> None:
    """Raises UserError when one of two folders is, or lies in, the other."""
    a, b = target.resolve(), source.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"{target}: the target and {source} are inside one another; choose another directory")
