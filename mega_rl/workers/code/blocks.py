"""The program that a response holds: its last closed fenced block."""

from __future__ import annotations

import ast
import re
import warnings

# No two parts match the same characters next to each other, so that a line is read in linear time.
_FENCE = re.compile(r"[ \t]{0,8}(?P<fence>`{3,}|~{3,}(?!~))[ \t]*(?P<rest>(?:[^ \t`\r\n][^`\r\n]*)?)\r?\n?")
MOST_CHARACTERS = 1 << 15  # longest program parsed outside a sandbox: half a second
PYTHON = ("", "python", "python3", "py")


def last_program(response: str) -> str | None:
    """Return the code of the last closed block of Python, or of no language; None without one.

    A block begins at a line with three or more backticks or tildes, and ends at the next line with nothing else than as
    many or more of them.
    """
    program: str | None = None
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in response.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line)
        if opened is None:
            opened, lines = fence, []
        elif fence is None or fence["rest"].strip() or not fence["fence"].startswith(opened["fence"]):
            lines.append(line)
        else:
            words = opened["rest"].split()
            if not words or words[0].lower() in PYTHON:
                program = "".join(lines)
            opened = None
    return program


def code_format(response: str) -> float:
    """Return 1.0 if the response holds a closed block of Python that parses, else 0.0; 0.0 also for a long one.

    A block may have `MOST_CHARACTERS`.
    """
    program = last_program(response)
    if program is None or not program.strip() or len(program) > MOST_CHARACTERS:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Parsed only: twenty nested `finally` would compile to gigabytes.
            compile(program, "program.py", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return 0.0
    return 1.0
