"""`mega-rl data`: published problem sets as JSONL files, a made one, and the prompts of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.data.problem_sets import GSM8K, INSTRUCTION, MATH, write_files
from mega_rl.cli.help import Commands
from mega_rl.cli.options import Overrides, Recipe
from mega_rl.cli.quickstart.word_problems import make_problems, write_problems
from mega_rl.tracking import progress

app = Commands(name="data", help="Write the rows of a problem set, or show the prompts of a recipe.")

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
    """Write the rows of a problem set, or show the prompts of a recipe."""


@app.command()
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option("--prompts", min=0, help="Prompts of each set that are shown.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the sets of prompts of a recipe: rows, tokens, shares, and how many epochs of each the run draws.

    The first prompts of each are shown as the model sees them. Nothing is trained, and no weight is read.
    """
    from mega_rl.cli.data.overview import show_prompts

    if not as_json:
        progress.show_progress()
    show_prompts(recipe, overrides or [], prompts=prompts, as_json=as_json)


@app.command()
def gsm8k(
    out: Out,
    train: Train = GSM8K.train,
    test: Test = GSM8K.test,
    instruction: Instruction = INSTRUCTION,
    force: Force = False,
) -> None:
    """Write GSM8K, grade-school word problems: 7,473 to train on and 1,319 to test with."""
    progress.show_progress()
    _report(write_files(GSM8K, out, train=train, test=test, instruction=instruction, force=force))


@app.command()
def math(
    out: Out,
    train: Train = MATH.train,
    test: Test = MATH.test,
    instruction: Instruction = INSTRUCTION,
    force: Force = False,
) -> None:
    """Write MATH, competition mathematics: 7,500 problems to train on and the 500 of MATH-500 to test with."""
    progress.show_progress()
    _report(write_files(MATH, out, train=train, test=test, instruction=instruction, force=force))


@app.command("word-problems")
def word_problems(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that a repository of the Hub would be.")],
    train: Annotated[int, typer.Option("--train", help="Questions to train on.", min=1)] = 4000,
    test: Annotated[int, typer.Option("--test", help="Questions to test with, none of which trains.", min=1)] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the questions.", min=0)] = 0,
    force: Force = False,
) -> None:
    """Write easy word problems in the shape of GSM8K, made by a program: for runs without a network."""
    problems = make_problems(train + test, seed=seed)
    _report(write_problems(out, problems[test:], problems[:test], seed=seed, force=force))


def _report(rows: Mapping[Path, int]) -> None:
    for file, count in rows.items():
        typer.echo(f"{file}: {count:,} rows")
