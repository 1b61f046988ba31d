"""Orders and reports between the launcher of node 0 and the others, to and from their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from mega_rl.launcher.ranks import Assignment, RankEnd

START, SIGNAL, END, KILL, FINISH = "start", "signal", "end", "kill", "finish"  # orders of node 0
JOIN, ENDED, STOPPED_BY = "join", "ended", "stopped by"  # reports to it

Message = Mapping[str, object]


@dataclass(frozen=True)
class Joining:
    """First message of a launcher: its number, its host, and what it was started to run."""

    number: int
    host: str
    command: str  # digest of the program and of the sizes, equal on all nodes


Record = TypeVar("Record", Joining, Assignment, RankEnd)


def of(kind: str, content: Joining | Assignment | RankEnd | None = None, **values: object) -> dict[str, object]:
    """Return a message: its kind, and the fields of a record or values."""
    return {"type": kind, **({} if content is None else asdict(content)), **values}


def assignment(message: Message) -> Assignment:
    """Return the assignment of a START. Raises ValueError."""
    return _record(Assignment, message)


def joining(message: Message) -> Joining:
    """Return the content of a JOIN. Raises ValueError."""
    if message.get("type") != JOIN:
        raise ValueError(f"a message of type {JOIN} must come first")
    return _record(Joining, message)


def ends(message: Message) -> tuple[int, Sequence[RankEnd]]:
    """Return generation and ends of an ENDED. Raises ValueError."""
    values = message.get("ends")
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError("ends must be a list of objects")
    return number(message, "generation"), [_record(RankEnd, value) for value in values]


def number(message: Message, name: str) -> int:
    """Return an integer of a message. Raises ValueError."""
    value = message.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer")
    return value


def _record(record: type[Record], message: Message) -> Record:
    """Return the record in a message, of integers and texts. Raises ValueError for another type."""
    make: Callable[..., Record] = record
    types = {"int": int, "str": str}
    values = {field.name: message.get(field.name) for field in fields(record)}
    for field in fields(record):
        if type(values[field.name]) is not types[str(field.type)]:
            raise ValueError(f"{field.name} must be of type {field.type}")
    return make(**values)
