"""Loading of a checkpoint's tensors into live memory of any layout: plan, verify, agree over ranks, then write."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.checkpoint.format.reader import MAX_THREADS, Checkpoint, StoredPiece
from mega_rl.checkpoint.format.untrusted import limited
from mega_rl.checkpoint.run_state import ORDER
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.agreement import all_failures
from mega_rl.parallel.boxes import intersection, within
from mega_rl.protocols import Ranks
from mega_rl.storage.safetensors_reader import DTYPE_NAMES
from mega_rl.tracking import progress
from mega_rl.types import Box, Piece

_ANOTHER_MODEL = (
    "it is of another model, or of settings with other optimizer state: use the settings that it was saved with, or "
    "checkpoint.resume=never, which starts anew and keeps what is there in previous/"
)
_OF_A_RANK = re.compile(r"rank\d{5,}/")
_OF_THE_ORDER = f"{ORDER}/"
HEARD_RANKS = 8  # whose problems are shown; a checkpoint's problems are mostly the same on all


class PieceCopy(NamedTuple):
    """Copy of a box of a stored piece into live memory."""

    source: StoredPiece
    inner: Box  # within the stored piece
    target: Tensor  # [*inner.shape], any strides and device


def fill(checkpoint: Checkpoint, pieces: Sequence[Piece], *, ranks: Ranks, whole: bool = False) -> None:
    """Fill the memory of every piece from the checkpoint; collective over `ranks`, each with its own pieces.

    Each rank reads and verifies all stored pieces that it needs a part of. No rank writes before all ranks have
    verified theirs. The first dimension of a resizable tensor may differ from the stored one: elements beyond stay as
    they are. `whole`: every tensor of the checkpoint must have a place.

    Raises:
        UserErrors: on all ranks alike: names that are missing or left over, other shapes or dtypes, elements that no
            stored piece has, damaged data.
    """
    copies, problems = plan(checkpoint, pieces)
    problems += _left_over(checkpoint, pieces, ranks) if whole else []
    _agree(limited(problems, checkpoint.folder), ranks)
    _agree(_damage(checkpoint, copies), ranks)
    copies.sort(key=_place)
    advance = progress.counter(sum(copy.target.nbytes for copy in copies), unit="B")

    def read(copy: PieceCopy) -> None:
        checkpoint.read_into(copy.source, copy.inner, copy.target)
        advance(copy.target.nbytes)

    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(read, copies):
            pass  # taking a result raises the error of its read


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
            parts = stored[piece.name].copies(piece)
            wanted = _there(piece, checkpoint.manifest.tensors[piece.name].shape)
            missing = prod(wanted) - sum(prod(copy.inner.shape) for copy in parts)
            if missing:
                problem = f"{piece.name}: {missing} of its elements from {list(piece.box.offset)} on are stored nowhere"
            copies += parts
        if problem is not None:
            problems[f"checkpoint {checkpoint.folder}: {problem}"] = None
    return copies, list(problems)


def _left_over(checkpoint: Checkpoint, pieces: Sequence[Piece], ranks: Ranks) -> list[str]:
    """Return a problem for every tensor that no rank has a place for; collective.

    Not for those of single ranks and of an order of prompts, which a run may do without.
    """
    names = sorted(name for name in checkpoint.manifest.tensors if not name.startswith(_OF_THE_ORDER))
    names = [name for name in names if not _OF_A_RANK.match(name)]
    wanted = {piece.name for piece in pieces}
    placed = ranks.max(torch.tensor([name in wanted for name in names], dtype=torch.int32)).tolist()
    return [
        f"checkpoint {checkpoint.folder}: {name}: is not in this run; {_ANOTHER_MODEL}"
        for name, there in zip(names, placed, strict=True)
        if not there
    ]


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


def _there(piece: Piece, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the part of a piece that lies within the stored tensor."""
    if not piece.resizable or not stored:
        return piece.box.shape
    rows = min(piece.box.offset[0] + piece.box.shape[0], stored[0]) - piece.box.offset[0]
    return (max(rows, 0), *piece.box.shape[1:])


def _damage(checkpoint: Checkpoint, copies: Sequence[PieceCopy]) -> list[str]:
    """Verify the checksums of the stored pieces that are needed; return the problems."""
    try:
        checkpoint.verify({_place(copy): copy.source for copy in copies}.values())
    except UserError as error:
        return str(error).split("\n")
    return []


def _place(copy: PieceCopy) -> tuple[str, int]:
    """Return the file and offset of the stored piece, to read in order."""
    return str(copy.source.file), copy.source.offset


def _agree(problems: Sequence[str], ranks: Ranks) -> None:
    """Raise the problems of all ranks on every rank; collective."""
    heard, failing = all_failures("\n".join(problems) if problems else None, ranks, most=HEARD_RANKS)
    lines = dict.fromkeys(line for message in heard.values() for line in message.split("\n"))
    if failing > HEARD_RANKS:
        lines[f"{failing - HEARD_RANKS} more ranks have problems with this checkpoint"] = None
    if lines:
        raise UserErrors(list(lines))
