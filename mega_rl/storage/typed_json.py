"""Dataclasses read from JSON objects that may be damaged or hostile: exact types, no missing field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

MAX_NUMBER = 1 << 63


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
    if kind is float and isinstance(value, int | float) and type(value) is not bool and abs(value) < MAX_NUMBER:
        return float(value)
    if kind is int and type(value) is int and abs(value) < MAX_NUMBER:
        return value
    if kind is bool and type(value) is bool:
        return value
    if kind is str and isinstance(value, str):
        return "".join(character if character.isprintable() else " " for character in value)
    raise ValueError(f"{name} must be of type {getattr(kind, '__name__', kind)}")


@cache
def _hints(kind: Callable[..., object]) -> Mapping[str, object]:
    return get_type_hints(kind)
