"""Checks of a recipe's values (type, range, legal values), and model facts that rules read."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

Unknown = Callable[[str], str]
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 160, 160, 40


ONLY_REFERENCES = "only ${section.key} references are allowed; write the value"


class BadValue(ValueError):
    """A value that does not fit its field; the caller adds the key and the value."""


def shown(value: object) -> str:
    """A user's value on one line, cut to a readable length."""
    return _SHORT.repr(value)


def describe_range(field: dataclasses.Field[Any]) -> str:
    """Return a field's range in words: 'at least 1', 'one of bf16, fp32'; '' for any."""
    meta = field.metadata
    if meta["kinds"]:
        return "named " + ", ".join(meta["kinds"])
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    bounds = [("above", meta["above"]), ("at least", meta["min"]), ("at most", meta["max"])]
    return " and ".join(f"{word} {bound:.10g}" for word, bound in bounds if bound is not None)


def coerce(value: object, kind: Any, field: dataclasses.Field[Any]) -> Any:
    """`value` as the field's type, in range.

    An int given for a float becomes one, and a single item given for a list a list of one. Raises BadValue.
    """
    if isinstance(kind, types.UnionType):  # a setting that may be None by default only
        kind = kind.__args__[0]
    if isinstance(kind, types.GenericAlias):
        *_, item = kind.__args__
        return _coerce_mapping(value, item) if kind.__origin__ is dict else _coerce_list(value, item, field)
    if isinstance(value, bool) and str(value).lower() in (field.metadata["choices"] or ()):
        value = str(value).lower()
    number_given = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and number_given:
        value = _as_float(value)  # type: ignore[arg-type]
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise BadValue(_needs(field, kind))
    if not _in_range(value, field):
        unit = field.metadata["unit"]
        raise BadValue(f"must be {describe_range(field)}" + (f" ({unit})" if unit else ""))
    return value


def settings_of(
    area: Any, given: Mapping[str, object], place: str, problems: list[str], unknown: Unknown
) -> dict[str, Any]:
    """Return given settings as a dataclass's types; mistakes go to `problems`. unknown: an unknown name's line."""
    fields, hints, settings = getattr(area, "__dataclass_fields__", {}), get_type_hints(area), {}
    for name, value in given.items():
        try:
            settings[name] = coerce(value, hints[name], fields[name])
        except KeyError:
            problems.append(unknown(name))
        except BadValue as error:
            problems.append(f"{place}.{name}={shown(value)}: {error}")
    return settings


def _needs(field: dataclasses.Field[Any], kind: type) -> str:
    if field.metadata["choices"]:
        return f"must be {describe_range(field)}"
    if kind is str:
        return "needs a text; put it in quotes"
    legal = describe_range(field)
    what = {bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
    return f"needs {what}" + (f", {legal}" if legal else "")


def _coerce_list(value: object, item: type, field: dataclasses.Field[Any]) -> list[Any]:
    words = {str: "texts", int: "whole numbers"}[item]
    if type(value) is item and value != "" and not (isinstance(value, str) and "," in value):
        value = [value]
    if not isinstance(value, list) or any(type(entry) is not item for entry in value):
        raise BadValue(f"needs a list of {words}; write it as [a, b]")
    if not all(_in_range(entry, field) for entry in value):
        raise BadValue(f"each must be {describe_range(field)}")
    return list(value)


def _coerce_mapping(value: object, kind: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadValue("needs a mapping of names to values; write it as {name: value}")
    lists = isinstance(kind, types.GenericAlias)  # keys are data sources: any text
    for name, entry in value.items():
        if not isinstance(name, str) or not (name.isidentifier() or (lists and name)):
            raise BadValue(f"{shown(name)} is not a name; legal: letters, digits and _, as {{enable_thinking: false}}")
        if not is_json(entry):
            raise BadValue(
                f"the value of {name} must be made of texts, finite numbers, true, false, null, [a, b], {{a: b}}"
            )
        if lists and not (isinstance(entry, list) and all(isinstance(item, str) for item in entry)):
            raise BadValue(f"the value of {name} must be a list of texts; write it as [a, b]")
        if kind is str and not isinstance(entry, str):
            raise BadValue(f"the value of {name} must be a text")
        if kind is float and type(entry) not in (int, float):
            raise BadValue(f"the value of {name} must be a finite number")
    return {name: _as_float(entry) for name, entry in value.items()} if kind is float else dict(value)


def _as_float(value: float) -> float:
    """Return a number as a float; one of hundreds of digits is too large for it."""
    try:
        return float(value)
    except OverflowError:
        raise BadValue("needs a finite number; this one is too large") from None


def is_json(value: object, *, finite: bool = True) -> bool:
    """Return whether a value comes back from JSON unchanged; finite: JSON of the standard, without NaN."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_json(entry, finite=finite) for name, entry in value.items())
    if isinstance(value, list):
        return all(is_json(entry, finite=finite) for entry in value)
    if isinstance(value, float):
        return not finite or math.isfinite(value)
    return value is None or isinstance(value, (str, int))


def _in_range(value: Any, field: dataclasses.Field[Any]) -> bool:
    meta = field.metadata
    if meta["choices"] is not None:
        return value in meta["choices"]
    return not (
        (meta["min"] is not None and value < meta["min"])
        or (meta["max"] is not None and value > meta["max"])
        or (meta["above"] is not None and value <= meta["above"])
    )


MAX_LISTED = 12  # legal values that one line repeats
MAX_CANDIDATE = 4096  # largest divisor that is looked for


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a checkpoint's model that a layout must divide, and what else sets limits."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    max_position_embeddings: int
    multi_latent_attention: bool = False
    delta_key_heads: int = 0  # of gated delta nets; 0: there are none
    uncut: str = ""  # what context parallelism does not cut
    num_experts: int = 0  # in a mixture-of-experts layer; 0: a dense model
    expert_ffn_hidden_size: int = 0
    expert_biases: bool = False

    def too_long(self, key: str, keys: str, longest: int, *, sglang: bool) -> Iterator[str]:
        """Yield a line if `key`'s checkpoint has no room for `longest` tokens, the sum of `keys`."""
        free = " but the one that SGLang keeps free" * sglang
        if longest > (positions := self.max_position_embeddings - sglang):
            yield f"{keys}={longest} is above the {positions} positions of {key}{free}; make them shorter"


def divisors(number: int) -> list[int]:
    """Divisors up to MAX_CANDIDATE, and the number itself."""
    small = [candidate for candidate in range(1, min(number, MAX_CANDIDATE + 1)) if number % candidate == 0]
    return [*small, number] if small[-1:] != [number] else small


def listed(values: Sequence[int]) -> str:
    """The first values, as a line of text."""
    words = [str(value) for value in values[:MAX_LISTED]]
    return ", ".join(words) + (", ..." if len(values) > MAX_LISTED else "")


def leave_out(*keys: str) -> str:
    """Return the advice to drop settings, from a recipe or on a command line."""
    them = "it" if len(keys) == 1 else "them"
    return f"leave {them} out (on a command line: {' '.join(f'{key}=null' for key in keys)})"
