"""The `mega-rl` command. `--help` and every mistake in a config answer without importing torch."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mega_rl import __version__, progress
from mega_rl.cli import (
    bench,
    checkpoint,
    convert,
    data,
    plan,
    quickstart,
    recipes,
    replay,
    run_export,
    verify,
    verify_rl,
)
from mega_rl.cli.evaluation.command import evaluate
from mega_rl.cli.help import Commands
from mega_rl.cli.launch import app as launch_app
from mega_rl.cli.launch_options import LaunchOptions, become
from mega_rl.cli.layout_options import with_options
from mega_rl.cli.show import plot, report, view
from mega_rl.config import loader, render
from mega_rl.config.keys import FIELDS
from mega_rl.config.origins import pinned_overrides
from mega_rl.environment import variables_of
from mega_rl.errors import PeerError, RunError, UserError, UserErrors, limits_as_errors
from mega_rl.health.overview import overview
from mega_rl.launcher.peers import has_launcher, innocence
from mega_rl.launcher.ranks import LAST_WORD, LOST_PEER, WAITED_IN_VAIN
from mega_rl.progress.printable import printable
from mega_rl.schedulers.slurm.tasks import become_rank
from mega_rl.workers.user_files import place_in_users_code

EXIT_INTERRUPTED = 130
# Rank 0 reports a mistake that every rank finds, and the launcher then ends the others. One that is still alive after
# this found something of its own.
OTHER_RANKS_WAIT_S = 5.0
LOST_CONNECTION = "lost the connection to another rank, which has ended; what that rank said, if anything, is the cause"
# Errors that another rank has caused, outside of a run, which names phase and collective (`mega_rl.health.guard`).
BY_OTHERS = {LOST_PEER: LOST_CONNECTION, WAITED_IN_VAIN: "waited in a collective for a rank that did not come in time"}

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
app.add_typer(launch_app)


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
@with_options
def train(
    launch: LaunchOptions,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, as optim.lr=2e-6."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe: a YAML file, or the name of a packaged one, as quickstart.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config, marking what differs from the defaults.")
    ] = False,
) -> None:
    """Train a policy with the settings of a recipe and of the command line."""
    settings = overrides or []
    if launch.nproc_per_node is None:
        become_rank()
    progress.show_progress()
    if print_config:
        render.print_config(loader.load(config, settings))
        return

    if launch.nproc_per_node not in (None, 1):
        logging.getLogger("mega_rl.config").setLevel(logging.WARNING)  # the ranks read the settings again
    launch.check(os.environ)
    with progress.phase(f"checking {config or 'the settings'}, models and data", announce=True):
        from mega_rl.preflight import preflight

        resolved = preflight(config, settings, world_size=launch.world_size, launchers=launch.nnodes + launch.spares)
    if launch.needs_launcher:
        recipe = [] if config is None else ["--config", str(config)]
        program = ["mega_rl.cli", "train", *recipe, *settings, *pinned_overrides(resolved)]
        become(launch.launch(program, run_dir=resolved.trainer.run_dir, resume=resolved.checkpoint.resume))
    if not resolved.metrics.progress_bar:
        progress.show_progress(live=False)
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.accelerator import prepare

        accelerator = prepare(
            resolved.trainer.device,
            variables=variables_of(resolved.engine, resolved.rollout, resolved.trainer),
            deepep=resolved.engine.megatron.moe.dispatcher == "deepep",
        )
        from mega_rl.assemble import train as run

    raise typer.Exit(run(resolved, accelerator))


@app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Folder of a run: show its ranks while it lives, else its newest report."),
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="With --run: stacks of the ranks on this machine.")] = False,
    require: Annotated[
        str | None,
        typer.Option(
            "--require", metavar="NAME,...", help="Instead fail with a line for each of these that is missing: te,cuda."
        ),
    ] = None,
) -> None:
    """List versions, devices and optional packages, and what is used where one is missing; or look at a run.

    With --run the exit code is 1 if the run's last end was a hang or a failure.
    """
    if run is not None:
        if require is not None:
            raise UserError("--require and --run: one looks at this machine, the other at a run; give one of them")
        lines, code = overview(run, stacks=stacks)
        for line in lines:
            typer.echo(line)
        raise typer.Exit(code)
    if stacks:
        raise UserError("--stacks: shows the ranks of a run; give its folder with --run")
    from mega_rl.cli.doctor import missing, report

    if require is not None:
        lines = list(missing([name for name in require.replace(" ", "").split(",") if name]))
        typer.echo("\n".join(lines) or f"all there: {require}")
        raise typer.Exit(1 if lines else 0)
    for line in report():
        typer.echo(line)


app.command("eval")(with_options(evaluate))
app.command()(plan.plan)
app.command()(plot.plot)
app.command()(replay.replay)
app.command()(report.report)
app.command()(view.view)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0; 1 for a run that cannot go on; 2 for a mistake of the user; 130 for Ctrl-C; 128 + signal for a stopped run.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    word = os.environ.pop(LAST_WORD, "")  # programs that a rank starts have none in how it ends
    code = run_app(app, given, prog_name="mega-rl")
    if word:
        os.pwrite(int(word), bytes([code + 1]), int(os.environ["RANK"]))
    return code


def run_app(command: typer.Typer, arguments: Sequence[str], *, prog_name: str) -> int:
    """Run a typer app with this project's exit codes and one-line errors; returns the exit code, as `main` does."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.pop("RANK", None)  # a launcher sets both: left over, it would silence a process that is the only one
    try:
        with limits_as_errors():
            outcome = command(args=list(arguments), prog_name=prog_name, standalone_mode=False)
    except UserError as error:
        return _report(error.problems if isinstance(error, UserErrors) else [str(error)])
    except PeerError as error:
        code = innocence(error)
        return code if code is not None and has_launcher() else _report([str(error)], code=error.exit_code)
    except RunError as error:
        return _report([str(error)], code=error.exit_code)
    except typer.BadParameter as error:
        return _report([f"{error.format_message()}; see {prog_name} --help"])
    except typer.TyperException as error:
        return _report([f"{_in_words(error)}; see {prog_name} --help"])
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        if (code := innocence(error)) is not None and has_launcher():
            return code  # the launcher says which rank it was
        if (problem := _in_one_line(error) if code is None else BY_OTHERS[code]) is None:
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
        sys.stderr.write(prefix + printable(" ".join(problem.split("\n"))) + "\n")
    sys.stderr.flush()
    return code


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Run the command line as a program, which ends with its exit code."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _begin_with_all_streams()
    end = _End()
    atexit.register(end)  # the first to be registered is the last to be called
    try:
        end.exit_code = main(arguments)
    except SystemExit as error:  # of a user's code
        end.exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    sys.exit(end.exit_code)


def _begin_with_all_streams() -> NoReturn:
    """Begin again with /dev/null for streams that the caller has closed: the next file would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _End:
    """End of the program after its threads and exit handlers, without the interpreter's teardown.

    That would walk half a million objects of PyTorch and Megatron-Core, a silent two seconds after the last line, and
    destroy groups, streams and extension modules in an order that their libraries do not always survive.
    """

    def __init__(self) -> None:
        self.exit_code = 1  # of an error with a traceback

    def __call__(self) -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a reader that has gone, a closed stream
                stream.flush()
        os._exit(self.exit_code)
