"""Writer of records, whole or not at all, within a bound on the disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mega_rl import disk
from mega_rl.converters.safetensors.reader import DTYPE_NAMES
from mega_rl.converters.safetensors.writer import SafetensorsFile, TensorSpec
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import failure_of
from mega_rl.protocols import Ranks
from mega_rl.tracking.records.reader import (
    RECORD_FILE,
    TENSORS,
    WEIGHTS,
    RecordDescription,
    Shard,
    folder_of,
    records,
    to_json,
)
from mega_rl.types import JsonObject

log = logging.getLogger(__name__)

HEADER_BYTES = 64 << 10  # room for record.json and each header


@dataclass(frozen=True)
class RecordWriter:
    """Writer of the records of a run under `root`, on all of its ranks."""

    root: Path
    limit: int  # bytes of all records together
    everyone: Ranks
    replica: int  # number of this rank's data-parallel replica
    is_first: bool  # this rank writes the rows of its replica
    save_weights: Callable[[Path], None] | None = None  # into a folder, with a folder for each role; collective
    weights_bytes: int = 0  # about

    def __call__(
        self, description: RecordDescription, tensors: Mapping[str, Tensor], rows: Sequence[JsonObject]
    ) -> bool:
        """Write the record of a step, and return whether that succeeded; collective.

        tensors: the rows of this replica, on the host. rows: the same for people. If a record cannot be written, rank 0
        logs the reason and removes its remains; training continues.
        """
        text = "".join(f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n" for row in rows)
        own = sum(tensor.nbytes for tensor in tensors.values()) + len(text.encode()) + HEADER_BYTES
        nbytes = int(self.everyone.sum(torch.tensor(own if self.is_first else 0)))
        nbytes += self.weights_bytes
        work = _hidden(self.root, description.step)
        failure = failure_of(lambda: self._begin(work, nbytes), self.everyone)
        if failure is None:
            failure = self._write(work, description, tensors, text)
        if failure is not None and self.everyone.rank == 0:
            log.warning("step %d is not recorded: %s; training continues", description.step, failure)
            try:
                disk.remove_tree(work)
            except disk.SaveError as error:
                log.warning("its remains could not be removed: %s", error)
        return failure is None

    def _begin(self, work: Path, nbytes: int) -> None:
        """Make room and an empty hidden folder, on rank 0. Raises RunError."""
        if self.everyone.rank != 0:
            return
        self._make_room(nbytes)
        free = disk.free_bytes(self.root)
        if free < nbytes:
            raise RunError(f"{self.root}: {nbytes / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free")
        disk.remove_tree(work)
        disk.make_folder(work)

    def _make_room(self, nbytes: int) -> None:
        """Remove the oldest records until `nbytes` more fit the limit. Raises RunError."""
        if nbytes > self.limit:
            raise RunError(
                f"it takes {nbytes / (1 << 20):.1f} MiB, more than metrics.records.max_mib={self.limit >> 20} allows "
                "all records together; raise it"
            )
        sizes = {folder: size_of(folder) for folder in records(self.root)}
        for folder in list(sizes):
            if sum(sizes.values()) + nbytes <= self.limit:
                break
            _remove(folder)
            del sizes[folder]

    def _write(
        self, work: Path, description: RecordDescription, tensors: Mapping[str, Tensor], text: str
    ) -> str | None:
        """Write this rank's files and the weights, then name the record; return the failure; collective."""
        shards: list[Shard] = []
        failure = failure_of(lambda: shards.extend(self._write_rows(work, tensors, text)), self.everyone)
        if failure is None and (save := self.save_weights) is not None:
            failure = failure_of(lambda: save(work / WEIGHTS), self.everyone)
        if failure is not None:
            return failure
        listed = self.everyone.gather_json([asdict(shard) for shard in shards])
        files = sorted((Shard(**entry) for of_rank in listed for entry in of_rank), key=lambda shard: shard.file)
        dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in tensors.items()}
        described = json.dumps(to_json(description, files, dtypes), indent=1, allow_nan=False)
        target = folder_of(self.root, description.step)
        return failure_of(lambda: self._publish(work, target, described + "\n"), self.everyone)

    def _write_rows(self, work: Path, tensors: Mapping[str, Tensor], text: str) -> list[Shard]:
        """Write the rows of this replica as tensors and texts. Raises UserError, RunError."""
        if not self.is_first:
            return []
        paths = [work / f"replica_{self.replica:05d}.safetensors"]
        named = {name: tensors[name].contiguous() for name in TENSORS if name in tensors}
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()]
        with SafetensorsFile(paths[0], specs) as file:
            for name, tensor in named.items():
                file.write(name, tensor)
        if text:
            paths.append(paths[0].with_suffix(".jsonl"))
            disk.write_text(paths[1], text)
        shards = []
        for path in paths:
            with path.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            shards.append(Shard(path.name, path.stat().st_size, digest, len(tensors["prompt_index"])))
        return shards

    def _publish(self, hidden: Path, target: Path, described: str) -> None:
        """Describe the record and give it its name, on rank 0, within the bound. Raises RunError."""
        if self.everyone.rank != 0:
            return
        disk.write_text(hidden / RECORD_FILE, described)
        self._make_room(size_of(hidden))
        for path in (path for path in hidden.rglob("*") if path.is_dir()):
            disk.sync_folder(path)
        disk.sync_folder(hidden)
        _remove(target)
        disk.rename(hidden, target)
        disk.sync_folder(self.root)


def clear_records(root: Path, *, after: int) -> None:
    """Remove records of steps after `after`, and remains of killed runs. Raises SaveError."""
    for name in os.listdir(root) if root.is_dir() else []:
        if name.startswith(".step_") and name.endswith((".tmp", ".removed")):
            disk.remove_tree(root / name)
    for folder in records(root):
        if int(folder.name.removeprefix("step_")) > after:
            _remove(folder)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _hidden(root: Path, step: int) -> Path:
    """Return the hidden folder in which a record is written."""
    return root / f".{folder_of(root, step).name}.tmp"


def _remove(folder: Path) -> None:
    """Remove a record under a hidden name: a kill leaves no half record."""
    if folder.is_dir() and not folder.is_symlink():
        hidden = folder.with_name(f".{folder.name}.removed")
        disk.remove_tree(hidden)
        disk.rename(folder, hidden)
        disk.remove_tree(hidden)
