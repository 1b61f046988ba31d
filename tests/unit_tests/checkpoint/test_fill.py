"""Filling pieces from stored pieces that are cut otherwise; and that nothing is written unless all is in order."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.reader import Checkpoint
from mega_rl.checkpoint.format.shards import PieceSpec, order, shard_name, write_shard
from mega_rl.checkpoint.resume import fill
from mega_rl.converters.safetensors.reader import DTYPE_NAMES
from mega_rl.errors import UserErrors
from mega_rl.parallel.boxes import Box, Piece, flat_boxes, whole
from mega_rl.parallel.comm import GroupRanks, SingleRank
from tests.helpers.distributed import run_ranks
from tests.unit_tests.checkpoint.written import cut, data_of, manifest_of

NAME = "actor/weights/a"
DTYPES = (torch.float32, torch.bfloat16, torch.int16)


def save(root: Path, tensors: Mapping[str, Tensor], cuts: Mapping[str, Sequence[Box]] | None = None) -> Path:
    """A checkpoint of these tensors, the pieces of each dealt out to two shards."""
    work, records = folders.begin(root, 1), []
    for rank in range(2):
        boxes = {n: (cuts or {}).get(n, [whole(tuple(t.shape))])[rank::2] for n, t in tensors.items()}
        parts = [(name, box) for name, some in boxes.items() for box in some]
        specs = [PieceSpec(name, DTYPE_NAMES[tensors[name].dtype], *box) for name, box in parts]
        data = (data_of(cut(tensors[parts[i][0]], parts[i][1])) for i in order(specs))
        records.append(write_shard(work / shard_name(rank), specs, data))
    return folders.publish(root, manifest_of(1, tensors, records))


def piece(tensor: Tensor, box: Box | None = None, *, name: str = NAME, resizable: bool = False) -> Piece:
    """A piece of a tensor of this shape, zeros so far; its memory is of another order than the tensor's."""
    box = box or whole(tuple(tensor.shape))
    backwards = torch.zeros(tuple(reversed(box.shape)), dtype=tensor.dtype)
    data = backwards.permute(*reversed(range(len(box.shape)))) if box.shape else backwards
    return Piece(name, tuple(tensor.shape), box, data, owned=True, resizable=resizable)


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(1, prod(shape) + 1) % 251).to(dtype).view(shape)


@st.composite
def partitions(draw: Any, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut into boxes: by flat ranges, as optimizers do, or by planes, as tensor parallelism does."""
    size = prod(shape)
    if not shape or draw(st.booleans()):
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=6))})
        return [box for low, high in pairwise(cuts) for box in flat_boxes(shape, low, high)]
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        number, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        offset, lengths = boxes[number]
        if lengths[axis] > 1:
            first = draw(st.integers(1, lengths[axis] - 1))
            rest = (*offset[:axis], offset[axis] + first, *offset[axis + 1 :])
            boxes[number] = Box(offset, (*lengths[:axis], first, *lengths[axis + 1 :]))
            boxes.append(Box(rest, (*lengths[:axis], lengths[axis] - first, *lengths[axis + 1 :])))
    return boxes


@settings(deadline=None, max_examples=150)
@given(st.data(), st.lists(st.integers(1, 6), max_size=4).map(tuple), st.sampled_from(DTYPES))
def test_any_cut_from_any_other(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What is filled is the tensor, whatever both cuts are and whatever memory it goes to."""
    tensor = sample(shape, dtype)
    stored, wanted = data.draw(partitions(shape)), data.draw(partitions(shape))
    pieces = [piece(tensor, box) for box in wanted]
    with tempfile.TemporaryDirectory() as folder:
        fill(Checkpoint.open(save(Path(folder), {NAME: tensor}, {NAME: stored})), pieces, ranks=SingleRank())
    assert all(torch.equal(each.data, cut(tensor, each.box)) for each in pieces)


def test_rows_that_a_layout_has_added_or_lacks(tmp_path: Path) -> None:
    """Of a padded vocabulary all rows that both have are taken; others stay as they are."""
    checkpoint = Checkpoint.open(save(tmp_path, {NAME: sample((5, 3))}))
    more, fewer = torch.full((3, 3), -1.0), torch.full((4, 3), -1.0)
    pieces = [
        Piece(NAME, (8, 3), Box((4, 0), (3, 3)), more, owned=True, resizable=True),
        Piece(NAME, (8, 3), Box((7, 0), (1, 3)), torch.full((1, 3), -1.0), owned=True, resizable=True),
        Piece(NAME, (4, 3), Box((0, 0), (4, 3)), fewer, owned=True, resizable=True),
    ]
    fill(checkpoint, pieces, ranks=SingleRank())
    assert more.tolist() == [[13.0, 14.0, 15.0], [-1.0] * 3, [-1.0] * 3]
    assert pieces[1].data.tolist() == [[-1.0] * 3]
    assert torch.equal(fewer, sample((5, 3))[:4])


def test_all_mismatches_are_listed_at_once(tmp_path: Path) -> None:
    """Names, dtypes and shapes; and the pieces that do fit stay untouched."""
    stored = {NAME: sample((4, 3)), "good": sample((2,)), "half": sample((3,), torch.bfloat16), "rows": sample((4, 3))}
    stored |= {"surplus": sample((1,)), "rank00000/random/torch": sample((1,))}
    folder = save(tmp_path, stored)
    pieces = [
        piece(sample((2,)), name="good"),
        piece(sample((3, 4))),
        piece(sample((3, 4)), Box((0, 0), (1, 1))),  # the same problem once more
        piece(sample((3,)), name="half"),
        piece(sample((3,)), name="absent"),
        piece(sample((4, 4)), name="rows", resizable=True),
    ]
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(UserErrors) as error:
        fill(checkpoint, pieces, ranks=SingleRank(), whole=True)
    shape, dtype, absent, rows, surplus = error.value.problems
    assert f"checkpoint {folder}: {NAME}: has shape [4, 3], this run's is [3, 4]" in shape
    assert "half: has dtype BF16, this run's is F32" in dtype
    assert "absent: is not in it" in absent
    assert "rows: has shape [4, 3], this run's is [4, 4]" in rows
    assert "surplus: is not in this run" in surplus
    assert not any(bool(each.data.any()) for each in pieces)


def flip(folder: Path, name: str) -> None:
    """Change one bit of the last stored piece of a tensor."""
    checkpoint = Checkpoint.open(folder)
    actual = checkpoint.pieces[name][-1]
    with open(actual.file, "r+b") as file:
        file.seek(actual.offset)
        value = file.read(1)[0]
        file.seek(actual.offset)
        file.write(bytes([value ^ 1]))


def test_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """And in what is not needed it is not looked for."""
    tensors = {NAME: sample((4, 3)), "other": sample((5,))}
    folder = save(tmp_path, tensors, {NAME: list(flat_boxes((4, 3), 0, 5)) + list(flat_boxes((4, 3), 5, 12))})
    flip(folder, NAME)
    pieces = [piece(tensors["other"], name="other"), piece(tensors[NAME])]
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(UserErrors, match=f"{NAME} at .*checksum"):
        fill(checkpoint, pieces, ranks=SingleRank())
    assert not any(bool(each.data.any()) for each in pieces)
    fill(checkpoint, pieces[:1], ranks=SingleRank())
    assert torch.equal(pieces[0].data, tensors["other"])


def fill_on_two_ranks(rank: int, folder: str, damaged: str) -> dict[str, Any]:
    """Each rank wants tensors of its own; rank 1's are in order."""
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.group.WORLD
    assert world is not None
    actual: dict[str, Any] = {}
    wanted = {
        "sound": {0: piece(sample((5,)), name="other"), 1: piece(sample((4, 3)))},
        "names": {0: piece(sample((2,)), name="absent"), 1: piece(sample((4, 3)))},
        "names of both": {0: piece(sample((2,)), name="absent"), 1: piece(sample((2,)), name="lost")},
        "damage": {0: piece(sample((5,)), name="other"), 1: piece(sample((4, 3)))},
    }
    for case, pieces in wanted.items():
        checkpoint = Checkpoint.open(damaged if case == "damage" else folder)
        try:
            fill(checkpoint, [pieces[rank]], ranks=GroupRanks(world))
            problems = []
        except UserErrors as error:
            problems = list(error.problems)
        actual[case] = {"problems": problems, "written": bool(pieces[rank].data.any())}
    return actual


def test_ranks_agree_before_they_write(tmp_path: Path) -> None:
    """One rank's problem is every rank's, in the same words, and no memory has changed anywhere."""
    tensors = {NAME: sample((4, 3)), "other": sample((5,))}
    folder, damaged = save(tmp_path / "sound", tensors), save(tmp_path / "damaged", tensors)
    flip(damaged, "other")
    first, second = run_ranks(2, fill_on_two_ranks, str(folder), str(damaged), timeout_s=60, device="cpu")
    assert first == second
    assert first["sound"] == {"problems": [], "written": True}
    for case, names in (("names", ["absent"]), ("names of both", ["absent", "lost"]), ("damage", ["other"])):
        assert not first[case]["written"]
        assert len(first[case]["problems"]) == len(names), first[case]
        assert all(name in problem for name, problem in zip(names, first[case]["problems"], strict=True))
