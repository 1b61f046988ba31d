"""`mega-rl data`: published problem sets as the JSONL files that the packaged recipes name. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl import progress
from mega_rl.cli.help import Commands
from mega_rl.datafiles.problems import GSM8K, INSTRUCTION, MATH, ProblemSet
from mega_rl.datafiles.writing import Source, write_files

app = Commands(name="data", help="Write train.jsonl and test.jsonl of a published problem set.")

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder for train.jsonl and test.jsonl, as data/gsm8k.")]
Train = Annotated[
    str,
    typer.Option("--train", metavar="ROWS", help="Training rows: name on the Hub, or a Parquet or JSONL file."),
]
Test = Annotated[
    str, typer.Option("--test", metavar="ROWS", help="Test rows: name on the Hub, or a Parquet or JSONL file.")
]
Instruction = Annotated[str, typer.Option("--instruction", help='Text after each question; "" for none.')]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]


@app.callback()
def _commands() -> None:
    """Write train.jsonl and test.jsonl of a published problem set."""
    progress.show_progress()


@app.command()
def gsm8k(
    out: Out,
    train: Train = GSM8K.train,
    test: Test = GSM8K.test,
    instruction: Instruction = INSTRUCTION,
    force: Force = False,
) -> None:
    """Write GSM8K, grade-school word problems: 7,473 to train on and 1,319 to test with."""
    _write(GSM8K, out, train, test, instruction=instruction, force=force)


@app.command()
def math(
    out: Out,
    train: Train = MATH.train,
    test: Test = MATH.test,
    instruction: Instruction = INSTRUCTION,
    force: Force = False,
) -> None:
    """Write MATH, competition mathematics: 7,500 problems to train on and the 500 of MATH-500 to test with."""
    _write(MATH, out, train, test, instruction=instruction, force=force)


def _write(problems: ProblemSet, out: Path, train: str, test: str, *, instruction: str, force: bool) -> None:
    sources: dict[str, Source] = {
        "train.jsonl": ("--train", train, "train"),
        "test.jsonl": ("--test", test, "validation"),
    }
    for file, count in write_files(problems, out, sources, instruction=instruction, force=force).items():
        typer.echo(f"{file}: {count:,} rows")
