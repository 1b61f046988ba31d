"""Published problem sets as JSONL files: where they are, how a row becomes a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_rl.data.hub.names import FolderName, Role, dataset_name, folder_name
from mega_rl.disk import make_folder, replace_text
from mega_rl.errors import UserError
from mega_rl.rewards.builtin import final_answer, plain_number

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."  # what the reward math_verify looks for


@dataclass(frozen=True)
class ProblemSet:
    """A set of questions whose solutions end with a final answer."""

    train: str  # name on the Hub
    test: str
    question: str  # column
    solution: str  # column
    answer: Callable[[str], str | None]  # final answer of a solution; None without one


def number_after_hashes(solution: str) -> str | None:
    """Return the number after "####" without separators of thousands or a currency: "#### $1,200" gives "1200"."""
    if "####" not in solution:
        return None
    number = plain_number(solution.rpartition("####")[2])
    return None if number is None else f"{number:f}"


def boxed(solution: str) -> str | None:
    """Return the content of the last box of a solution: \\boxed{...}, \\fbox{...} or \\boxed 7."""
    solution = re.sub(r"\\fbox\s*\{", r"\\boxed{", solution)
    solution = re.sub(r"\\boxed\s+([^\s{$]+)", r"\\boxed{\1}", solution)
    return (final_answer(solution) or None) if "\\boxed" in solution else None


GSM8K = ProblemSet("openai/gsm8k:main:train", "openai/gsm8k:main:test", "question", "answer", number_after_hashes)
MATH = ProblemSet(
    "DigitalLearningGmbH/MATH-lighteval:default:train",
    "HuggingFaceH4/MATH-500:default:test",
    "problem",
    "solution",
    boxed,
)


def write_files(
    problems: ProblemSet, out: Path, *, train: str, test: str, instruction: str, force: bool
) -> dict[Path, int]:
    """Write train.jsonl and test.jsonl, and return the rows by file. A row is

        {"prompt": [{"role": "user", "content": question and instruction}], "answer": final answer}

    train, test: rows, as names on the Hub or local files. Raises UserError before anything is written, for a file that
    exists (without `force`), for rows that cannot be read, and for a row without a question or a final answer.
    """
    targets = {out / "train.jsonl": ("--train", train), out / "test.jsonl": ("--test", test)}
    if not force and (taken := [target for target in targets if target.exists()]):
        raise UserError(f"{taken[0]}: is there already; name another folder, or give --force to replace it")
    texts: dict[Path, list[str]] = {}
    for target, (option, rows) in targets.items():
        label = f"{option}={rows}"
        role: Role = "train" if option == "--train" else "validation"
        numbered = enumerate((row for file in _files(rows, role, label) for row in _rows(file, label)), start=1)
        texts[target] = [_line(problems, row, instruction, f"{label}: row {n}") for n, row in numbered]
        if not texts[target]:
            raise UserError(f"{label}: holds no rows")
    make_folder(out)
    for target, lines in texts.items():
        replace_text(target, "".join(lines))
    return {target: len(lines) for target, lines in texts.items()}


def _files(rows: str, role: Role, label: str) -> list[Path]:
    """Return the local files of rows, downloading a dataset of the Hub. Raises UserError."""
    name = folder_name(rows) or dataset_name(rows)
    if name is not None:
        from mega_rl.data.hub.rows import fetch_rows, folder_files

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
    """Yield the rows of a file. Raises UserError."""
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
    content = row[problems.question].strip() + (f"\n{instruction}" if instruction else "")
    prompt = [{"role": "user", "content": content}]
    return json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) + "\n"
