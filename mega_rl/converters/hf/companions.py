"""Files next to the weights of a checkpoint (config.json, tokenizer, templates): copied, rarely changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.safetensors.output_folder import copy_files, write_json
from mega_rl.errors import UserError

# Endings of weights, code and files of other weights, which are never copied.
_WEIGHTS = ".safetensors .bin .pt .pth .ckpt .h5 .msgpack .onnx .onnx_data .gguf .npz .npy .distcp .ot .tflite .pkl"
_CODE = ".py .pyc .so .sh .ipynb .js .exe .dll .jar"
_ENDINGS = tuple(f"{_WEIGHTS} {_CODE} .index.json".split())
_ADAPTERS = ("adapter_config.json", "adapter_model.")
MOST_BYTES = 512 << 20  # larger files are weights in a format without a known ending
_SHOWN = 10  # names in a message
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_DTYPE_KEYS = ("dtype", "torch_dtype")


def companions(source: Path) -> dict[str, Path]:
    """Return the files of a checkpoint folder and subfolders to copy: name -> path without links.

    These are all files except weights, code, indexes, adapters and hidden files. Raises UserError without a
    config.json, and for a link that leads out of the folder: its target could be published with the model.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"{source}: has no config.json to copy into the exported checkpoint")
    return {
        path.relative_to(source).as_posix(): _without_links(path, source)
        for path in _regular_files(source)
        if not path.name.endswith(_ENDINGS)
        and not path.name.startswith(_ADAPTERS)
        and path.stat().st_size <= MOST_BYTES
    }


def not_copied(source: Path, files: Mapping[str, Path]) -> str:
    """Return "; not copied: run.py, x.bin" for a folder's files other than `files` and weights."""
    names = {path.relative_to(source).as_posix() for path in _regular_files(source)} - set(files)
    left = sorted(name for name in names if not name.endswith((".safetensors", ".index.json")))
    more = f" and {len(left) - _SHOWN} more" if left[_SHOWN:] else ""
    return f"; not copied from {source}: {', '.join(left[:_SHOWN])}{more}" if left else ""


def _regular_files(source: Path) -> list[Path]:
    """Return the sorted files of a folder and its subfolders without hidden ones."""
    paths = [*source.glob("[!.]*"), *source.glob("[!.]*/[!.]*")]
    return sorted(path for path in paths if path.is_file())


def _without_links(path: Path, source: Path) -> Path:
    """Return a file's real path, which must be in the folder or its repository's Hub blobs."""
    place, folder = path.resolve(), source.resolve()
    if place.is_relative_to(folder):
        return place
    if folder.parent.name == "snapshots" and place.parent == folder.parent.parent / "blobs":
        return place
    raise UserError(
        f"{path}: is, or lies behind, a link to {place}, outside of the model's folder, so it is not copied into an "
        "export; put a copy of the file in its place, or delete the link"
    )


def config_changes(
    hf: HFConfig, *, dtype: str | None = None, mtp_dropped: bool = False, scores: bool = False
) -> dict[str, Any]:
    """Return the keys of config.json that an export changes; the value None removes one.

    Exported weights have the model's dtype, so the key for quantised ones goes; a `dtype` ("bfloat16") that the caller
    asks for replaces another in the file; prediction layers that the export drops count 0. scores: the model has a
    score for an output layer, which makes it transformers' class for one label.
    """
    if hf.wrapper is None:
        return _changes(hf.raw, dtype, mtp_dropped) | (_of_scores(hf.raw) if scores else {})
    changes = _changes(hf.wrapper, dtype, mtp_dropped)
    text = hf.wrapper.get("text_config")
    if isinstance(text, dict) and (inside := _changes(text, dtype, mtp_dropped)):
        changes["text_config"] = _changed(text, inside)
    return changes


def _of_scores(raw: Mapping[str, Any]) -> dict[str, Any]:
    names = [re.sub(r"For[A-Za-z]+$", "ForSequenceClassification", name) for name in raw.get("architectures") or ()]
    changes = {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {key: value for key, value in changes.items() if raw.get(key) != value}


def _changes(raw: Mapping[str, Any], dtype: str | None, mtp_dropped: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if raw.get("quantization_config"):
        changes["quantization_config"] = None
    if dtype is not None:
        changes |= {key: dtype for key in _DTYPE_KEYS if key in raw and raw[key] != dtype}
    if mtp_dropped:
        changes |= {key: 0 for key in _MTP_KEYS if raw.get(key)}
    return changes


def _changed(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**raw, **changes}.items() if key not in changes or value is not None}


def copy_companions(folder: Path, files: Mapping[str, Path], changes: Mapping[str, Any]) -> None:
    """Copy files (name -> source) into a folder, config.json with `changes`, and flush them to disk."""
    copy_files(folder, {name: path for name, path in files.items() if name != "config.json" or not changes})
    if changes:
        kept = _changed(json.loads(files["config.json"].read_bytes()), changes)
        write_json(folder / "config.json", kept)
