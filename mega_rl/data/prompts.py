"""Prompts: rows of files or of a user's source, tokenised, split, and identified by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mega_rl.data.chat import ChatTemplate, Tokenizer
from mega_rl.data.columns import RowColumns, RowProblem
from mega_rl.data.order import SPLIT, permutation
from mega_rl.data.rows import PromptRow, RowSource, Text, parse_row, read_rows
from mega_rl.errors import UserError, UserErrors
from mega_rl.types import Prompt

logger = logging.getLogger(__name__)

MAX_PROBLEMS_SHOWN = 20
MOST_TEXT = 16 << 20  # characters of a prompt
TOKENIZER_BATCH = 1024  # texts handed to the tokenizer at once: enough to use its threads
# Beginning of "train.jsonl:17: ..." and "train.parquet: row 17: ...".
_PLACE = re.compile(r"(.*?):( row )?(\d+): ", re.DOTALL)


@dataclass(frozen=True)
class PromptReading:
    """Columns, template, tokenizer and limits for reading rows of prompts."""

    tokenizer: Tokenizer
    vocab_size: int
    columns: RowColumns
    template: ChatTemplate | None
    max_prompt_tokens: int
    overlong: str = "error"
    malformed: str = "error"

    def prompts(
        self, rows: Iterable[tuple[str, object]], fatal: list[str], *, first: int = 0
    ) -> tuple[list[Prompt], int]:
        """Return (prompts of (place, content) rows, number of rows); numbers begin at `first`."""
        bad: list[str] = []
        parsed: list[PromptRow] = []
        sizes: Counter[str] = Counter()
        for index, (where, content) in enumerate(rows, start=first):
            sizes[where.rpartition(":")[0]] += 1
            try:
                parsed.append(self._parsed(content, where, index))
            except RowProblem as problem:
                bad.append(f"{where}: {problem}")
        prompts, long = self._tokenised(parsed, fatal, bad)
        unread = [row for row in parsed if row.unread]
        if unread and not first:  # for people: once, not for each block of a stream
            names = ", ".join(sorted(unread[0].unread))
            logger.warning(
                "%s: the row sets %s for a chat template, and its prompt does not show it", unread[0].where, names
            )
        problems = {"data.malformed_rows": (self.malformed, bad), "data.overlong_prompts": (self.overlong, long)}
        _report(fatal, problems, sizes)
        return prompts, sizes.total()

    def _parsed(self, row: object, where: str, index: int) -> PromptRow:
        """Return a row as text. Raises RowProblem."""
        return parse_row(row, where, index, self.columns, self.template)

    def _tokenised(
        self, parsed: Sequence[PromptRow], fatal: list[str], bad: list[str]
    ) -> tuple[list[Prompt], list[str]]:
        """Return (prompts that fit, lines of long ones); other problems go to `fatal` and `bad`."""
        prompts: list[Prompt] = []
        long: list[str] = []
        rows: list[PromptRow] = []
        for row in parsed:
            if len(row.model_text) > MOST_TEXT:  # tokenizing it could take all memory
                bad.append(f"{row.where}: has {len(row.model_text):,} characters; at most {MOST_TEXT:,} are tokenized")
            else:
                rows.append(row)
        for first in range(0, len(rows), TOKENIZER_BATCH):
            chunk = rows[first : first + TOKENIZER_BATCH]
            ids = self._ids_of([text for row in chunk for text in row.texts])
            for row in chunk:
                try:
                    prompt = self._with_ids(row, ids)
                except RowProblem as problem:
                    bad.append(f"{row.where}: {problem}")
                    continue
                sequences = [one.token_ids for one in prompt.given] or [prompt.token_ids]
                highest, length = max(map(max, sequences)), max(map(len, sequences))
                if highest >= self.vocab_size:
                    fatal.append(
                        f"{row.where}: token id {highest} is outside the model's vocabulary of {self.vocab_size}: the "
                        "tokenizer does not belong to this model"
                    )
                elif length > self.max_prompt_tokens:
                    what = f"row has {length} tokens with its answer" if prompt.given else f"prompt has {length} tokens"
                    long.append(f"{row.where}: the {what}, above data.max_prompt_tokens={self.max_prompt_tokens}")
                else:
                    prompts.append(prompt)
        return prompts, long

    def _ids_of(self, texts: Sequence[Text]) -> dict[Text, list[int]]:
        """Return the token ids of every text; plain text gets the tokenizer's special tokens."""
        ids: dict[Text, list[int]] = {}
        for is_plain in (True, False):
            own = list(dict.fromkeys(text for text, plain in texts if plain == is_plain))
            if own:
                encoded = self.tokenizer(own, add_special_tokens=is_plain)["input_ids"]
                ids |= {(text, is_plain): tokens for text, tokens in zip(own, encoded, strict=True)}
        return ids

    def _with_ids(self, row: PromptRow, ids: Mapping[Text, list[int]]) -> Prompt:
        """Return the row's prompt with its tokens. Raises RowProblem."""
        (text,) = row.texts
        if not ids[text]:
            raise RowProblem("the prompt has no tokens")
        return replace(row.prompt, token_ids=tuple(ids[text]))


def load_prompts(files: Sequence[str | Path] | RowSource, reading: PromptReading) -> list[Prompt]:
    """Return every prompt of the files or of a user's source in order, tokenised.

    `Prompt.text` is the string in the file, or the content of the last message; `Prompt.index` numbers all rows. Raises
    UserErrors that names file and line of every problem, 20 of them in full.
    """
    if not files:
        raise UserError("no prompt files are given: set data.train_files to JSONL or Parquet files")
    fatal: list[str] = []
    prompts, num_rows = reading.prompts(read_rows(files, reading.columns, fatal), fatal)
    if not prompts:
        names = files.name if isinstance(files, RowSource) else ", ".join(map(str, files))
        raise UserError(f"{names}: no usable prompt is left of {num_rows} rows")
    return prompts


def split(prompts: Sequence[Prompt], val_size: int, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return (training, validation): `val_size` random prompts are held out, by the seed; order is kept."""
    if val_size >= len(prompts):
        raise UserError(f"data.val_size={val_size}: must be below the number of training prompts, {len(prompts)}")
    held_out = set(permutation(len(prompts), key=(seed, SPLIT))[:val_size])
    train = [prompt for position, prompt in enumerate(prompts) if position not in held_out]
    return train, [prompts[position] for position in sorted(held_out)]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of content and order of the prompts (hex), to detect changed data."""
    digest = hashlib.sha256()
    for prompt in prompts:
        columns = [] if prompt.row is None else [prompt.row]
        further: list[object] = [prompt.source] if prompt.source else []
        further += [[one.token_ids, one.spans] for one in prompt.given] + [prompt.worth] * bool(prompt.given)
        content = [prompt.token_ids, prompt.text, prompt.answer, *columns, *further]
        row = json.dumps(content, separators=(",", ":"), default=repr)  # Parquet has more types than JSON
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()


def _report(fatal: list[str], problems: Mapping[str, tuple[str, list[str]]], sizes: Counter[str]) -> None:
    """Log the dropped rows, and raise for the other problems.

    problems: setting for such rows -> its value, and a line for each row. sizes: rows of each file.
    """
    lines, hints = list(fatal), []
    for key, (policy, own) in problems.items():
        if own and policy == "drop":
            logger.warning("%s=drop: %d rows are dropped, the first is %s", key, len(own), own[0])
            continue
        lines += own
        if own and not fatal and 2 * len(own) < sizes.total():
            hints.append(f"set {key}=drop to go on without them")
    if not lines:
        return
    lines = _grouped(lines, sizes)
    shown = lines[:MAX_PROBLEMS_SHOWN]
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    raise UserErrors([*shown, *hints])


def _grouped(lines: Sequence[str], sizes: Counter[str]) -> list[str]:
    """Return one line for each kind of problem of a file; numbers make no difference."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        place = _PLACE.match(line)
        kind = (place[1], re.sub(r"\d+", "0", line[place.end() :])) if place else ("", line)
        kinds.setdefault(kind, []).append(line)
    grouped = []
    for (file, _), (first, *others) in kinds.items():
        place = _PLACE.match(first)
        if others and place:
            many = "all" if len(others) + 1 == sizes[file] else f"{len(others) + 1} of"
            where = f"{'row' if place[2] else 'line'} {place[3]}"
            first = f"{many} {sizes[file]} rows of {file} (first: {where}): {first[place.end() :]}"
        grouped.append(first)
    return grouped
