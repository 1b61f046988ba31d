"""References in values: `${section.key}` stands for the value of another setting. Nothing else is looked up or run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mega_rl.config.values import BadValue

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")


def resolve(value: Any, settings: Mapping[str, Any], *, above: tuple[str, ...] = ()) -> Any:
    """Return a value with its references replaced by what `settings` has; a mapping stands as it is.

    A text that is one reference becomes the other setting's value, of whatever type; in a longer one its text is put
    in. `above` are the keys whose values led here. Raises BadValue.
    """
    if isinstance(value, list):
        return [resolve(entry, settings, above=above) if isinstance(entry, str) else entry for entry in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if "${" in _REFERENCE.sub("", value):
        raise BadValue("only ${section.key} references are allowed; write the value")
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _value(whole[1], settings, above)
    return _REFERENCE.sub(lambda match: str(_value(match[1], settings, above)), value)


def _value(key: str, settings: Mapping[str, Any], above: tuple[str, ...]) -> Any:
    if key not in settings or key in above:
        raise BadValue("refers to a key that does not exist or to itself")
    return resolve(settings[key], settings, above=(*above, key))
