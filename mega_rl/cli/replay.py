"""`mega-rl replay`: exit code 0 if a step agrees with its record, 1 if not, 2 for mistakes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_rl.cli.text.tables import print_json, print_table
from mega_rl.cli.verify import end, refuse_launcher
from mega_rl.errors import UserError, UserErrors
from mega_rl.tracking import progress

if TYPE_CHECKING:
    from mega_rl.tracking.records.reader import Record
    from mega_rl.verify.replay.compare import Difference, TokenPlace
    from mega_rl.verify.replay.run import Replay

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
        except UserError as error:  # the option has another name here
            problems = error.problems if isinstance(error, UserErrors) else [str(error)]
            raise UserErrors([problem.replace("--layouts", "--layout", 1) for problem in problems]) from error
        step = prepared.record
        scored = rewards.compare_rewards(step, atol=atol) if with_rewards else []
        if scored and not as_json:
            _print(f"step {step.description.step}, its {len(step.rows)} responses scored again", scored)
        log.info("replaying %s", record)
        results = []
        for result in run.replay_layouts(prepared, Path(work), timeout_s=timeout_s, atol=atol):
            results.append(result)
            if not as_json:
                origin = f"recorded on {step.description.world_size} rank(s) of {step.description.layout}"
                title = f"step {step.description.step}, {origin}; replayed: {result.layout.title}"
                _print(title, result.differences, label=f"{result.layout.title}: ")
    if as_json:
        print_json(_facts(results, step, scored))
    end([*(result.first is None for result in results), *(one.good for one in scored)])


def _print(title: str, differences: Sequence[Difference], *, label: str = "") -> None:
    """Print every tensor's largest difference, and the first tensor and place beyond its tolerance."""
    typer.echo(title)
    rows = []
    for difference in differences:
        at = "" if difference.worst is None else where(difference.worst)
        word = "equal" if difference.good else f"DIFFERS at {difference.num_beyond:,}"
        largest = f"{difference.largest:.1e}" if difference.largest else "0"
        rows.append((difference.tensor, largest, at, f"{difference.allowed:g}", word))
    print_table(("tensor", "largest difference", "at", "allowed", "verdict"), rows)
    first = next((difference for difference in differences if not difference.good), None)
    if first is not None:
        typer.echo(label + in_words(first))


def in_words(difference: Difference) -> str:
    """Describe the first element of a tensor that is beyond its tolerance."""
    place = difference.first
    assert place is not None
    numbers = f"recorded {place.recorded:.9g}, replayed {place.replayed:.9g}"
    return f"{difference.tensor} differs first at {where(place)}: {numbers}"


def where(place: TokenPlace) -> str:
    """Return "prompt 3, sample 1 (row 13), token 17 ' the'"."""
    row = f"prompt {place.prompt}, sample {place.sample} (row {place.row})"
    if place.token is None:
        return row
    return f"{row}, token {place.token}" + (f" {place.text!r}" if place.text else "")


def _facts(results: Sequence[Replay], record: Record, rewards: Sequence[Difference]) -> dict[str, object]:
    """Return all results for JSON. rewards: of responses that were scored again."""
    layouts = [
        {
            "layout": result.layout.name,
            "ranks": result.layout.ranks,
            "good": result.first is None,
            "first": None if result.first is None else result.first.tensor,
            "tensors": [asdict(difference) for difference in result.differences],
        }
        for result in results
    ]
    return {
        "record": str(record.folder),
        "step": record.description.step,
        "good": all(result.first is None for result in results) and all(one.good for one in rewards),
        "layouts": layouts,
        "rewards": [asdict(difference) for difference in rewards],
    }
