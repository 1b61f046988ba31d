"""`mega-rl data`: published problem sets as JSONL files, a made one, and the prompts of a recipe.

Imports no torch by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.help import Commands
from mega_rl.datafiles.problems import GSM8K, INSTRUCTION, MATH, ProblemSet
from mega_rl.datafiles.writing import Source, write_files
from mega_rl.quickstart.gsm8k_problems import make_problems, write_folder
from mega_rl.tracking import progress
from mega_rl.tracking.progress import printable

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
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Recipe: a YAML file, or the name of a packaged one.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, as data.mixture.temperature=2."),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=0, help="Prompts of each set that are shown.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the sets of prompts of a recipe: rows, tokens, shares, and how many epochs of each the run draws.

    The first prompts of each are shown as the model sees them. Nothing is trained, and no weight is read.
    """
    from mega_rl.datafiles.overview import overview_lines

    if not as_json:
        progress.show_progress()
    for line in overview_lines(recipe, overrides or [], prompts=prompts, as_json=as_json):
        typer.echo("\n".join(map(printable, line.split("\n"))))


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
    files = write_folder(out, {"train": problems[test:], "test": problems[:test]}, seed=seed, force=force)
    for file, count in files.items():
        typer.echo(f"{file}: {count:,} rows")


def _write(problems: ProblemSet, out: Path, train: str, test: str, *, instruction: str, force: bool) -> None:
    progress.show_progress()
    sources: dict[str, Source] = {
        "train.jsonl": ("--train", train, "train"),
        "test.jsonl": ("--test", test, "validation"),
    }
    for file, count in write_files(problems, out, sources, instruction=instruction, force=force).items():
        typer.echo(f"{file}: {count:,} rows")
