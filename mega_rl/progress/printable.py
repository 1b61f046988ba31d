"""Texts of others on a terminal or in a log."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Return a text for a terminal or a log, on one line: ESC as \\x1b, line ends as \\n, direction marks as \\u202e.

    Texts of policies, files and programs could otherwise move the cursor, or look like lines of the log.
    """
    if text.isprintable():
        return text
    kept = (c if c.isprintable() or c == "\t" or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)
    return "".join(kept)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code >= 0x7F else character.encode("unicode_escape").decode()
