"""Identity that a checkpoint and a resumed run share: seed, prompts, model, engine.

A model is known by its content: config.json and its tensors' names, dtypes, shapes and a sample of their bytes. A copy
in another folder, or in other files, is the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_rl.config.keys import TAGGED, flattened
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.data.stream import FileShard
from mega_rl.data.tokenizer_identity import read_json_object
from mega_rl.errors import UserError
from mega_rl.parallel.agreement import run_on_one
from mega_rl.protocols import Ranks
from mega_rl.types import JsonObject

FILES = "data_files"  # record next to the identity that explains a mismatch; not compared
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
_SAMPLED_TENSORS, _SAMPLE_BYTES = 64, 4096


def run_identity(
    known: Mapping[str, Any], model: Path, files: Mapping[str, str], *, sampled: bool, ranks: Ranks
) -> JsonObject:
    """Return `known` with the content of model and data files; collective.

    files: paths by their names for people. sampled: as in `file_records`. Raises UserError on all ranks.
    """

    def read() -> JsonObject:
        try:
            return {"model": model_identity(model), FILES: file_records(files, sampled=sampled)}
        except OSError as error:
            raise UserError(str(error)) from error

    return {**known, **run_on_one(read, ranks)}


def model_identity(folder: Path) -> str:
    """Return the identity of a checkpoint folder by content; reads at most 256 KiB.

    Raises UserError: config.json or the weights cannot be read.
    """
    config = {k: v for k, v in read_json_object(folder / "config.json").items() if k not in _NOT_OF_THE_MODEL}
    with CheckpointReader(folder) as reader:
        infos = sorted(reader.tensors.values(), key=lambda info: info.name)
    table = [[info.name, str(info.dtype), list(info.shape)] for info in infos]
    digest = hashlib.sha256(json.dumps([config, table], sort_keys=True, separators=(",", ":")).encode())
    for info in infos[:: max(1, -(-len(infos) // _SAMPLED_TENSORS))]:
        with info.file.open("rb") as file:  # bytes from the middle of the tensor
            file.seek(info.offset + max(0, (info.nbytes - _SAMPLE_BYTES) // 2))
            digest.update(file.read(min(_SAMPLE_BYTES, info.nbytes)))
    return "content:" + digest.hexdigest()


def file_records(files: Mapping[str, str], *, sampled: bool = False) -> dict[str, list[int | str]]:
    """Return [bytes, SHA-256] of every data file that exists, by its name for people.

    sampled: for streamed files, which are too large to read at every start, a sample of the bytes; also records names
    of the Hub, without bytes.
    """
    records: dict[str, list[int | str]] = {}
    for name, path in files.items():
        if sampled:
            is_file = Path(path).is_file()
            records[name] = [os.stat(path).st_size, FileShard(Path(path)).identity()] if is_file else [0, path]
        elif Path(path).is_file():
            with open(path, "rb") as file:
                records[name] = [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]
    return records


def differences(
    stored: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    stored_config: Mapping[str, Any],
    config: Mapping[str, Any],
) -> list[str]:
    """Return the differences between a checkpoint's run and this one, in words."""
    mismatches = []
    for key in {**stored, **current}:
        value = current.get(key)
        if key == FILES or stored.get(key) == value:
            continue
        if key == "model":
            before, now = (config.get("model", {}).get("path", "") for config in (stored_config, config))
            mismatches.append(f"model.path: {before!r} -> {now!r}, whose config.json or weights differ")
        elif key == "data":
            mismatches.append(_data_difference(stored.get(FILES), current.get(FILES), stored_config, config))
        else:
            mismatches.append(f"{key}: {stored.get(key)!r} -> {value!r}")
    return mismatches


def _data_difference(stored: Any, current: Any, stored_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return which files or settings have changed the training prompts."""
    before, now = (each if isinstance(each, dict) else {} for each in (stored, current))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    others = {"train_files": None, "val_files": None}
    sections = [{"data": {**each.get("data", {}), **others}} for each in (stored_config, config)]
    words = [*([f"other files ({', '.join(names)})"] if names else []), *filter(None, [changes(*sections)])]
    same = "the same files give other prompts: by the tokenizer, or this version's reading of them"
    return f"training prompts: {'; '.join(words) or same}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ between two resolved configs: "optim.lr 0.001 -> 0.0005, ...".

    Ignores settings that only one of them has, except settings of a user's class that both choose.
    """
    old, new = flattened(before), flattened(now)
    for one, other in ((old, new), (new, old)):
        for key in one.keys() - other.keys():
            section = key.rpartition(".")[0]
            if section in TAGGED and other.get(f"{section}.name") == one.get(f"{section}.name"):
                other[key] = None
    differing = [key for key in new if key in old and _plain(old[key]) != _plain(new[key])]
    return ", ".join(f"{key} {_shown(old[key])} -> {_shown(new[key])}" for key in differing)


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else repr(value) if value == "" else str(value)
