"""One rank's part of a save, from bytes in memory to the published checkpoint. No torch: the writer has none.

Every rank writes its shard and then a record of it beside the shard: `.done` with what the manifest needs, or
`.failed` with a message. The first rank's job goes on to wait for the records of all and to publish the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl.checkpoint.folders import publish, retire
from mega_rl.checkpoint.format.coverage import missing_elements, overlap
from mega_rl.checkpoint.format.manifest import Manifest, WholeTensor, now
from mega_rl.checkpoint.format.shards import PieceSpec, ShardRecord, order, write_shard
from mega_rl.errors import UserError
from mega_rl.storage import disk
from mega_rl.storage.disk import SaveError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.005, 0.25  # between two polls for records


class JobPiece(NamedTuple):
    """A piece of a tensor to write and the place of its staged bytes."""

    spec: PieceSpec
    global_shape: tuple[int, ...]
    at: int  # first byte in the staging memory, if the job has one


@dataclass(frozen=True)
class Publication:
    """Publication of a checkpoint by the first rank, once all shards are written."""

    root: str
    step: int
    shards: tuple[str, ...]  # names of all shards, in rank order
    manifest: dict[str, Any]  # fields of the manifest but for the tensors, shards and date
    retention: dict[str, Any]  # arguments of folders.retire


@dataclass(frozen=True)
class SaveJob:
    """One rank's part of a save."""

    folder: str  # the temporary one
    shard: str  # its file name
    pieces: tuple[JobPiece, ...]
    timeout_s: float
    publication: Publication | None = None  # of the first rank

    def to_json(self) -> dict[str, Any]:
        """Return the job for `from_json`."""
        publication = None if self.publication is None else vars(self.publication)
        return vars(self) | {"publication": publication}

    @staticmethod
    def from_json(value: dict[str, Any]) -> SaveJob:
        """Return the job of `to_json`, after a round trip through JSON."""
        pieces = tuple(
            JobPiece(PieceSpec(name, dtype, tuple(offset), tuple(shape)), tuple(whole), at)
            for (name, dtype, offset, shape), whole, at in value["pieces"]
        )
        raw = value["publication"]
        publication = None if raw is None else Publication(**raw | {"shards": tuple(raw["shards"])})
        return SaveJob(**value | {"pieces": pieces, "publication": publication})


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a successful job."""

    nbytes: int  # of this rank's shard
    notes: tuple[str, ...] = field(default=())  # problems that did not harm the checkpoint


def perform(job: SaveJob, data: Callable[[int], memoryview], *, given_up: Callable[[], bool]) -> SaveOutcome:
    """Write the shard and its record; the first rank then waits for all records and publishes.

    data: returns the bytes of the piece with an index.

    Raises:
        SaveError: naming file and reason; the record holds the same message if it can be written.
    """
    deadline = time.monotonic() + job.timeout_s
    nbytes = 0
    if job.pieces:
        nbytes = _write_own(job, data)
    if job.publication is None:
        return SaveOutcome(nbytes)
    return SaveOutcome(nbytes, _publish(job, job.publication, deadline=deadline, given_up=given_up))


def _write_own(job: SaveJob, data: Callable[[int], memoryview]) -> int:
    """Write this rank's shard and record; return the shard's bytes."""
    folder = Path(job.folder)
    try:
        record, layout = write_part(folder / job.shard, job.pieces, data)
        disk.replace_text(folder / _done(job.shard), json.dumps({"shard": record.to_json(), "layout": layout}))
    except SaveError as error:
        with contextlib.suppress(SaveError):  # the ranks exchange failures as well
            disk.replace_text(folder / _failed(job.shard), str(error))
        raise
    return record.nbytes


def write_part(path: Path, pieces: Sequence[JobPiece], data: Callable[[int], memoryview]) -> tuple[ShardRecord, str]:
    """Write a rank's shard; return its record and its layout, a text for `merge_layouts`. Raises SaveError."""
    specs = [piece.spec for piece in pieces]
    record = write_shard(path, specs, (data(index) for index in order(specs)))
    return record, json.dumps({"pieces": specs, "wholes": [piece.global_shape for piece in pieces]})


def merge_layouts(texts: Iterable[str]) -> dict[str, WholeTensor]:
    """Return the tensors of a checkpoint from the layouts of all ranks' shards.

    Raises SaveError where the pieces do not cover every tensor exactly once.
    """
    tensors: dict[str, WholeTensor] = {}
    pieces: dict[str, list[PieceSpec]] = {}
    for text in texts:
        layout = json.loads(text)
        for (name, dtype, offset, shape), global_shape in zip(layout["pieces"], layout["wholes"], strict=True):
            whole = WholeTensor(dtype, tuple(global_shape))
            if tensors.setdefault(name, whole) != whole:
                raise SaveError(f"{name}: is {tensors[name]} on one rank and {whole} on another")
            pieces.setdefault(name, []).append(PieceSpec(name, dtype, tuple(offset), tuple(shape)))
    _check_coverage(tensors, pieces)
    return tensors


def _publish(
    job: SaveJob, publication: Publication, *, deadline: float, given_up: Callable[[], bool]
) -> tuple[str, ...]:
    """Publish the shards of all ranks as a checkpoint, then remove old ones; return the problems of the removal."""
    folder = Path(job.folder)
    texts = _wait_for_records(folder, publication.shards, job.timeout_s, deadline=deadline, given_up=given_up)
    parts = [json.loads(text) for text in texts]
    records = tuple(ShardRecord.from_json(part["shard"], folder) for part in parts)
    tensors = merge_layouts(part["layout"] for part in parts)
    for name in publication.shards:
        disk.remove_file(folder / _done(name))
    if given_up():
        raise SaveError("given up")
    manifest = Manifest(**publication.manifest, saved_at=now(), tensors=tensors, shards=records)
    publish(Path(publication.root), publication.step, manifest)
    try:
        retire(Path(publication.root), newest_step=publication.step, **publication.retention)
    except (SaveError, UserError) as error:
        return (f"old checkpoints could not be removed: {error}",)
    return ()


def _check_coverage(tensors: Mapping[str, WholeTensor], pieces: Mapping[str, Sequence[PieceSpec]]) -> None:
    """Check that the ranks together have written every element exactly once. Raises SaveError."""
    for name, whole in tensors.items():
        missing = missing_elements(pieces[name], whole.shape)
        if missing or overlap(pieces[name]) is not None:
            what = f"lack {missing} of its elements" if missing > 0 else "overlap"
            raise SaveError(f"{name} {list(whole.shape)}: the pieces of all ranks {what}; this is a bug")


def _wait_for_records(
    folder: Path, shards: Sequence[str], timeout_s: float, *, deadline: float, given_up: Callable[[], bool]
) -> list[str]:
    """Wait for the `.done` of every shard; return their texts. Raises SaveError for a `.failed` or at the deadline."""
    texts: dict[str, str] = {}
    wait_s = FIRST_WAIT_S
    while True:
        for shard in [shard for shard in shards if shard not in texts]:
            try:
                texts[shard] = (folder / _done(shard)).read_text(encoding="utf-8")
            except FileNotFoundError:
                _raise_if_failed(folder, shard)
            except OSError as error:
                raise SaveError(f"{folder / _done(shard)}: {error.strerror}") from error
        missing = [shard for shard in shards if shard not in texts]
        if not missing:
            return [texts[shard] for shard in shards]
        if given_up():
            raise SaveError("given up")
        if time.monotonic() > deadline:
            raise SaveError(f"waited {timeout_s:g} s for {', '.join(missing)}, which other ranks write")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _raise_if_failed(folder: Path, shard: str) -> None:
    try:
        message = (folder / _failed(shard)).read_text(encoding="utf-8")
    except OSError:
        return
    raise SaveError(message)


def _done(shard: str) -> str:
    return Path(shard).stem + ".done"


def _failed(shard: str) -> str:
    return Path(shard).stem + ".failed"
