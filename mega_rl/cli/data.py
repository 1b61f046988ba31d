"""`mega-rl data`: problem sets as JSONL files, and the prompts of a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mega_rl.cli.options import Overrides, Recipe
from mega_rl.cli.output import Commands
from mega_rl.cli.quickstart.word_problems import make_problems, write_problems
from mega_rl.data.columns import RowColumns, RowProblem
from mega_rl.data.hub import FolderName, Role, dataset_name, folder_name
from mega_rl.disk import make_folder, replace_text
from mega_rl.errors import UserError, UserErrors
from mega_rl.rewards.builtin import final_answer, plain_number
from mega_rl.tracking import progress

app = Commands(name="data", help="Write the rows of a problem set, or show the prompts of a recipe.")

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."  # math_verify looks for the box


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

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder for train.jsonl and test.jsonl, as data/gsm8k.")]
Train = Annotated[str, typer.Option(metavar="ROWS", help="Training rows: name on the Hub, or a Parquet or JSONL file.")]
Test = Annotated[str, typer.Option(metavar="ROWS", help="Test rows: name on the Hub, or a Parquet or JSONL file.")]
Instruction = Annotated[str, typer.Option(help='Text after each question; "" for none.')]


def _report(rows: Mapping[Path, int]) -> None:
    for file, count in rows.items():
        typer.echo(f"{file}: {count:,} rows")


Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]


@app.command()
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts of each set that are shown.")] = 2,
) -> None:
    """Show a recipe's sets of prompts: rows, tokens, shares and epochs that the run draws.

    The first prompts of each are shown as the model sees them. Nothing is trained, and no weight is read.
    """
    from mega_rl.cli.prompts import show_prompts

    progress.show_progress()
    show_prompts(recipe, overrides or [], prompts=prompts)


def _add(name: str, problems: ProblemSet, summary: str) -> None:
    """Add the command that writes a problem set."""

    def write(
        out: Out,
        train: Train = problems.train,
        test: Test = problems.test,
        instruction: Instruction = INSTRUCTION,
        force: Force = False,
    ) -> None:
        progress.show_progress()
        _report(write_files(problems, out, train=train, test=test, instruction=instruction, force=force))

    app.command(name, help=summary)(write)


_add("gsm8k", GSM8K, "Write GSM8K, grade-school word problems: 7,473 to train on and 1,319 to test with.")
_add("math", MATH, "Write MATH, competition mathematics: 7,500 to train on and the 500 of MATH-500 to test with.")


@app.command("word-problems")
def word_problems(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that a repository of the Hub would be.")],
    train: Annotated[int, typer.Option(help="Questions to train on.", min=1)] = 4000,
    test: Annotated[int, typer.Option(help="Questions to test with, none of which trains.", min=1)] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the questions.", min=0)] = 0,
    force: Force = False,
) -> None:
    """Write generated easy word problems in the format of GSM8K, for runs without a network."""
    problems = make_problems(train + test, seed=seed)
    _report(write_problems(out, problems[test:], problems[:test], seed=seed, force=force))


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
    columns = RowColumns(problems.question, problems.solution)
    for target, (option, rows) in targets.items():
        label = f"{option}={rows}"
        role: Role = "train" if option == "--train" else "validation"
        numbered = enumerate(_rows(rows, role, label, columns), start=1)
        texts[target] = [_line(problems, row, instruction, f"{label}: row {n}") for n, row in numbered]
    make_folder(out)
    for target, lines in texts.items():
        replace_text(target, "".join(lines))
    return {target: len(lines) for target, lines in texts.items()}


def _rows(rows: str, role: Role, label: str, columns: RowColumns) -> Iterator[object]:
    """Yield the rows of files, downloading a dataset of the Hub. Raises UserError."""
    from mega_rl.data.hub import fetch_rows, folder_files
    from mega_rl.data.rows import read_rows

    name = folder_name(rows) or dataset_name(rows)
    if isinstance(name, FolderName):
        files = folder_files(name, role=role, label=label)
    else:
        files = [Path(rows)] if name is None else [fetch_rows(name, role=role, label=label)[0]]
    fatal: list[str] = []
    for place, row in read_rows(files, columns, fatal):
        if isinstance(row, RowProblem):
            raise UserError(f"{label}: {place}: {row}")
        yield row
    if fatal:
        raise UserErrors([f"{label}: {problem}" for problem in fatal])


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
