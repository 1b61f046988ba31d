"""`mega-rl replay`: exit code 0 when a step agrees with its record, 1 when a tensor does not, 2 for mistakes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.text.replay import print_json, print_replay, print_rewards
from mega_rl.cli.verify import EXIT_DIFFERS, refuse_launcher
from mega_rl.errors import UserError, UserErrors
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


def replay(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="Folder of a record, as RUN/records/step_000001.")],
    names: Annotated[
        str,
        typer.Option(
            "--layout", metavar="NAMES", help="Layouts, as tp2pp2,cp2; 1 is one rank, fsdp2 the FSDP engine on two."
        ),
    ] = "1",
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="DIR",
            help="Weights that the step began with: a checkpoint of the run, or a Hugging Face folder (a folder with "
            "actor/ and critic/). Default: those of the record, or of the run's checkpoint of the step before.",
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            "--atol", min=0, help="Largest difference; of values above 1 relative. Default: 1e-5, models in bf16 0.15."
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one layout may take.")] = 1800.0,
    with_rewards: Annotated[
        bool, typer.Option("--rewards", help="Also call the run's reward functions again, on the rows of its data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compute a recorded step again, on any layout or engine, and name the first tensor and token that differ."""
    progress.show_progress()
    refuse_launcher("replay")
    with progress.importing("PyTorch"):
        from mega_rl.verify.replay import rewards, run
    with run.working_folder() as work:
        try:
            prepared = run.prepare(record, names, Path(work), weights=weights)
        except UserErrors as error:
            raise UserErrors([problem.replace("--layouts", "--layout", 1) for problem in error.problems]) from error
        except UserError as error:
            raise UserError(str(error).replace("--layouts", "--layout", 1)) from error
        scored = rewards.compare_rewards(prepared.record, atol=atol) if with_rewards else []
        if scored and not as_json:
            print_rewards(scored, prepared.record)
        log.info("replaying %s", record)
        results = []
        for result in run.replay_layouts(prepared, Path(work), timeout_s=timeout_s, atol=atol):
            results.append(result)
            if not as_json:
                print_replay(result, prepared.record)
    if as_json:
        print_json(results, prepared.record, rewards=scored)
    if any(result.first is not None for result in results) or not all(one.good for one in scored):
        raise typer.Exit(EXIT_DIFFERS)
