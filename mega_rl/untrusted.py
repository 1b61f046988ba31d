"""Strict, bounded readers of files and messages that may be damaged or hostile."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, cast, get_args, get_origin, get_type_hints

from mega_rl.errors import UserError

if TYPE_CHECKING:
    from httpx import Response

JsonFields: TypeAlias = dict[str, Any]  # a parsed object; its reader checks the types
Record = TypeVar("Record")

MAX_DIMS = 16
MAX_FAULTS = 20  # messages of one file
MAX_NUMBER = 1 << 63
_hints = cache(get_type_hints)
_SHOWN = 80  # characters of a text in a message


def parse_object(text: bytes | str) -> JsonFields:
    """Return the JSON object that `text` (UTF-8) holds.

    Raises ValueError with the reason for anything else: also a key that occurs twice, and a number that is not finite.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({shorten(str(error), 2 * _SHOWN)})") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, must be an object")
    return value


def shorten(text: str, limit: int = _SHOWN) -> str:
    """Return a text of a file for a message: at most `limit` characters, without control characters."""
    text = text if text.isprintable() else repr(text[:limit])
    return text if len(text) <= limit + 2 else text[:limit] + "..."


def _without_repeats(pairs: list[tuple[str, Any]]) -> JsonFields:
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(text)} is not a finite number")
    return value


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file; return (descriptor, size). Raises UserError for anything else."""
    try:
        # Without O_NONBLOCK the open would wait for a pipe's writer; it has no effect on regular files.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else error.strerror
        raise UserError(f"{path}: cannot be read ({reason})") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise UserError(f"{path}: is not a regular file")
    return fd, status.st_size


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises UserError."""
    fd, size = open_regular(path)
    try:
        if size > limit:
            raise UserError(f"{path}: {size} bytes, at most {limit} are allowed")
        return read_at(fd, 0, size, path)
    finally:
        os.close(fd)


def read_at(fd: int, offset: int, size: int, path: Path) -> bytes:
    """Return `size` bytes from `offset` on, fewer where the file ends. Raises UserError."""
    parts = []
    try:
        while size and (part := os.pread(fd, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return b"".join(parts)


async def read_body(response: Response, limit: int) -> bytes:
    """Return the body of an HTTP answer; of a longer one a bit over `limit`."""
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > limit:
            break
    return bytes(content)


def decode_json(data: bytes, where: str | Path) -> dict[str, Any]:
    """Parse a JSON object; duplicate keys and non-finite numbers are errors. Raises UserError."""
    try:
        return parse_object(data)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def fault(where: str | Path, key: str, value: Any, rule: str) -> str:
    """Return the message for a value that breaks a rule."""
    return f"{where}: {shorten(key)}={shown(value)} {rule}"


def limited(problems: list[str], where: str | Path) -> list[str]:
    """Return the first `MAX_FAULTS` problems, and a line with the number of the rest."""
    more = len(problems) - MAX_FAULTS
    return problems if more <= 0 else [*problems[:MAX_FAULTS], f"{where}: {more} more faults like these"]


def shown(value: Any) -> str:
    """Return a value for a message: short, on one line, for any type and size."""
    if isinstance(value, list) and len(value) <= MAX_DIMS and all(isinstance(v, int | float | str) for v in value):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:  # its digits may be more than Python prints
        return f"an integer of {value.bit_length()} bits"
    return shorten(repr(value[:_SHOWN] if isinstance(value, str) else value))


def is_count(value: Any, least: int = 0) -> TypeGuard[int]:
    """Return whether a value is a whole number from `least` to 2**63 - 1."""
    return type(value) is int and least <= value < 1 << 63


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a finite number within a float's range."""
    if type(value) is int:
        return abs(value) < 1 << 1000
    return type(value) is float and math.isfinite(value)


def is_shape(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of at most `MAX_DIMS` sizes."""
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(is_count(v) for v in value)


def is_checksum(value: Any) -> TypeGuard[str]:
    """Return whether a value is 16 lower-case hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


def is_plain_path(value: Any) -> TypeGuard[str]:
    """Return whether a value is a short, printable relative path without . and .., as names of tensors are."""
    named = isinstance(value, str) and len(value) <= 1024 and value.isprintable() and "\\" not in value
    return named and not {"", ".", ".."} & {*value.split("/")}


def read_record(kind: type[Record], value: object) -> Record:
    """Return the dataclass `kind` from a parsed JSON object, which may have further fields.

    Fields are whole numbers, floats, texts, booleans, dataclasses, tuples and mappings of them, or None. Control
    characters of texts, which could change a terminal, become blanks. Raises ValueError with the field's name.
    """
    return cast(Record, _read(kind, value, kind.__name__))


def _read(kind: object, value: object, name: str) -> object:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None and NoneType in parts else _read(parts[0], value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(parts[0], one, name) for one in value)
    if isinstance(value, dict) and is_dataclass(kind):
        make = cast(Callable[..., object], kind)
        return make(**{field: _read(hint, value.get(field), field) for field, hint in _hints(make).items()})
    if isinstance(value, dict) and origin is Mapping:
        return {_read(str, key, name): _read(parts[1], one, name) for key, one in value.items()}
    if kind in (int, float) and type(value) in (int, kind) and abs(cast(float, value)) < MAX_NUMBER:
        return cast(type, kind)(value)
    if kind is bool and type(value) is bool:
        return value
    if kind is str and isinstance(value, str):
        return "".join(character if character.isprintable() else " " for character in value)
    raise ValueError(f"{name} must be of type {getattr(kind, '__name__', kind)}")
