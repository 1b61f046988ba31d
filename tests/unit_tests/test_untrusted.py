from __future__ import annotations

import pytest

from mega_rl.untrusted import parse_object, shorten


def test_an_object_as_json_loads_gives_it() -> None:
    assert parse_object('{"a": [1, 2.5, null], "ü": {"b": true}}'.encode()) == {"a": [1, 2.5, None], "ü": {"b": True}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a JSON list, must be an object"),
        ('{"a": {"b": 1, "b": 2}}', "a key occurs twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        ('{"a":' * 100_000, "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
    ],
)
def test_anything_else_is_refused_with_its_reason(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_object(text)


def test_names_are_shortened_to_one_line() -> None:
    assert shorten("model.norm") == "model.norm"
    assert shorten("a\nb") == r"'a\nb'"
    assert len(shorten("x" * 10_000)) < 100
