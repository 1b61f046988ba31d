"""Rows of a problem set -> JSONL files of prompts, all of them or none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from mega_rl.datafiles.problems import ProblemSet
from mega_rl.errors import UserError
from mega_rl.hub.names import FolderName, Role, dataset_name, folder_name
from mega_rl.storage.disk import make_folder, replace_text

Source = tuple[str, str, Role]  # option ("--train"), its value, and which split is meant where it names none


def write_files(
    problems: ProblemSet, out: Path, sources: Mapping[str, Source], *, instruction: str, force: bool
) -> dict[Path, int]:
    """Return the rows written by file, {"train.jsonl": (option, rows, role)} into `out`; each row is

        {"prompt": [{"role": "user", "content": question and instruction}], "answer": final answer}

    Raises UserError before anything is written: for a file that is there (without `force`), for rows that cannot be
    had, for a row without a question or a final answer.
    """
    taken = [out / name for name in sources if (out / name).exists()]
    if taken and not force:
        raise UserError(f"{taken[0]}: is there already; name another folder, or give --force to replace it")
    texts: dict[Path, list[str]] = {}
    for name, (option, rows, role) in sources.items():
        label = f"{option}={rows}"
        numbered = enumerate(chain.from_iterable(_rows(file, label) for file in _files(rows, role, label)), start=1)
        texts[out / name] = [_line(problems, row, instruction, f"{label}: row {n}") for n, row in numbered]
        if not texts[out / name]:
            raise UserError(f"{label}: holds no rows")
    make_folder(out)
    for target, lines in texts.items():
        replace_text(target, "".join(lines))
    return {target: len(lines) for target, lines in texts.items()}


def _files(rows: str, role: Role, label: str) -> list[Path]:
    """Return the local files of some rows, downloading a data set of the Hub. Raises UserError."""
    name = folder_name(rows) or dataset_name(rows)
    if name is not None:
        from mega_rl.hub.rows import fetch_rows, folder_files

        if isinstance(name, FolderName):
            return folder_files(name, role=role, label=label)
        return [fetch_rows(name, role=role, label=label)[0]]
    file = Path(rows)
    if not file.is_file() or file.suffix not in (".parquet", ".jsonl"):
        raise UserError(
            f"{label}: needs a .parquet or .jsonl file that is there, or a name such as org/name:config:split"
        )
    return [file]


def _rows(file: Path, label: str) -> Iterator[Any]:
    """Yield the rows. Raises UserError for a file that is not what its suffix says."""
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            yield from pyarrow.parquet.read_table(file).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{label}: not a readable Parquet file: {' '.join(str(error).split())}") from None
        return
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{label}: not a file of JSON lines: {error}") from None


def _line(problems: ProblemSet, row: Any, instruction: str, where: str) -> str:
    """Return one line of the file. Raises UserError."""
    for column in (problems.question, problems.solution):
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            has = ", ".join(row) if isinstance(row, dict) else "no columns"
            raise UserError(f"{where}: has no text in column {column!r}; it has {has}")
    answer = problems.answer(row[problems.solution])
    if answer is None:
        raise UserError(f"{where}: {problems.solution!r} ends with no final answer: {row[problems.solution][-80:]!r}")
    content = f"{row[problems.question].strip()}\n{instruction}" if instruction else row[problems.question].strip()
    prompt = [{"role": "user", "content": content}]
    return json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) + "\n"
