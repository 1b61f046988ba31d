"""A small checkpoint on disk, written by hand, and what must be in it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.format.manifest import Manifest, WholeTensor, commit_text, now
from mega_rl.checkpoint.format.shards import PieceSpec, ShardRecord, checksum, order, shard_name, write_shard
from mega_rl.converters.safetensors.reader import DTYPE_NAMES, as_bytes
from mega_rl.parallel.boxes import Box

MATRIX, VECTOR, SCALAR, COUNTER = "actor/main/weight", "actor/weights/norm", "actor/exp_avg/scale", "rank00000/random/n"


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every kind: FP32 and BF16 matrices, a scalar, integers, a flag, bytes, and one without elements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        MATRIX: torch.randn(12, 16, generator=generator),
        "actor/weights/experts": torch.randn(3, 4, 6, generator=generator).bfloat16(),
        VECTOR: torch.randn(10, generator=generator).bfloat16(),
        SCALAR: torch.randn((), generator=generator),
        COUNTER: torch.randint(-(1 << 60), 1 << 60, (7,), generator=generator),
        "rank00000/random/state": torch.randint(0, 256, (33,), dtype=torch.uint8, generator=generator),
        "rank00000/rollout/flags": torch.tensor([True, False, True]),
        "rank00001/rollout/none": torch.empty(0, 5),
    }


# Which boxes of which tensors a rank writes; what is not named is written whole by rank 0.
CUTS: Mapping[str, list[tuple[int, Box]]] = {
    MATRIX: [
        (0, Box((0, 0), (5, 16))),
        (1, Box((5, 0), (7, 7))),
        (1, Box((5, 7), (1, 9))),
        (2, Box((6, 7), (6, 9))),
    ],
    "actor/weights/experts": [(1, Box((0, 0, 0), (3, 4, 2))), (2, Box((0, 0, 2), (3, 4, 4)))],
    VECTOR: [(2, Box((0,), (4,))), (0, Box((4,), (6,)))],
}


def data_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, as a shard takes them."""
    return (
        as_bytes(tensor.clone(memory_format=torch.contiguous_format).view(-1)).data
        if tensor.numel()
        else memoryview(b"")
    )


def cut(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def write_shards(folder: Path, whole: Mapping[str, Tensor]) -> list[ShardRecord]:
    """Three shards with all pieces of `CUTS`."""
    pieces: dict[int, list[tuple[PieceSpec, Tensor]]] = {0: [], 1: [], 2: []}
    for name, tensor in whole.items():
        everything = [(0, Box((0,) * tensor.dim(), tuple(tensor.shape)))]
        for rank, box in CUTS.get(name, everything):
            pieces[rank].append((PieceSpec(name, DTYPE_NAMES[tensor.dtype], *box), cut(tensor, box)))
    records = []
    for rank, parts in pieces.items():
        specs = [spec for spec, _ in parts]
        data = (data_of(parts[i][1]) for i in order(specs))
        records.append(write_shard(folder / shard_name(rank), specs, data))
    return records


def manifest_of(
    step: int,
    whole: Mapping[str, Tensor],
    shards: list[ShardRecord],
    *,
    metrics: Mapping[str, float] | None = None,
    saved_at: str | None = None,
) -> Manifest:
    """A manifest of these tensors and shards."""
    return Manifest(
        step=step,
        saved_at=saved_at or now(),
        identity={"seed": 1, "data": "abc"},
        state={"kl": 0.1, "weight_version": step},
        numbers={"actor": {"optimizer_steps": step, "lr": 1e-6}},
        world_size=3,
        layout="tp1 dp3",
        config={"checkpoint": {"keep": 2, "keep_best": "val/reward_mean"}, "nested": {"list": [1, 2.5, None, True]}},
        versions={"mega_rl": "0.1.0", "torch": "2"},
        metrics=metrics or {},
        tensors={n: WholeTensor(DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in whole.items()},
        shards=tuple(shards),
    )


def save(
    root: Path,
    step: int,
    *,
    seed: int = 0,
    metrics: Mapping[str, float] | None = None,
    saved_at: str | None = None,
) -> Path:
    """A complete checkpoint of `tensors(seed)` after so many steps; returns its folder."""
    work, whole = folders.begin(root, step), tensors(seed)
    manifest = manifest_of(step, whole, write_shards(work, whole), metrics=metrics, saved_at=saved_at)
    return folders.publish(root, manifest)


def flip(file: Path, at: int = -1, bit: int = 0) -> None:
    """Changes one bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest and gives COMMIT its checksum, as one who means harm would."""
    raw = json.loads((folder / "manifest.json").read_text())
    change(raw)
    put_manifest(folder, json.dumps(raw).encode())


def put_manifest(folder: Path, data: bytes) -> None:
    """Replaces the manifest, with the COMMIT that belongs to it."""
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMIT").write_text(commit_text(data))


def header_of(file: Path) -> dict[str, Any]:
    """The header of a shard."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def put_header(file: Path, text: bytes, *, length: int | None = None) -> None:
    """Replaces the header's text, with size and checksum in the manifest and COMMIT that belong to it."""
    data = file.read_bytes()
    body = data[8 + struct.unpack("<Q", data[:8])[0] :]
    prefix = struct.pack("<Q", len(text) if length is None else length)
    file.write_bytes(prefix + text + body)

    def change(raw: dict[str, Any]) -> None:
        for shard in raw["shards"]:
            if shard["file"] == file.name:
                shard |= {"bytes": file.stat().st_size, "header": checksum(prefix + text)}

    edit_manifest(file.parent, change)


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the header of a shard, as `put_header`."""
    header = header_of(file)
    change(header)
    put_header(file, json.dumps(header).encode())
