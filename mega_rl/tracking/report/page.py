"""The page of a report, one HTML text with styles, program and data inside, and the samples on it.

Data is JSON in an element that no browser runs, and the program puts texts into the page as texts. The page's content
security policy allows this program and these styles, by their hashes, and nothing else. Units and meanings of metrics
come from a table that `make docs` makes of docs/metrics.md.

A sample is a dumped response, or a record's row with values of tokens. It has the fields source ("step 20"), prompt,
response, numbers, for agents turns (number from 1, 0: read; text), and for records texts (of each token), their turns
as of_turns, and values (by name, one for each text).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from mega_rl.errors import UserError
from mega_rl.untrusted import JsonFields, open_regular, parse_object

if TYPE_CHECKING:
    from mega_rl.tracking.records.reader import Record

logger = logging.getLogger(__name__)

# Title and the beginnings of names; the first title that fits counts.
THEMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/", "val/")),
    ("Importance", ("importance/", "rollout/logprob", "rollout/stale", "rollout/ahead", "rollout/weight_version")),
    ("Responses", ("rollout/",)),
    ("Agents", ("agent/",)),
    ("Policy", ("actor/", "kl/", "advantage/")),
    ("Critic", ("critic/", "values/", "returns/")),
    ("Time", ("time/", "perf/", "sync/", "sglang/")),
    ("Memory", ("memory/",)),
    ("Checkpoints, data and others", ("",)),
)
OVERVIEW = (
    "reward/mean", "val/reward_mean", "kl/ref", "actor/entropy", "actor/grad_norm", "rollout/response_tokens_mean",
    "agent/turns_mean", "agent/end_done_fraction",
    "rollout/logprob_diff_max", "actor/clip_fraction_high", "values/explained_variance", "rollout/truncated_fraction",
    "reward/equal_groups_fraction", "time/step_s",
)  # fmt: skip
MAX_CHARACTERS = 400_000  # all samples of a page together, as JSON
MAX_LINE = 16 << 20  # characters of a row that is read
MAX_TEXT = 6_000  # characters of a prompt or response
MAX_TOKENS = 1_500  # a longer sample is cut
MAX_TURNS = 100  # parts of a conversation that are shown: turns, and what they read
NUM_SOURCES = 4  # dumps and records of a run that are shown, the newest of each
NUM_ROWS = 12  # rows of each, the first ones
_DUMP, _RECORD = re.compile(r"(?:step|val)_(\d+)\.jsonl"), re.compile(r"step_(\d{6,12})")
_TEXTS = ("prompt", "rendered_prompt", "response", "token_texts")
DIGITS = 4
_PLACE = re.compile(r"<[a-z]+>")


def explain(name: str) -> dict[str, str] | None:
    """Return unit, meaning and expected range of a metric, None if docs/metrics.md does not list it."""
    exact, patterns = _table()
    if name in exact:
        return exact[name]
    return next((entry for pattern, entry in patterns if pattern.fullmatch(name)), None)


def reward_parts(names: Iterable[str]) -> list[str]:
    """Return the metrics of the reward's parts: unlisted names below "reward/"."""
    exact, _ = _table()
    return [name for name in names if name.startswith("reward/") and name.count("/") == 1 and name not in exact]


def theme_of(name: str) -> str:
    """Return the title under which a metric is drawn."""
    return next(title for title, beginnings in THEMES if name.startswith(beginnings))


@cache
def _table() -> tuple[dict[str, dict[str, str]], list[tuple[re.Pattern[str], dict[str, str]]]]:
    """Return entries by name, and those of names with a place as patterns."""
    exact: dict[str, dict[str, str]] = {}
    patterns: list[tuple[re.Pattern[str], dict[str, str]]] = []
    for line in _file("metrics.tsv").splitlines():
        name, *cells = line.split("\t")
        entry = dict(zip(("unit", "meaning", "expect"), cells, strict=True))
        if _PLACE.search(name):
            patterns.append((re.compile(".+".join(map(re.escape, _PLACE.split(name)))), entry))
        else:
            exact[name] = entry
    return exact, patterns


def render(content: JsonFields) -> str:
    """Return the page that shows the content."""
    style, program = _file("report.css"), '"use strict";\n' + _file("charts.js") + "\n" + _file("report.js")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(program)}'; style-src 'sha256-{_hash(style)}'; "
        f"img-src data:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape("mega_rl: " + ", ".join(run["label"] for run in content["runs"])),
        "STYLE": style,
        "DATA": to_script_data(content),
        "PROGRAM": program,
    }
    pieces = _file("report.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def to_script_data(content: object) -> str:
    """Return JSON for a script element: nothing in it ends the element."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shorten(value: float) -> float | int:
    """Return a value of four significant digits, whole numbers below ten million as they are."""
    if abs(value) < 1e7 and value == int(value):
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def _file(name: str) -> str:
    return files("mega_rl.tracking.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read_samples(run_dir: Path, *, max_characters: int = MAX_CHARACTERS) -> tuple[list[JsonFields], int]:
    """Return the newest samples, those of records first, and the number without room.

    A damaged file is logged and left out.
    """
    rows: list[JsonFields] = []
    room, left_out = max_characters, 0
    for sample in _newest(run_dir):
        size = len(json.dumps(sample, ensure_ascii=True))
        if size <= room:
            rows.append(sample)
            room -= size
        else:
            left_out += 1
    return rows, left_out


def _newest(run_dir: Path) -> Iterator[JsonFields]:
    for folder in _by_step(run_dir / "records", _RECORD):
        try:
            yield from _of_record(folder)
        except UserError as error:
            logger.warning("%s; left out of the report", error)
    for file in _by_step(run_dir / "rollouts", _DUMP):
        validation, step = file.name.startswith("val"), int(file.stem.partition("_")[2])
        source = f"validation of step {step}" if validation else f"step {step}"
        try:
            yield from (_sample(row, source) for row in _rows(file))
        except (OSError, ValueError) as error:
            logger.warning("%s: cannot be read: %s; left out of the report", file, error)


def _by_step(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the newest entries of a folder that have such a name, newest step first."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    steps = [(int(match[1]), path) for path in entries if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(steps, reverse=True)][:NUM_SOURCES]


def _rows(file: Path) -> Iterator[JsonFields]:
    """Yield the first rows of a dump. Raises UserError for a pipe or device."""
    with open(open_regular(file)[0], encoding="utf-8") as lines:
        for _ in range(NUM_ROWS):
            line = lines.readline(MAX_LINE)
            if not line.endswith("\n"):
                return  # the end, or a row that is being written
            yield parse_object(line)


def _sample(row: JsonFields, source: str) -> JsonFields:
    numbers = {key: value for key, value in row.items() if key not in _TEXTS and not isinstance(value, (list, dict))}
    return {
        "source": source,
        "prompt": _cut(str(row.get("rendered_prompt") or row.get("prompt") or "")),
        "response": _cut(str(row.get("response", ""))),
        "numbers": {key: _short(value) for key, value in numbers.items()},
        "turns": _turns(row.get("conversation")),
        "texts": [],
        "of_turns": [],
        "values": {},
    }


def _turns(given: object) -> list[tuple[int, str]]:
    """Return the parts of a conversation that are what they should be."""
    parts = given[:MAX_TURNS] if isinstance(given, list) else []
    return [
        (part[0], _cut(str(part[1]))) for part in parts if isinstance(part, list) and [*map(type, part)] == [int, str]
    ]


def _short(value: object) -> object:
    return shorten(value) if isinstance(value, float) else _cut(value) if isinstance(value, str) else value


def _cut(text: str) -> str:
    """Return a text with its middle left out if it is long."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _of_record(folder: Path) -> Iterator[JsonFields]:
    """Yield samples of a record's first rows; values off the loss mask are None.

    Raises UserError for a record that is damaged or of another format.
    """
    from mega_rl.tracking.records.reader import read_record  # imports numpy, which other commands need not wait for

    record = read_record(folder)
    for number, row in enumerate(record.rows[:NUM_ROWS]):
        try:
            texts, values = [str(text) for text in row["token_texts"]], _values(record, number)
            if any(len(column) != len(texts) for column in values.values()):
                raise ValueError("texts of tokens and their values differ in number")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{folder}: row {number} does not fit a record ({error}); it is damaged") from error
        short = {
            name: [shorten(value) if math.isfinite(value) else None for value in column[:MAX_TOKENS]]
            for name, column in values.items()
        }
        turns = record.tensors.get("turn", record.tensors["loss_mask"])[number, : len(texts)].tolist()
        tokens = {"texts": texts[:MAX_TOKENS], "of_turns": [int(turn) for turn in turns[:MAX_TOKENS]], "values": short}
        yield _sample(row, f"record of step {row['step']}") | tokens


def _values(record: Record, row: int) -> dict[str, list[float]]:
    """Return the values of a row's tokens by name; none without the trainer's log-probs."""
    import numpy as np

    length = int(record.tensors["lengths"][row])
    mask = record.tensors["loss_mask"][row, :length].astype(bool)
    columns = {name: tensor[row, :length] for name, tensor in record.tensors.items() if tensor.ndim == 2}
    trainer = columns.get("policy_logprobs", columns.get("old_logprobs"))
    if trainer is None:
        return {}
    shown = {"advantage": columns.get("advantages")}
    if "rollout_logprobs" in columns:
        shown["log-prob difference"] = trainer - columns["rollout_logprobs"]
    if "entropy" in columns:
        shown["entropy"] = columns["entropy"]
    else:  # -log p of the sampled token, whose expectation is the entropy
        shown["entropy estimate (-log p)"] = -trainer
    if "ref_logprobs" in columns:
        shown["log-prob over reference"] = trainer - columns["ref_logprobs"]
    shown["value"] = columns.get("values")
    return {name: np.where(mask, column, np.nan).tolist() for name, column in shown.items() if column is not None}
