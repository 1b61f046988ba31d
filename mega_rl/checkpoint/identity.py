"""The identity of a run, which a checkpoint and the run that goes on from it share: seed, prompts, model, engine.

A model is known by its content: config.json and its tensors' names, dtypes, shapes and a sample of their bytes. A copy
in another folder, or one in other files, is the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_rl.checkpoint.changes import changes, in_words
from mega_rl.data.stream import FileShard
from mega_rl.data.tokenizer_identity import read_json_object
from mega_rl.errors import UserError
from mega_rl.storage.safetensors_reader import CheckpointReader, TensorInfo

CONTENT = "content:"  # begins the identity of a model; old checkpoints have its path instead
FILES = "data_files"  # a record beside the identity, from which a mismatch is explained; not compared itself
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
_SAMPLED_TENSORS, _SAMPLE_BYTES = 64, 4096


def model_identity(folder: Path) -> str:
    """Return the identity of a Hugging Face checkpoint folder by content; reads at most 256 KiB of weights.

    Raises:
        UserError: config.json or the weights cannot be read.
    """
    config = {k: v for k, v in read_json_object(folder / "config.json").items() if k not in _NOT_OF_THE_MODEL}
    with CheckpointReader(folder) as reader:
        infos = sorted(reader.tensors.values(), key=lambda info: info.name)
    table = [[info.name, str(info.dtype), list(info.shape)] for info in infos]
    digest = hashlib.sha256(json.dumps([config, table], sort_keys=True, separators=(",", ":")).encode())
    for info in infos[:: max(1, -(-len(infos) // _SAMPLED_TENSORS))]:
        digest.update(_sample(info))
    return CONTENT + digest.hexdigest()


def file_records(files: Mapping[str, str], *, sampled: bool = False) -> dict[str, list[int | str]]:
    """Return [bytes, SHA-256] of every data file that is there, by its name for people.

    sampled: of files that are streamed, and too large to be read at every start; also names of the Hub, without bytes.
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
    """Return in words each respect in which a checkpoint is of another run; empty where it is of this one."""
    stored = {"engine": "megatron", **stored}  # old checkpoints do not name their engine
    mismatches = []
    for key, value in current.items():
        if key == FILES or stored.get(key) == value:
            continue
        if key == "model":
            mismatches += _model_difference(stored.get(key), value, stored_config, config)
        elif key == "data":
            mismatches.append(_data_difference(stored.get(FILES), current.get(FILES), stored_config, config))
        else:
            mismatches.append(f"{key}: {stored.get(key)!r} -> {value!r}")
    return mismatches


def _sample(info: TensorInfo) -> bytes:
    """Return bytes from the middle of a tensor."""
    at = max(0, (info.nbytes - _SAMPLE_BYTES) // 2)
    with info.file.open("rb") as file:
        file.seek(info.offset + at)
        return file.read(min(_SAMPLE_BYTES, info.nbytes))


def _model_difference(
    stored: Any, current: Any, stored_config: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
    """Return why the model is another one; nothing where an old checkpoint has a path to the same model."""
    path = _setting(config, "model", "path")
    if isinstance(stored, str) and not stored.startswith(CONTENT) and path is not None:
        if Path(stored).resolve() == Path(path).resolve():
            return []
        try:
            if model_identity(Path(stored)) == current:
                return []
        except UserError:
            pass  # it is not there any more: only its path is known
        return [f"model.path: {stored!r} -> {path!r}"]
    before = _setting(stored_config, "model", "path")
    if before is None or path is None:
        return [f"model: {stored!r} -> {current!r}"]
    if before == path:
        return [f"model.path: {path!r} holds another model now, by config.json or its weights"]
    return [f"model.path: {before!r} -> {path!r}, whose config.json or weights differ"]


def _data_difference(stored: Any, current: Any, stored_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return which files or settings have changed the training prompts."""
    before, now = (each if isinstance(each, dict) else {} for each in (stored, current))
    words = [f"{name} is not among the files any more" for name in before if name not in now]
    words += [f"{name} is new" for name in now if before and name not in before]
    for name in (name for name in now if name in before and now[name] != before[name]):
        old, new = (record[0] for record in (before[name], now[name]))
        words.append(f"{name} has changed" + (f" ({old:,} -> {new:,} bytes)" if old != new else ""))
    sections = [{"data": each.get("data", {})} for each in (stored_config, config)]
    words += [in_words([change]) for change in changes(*sections) if not change.key.endswith("_files")]
    if not words:
        words = [] if before else [f"the files are {', '.join(now) or 'unknown'}"]
        words.append("the same files give other prompts: by the tokenizer, or this version's reading of them")
    return f"training prompts: {'; '.join(words)}"


def _setting(config: Mapping[str, Any], section: str, name: str) -> str | None:
    values = config.get(section)
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, str) else None
