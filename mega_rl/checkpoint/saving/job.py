"""One rank's part of a save, from bytes in memory to the published checkpoint.

Every rank writes its shard and then a record next to the shard: `.done` with the shard's entry of the manifest, or
`.failed` with a message. The first rank's job then waits for the records of all and publishes the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl import disk
from mega_rl.checkpoint.folders import publish, remove, surplus
from mega_rl.checkpoint.format.manifest import Manifest, WholeTensor, now
from mega_rl.checkpoint.format.shards import PieceSpec, ShardRecord, missing_elements, order, overlap, write_shard
from mega_rl.disk import SaveError
from mega_rl.errors import UserError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.005, 0.25  # between two polls for records


class JobPiece(NamedTuple):
    """A piece of a tensor to write and the place of its staged bytes."""

    spec: PieceSpec
    global_shape: tuple[int, ...]
    at: int  # first byte in the staging memory, if the job has one


class Publication(NamedTuple):
    """Publication of a checkpoint by the first rank, once all shards are written."""

    root: str
    step: int
    shards: tuple[str, ...]  # file names of all shards, in rank order
    manifest: dict[str, Any]  # fields of the manifest except tensors, shards and date
    retention: dict[str, Any]  # arguments of folders.surplus


class SaveJob(NamedTuple):
    """One rank's part of a save."""

    folder: str  # the temporary folder
    shard: str  # its file name
    pieces: tuple[JobPiece, ...]
    timeout_s: float
    publication: Publication | None = None  # for the first rank

    @staticmethod
    def from_json(value: list[Any]) -> SaveJob:
        """Return a job after a round trip through JSON, which makes lists of tuples."""
        folder, shard, raw, timeout_s, publication = value
        pieces = tuple(
            JobPiece(PieceSpec(name, dtype, tuple(offset), tuple(shape)), tuple(whole), at)
            for (name, dtype, offset, shape), whole, at in raw
        )
        return SaveJob(folder, shard, pieces, timeout_s, None if publication is None else Publication(*publication))


def perform(job: SaveJob, data: Callable[[int], memoryview], *, given_up: Callable[[], bool]) -> list[str]:
    """Write the shard and its record; the first rank then waits for all records and publishes.

    data: returns the bytes of the piece with an index.

    Returns:
        problems that did not harm the checkpoint

    Raises:
        SaveError: naming file and reason; the record holds the same message if it can be written.
    """
    deadline = time.monotonic() + job.timeout_s
    folder = Path(job.folder)
    if job.pieces:
        try:
            record, layout = write_part(folder / job.shard, job.pieces, data)
            text = json.dumps({"shard": record.to_json(), "layout": layout})
            disk.replace_text(_record(folder, job.shard, "done"), text)
        except SaveError as error:
            with contextlib.suppress(SaveError):  # the ranks exchange failures as well
                disk.replace_text(_record(folder, job.shard, "failed"), str(error))
            raise
    if job.publication is None:
        return []
    return _publish(folder, job.publication, job.timeout_s, deadline=deadline, given_up=given_up)


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
    for name, whole in tensors.items():
        missing = missing_elements(pieces[name], whole.shape)
        if missing or overlap(pieces[name]) is not None:
            what = f"lack {missing} of its elements" if missing > 0 else "overlap"
            raise SaveError(f"{name} {list(whole.shape)}: the pieces of all ranks {what}; this is a bug")
    return tensors


def _publish(
    folder: Path, publication: Publication, timeout_s: float, *, deadline: float, given_up: Callable[[], bool]
) -> list[str]:
    """Publish a checkpoint, then remove old ones; return the problems of the removal."""
    texts = _wait_for_records(folder, publication.shards, timeout_s, deadline=deadline, given_up=given_up)
    parts = [json.loads(text) for text in texts]
    records = tuple(ShardRecord.from_json(part["shard"], folder) for part in parts)
    tensors = merge_layouts(part["layout"] for part in parts)
    for name in publication.shards:
        disk.remove_file(_record(folder, name, "done"))
    if given_up():
        raise SaveError("given up")
    root = Path(publication.root)
    manifest = Manifest(**publication.manifest, saved_at=now(), tensors=tensors, shards=records)
    publish(root, publication.step, manifest)
    try:
        remove([path for path, _ in surplus(root, newest_step=publication.step, **publication.retention)])
    except (SaveError, UserError) as error:
        return [f"old checkpoints could not be removed: {error}"]
    return []


def _wait_for_records(
    folder: Path, shards: Sequence[str], timeout_s: float, *, deadline: float, given_up: Callable[[], bool]
) -> list[str]:
    """Return the texts of all shards' `.done`. Raises SaveError for `.failed` or lateness."""
    texts: dict[str, str] = {}
    wait_s = FIRST_WAIT_S
    while True:
        for shard in [shard for shard in shards if shard not in texts]:
            failed, done = _record(folder, shard, "failed"), _record(folder, shard, "done")
            if failed.exists():
                raise SaveError(failed.read_text(encoding="utf-8"))
            try:
                texts[shard] = done.read_text(encoding="utf-8")
            except FileNotFoundError:
                pass
            except OSError as error:
                raise SaveError(f"{done}: {error.strerror}") from error
        missing = [shard for shard in shards if shard not in texts]
        if not missing:
            return [texts[shard] for shard in shards]
        if given_up():
            raise SaveError("given up")
        if time.monotonic() > deadline:
            raise SaveError(f"waited {timeout_s:g} s for {', '.join(missing)}, which other ranks write")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _record(folder: Path, shard: str, kind: str) -> Path:
    return folder / f"{Path(shard).stem}.{kind}"
