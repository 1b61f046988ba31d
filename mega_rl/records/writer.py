"""Writer of records: every replica its rows, whole or not at all, within a bound on the disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import failure_of, first_failure
from mega_rl.protocols import Ranks
from mega_rl.records import folders
from mega_rl.records.format import RECORD_FILE, TENSORS, WEIGHTS, RecordDescription, Shard, to_json
from mega_rl.storage import disk
from mega_rl.storage.safetensors_reader import DTYPE_NAMES
from mega_rl.storage.safetensors_writer import SafetensorsFile, TensorSpec
from mega_rl.types import JsonObject

log = logging.getLogger(__name__)

HEADER_BYTES = 64 << 10  # of record.json and of each shard, a generous guess for the bound


@dataclass(frozen=True)
class Weights:
    """Weights that go into a record."""

    nbytes: int  # about
    save: Callable[[Path], None]  # into a folder, one below for each role; collective over all ranks


@dataclass(frozen=True)
class RecordWriter:
    """Writer of the records of a run under `root`, on all of its ranks."""

    root: Path
    limit: int  # bytes of all records together
    everyone: Ranks
    replica: int  # number of this rank's data-parallel replica
    is_first: bool  # whether this rank writes the rows of its replica
    weights: Weights | None = None

    def __call__(
        self, description: RecordDescription, tensors: Mapping[str, Tensor], rows: Sequence[JsonObject]
    ) -> bool:
        """Write the record of a step, and return whether it is there; collective.

        tensors: of this replica's rows, on the host. rows: the same for people. A record that cannot be written is
        reported on rank 0, its remains removed; training goes on.
        """
        text = "".join(f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n" for row in rows)
        own = sum(tensor.nbytes for tensor in tensors.values()) + len(text.encode()) + HEADER_BYTES
        nbytes = int(self.everyone.sum(torch.tensor(own if self.is_first else 0)))
        nbytes += 0 if self.weights is None else self.weights.nbytes
        step = description.step
        failure = failure_of(lambda: self._begin(step, nbytes), self.everyone)
        if failure is None:
            failure = self._write(description, tensors, text)
        if failure is not None and self.everyone.rank == 0:
            log.warning("step %d is not recorded: %s; training goes on", step, failure)
            try:
                disk.remove_tree(folders.temporary(self.root, step))
            except disk.SaveError as error:
                log.warning("its remains could not be removed: %s", error)
        return failure is None

    def _begin(self, step: int, nbytes: int) -> None:
        """Make room and an empty folder, on rank 0. Raises RunError."""
        if self.everyone.rank != 0:
            return
        self._make_room(nbytes)
        free = disk.free_bytes(self.root)
        if free < nbytes:
            raise RunError(f"{self.root}: {nbytes / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free")
        folders.begin(self.root, step)

    def _make_room(self, nbytes: int) -> None:
        if not folders.make_room(self.root, nbytes, limit=self.limit):
            raise RunError(
                f"it takes {nbytes / (1 << 20):.1f} MiB, more than metrics.records.max_mib={self.limit >> 20} allows "
                "all records together; raise it"
            )

    def _write(self, description: RecordDescription, tensors: Mapping[str, Tensor], text: str) -> str | None:
        """Write this rank's files and the weights, then name the record; return why it failed; collective."""
        work = folders.temporary(self.root, description.step)
        shards: list[Shard] = []
        message = None
        try:
            if self.is_first:
                shards = self._write_rows(work, tensors, text)
        except (UserError, RunError, OSError) as error:
            message = str(error)
        failure = first_failure(message, self.everyone)
        if failure is None and self.weights is not None:
            failure = self._save_weights(work / WEIGHTS, self.weights)
        if failure is not None:
            return failure
        listed = self.everyone.gather_json([asdict(shard) for shard in shards])
        files = [Shard(**entry) for of_rank in listed for entry in of_rank]
        dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in tensors.items()}
        return failure_of(lambda: self._publish(description, files, dtypes), self.everyone)

    def _write_rows(self, work: Path, tensors: Mapping[str, Tensor], text: str) -> list[Shard]:
        """Write the rows of this replica as tensors, and as texts where there are such. Raises UserError, RunError."""
        path = work / f"replica_{self.replica:05d}.safetensors"
        named = {name: tensors[name].contiguous() for name in TENSORS if name in tensors}
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()]
        with SafetensorsFile(path, specs) as file:
            for name, tensor in named.items():
                file.write(name, tensor)
        paths = [path]
        if text:
            paths.append(path.with_suffix(".jsonl"))
            disk.write_text(paths[1], text)
        return [_shard(path, rows=len(tensors["prompt_index"])) for path in paths]

    def _save_weights(self, folder: Path, weights: Weights) -> str | None:
        """Save the weights; return why it failed; collective."""
        message = None
        try:
            weights.save(folder)
        except (UserError, RunError, OSError) as error:
            message = str(error)
        return first_failure(message, self.everyone)

    def _publish(self, description: RecordDescription, files: list[Shard], dtypes: Mapping[str, str]) -> None:
        """Describe the record and name it, on rank 0, within the bound. Raises RunError."""
        if self.everyone.rank != 0:
            return
        work = folders.temporary(self.root, description.step)
        described = to_json(description, sorted(files, key=lambda shard: shard.file), dtypes)
        disk.write_text(work / RECORD_FILE, json.dumps(described, indent=1, allow_nan=False) + "\n")
        self._make_room(folders.size_of(work))
        folders.publish(self.root, description.step)


def _shard(path: Path, *, rows: int) -> Shard:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Shard(path.name, path.stat().st_size, digest, rows)
