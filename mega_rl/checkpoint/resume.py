"""Resuming from a checkpoint: choose it, check it, fill engines and rank states.

`fill` plans the copies, verifies them, agrees over the ranks, and only then writes.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import COMMIT_FILE, Manifest
from mega_rl.checkpoint.format.reader import Checkpoint, PieceCopy, StoredPiece
from mega_rl.checkpoint.identity import changes, differences
from mega_rl.checkpoint.run_state import ORDER, RunState, rank_prefix
from mega_rl.config.schema import CheckpointConfig
from mega_rl.converters.safetensors.reader import DTYPE_NAMES, DTYPES
from mega_rl.errors import RunError, UserError, UserErrors
from mega_rl.parallel.agreement import all_failures, all_succeed, first_failure, run_on_one
from mega_rl.parallel.boxes import Box, Piece, intersection, whole, within
from mega_rl.protocols import Ranks
from mega_rl.tracking import progress
from mega_rl.untrusted import limited

log = logging.getLogger(__name__)

RESUME_HINT = "set checkpoint.fallback=true to resume from an older checkpoint, or checkpoint.resume to another one"
NEW_RUN_HINT = "set checkpoint.resume=never to start anew (old files are kept, in previous/)"

# Fetches the bytes that the pieces need and this host lacks, before they are read; collective.
Fetch = Callable[[Checkpoint, Sequence[Piece]], None]


class DamagedError(UserError):
    """A damaged checkpoint; an older one may be usable."""


def resume(root: Path, run: RunState, settings: CheckpointConfig) -> tuple[Path, Manifest] | None:
    """Fill engines and rank states from a checkpoint and return it; None to start afresh; collective.

    Raises UserError: on all ranks; the engines are unchanged.
    """
    first: DamagedError | None = None
    for name in run_on_one(lambda: [str(folder) for folder in _candidates(root, settings)], run.ranks):
        folder = Path(name)
        try:
            manifest = restore_from(folder, run)
        except DamagedError as error:
            first = first or error
            if not settings.fallback:
                break
            if run.ranks.rank == 0:
                log.warning("FALLING BACK to an older checkpoint: %s is damaged: %s", folder, error)
            continue
        if run.ranks.rank == 0:
            log.info("restored %s", folder)
            report_changes(manifest, run.config)
        return folder, manifest
    if first is not None:
        message = str(first) if "checkpoint.resume" in str(first) else f"{first}; {RESUME_HINT}"
        raise UserErrors(message.split("\n")) from first
    return None


def _candidates(root: Path, settings: CheckpointConfig) -> list[Path]:
    """Return the checkpoints to resume from, best first. Raises UserError."""
    wanted = settings.resume
    if wanted == "never":
        return []
    if wanted == "auto":
        damaged = [f"{folder}: {why}" for folder, why in folders.damaged(root)]
        if damaged and not settings.fallback:
            raise UserError(f"{damaged[-1]}; {RESUME_HINT}")
        for folder, why in folders.torn(root):
            log.warning("%s is not a complete checkpoint and is ignored: %s", folder, why)
        return folders.complete(root)[::-1]
    path = Path(wanted).absolute()
    if (path / COMMIT_FILE).exists():
        return [path]
    complete = folders.complete(path / folders.CHECKPOINTS) or folders.complete(path)
    if not complete:
        raise UserError(f"checkpoint.resume={wanted}: no complete checkpoint there ({COMMIT_FILE} is missing)")
    return complete[::-1]


def restore_from(folder: Path, run: RunState, *, fetch: Fetch | None = None) -> Manifest:
    """Fill engines and rank states from one checkpoint; collective.

    Raises DamagedError: on all ranks; another checkpoint may be usable. The engines are unchanged; UserError: on all
    ranks; it is of another run.
    """
    ranks = run.ranks
    opened: list[Checkpoint] = []
    all_succeed(lambda: opened.append(Checkpoint.open(folder)), ranks, error=DamagedError)
    (checkpoint,) = opened
    manifest = checkpoint.manifest
    _check_run(folder, manifest, run)
    engines = run.restorable(manifest.numbers)
    same_layout = (manifest.world_size, manifest.layout) == (ranks.size, run.layout)
    pieces = []
    for name, engine in engines.items():
        pieces += [replace(piece, name=f"{name}/{piece.name}") for piece in engine.state().pieces]
    kept: dict[str, dict[str, torch.Tensor]] = {name: {} for name in run.rank_states}
    for name in run.rank_states if same_layout else ():
        prefix = rank_prefix(ranks.rank, name)
        for key in (key for key in manifest.tensors if key.startswith(prefix)):
            dtype, shape = manifest.tensors[key]
            tensor = kept[name][key.removeprefix(prefix)] = torch.empty(shape, dtype=DTYPES[dtype])
            pieces.append(Piece(key, shape, whole(shape), tensor, owned=False))
    try:
        if fetch is not None:
            fetch(checkpoint, pieces)
        fill(checkpoint, pieces, ranks=ranks, whole=True)
    except (UserError, RunError) as error:
        raise DamagedError(str(error)) from error
    if not same_layout and ranks.rank == 0:
        log.info("%s is of the layout %s: ranks draw fresh random numbers", folder, manifest.layout)
    for name, engine in engines.items():
        engine.resume_from(manifest.numbers[name])
    for name, rank_state in run.rank_states.items():
        rank_state.restore(kept[name] or None)
    return manifest


def _check_run(folder: Path, manifest: Manifest, run: RunState) -> None:
    """Raise UserError on all ranks for another run's checkpoint; rank 0 compares; collective."""
    message = None
    if run.ranks.rank == 0:
        differing = differences(manifest.identity, run.identity, stored_config=manifest.config, config=run.config)
        missing, surplus = run.mismatched(manifest.numbers)
        if differing:
            message = f"is of another run ({', '.join(differing)}); {NEW_RUN_HINT} or another trainer.run_dir"
        elif missing or surplus:
            what = [f"no {name}" for name in missing] + [f"a {name} that this run lacks" for name in surplus]
            message = f"has {' and '.join(what)}; it is of a run with other models: {NEW_RUN_HINT}"
    message = first_failure(message, run.ranks)
    if message is not None:
        raise UserError(f"checkpoint {folder} {message}")


def report_changes(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Log the settings that differ from those of the checkpoint's run."""
    if changed := changes(manifest.config, config):
        log.warning("settings differ from the checkpoint's: %s; the run continues with the new ones", changed)


_ANOTHER_MODEL = (
    "it is of another model, or of settings with other optimizer state: use the settings that it was saved with, or "
    "checkpoint.resume=never, which starts anew and keeps the old files in previous/"
)
# Tensors of single ranks and of an order of prompts, which a run may do without.
_OPTIONAL = re.compile(rf"rank\d{{5,}}/|{ORDER}/")
SHOWN_RANKS = 8  # a checkpoint's problems are mostly the same on all ranks


def fill(checkpoint: Checkpoint, pieces: Sequence[Piece], *, ranks: Ranks, whole: bool = False) -> None:
    """Fill the memory of this rank's pieces from the checkpoint; collective over `ranks`.

    Each rank reads and verifies all stored pieces that it needs a part of. No rank writes before all ranks have
    verified theirs. The first dimension of a resizable tensor may differ from the stored one: elements beyond stay as
    they are. `whole`: every tensor of the checkpoint must have a place.

    Raises UserErrors: the same on all ranks: names that are missing or left over, other shapes or dtypes, damaged data.
    """
    copies, problems = plan(checkpoint, pieces)
    if whole:
        names = sorted(name for name in checkpoint.manifest.tensors if not _OPTIONAL.match(name))
        wanted = {piece.name for piece in pieces}
        placed = ranks.max(torch.tensor([name in wanted for name in names], dtype=torch.int32)).tolist()
        left_over = [name for name, there in zip(names, placed, strict=True) if not there]
        problems += [
            f"checkpoint {checkpoint.folder}: {name}: is not in this run; {_ANOTHER_MODEL}" for name in left_over
        ]
    _agree(limited(problems, checkpoint.folder), ranks)
    _agree(_problems_of(lambda: checkpoint.verify(copy.source for copy in copies)), ranks)
    done = progress.counter(sum(copy.target.nbytes for copy in copies))
    _agree(_problems_of(lambda: checkpoint.read(copies, done=done)), ranks)


def plan(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> tuple[list[PieceCopy], list[str]]:
    """Return the copies that fill these pieces, and the problems, each tensor's once."""
    copies: list[PieceCopy] = []
    problems: dict[str, None] = {}
    stored: dict[str, _Stored] = {}
    for piece in pieces:
        problem = _mismatch(checkpoint, piece)
        if problem is None:
            if piece.name not in stored:
                stored[piece.name] = _Stored(checkpoint.pieces[piece.name])
            copies += stored[piece.name].copies(piece)
        if problem is not None:
            problems[f"checkpoint {checkpoint.folder}: {problem}"] = None
    return copies, list(problems)


class _Stored:
    """Index of the stored pieces of one tensor by their offset in the first dimension."""

    def __init__(self, pieces: Iterable[StoredPiece]) -> None:
        self.pieces = sorted(((piece.box, piece) for piece in pieces), key=lambda each: each[0].offset[:1])
        self.starts = [box.offset[0] if box.offset else 0 for box, _ in self.pieces]
        self.longest = max((box.shape[0] if box.shape else 1 for box, _ in self.pieces), default=0)

    def copies(self, piece: Piece) -> list[PieceCopy]:
        """Return a copy from every stored piece that overlaps `piece`."""
        first, end = (piece.box.offset[0], piece.box.offset[0] + piece.box.shape[0]) if piece.box.shape else (0, 1)
        low, high = bisect_left(self.starts, first - self.longest + 1), bisect_left(self.starts, end)
        copies = []
        for box, source in self.pieces[low:high]:
            common = intersection(box, piece.box)
            if common is not None:
                target = _narrowed(piece.data, within(piece.box, common))
                copies.append(PieceCopy(source, within(box, common), target))
        return copies


def _narrowed(data: Tensor, box: Box) -> Tensor:
    for axis, (offset, length) in enumerate(zip(*box, strict=True)):
        data = data.narrow(axis, offset, length)
    return data


def _mismatch(checkpoint: Checkpoint, piece: Piece) -> str | None:
    """Return why a stored tensor cannot fill this piece, None if it can."""
    tensor = checkpoint.manifest.tensors.get(piece.name)
    if tensor is None:
        return f"{piece.name}: is not in it; {_ANOTHER_MODEL}"
    expected = DTYPE_NAMES[piece.data.dtype]
    if tensor.dtype != expected:
        return (
            f"{piece.name}: has dtype {tensor.dtype}, this run's is {expected}; use the dtypes that it was saved with"
        )
    skipped = 1 if piece.resizable else 0
    same = len(tensor.shape) == len(piece.global_shape) and tensor.shape[skipped:] == piece.global_shape[skipped:]
    if not same:
        return f"{piece.name}: has shape {list(tensor.shape)}, this run's is {list(piece.global_shape)}: another model"
    return None


def _problems_of(work: Callable[[], None]) -> list[str]:
    try:
        work()
    except UserError as error:
        return str(error).split("\n")
    return []


def _agree(problems: Sequence[str], ranks: Ranks) -> None:
    """Raise the problems of all ranks on every rank; collective."""
    heard, failing = all_failures("\n".join(problems) if problems else None, ranks, most=SHOWN_RANKS)
    lines = dict.fromkeys(line for message in heard.values() for line in message.split("\n"))
    if failing > SHOWN_RANKS:
        lines[f"{failing - SHOWN_RANKS} more ranks have problems with this checkpoint"] = None
    if lines:
        raise UserErrors(list(lines))
