"""Host list expressions of Slurm, as in SLURM_JOB_NODELIST: `login1,gpu[001-004,007]-ib`. Bounded and strict."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from mega_rl.errors import UserError

MAX_HOSTS = 65_533  # Slurm's own limit of nodes
MAX_CHARACTERS = 1_000_000
MAX_DIGITS = 9  # of a number in brackets
_ITEM = re.compile(r"(?:[A-Za-z0-9._-]+|\[[^][]*\])+")  # one of the expression's comma-separated parts
_PART = re.compile(r"[^][]+|\[[^][]*\]")
_RANGE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}}))?")


def expand(expression: str, *, what: str) -> list[str]:
    """Return the hosts of an expression in their order, at most MAX_HOSTS.

    what: name of the expression in errors. Raises UserError for anything that Slurm would not have written.
    """
    if len(expression) > MAX_CHARACTERS:
        raise UserError(f"{what}: has {len(expression)} characters, more than {MAX_CHARACTERS}")
    hosts: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(expression, position)
        if item is None:
            raise _broken(expression, position, what)
        hosts += _hosts_of(item[0], what=what, room=MAX_HOSTS - len(hosts))
        position = item.end()
        if position == len(expression):
            break
        if expression[position] != ",":
            raise _broken(expression, position, what)
        position += 1
    if len(set(hosts)) < len(hosts):
        raise UserError(f"{what}={_shown(expression)}: names a host twice")
    return hosts


def counts(expression: str, *, what: str) -> list[int]:
    """Return the numbers of an expression such as `2(x3),1`, that of SLURM_STEP_TASKS_PER_NODE: [2, 2, 2, 1].

    what: name of the expression in errors. Raises UserError for anything that Slurm would not have written.
    """
    numbers: list[int] = []
    for part in expression[:MAX_CHARACTERS].split(","):
        match = re.fullmatch(rf"([1-9][0-9]{{0,{MAX_DIGITS - 1}}})(?:\(x([1-9][0-9]{{0,4}})\))?", part, re.ASCII)
        if match is None:
            raise UserError(f"{what}={_shown(expression)}: {_shown(part)!r} is no count of tasks as 8 or 8(x4)")
        numbers += [int(match[1])] * int(match[2] or 1)
        if len(numbers) > MAX_HOSTS:
            raise UserError(f"{what}={_shown(expression)}: counts more than {MAX_HOSTS} nodes")
    return numbers


def _hosts_of(item: str, *, what: str, room: int) -> Iterator[str]:
    """Yield the hosts of one part, `rack[1-2]n[01-16]` by its last number first."""
    choices: list[list[str]] = []
    number = 1
    for part in _PART.findall(item):
        choices.append(_numbers(part, what=what, room=room) if part.startswith("[") else [part])
        number *= len(choices[-1])
        if number > room:
            raise UserError(f"{what}={_shown(item)}: names more than {MAX_HOSTS} hosts")
    return map("".join, itertools.product(*choices))


def _numbers(brackets: str, *, what: str, room: int) -> list[str]:
    """Return the numbers of `[001-004,007]`, each as wide as the first of its range."""
    numbers: list[str] = []
    for text in brackets[1:-1].split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise UserError(f"{what}={_shown(brackets)}: {_shown(text)!r} is no number or range as 001-004")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UserError(f"{what}={_shown(brackets)}: the range {text} ends before it begins")
        if len(numbers) + last - first + 1 > room:
            raise UserError(f"{what}={_shown(brackets)}: names more than {MAX_HOSTS} hosts")
        numbers += [str(n).zfill(len(match[1])) for n in range(first, last + 1)]
    return numbers


def _broken(expression: str, position: int, what: str) -> UserError:
    rest = expression[position:]
    return UserError(f"{what}={_shown(expression)}: is no list of hosts of Slurm from {_shown(rest)!r} on")


def _shown(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
