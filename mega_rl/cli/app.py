"""The `mega-rl` command. `--help` and every mistake in a config answer without importing torch."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from mega_rl import __version__
from mega_rl.cli.output import Commands, Later
from mega_rl.config.user_files import place_in_users_code
from mega_rl.errors import LAST_WORD, PeerError, RunError, UserError, UserErrors
from mega_rl.tracking import progress
from mega_rl.tracking.progress import printable

EXIT_INTERRUPTED = 130
# Rank 0 reports a mistake that every rank finds, and the launcher then ends the others. A rank that is still alive
# after this time found a mistake that rank 0 did not.
OTHER_RANKS_WAIT_S = 5.0

# In the order of the help. The summary is the first sentence of the command's help.
_COMMANDS = (
    Later("Start", "quickstart", "quickstart.run:quickstart",
          "Train a tiny model in minutes on two cores: sums with PPO, word problems with GRPO."),
    Later("Start", "recipes", "look:recipes", "List and show the recipes that come with the package."),
    Later("Start", "data", "data:app", "Write the rows of a problem set, or show the prompts of a recipe."),
    Later("Train", "train", "train:train", "Train a policy with the settings of a recipe and of the command line."),
    Later("Train", "sft", "train:sft",
          "Train a model on given answers by maximum likelihood: conversations, completions or text."),
    Later("Train", "dpo", "train:dpo",
          "Train a policy on preferences: DPO, IPO, SimPO and ORPO on pairs, KTO on labelled answers."),
    Later("Train", "rm", "train:rm",
          "Train a reward model on pairs of answers: a sequence-classification checkpoint with one label."),
    Later("Train", "together", "train:together",
          "Train the adapters of several recipes on one base, a step of each in turn."),
    Later("Train", "distill", "train:distill",
          "Train a student on the answers of a teacher, or of itself, that mega-rl eval has sampled."),
    Later("Train", "eval", "train:evaluate",
          "Sample a model's answers to prompts and report pass@k, avg@k and maj@k with 95 % intervals."),
    Later("Train", "checkpoint", "checkpoint:app", "List, verify, export and remove the checkpoints of a run."),
    Later("Look", "report", "look:report",
          "Write curves, warnings, times, settings and samples of runs as one self-contained HTML file."),
    Later("Check", "doctor", "look:doctor",
          "List versions and devices, what works here, and what is used where something does not."),
    Later("Check", "plan", "look:plan",
          "Say from recipe and config.json whether a run fits its GPUs: memory by phase, and advice."),
    Later("Check", "verify", "verify:app", "Check that parallel layouts and engines compute what one rank computes."),
    Later("Check", "card", "verify:card",
          "Prove on a small twin what works with a model here; write a page and JSON."),
    Later("Check", "audit", "look:audit",
          "Prove from a run's records that each prompt and token trained once and in time."),
    Later("Check", "replay", "verify:replay",
          "Repeat a recorded step on any layout or engine, naming the first differing tensor and token."),
    Later("Check", "bench", "verify:bench_app", "Tasks that show whether the trainer learns."),
    Later("Convert", "convert", "convert:app",
          "Convert, inspect and compare checkpoints: Hugging Face and Megatron-Core."),
    Later("Cluster", "launch", "launch:app", "Runs on several nodes, by the scheduler of a cluster."),
)  # fmt: skip

_HELP = "Post-training of language models by reinforcement learning on Megatron-Core."
app = Commands(name="mega-rl", help=_HELP, completion=True, later=_COMMANDS)


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
    """Post-training of language models by reinforcement learning on Megatron-Core."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0; 1 for a run that cannot continue; 2 for a mistake of the user; 130 for Ctrl-C; 128 + signal for a stopped run.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    word = os.environ.pop(LAST_WORD, "")  # removed, so that programs which a rank starts do not report its end
    code = _run(given)
    if word:
        os.pwrite(int(word), bytes([code + 1]), int(os.environ["RANK"]))
    return code


def _run(arguments: Sequence[str]) -> int:
    """Run the command with one-line errors; return the exit code."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.pop("RANK", None)  # a launcher sets both: left over, it would silence a process that is the only one
    try:
        outcome = app(args=list(arguments), prog_name="mega-rl", standalone_mode=False)
    except UserError as error:
        return _report(error.problems if isinstance(error, UserErrors) else [str(error)])
    except typer.TyperException as error:
        return _report([f"{error.format_message()}; see mega-rl --help"])
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        if (code := _end_of_run(error)) is None:
            raise
        return code
    finally:
        progress.close()
    return outcome if isinstance(outcome, int) else 0


def _end_of_run(error: Exception) -> int | None:
    """Report the error and return the exit code; None for an error that needs its traceback."""
    from mega_rl.tracking.health.records import BY_OTHERS, has_launcher, innocent_code

    is_known = isinstance(error, RunError)
    code = innocent_code(error) if isinstance(error, PeerError) or not is_known else None
    if code is not None and has_launcher():
        return code  # the launcher says which rank it was
    problem = str(error) if is_known else BY_OTHERS.get(code or 0, "")
    if not problem and (place := place_in_users_code(error)) is not None:
        problem = f"your own code raised {type(error).__name__}: {error} (at {place})"
    return _report([problem], code=RunError.exit_code) if problem else None


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
    codes = [1]  # exit code for a traceback
    atexit.register(_end, codes)  # the first to be registered is the last to be called
    try:
        codes.append(main(arguments))
    except SystemExit as error:  # raised by a user's code
        codes.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    sys.exit(codes[-1])


def _end(codes: Sequence[int]) -> None:
    """Exit with the last code, without the interpreter's slow teardown: some libraries do not survive it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(codes[-1])
