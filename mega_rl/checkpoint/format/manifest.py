"""Manifest of a checkpoint: identity, state, tensors and shards.

COMMIT holds the manifest's size and checksum; the manifest those of every header; a header those of the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl.checkpoint.format.shards import ShardRecord, checksum
from mega_rl.converters.safetensors.header import ITEM_BYTES
from mega_rl.disk import SaveError
from mega_rl.errors import UserError, UserErrors
from mega_rl.untrusted import (
    decode_json,
    fault,
    is_count,
    is_number,
    is_plain_path,
    is_shape,
    limited,
    shown,
)

FORMAT, VERSION = "mega_rl checkpoint", 2
MANIFEST_FILE, COMMIT_FILE = "manifest.json", "COMMIT"
MAX_MANIFEST_BYTES = 64 << 20
MAX_COMMIT_BYTES = 1024


# Types in the file.
_TYPES: Mapping[str, type] = {
    **{"step": int, "saved_at": str, "identity": dict, "state": dict, "numbers": dict, "world_size": int},
    **{"layout": str, "config": dict, "versions": dict, "metrics": dict, "tensors": dict, "shards": list},
}


class WholeTensor(NamedTuple):
    """Dtype and shape of a whole tensor of a checkpoint."""

    dtype: str  # "F32", "BF16", as in safetensors headers
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json: everything about a checkpoint except its shards' headers and data."""

    step: int  # steps done
    saved_at: str  # ISO 8601 with UTC offset, see `now`
    identity: Mapping[str, Any]  # equal in a checkpoint and the runs that may resume from it
    state: Mapping[str, Any]  # state of the trainer
    numbers: Mapping[str, Mapping[str, int | float]]  # step counters and the like, by engine
    world_size: int
    layout: str
    config: Mapping[str, Any]  # resolved
    versions: Mapping[str, str]  # mega_rl, torch, ...
    metrics: Mapping[str, float]  # finite metrics of the step
    tensors: Mapping[str, WholeTensor]  # name -> tensor
    shards: tuple[ShardRecord, ...]


def now() -> str:
    """Return the time in the form of `Manifest.saved_at`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def manifest_text(manifest: Manifest) -> str:
    """Return the content of manifest.json. Raises SaveError for a value that JSON cannot hold."""
    tensors, shards = dict(manifest.tensors), [shard.to_json() for shard in manifest.shards]
    raw = {"format": FORMAT, "version": VERSION, **vars(manifest), "tensors": tensors, "shards": shards}
    try:
        return json.dumps(raw, indent=None, separators=(",", ":"), allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise SaveError(f"manifest of step {manifest.step}: cannot be written as JSON ({error})") from error


def commit_text(manifest: bytes) -> str:
    """Return the content of COMMIT for these bytes of manifest.json."""
    return json.dumps({"manifest": checksum(manifest), "bytes": len(manifest)}) + "\n"


def check_commit(commit: bytes, manifest: bytes, folder: Path) -> None:
    """Check COMMIT against the manifest. Raises UserError for a damaged COMMIT or another manifest."""
    if commit != commit_text(manifest).encode():
        raise UserError(
            f"{folder / MANIFEST_FILE}: {len(manifest)} bytes with checksum {checksum(manifest)}, expected by "
            f"{folder / COMMIT_FILE}: {shown(commit.decode(errors='replace').strip())}; one of the two was changed or "
            "the disk is failing"
        )


def parse_manifest(data: bytes, where: str | Path) -> Manifest:
    """Parse the manifest. Raises UserError or UserErrors naming file, key, value and rule."""
    raw = decode_json(data, where)
    for key, value in (("format", FORMAT), ("version", VERSION)):
        if raw.get(key) != value or isinstance(raw[key], bool | float):
            problem = f"{key}={shown(raw[key])}" if key in raw else f"{key} is missing"
            raise UserError(f"{where}: {problem}, this program reads {value!r}")
    problems = [
        fault(where, key, raw.get(key), f"must be of type {kind.__name__}")
        for key, kind in _TYPES.items()
        if type(raw.get(key)) is not kind
    ]
    if problems:
        raise UserErrors(problems)
    engines = [one.values() if isinstance(one, dict) else [None] for one in raw["numbers"].values()]
    for key, valid in (
        ("step", is_count(raw["step"])),
        ("world_size", is_count(raw["world_size"], 1)),
        ("numbers", all(is_number(number) for one in engines for number in one)),
        ("metrics", all(map(is_number, raw["metrics"].values()))),
    ):
        problems += [] if valid else [fault(where, key, raw[key], "is not as a save writes it")]
    tensors = _tensors(raw["tensors"], where, problems)
    shards = _shards(raw["shards"], where, problems)
    if problems:
        raise UserErrors(limited(problems, where))
    return Manifest(**{key: raw[key] for key in _TYPES} | {"tensors": tensors, "shards": shards})


def _tensors(raw: Mapping[str, Any], where: str | Path, problems: list[str]) -> dict[str, WholeTensor]:
    tensors = {}
    for name, entry in raw.items():
        if not is_plain_path(name):
            problems.append(fault(where, "tensors", name, "must be names of printable parts without . and .."))
        elif not isinstance(entry, list) or len(entry) != 2 or not is_shape(entry[1]) or entry[0] not in [*ITEM_BYTES]:
            problems.append(fault(where, name, entry, f"must be one of {', '.join(ITEM_BYTES)} and a list of sizes"))
        else:
            tensors[name] = WholeTensor(entry[0], tuple(entry[1]))
    return tensors


def _shards(raw: list[Any], where: str | Path, problems: list[str]) -> tuple[ShardRecord, ...]:
    shards: dict[str, ShardRecord] = {}
    for i, entry in enumerate(raw):
        try:
            record = ShardRecord.from_json(entry, f"{where}: shards[{i}]")
        except UserError as error:
            problems.append(str(error))
            continue
        if record.file in shards:
            problems.append(fault(where, f"shards[{i}].file", record.file, "is there twice"))
        shards[record.file] = record
    return tuple(shards.values())
