"""Running a conversion: planned on every rank, the files shared between them, the target complete or not there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from mega_rl.converters.offline.formats import WeightFiles
from mega_rl.converters.offline.streaming import ByteProgress, OutputFile, write_files
from mega_rl.converters.offline.torch_dist import Written
from mega_rl.converters.offline.world import World, joined_world
from mega_rl.errors import UserError
from mega_rl.storage.output_folder import output_folder, require_space

logger = logging.getLogger(__name__)

# Room for names, sizes and extra states.
OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class WriteOptions:
    """Options of writing a target."""

    overwrite: bool = False
    jobs: int | None = None  # threads; None: one per core
    progress: ByteProgress | None = None


@dataclass(frozen=True)
class Report:
    """Result of a conversion, over all ranks."""

    num_tensors: int  # written
    num_files: int
    num_bytes: int  # of tensors written
    seconds: float
    ignored: tuple[str, ...] = ()  # tensors of the source left aside
    absent: tuple[str, ...] = ()  # parameters of the model that the source has nothing for, and the target neither
    kept: tuple[str, ...] = ()  # tensors taken over from the reference
    config_changes: tuple[str, ...] = ()  # keys of config.json that differ from the source's


@dataclass
class Conversion:
    """A conversion, planned: the files that will be written, and how the folder is completed."""

    files: list[OutputFile]
    complete: Callable[[Path, Sequence[Written]], None]
    ignored: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    config_changes: tuple[str, ...] = ()
    readers: list[WeightFiles] = field(default_factory=list)


def convert(
    prepare: Callable[[], Conversion],
    target: str | Path,
    inputs: Sequence[str | Path],
    *,
    options: WriteOptions,
    label: str,
) -> Report:
    """Plan on every rank, write each one's share, and let the target appear when all are done."""
    start = perf_counter()
    with joined_world() as world, ExitStack() as stack:
        for path in inputs:
            world.agree(lambda path=path: check_apart(Path(target), Path(path)))  # type: ignore[misc]
        job = world.agree(prepare)
        for reader in job.readers:
            stack.enter_context(reader)
        num_bytes = sum(file.nbytes for file in job.files)
        with new_folder(world, target, overwrite=options.overwrite) as work:
            world.first(lambda: require_space(work, num_bytes + OVERHEAD_BYTES))
            written = world.each(
                lambda: write_files(
                    work, job.files, world, threads=options.jobs, progress=options.progress, label=label
                ),
                encode=lambda share: [[one.key, list(one.place), one.file, one.offset, one.length] for one in share],
                decode=lambda raw: [Written(key, tuple(place), *where) for key, place, *where in raw],
            )
            world.first(lambda: job.complete(work, [place for share in written for place in share]))
    num_tensors = sum(len(file.outputs) for file in job.files)
    seconds = perf_counter() - start
    logger.info("wrote %s: %d tensors, %d bytes, %.1f s", target, num_tensors, num_bytes, seconds)
    changes = job.config_changes
    return Report(num_tensors, len(job.files), num_bytes, seconds, job.ignored, job.absent, job.kept, changes)


@contextmanager
def new_folder(world: World, target: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a folder that all ranks write and that becomes the target at the end; everything inside is collective."""
    with ExitStack() as stack:
        yield Path(world.first(lambda: str(stack.enter_context(output_folder(target, overwrite=overwrite)))))
        world.first(stack.close)


def check_apart(target: Path, source: Path) -> None:
    """Raise UserError when one of two folders is, or lies in, the other."""
    a, b = target.resolve(), source.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"{target}: the target and {source} are inside one another; choose another directory")
