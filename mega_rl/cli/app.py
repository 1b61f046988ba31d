"""The `mega-rl` command. `--help` and every mistake in a config answer without importing torch."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mega_rl import __version__, progress
from mega_rl.cli import (
    bench,
    checkpoint,
    convert,
    data,
    plan,
    plot,
    quickstart,
    recipes,
    run_export,
    verify,
    verify_rl,
)
from mega_rl.cli.help import Commands
from mega_rl.cli.launch import app as launch
from mega_rl.config.keys import FIELDS
from mega_rl.config.origins import pinned_overrides
from mega_rl.environment import variables_of
from mega_rl.errors import RunError, UserError, UserErrors
from mega_rl.workers.user_files import place_in_users_code

EXIT_INTERRUPTED = 130
# Rank 0 reports a mistake that every rank finds, and the launcher then ends the others. One that is still alive after
# this found something of its own.
OTHER_RANKS_WAIT_S = 5.0
# How gloo ends the collective of a rank whose peer has died.
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
LOST_CONNECTION = "lost the connection to another rank, which has ended; what that rank said, if anything, is the cause"

app = Commands(name="mega-rl", help="PPO and GRPO on Megatron-Core.", completion=True)
app.add_typer(quickstart.app)
app.add_typer(recipes.app)
app.add_typer(convert.app)
verify.app.command("rl")(verify_rl.rl)
app.add_typer(verify.app)
checkpoint.app.command("export")(run_export.export)
app.add_typer(checkpoint.app)
app.add_typer(data.app)
app.add_typer(bench.app)
app.add_typer(launch)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mega-rl {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """PPO and GRPO on Megatron-Core."""


@app.command()
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, as optim.lr=2e-6."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe: a YAML file, or the name of a packaged one, as quickstart.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, help="Start this many ranks on this machine with torchrun.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config, marking what differs from the defaults.")
    ] = False,
) -> None:
    """Train a policy with the settings of a recipe and of the command line."""
    settings = overrides or []
    progress.show_progress()
    if print_config:
        from mega_rl.config import loader, render

        render.print_config(loader.load(config, settings))
        return

    if nproc_per_node not in (None, 1):
        logging.getLogger("mega_rl.config").setLevel(logging.WARNING)  # the ranks read the settings again
    if nproc_per_node is not None and "RANK" in os.environ:
        raise UserError(f"--nproc-per-node={nproc_per_node} under a launcher that already started ranks; leave it out")
    with progress.phase(f"checking {config or 'the settings'}, models and data", announce=True):
        from mega_rl.preflight import preflight

        resolved = preflight(config, settings, world_size=nproc_per_node)
    if nproc_per_node is not None and nproc_per_node > 1:
        _become_torchrun(nproc_per_node, config, [*settings, *pinned_overrides(resolved)])
    if not resolved.metrics.progress_bar:
        progress.show_progress(live=False)
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.accelerator import prepare

        accelerator = prepare(
            resolved.trainer.device, variables=variables_of(resolved.engine, resolved.rollout, resolved.trainer)
        )
        from mega_rl.assemble import train as run

    raise typer.Exit(run(resolved, accelerator))


@app.command()
def doctor(
    require: Annotated[
        str | None,
        typer.Option(
            "--require", metavar="NAME,...", help="Instead fail with a line for each of these that is missing: te,cuda."
        ),
    ] = None,
) -> None:
    """List versions, devices and optional packages, and what is used where one is missing."""
    from mega_rl.cli.doctor import missing, report

    if require is not None:
        lines = list(missing([name for name in require.replace(" ", "").split(",") if name]))
        typer.echo("\n".join(lines) or f"all there: {require}")
        raise typer.Exit(1 if lines else 0)
    for line in report():
        typer.echo(line)


app.command()(plan.plan)
app.command()(plot.plot)


def _become_torchrun(nproc: int, config: Path | None, overrides: Sequence[str]) -> None:
    """Replace this process by torchrun, which then gets the signals and gives the exit code itself."""
    launcher = ["-m", "mega_rl.cli.torchrun", str(nproc), "mega_rl.cli"]
    recipe = [] if config is None else ["--config", str(config)]
    progress.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *launcher, "train", *recipe, *overrides], os.environ)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0; 1 for a run that cannot go on; 2 for a mistake of the user; 130 for Ctrl-C; 128 + signal for a stopped run.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    return run_app(app, given, prog_name="mega-rl")


def run_app(command: typer.Typer, arguments: Sequence[str], *, prog_name: str) -> int:
    """Run a typer app with this project's exit codes and one-line errors; returns the exit code, as `main` does."""
    try:
        outcome = command(args=list(arguments), prog_name=prog_name, standalone_mode=False)
    except UserError as error:
        return _report(error.problems if isinstance(error, UserErrors) else [str(error)])
    except RunError as error:
        return _report([str(error)], code=error.exit_code)
    except typer.BadParameter as error:
        return _report([f"{error.format_message()}; see {prog_name} --help"])
    except typer.TyperException as error:
        return _report([f"{_in_words(error)}; see {prog_name} --help"])
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        if (problem := _in_one_line(error)) is None:
            raise
        return _report([problem], code=RunError.exit_code)
    finally:
        progress.close()
    return outcome if isinstance(outcome, int) else 0


def _in_words(error: typer.TyperException) -> str:
    """Return an error of the command line; a setting given as an option is shown as it should be."""
    option = re.search(r"--([a-z_]+(?:\.\w+)*)", str(error))
    if option and option[1] in FIELDS:
        return f"settings have no dashes: write {option[1]}=VALUE"
    return str(error)


def _in_one_line(error: Exception) -> str | None:
    """Return what ended a run whose cause lies outside this package, None for an error that needs its traceback."""
    if isinstance(error, RuntimeError) and "gloo" in str(error) and any(words in str(error) for words in PEER_IS_GONE):
        return LOST_CONNECTION
    place = place_in_users_code(error)
    return None if place is None else f"your own code raised {type(error).__name__}: {error} (at {place})"


def _report(problems: Sequence[str], *, code: int = UserError.exit_code) -> int:
    progress.close()
    rank = os.environ.get("RANK", "0")
    prefix = "error: "
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHER_RANKS_WAIT_S)
        prefix = f"error: rank {rank}: "
    for problem in problems:
        sys.stderr.write(prefix + " ".join(problem.split("\n")) + "\n")
    sys.stderr.flush()
    return code


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Run the command line as a program, which ends with its exit code."""
    code = main(arguments)
    # The interpreter's last collections would walk half a million objects of PyTorch and Megatron-Core, a silent two
    # seconds after the last line.
    gc.freeze()
    sys.exit(code)
