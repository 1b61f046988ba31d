"""Headers of safetensors files, read with checks of every field.

A file is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors#format). Sizes, offsets and names are checked before a byte of data is read,
and nothing in a file is ever executed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl.errors import UserError, UserErrors
from mega_rl.untrusted import JsonFields, is_plain_path, is_shape, parse_object, read_at, shorten

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's limit, also applied to an index
METADATA = "__metadata__"
_MAX_NAME = 1024

# How names of a language model begin: its layers', and its head's. In a model of images and text the first are those
# that transformers 5 writes, the second those of transformers 4 and of Kimi.
PLAIN_NAMES = ("model.", "lm_head.")
WRAPPED_NAMES = (("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head."))

# Bytes of an element, by the name that a header gives the dtype.
ITEM_BYTES = {
    **dict.fromkeys(("F64", "C64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


class HeaderEntry(NamedTuple):
    """A tensor as a header lists it."""

    name: str
    dtype: str  # "F32", "BF16"
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file to the tensor's first byte
    nbytes: int


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix; a vector is one column."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


def tensor_names(folder: Path) -> Collection[str]:
    """Return the names that a checkpoint's index lists, or its only file has; empty without either."""
    if (folder / SINGLE_FILE).is_file():
        return read_entries(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        return ()
    names = parse_json((folder / INDEX_FILE).read_bytes(), folder / INDEX_FILE).get("weight_map")
    return names if isinstance(names, dict) else ()


def name_prefixes(names: Collection[str]) -> tuple[str, str]:
    """Return how the names of the language model among a checkpoint's tensors begin."""
    return next((pair for pair in WRAPPED_NAMES if f"{pair[0]}embed_tokens.weight" in names), PLAIN_NAMES)


def renamed(name: str, old: tuple[str, str], new: tuple[str, str]) -> str:
    """Return a name that begins as `old` says with the beginning of `new`; others stay."""
    pairs = zip(old, new, strict=True)
    return next((after + name.removeprefix(before) for before, after in pairs if name.startswith(before)), name)


def read_entries(path: Path) -> dict[str, HeaderEntry]:
    """Return every tensor of one file by name.

    Raises:
        UserError: the file is too short or not in this format.
        UserErrors: every entry whose type, shape or offsets are wrong; the tensors must fill the rest of the file
            without gap or overlap.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = read_header_bytes(file.fileno(), size, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_entries(parse_json(header[8:], path), path, size, start=len(header))


def read_header_bytes(fd: int, size: int, path: Path) -> bytes:
    """Return length and text of the header of a file of `size` bytes. Raises UserError."""
    prefix = read_at(fd, 0, 8, path)
    if len(prefix) < 8:
        raise UserError(f"{path}: {size} bytes are not a safetensors file; fetch the file again")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise UserError(
            f"{path}: header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; not a safetensors file, fetch "
            "it again"
        )
    # At most the file's size: the length is only a claim, and memory for it is allocated.
    text = read_at(fd, 8, min(length, size), path)
    if len(text) < length:
        raise UserError(
            f"{path}: truncated, {size} bytes do not hold the header of {length} bytes; fetch the file again"
        )
    return prefix + text


def parse_entries(raw: JsonFields, path: Path, size: int, *, start: int) -> dict[str, HeaderEntry]:
    """Return a parsed header's tensors by name. size: of the file; start: of its data.

    Raises UserErrors as `read_entries`.
    """
    problems: list[str] = []
    parsed = [_entry(name, value, path, start, problems) for name, value in raw.items() if name != METADATA]
    entries = {entry.name: entry for entry in parsed if entry is not None}
    problems = problems or _extent_faults(entries.values(), path, start, size)
    if problems:
        raise UserErrors(problems)
    return entries


def encode_header(entries: Mapping[str, Any]) -> bytes:
    """Return length and text of a header, padded to a multiple of 8 bytes."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def parse_json(text: bytes, path: Path) -> JsonFields:
    """Return the JSON object of a header or an index. Raises UserError naming `path`."""
    try:
        return parse_object(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}; fetch the file again") from error


def checkpoint_entries(path: Path) -> dict[str, HeaderEntry]:
    """Return a file's or directory's tensors; a single file wins over an index, as in transformers.

    Raises UserError or UserErrors for files that are missing, damaged or contradict the index.
    """
    if path.is_file():
        return read_entries(path)
    if not path.is_dir():
        raise UserError(f"checkpoint {path}: no such file or directory")
    if (path / SINGLE_FILE).is_file():
        return read_entries(path / SINGLE_FILE)
    if (path / INDEX_FILE).is_file():
        return _read_sharded(path)
    hint = "save the model again as safetensors"
    if any(path.glob("pytorch_model*.bin")):
        hint = "pickled .bin weights are never loaded, save them with save_pretrained(safe_serialization=True) first"
    raise UserError(f"checkpoint {path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; {hint}")


def _read_sharded(root: Path) -> dict[str, HeaderEntry]:
    """Return the index's tensors, each checked in its shard. Raises UserErrors with all contradictions."""
    index = root / INDEX_FILE
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise UserError(f"{index}: {index.stat().st_size} bytes, at most {MAX_HEADER_BYTES} are allowed")
        text = index.read_bytes()
    except OSError as error:
        raise UserError(f"{index}: cannot be read ({error.strerror})") from error
    weight_map = parse_json(text, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{index}: weight_map is {type(weight_map).__name__}, must be an object from tensor to file name; "
            "download or copy it again"
        )
    problems: list[str] = []
    by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if is_plain_path(shard):  # by its text: in a hub cache the files themselves are links out of the folder
            by_shard.setdefault(shard, []).append(name)
        else:
            problems.append(
                f"{index}: {shorten(name)} is in {shorten(repr(shard))}, must be a relative path inside the checkpoint"
            )
    tensors: dict[str, HeaderEntry] = {}
    for shard, names in sorted(by_shard.items()):
        if not os.path.isfile(root / shard):
            problems.append(
                f"{root / shorten(shard)}: no such file, but the index puts {len(names)} tensors there "
                f"({shorten(names[0])}, ...); download or copy it again"
            )
            continue
        try:
            header = read_entries(root / shard)
        except UserError as error:
            problems += error.problems if isinstance(error, UserErrors) else [str(error)]
        else:
            problems += [
                f"{root / shard}: lacks {shorten(name)}, which the index puts there"
                for name in names
                if name not in header
            ]
            if twice := sorted(header.keys() & tensors.keys()):
                more = f", and so are {len(twice) - 1} more" if twice[1:] else ""
                where = f"{root / shard}: {twice[0]} is also in {tensors[twice[0]].file.name}{more}"
                problems.append(f"{where}; only one file may hold a name, so write the checkpoint again")
            tensors.update(header)  # also names that the index lacks, which transformers loads: the model judges them
    if problems:
        raise UserErrors(problems)
    return tensors


def _entry(name: str, raw: Any, path: Path, start: int, problems: list[str]) -> HeaderEntry | None:
    """Return one entry, None after adding its faults to `problems`; the data begins at byte `start`."""
    where = f"{path}: {shorten(name)}"
    if not name.isprintable() or len(name) > _MAX_NAME:
        problems.append(f"{where}: a name must be printable and at most {_MAX_NAME} characters long")
        return None
    if not isinstance(raw, dict):
        problems.append(f"{where}: is a JSON {type(raw).__name__}, must be an object")
        return None
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        problems.append(f"{where}: dtype={shorten(repr(dtype))} is unknown, must be one of {', '.join(ITEM_BYTES)}")
    elif not is_shape(shape):
        problems.append(f"{where}: shape={shorten(repr(shape))} must be a list of sizes")
    elif not is_shape(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.append(f"{where}: data_offsets={shorten(repr(offsets))} must be [begin, end]")
    else:
        nbytes, need = offsets[1] - offsets[0], prod(shape) * ITEM_BYTES[dtype]
        if nbytes == need:
            return HeaderEntry(name, dtype, tuple(shape), path, start + offsets[0], nbytes)
        problems.append(f"{where}: {nbytes} bytes, but shape {shape} of {dtype} takes {need}")
    return None


def _extent_faults(entries: Iterable[HeaderEntry], path: Path, start: int, size: int) -> list[str]:
    """Return why the tensors do not fill the file exactly, empty if they do."""
    problems = []
    at, before = start, "the header"
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != at:
            verb = "overlaps" if entry.offset < at else "leaves a gap after"
            problems.append(f"{path}: {entry.name} {verb} {before} (begins at byte {entry.offset}, expected {at})")
        at, before = max(at, entry.offset + entry.nbytes), entry.name
    if not problems and at > size:
        problems.append(f"{path}: truncated, {size} bytes of the {at} that its header lists; fetch the file again")
    elif not problems and at < size:
        problems.append(f"{path}: {size - at} bytes follow the last tensor; fetch the file again")
    return problems
