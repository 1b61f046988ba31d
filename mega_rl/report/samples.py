"""Samples of a report: responses that a run has dumped, or whole records of steps with a value for each token.

A page shows a `ShownSample`, whatever it was read from: texts, numbers of the whole response, and tokens with values by
name. Texts were written by a model: they are data, and the page never reads them as HTML.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

from mega_rl.errors import UserError
from mega_rl.report.curves import shorten
from mega_rl.report.tokens import read_tokens
from mega_rl.storage.strict_json import JsonFields, parse_object

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 400_000  # of all samples of a page, as JSON
MAX_LINE = 16 << 20  # characters of a row that is read
MAX_TEXT = 6_000  # of a prompt or response
NUM_SOURCES = 4  # dumps and records of a run that are shown, the newest of each
NUM_ROWS = 12  # of each, the first
_DUMP = re.compile(r"(step|val)_(\d+)\.jsonl")
_RECORD = re.compile(r"step_(\d{6,12})")
Scalar: TypeAlias = str | int | float | bool | None
_TEXTS = ("prompt", "rendered_prompt", "response")


@dataclass(frozen=True)
class ShownSample:
    """A prompt and its response."""

    source: str  # "step 20", "validation of step 20", "record of step 20"
    prompt: str
    response: str
    numbers: Mapping[str, Scalar]  # reward, response_tokens, finished, ...
    texts: Sequence[str] = ()  # of each token, prompt and response
    values: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # by name, one for each of `texts`


@dataclass(frozen=True)
class ShownSamples:
    """Samples of a run as far as a page has room for them."""

    rows: list[JsonFields]  # fields of `ShownSample`
    left_out: int


def read_samples(run_dir: Path, *, max_characters: int = MAX_CHARACTERS) -> ShownSamples:
    """Return the newest samples of a run, those with values of tokens first; a damaged file is logged and left out."""
    rows: list[JsonFields] = []
    room, left_out = max_characters, 0
    for sample in _newest(run_dir):
        row = asdict(sample)
        size = len(json.dumps(row, ensure_ascii=True))
        if size > room:
            left_out += 1
            continue
        rows.append(row)
        room -= size
    return ShownSamples(rows, left_out)


def _newest(run_dir: Path) -> Iterator[ShownSample]:
    for folder in _by_step(run_dir / "records", _RECORD)[:NUM_SOURCES]:
        try:
            yield from (_of_record(row, values) for row, values in read_tokens(folder, limit=NUM_ROWS))
        except UserError as error:
            logger.warning("%s; left out of the report", error)
    for file in _by_step(run_dir / "rollouts", _DUMP)[:NUM_SOURCES]:
        try:
            yield from (_of_dump(row, file) for row in _rows(file))
        except (OSError, ValueError) as error:
            logger.warning("%s: cannot be read: %s; left out of the report", file, error)


def _by_step(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the entries of a folder that have such a name, newest step first."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    steps = [(int(match[match.lastindex or 0]), path) for path in entries if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(steps, reverse=True)]


def _rows(file: Path) -> Iterator[JsonFields]:
    """Yield the first rows of a dump. Raises OSError for a pipe, which may have no writer, and the like."""
    with open(file, encoding="utf-8", opener=_open_regular) as lines:
        for _ in range(NUM_ROWS):
            line = lines.readline(MAX_LINE)
            if not line.endswith("\n"):
                return  # the end, or a row that is being written
            yield parse_object(line)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def _of_dump(row: JsonFields, file: Path) -> ShownSample:
    match = _DUMP.fullmatch(file.name)
    assert match is not None
    source = f"validation of step {int(match[2])}" if match[1] == "val" else f"step {int(match[2])}"
    return _sample(row, source)


def _of_record(row: JsonFields, values: Mapping[str, Sequence[float]]) -> ShownSample:
    texts = [str(text) for text in row["token_texts"]]
    sample = _sample(
        {key: value for key, value in row.items() if key != "token_texts"}, f"record of step {row['step']}"
    )
    short = {
        name: [shorten(value) if math.isfinite(value) else None for value in column] for name, column in values.items()
    }
    return ShownSample(sample.source, sample.prompt, sample.response, sample.numbers, texts, short)


def _sample(row: JsonFields, source: str) -> ShownSample:
    prompt = str(row.get("rendered_prompt") or row.get("prompt") or "")
    numbers = {key: _short(value) for key, value in row.items() if key not in _TEXTS and _is_scalar(value)}
    return ShownSample(source, _cut(prompt), _cut(str(row.get("response", ""))), numbers)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _short(value: Scalar) -> Scalar:
    return shorten(value) if isinstance(value, float) else _cut(value) if isinstance(value, str) else value


def _cut(text: str) -> str:
    """Return a text with its middle left out where it is long."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
