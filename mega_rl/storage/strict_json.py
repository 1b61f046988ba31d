"""Strict parsing of JSON objects from files that may be damaged or hostile."""

from __future__ import annotations

import json
import math
from typing import Any, TypeAlias

JsonFields: TypeAlias = dict[str, Any]  # a parsed object; its reader checks the types

_SHOWN = 80  # characters of a value in a message


def parse_object(text: bytes | str) -> JsonFields:
    """Return the JSON object that `text` (UTF-8) holds.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deep, not an object, a key that occurs twice, or a number that is
            not finite; the message gives the reason, without the file's name.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant, parse_float=_finite
        )
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
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{shorten(repeated)} occurs twice")
    return result


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(text)} is too large a number")
    return value
