"""Python values as JSON and back: only builtin types, whatever the other side writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Value = Any  # of whatever type code and tests use

# Name of a form, the type that it has, and its parts as JSON; lists and dicts that hold values come by themselves.
FORMS = (
    ("bytes", (bytes, bytearray), lambda value: bytes(value).hex(), bytes.fromhex),
    ("range", range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    ("complex", complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
)
COLLECTIONS = (("tuple", tuple), ("set", set), ("frozenset", frozenset), ("iterator", None))


def encode(value: Value, other: Callable[[Value], Value]) -> Value:
    """Return a value's form in JSON; `other` gives that of an object.

    A subclass of a builtin type has that type's form. A list is a list; a type that JSON lacks is an object with one
    entry, as {"tuple": [1, 2]}.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encode(part, other) for part in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(part, other)] for key, part in value.items()]}
    for name, collection in COLLECTIONS[:3]:
        if isinstance(value, collection):
            return {name: [encode(part, other) for part in value]}
    for name, form, parts, _ in FORMS:
        if isinstance(value, form):
            return {name: parts(value)}
    return other(value)


def decode(value: Value, other: Callable[[str, Value], Value]) -> Value:
    """Return a value from its form in JSON; `other` makes objects from name and parts.

    Raises ValueError or TypeError for an unknown form.
    """
    if isinstance(value, list):
        return [decode(part, other) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {decode(key, other): decode(part, other) for key, part in parts}
    for name, _, _, made in FORMS:
        if kind == name:
            return made(parts)
    for name, collection in COLLECTIONS:
        if kind == name:
            return (collection or iter)([decode(part, other) for part in parts])
    return other(kind, parts)
