"""Loading of a checkpoint's tensors into live memory of any layout: plan, verify, agree over ranks, then write."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mega_rl.checkpoint.format.reader import Checkpoint, PieceCopy, StoredPiece
from mega_rl.checkpoint.run_state import ORDER
from mega_rl.converters.safetensors.reader import DTYPE_NAMES
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.agreement import all_failures
from mega_rl.parallel.boxes import intersection, within
from mega_rl.protocols import Ranks
from mega_rl.tracking import progress
from mega_rl.types import Box, Piece
from mega_rl.untrusted import limited

_ANOTHER_MODEL = (
    "it is of another model, or of settings with other optimizer state: use the settings that it was saved with, or "
    "checkpoint.resume=never, which starts anew and keeps the old files in previous/"
)
# Tensors of single ranks and of an order of prompts, which a run may do without.
_OPTIONAL = re.compile(rf"rank\d{{5,}}/|{ORDER}/")
SHOWN_RANKS = 8  # a checkpoint's problems are mostly the same on all ranks


def fill(checkpoint: Checkpoint, pieces: Sequence[Piece], *, ranks: Ranks, whole: bool = False) -> None:
    """Fill the memory of every piece from the checkpoint; collective over `ranks`, each with its own pieces.

    Each rank reads and verifies all stored pieces that it needs a part of. No rank writes before all ranks have
    verified theirs. The first dimension of a resizable tensor may differ from the stored one: elements beyond stay as
    they are. `whole`: every tensor of the checkpoint must have a place.

    Raises:
        UserErrors: the same on all ranks: names that are missing or left over, other shapes or dtypes, damaged data.
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
    done = progress.counter(sum(copy.target.nbytes for copy in copies), unit="B")
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
    """Return why a stored tensor cannot fill this one (name, shape or dtype), None if it can."""
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
