"""The `mega-rl` command. `--help` and every mistake in a config answer without importing torch."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.checkpoint import commands as checkpoint
from mega_rl.convert import verbs as convert
from mega_rl.errors import RunError, UserError, UserErrors
from mega_rl.verify import verbs as verify

EXIT_INTERRUPTED = 130
# Rank 0 reports a mistake that every rank finds, and the launcher then ends the others. One that is still alive after
# this found something of its own.
OTHER_RANKS_WAIT_S = 5.0

app = typer.Typer(
    name="mega-rl",
    help="PPO and GRPO on Megatron-Core.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(convert.app)
app.add_typer(verify.app)
app.add_typer(checkpoint.app)


@app.callback()
def _commands() -> None:
    """PPO and GRPO on Megatron-Core."""


@app.command()
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's, as optim.lr=2e-6."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe file (YAML), as recipes/quickstart.yaml.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, help="Start this many ranks on this machine with torchrun.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config, marking what differs from the defaults.")
    ] = False,
) -> None:
    """Train a policy."""
    settings = overrides or []
    if print_config:
        from mega_rl.config import loader, render

        render.print_config(loader.load(config, settings))
        return

    from mega_rl.preflight import preflight

    if nproc_per_node is not None and "RANK" in os.environ:
        raise UserError(f"--nproc-per-node={nproc_per_node} under a launcher that already started ranks; leave it out")
    resolved = preflight(config, settings, world_size=nproc_per_node)
    if nproc_per_node is not None and nproc_per_node > 1:
        _become_torchrun(nproc_per_node, config, settings)

    from mega_rl.accelerator import prepare

    configure_logging()
    accelerator = prepare(resolved.trainer.device)
    from mega_rl.assemble import run  # after prepare: it brings Megatron-Core in

    raise typer.Exit(run(resolved, accelerator))


@app.command()
def doctor() -> None:
    """List versions, devices and optional packages, and what is used where one is missing."""
    from mega_rl import doctor as report

    for line in report.report():
        typer.echo(line)


def configure_logging() -> None:
    """Progress of rank 0 and warnings of every rank, on stderr; of other packages only warnings."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("mega_rl").setLevel(logging.INFO if rank == "0" else logging.WARNING)


def _become_torchrun(nproc: int, config: Path | None, overrides: Sequence[str]) -> None:
    """Replace this process by torchrun, which then gets the signals and gives the exit code itself."""
    launcher = ["-m", "mega_rl.launch", str(nproc), "mega_rl.cli"]
    recipe = [] if config is None else ["--config", str(config)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *launcher, "train", *recipe, *overrides], environment)


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
        return _report([f"{error}; see {prog_name} --help"])
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return outcome if isinstance(outcome, int) else 0


def _report(problems: Sequence[str], *, code: int = UserError.exit_code) -> int:
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


def entry_point() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry_point()
