"""Files beside the weights of a checkpoint (config.json, tokenizer, templates): copied, hardly ever changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.errors import UserError
from mega_rl.storage.output_folder import copy_files, write_file

# Weights of the source, and its code, are never copied.
_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "*.tiktoken")
_EXCEPT = ("*.index.json",)
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_DTYPE_KEYS = ("dtype", "torch_dtype")


def companions(source: Path) -> dict[str, Path]:
    """Return the files of a checkpoint folder that are neither weights nor code: name -> path."""
    if not (source / "config.json").is_file():
        raise UserError(f"{source}: has no config.json to copy into the exported checkpoint")
    files = {path.name: path for pattern in _PATTERNS for path in source.glob(pattern) if path.is_file()}
    return {name: path for name, path in sorted(files.items()) if not any(path.match(p) for p in _EXCEPT)}


def config_changes(hf: HFConfig, *, dtype: str | None = None, mtp_dropped: bool = False) -> dict[str, Any]:
    """Return the keys of config.json that an export changes; the value None removes one.

    Exported weights have the model's dtype, so the key for 8-bit blocks goes; a `dtype` ("bfloat16") that the caller
    asks for replaces another in the file; prediction layers that the export drops count 0.
    """
    raw = hf.raw
    changes: dict[str, Any] = {}
    if hf.quantization is not None and "quantization_config" in raw:
        changes["quantization_config"] = None
    if dtype is not None:
        changes |= {key: dtype for key in _DTYPE_KEYS if key in raw and raw[key] != dtype}
    if mtp_dropped:
        changes |= {key: 0 for key in _MTP_KEYS if raw.get(key)}
    return changes


def copy_companions(folder: Path, files: Mapping[str, Path], changes: Mapping[str, Any]) -> None:
    """Copy the files (name -> source) into a folder, config.json with `changes`, and flush them to disk."""
    copy_files(folder, {name: path for name, path in files.items() if name != "config.json" or not changes})
    if changes:
        write_file(folder / "config.json", changed_config(files["config.json"].read_bytes(), changes))


def changed_config(text: bytes, changes: Mapping[str, Any]) -> bytes:
    """Return config.json with these keys changed or (None) removed; without changes, the same bytes."""
    if not changes:
        return text
    config = json.loads(text)
    config.update(changes)
    kept = {key: value for key, value in config.items() if key not in changes or value is not None}
    return (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()
