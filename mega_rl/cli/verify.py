"""`mega-rl verify`, `card`, `replay`, `bench`: exit codes 0 all agree, 1 not, 2 a mistake."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mega_rl import disk
from mega_rl.cli.options import Json, with_options
from mega_rl.cli.output import Commands, plain, print_json, print_table, show
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.downloads import checkpoint_folder
from mega_rl.errors import UserError
from mega_rl.tracking import progress
from mega_rl.tracking.health.guard import StoppedBySignal, stop_on_signals
from mega_rl.verify.layouts import TOLERANCES, UPDATES, Layout, Plan, fsdp, read_changes, resolve_all, tolerances, usual
from mega_rl.verify.learn.tasks import MOST_SEEDS, TASKS, TaskResult, record
from mega_rl.verify.rl.inputs import STEPS, read_run

if TYPE_CHECKING:
    from mega_rl.verify.replay import Difference, TokenPlace
    from mega_rl.verify.rl.compare import UpdateErrors
    from mega_rl.verify.run import Verdict

log = logging.getLogger(__name__)

app = Commands(name="verify", help="Check that parallel layouts and engines compute what one rank computes.")


Model = Annotated[
    Path,
    typer.Option(metavar="HF_DIR", help="Checkpoint (folder, or name on the Hub); with --twin a config.json does."),
]
NAMES = typer.Option(
    "--layouts", metavar="NAMES", help="Layouts, as tp2+sp,pp2; rl and replay also take fsdp2, and 1 for one rank."
)


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `layouts` and `engines`; every field is an option."""

    twin: Annotated[
        bool, typer.Option("--twin", help="Verify a model of few layers, experts and tokens with the same config.")
    ] = False
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of weights and activations.")] = "fp32"
    packing: Annotated[bool, typer.Option(help="Pack sequences; else pad them.")] = True
    transformer_impl: Annotated[
        Literal["auto", "local", "transformer_engine"], typer.Option(help="Megatron-Core's layers.")
    ] = "auto"
    tolerance: Annotated[
        str, typer.Option(metavar="NAME=NUMBER,...", help="logprob, loss, grad_norm, gradient or weight.")
    ] = ""
    seed: Annotated[int, typer.Option(min=0, help="Of the batch and of random weights.")] = 0
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one launch may take.")] = 1800.0
    as_json: Json = False


@app.command()
@with_options
def layouts(
    model: Model,
    names: Annotated[str | None, NAMES] = None,
    options: VerifyOptions = VerifyOptions(),
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Run every layout on this number of ranks; data parallelism takes what is left."),
    ] = None,
) -> None:
    """Compare the training engine's log-probs, loss, gradients and step on each layout with one rank's.

    Default: a dozen layouts that the model can have.
    """
    model, asked = _check(model, options)
    names, layers = usual(asked) if names is None else names, 1
    if options.twin:
        with progress.importing("PyTorch"):
            from mega_rl.verify.run import resolve_on_twin
        wanted, layers = resolve_on_twin(names, asked, where=str(model / "config.json"), nproc=nproc)
    else:
        wanted = resolve_all(names, asked, nproc=nproc)
    _verify(model, asked, wanted, options, layers=layers)


@app.command()
@with_options
def engines(
    model: Model,
    nproc: Annotated[
        int, typer.Option(min=1, help="Run the FSDP engine on one rank, and on this number of ranks.")
    ] = 2,
    options: VerifyOptions = VerifyOptions(),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps before weights are compared.")] = 3,
) -> None:
    """Compare log-probs, loss, every gradient and weights after some steps of both engines, on one batch."""
    model, asked = _check(model, options)
    _verify(model, asked, [fsdp(ranks) for ranks in sorted({1, nproc})], options, steps=steps)


@app.command()
def rl(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="Recipe (a YAML file, or the name of a packaged one) and settings that replace its own.",
        ),
    ] = None,
    names: Annotated[str, NAMES] = "1,tp2,pp2,dp2,fsdp2",
    steps: Annotated[int, typer.Option(min=1, help="Trainer steps; two updates each.")] = STEPS,
    tolerance: Annotated[str, typer.Option(metavar="PHASE=NUMBER,...", help="As gradient=1e-4,log-probs=1e-3.")] = "",
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Plant faults into the independent trainer: each must be named.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one run may take.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Compare every update of a small model's real run with an independent trainer in lockstep.

    The independent trainer, transformers' model under plain torch, gets the sampled tokens and the weights at the
    start, and computes the rest, the rewards too. The recipe's algorithm and optimizer count; its model is shrunk.
    """
    begin("verify")
    allowed = read_changes(tolerance, TOLERANCES)
    settings = settings or []
    if self_check:
        if settings:
            raise UserError(f"{settings[0]}: --self-check has its own runs; leave recipe and settings out")
        _plant_faults(timeout_s=timeout_s, as_json=as_json)
        return
    recipe = next((text for text in settings if "=" not in text and not text.startswith("~")), None)
    run = read_run(recipe, [text for text in settings if text != recipe], steps=steps)
    with progress.importing("PyTorch"):
        from mega_rl.verify.rl import run as lockstep
    with tempfile.TemporaryDirectory(prefix="verify_") as folder:
        log.info("verifying %s", recipe or "the default algorithm")
        config, layouts = lockstep.prepare_run(run, names, Path(folder))
        header = {"recipe": recipe or "none", "model": run.description, "steps": steps}
        facts = list[dict[str, object]]()
        if not as_json:
            _print_header(header)
        every = lockstep.follow_layouts(config, layouts, Path(folder), timeout_s=timeout_s, tolerances=allowed)
        for layout, updates, problem in every:
            fact = {"layout": layout.name, "ranks": layout.ranks, "good": not problem, "problem": problem}
            facts.append({**fact, "updates": [asdict(update) for update in updates]})
            if not as_json:
                _print_lockstep(layout, updates, problem, tolerances=allowed)
    good = all(fact["good"] for fact in facts)
    if as_json:
        print_json({"good": good, **header, "tolerances": allowed, "layouts": facts})
    end(good)


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RECORD", help="Folder of a record, as RUN/records/step_000001.")],
    names: Annotated[str, NAMES] = "1",
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint of the run that the step began with. Default: the record's weights, or the run's "
            "checkpoint of the step before.",
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(min=0, help="Largest difference; of values above 1 relative. Default: 1e-5, models in bf16 0.15."),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one layout may take.")] = 1800.0,
    as_json: Json = False,
) -> None:
    """Repeat a recorded step on any layout or engine, naming the first differing tensor and token."""
    begin("replay")
    with progress.importing("PyTorch"):
        from mega_rl.verify.replay import prepare, replay_layouts
    with tempfile.TemporaryDirectory(prefix="verify_") as name:
        work = Path(name)
        record, plans = prepare(folder, names, work, weights=weights, timeout_s=timeout_s)
        log.info("replaying %s", folder)
        step, facts = record.description, list[dict[str, object]]()
        for layout, differences in replay_layouts(record, plans, work, atol=atol):
            first = next((difference for difference in differences if not difference.good), None)
            fact = {"layout": layout.name, "ranks": layout.ranks, "good": first is None}
            tensors = [asdict(difference) for difference in differences]
            facts.append({**fact, "first": first and first.tensor, "tensors": tensors})
            if not as_json:
                origin = f"recorded on {step.world_size} rank(s) of {step.layout}"
                _print_differences(f"step {step.step}, {origin}; replayed: {layout.title}", differences)
            if first is not None and not as_json:
                typer.echo(f"{layout.title}: {in_words(first)}")
    good = all(fact["good"] for fact in facts)
    if as_json:
        print_json({"record": str(record.folder), "step": step.step, "good": good, "layouts": facts})
    end(good)


def card(
    model: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder, or name on the Hub; a config.json does.")],
    names: Annotated[str | None, NAMES] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of card.md and card.json.")] = Path("card"),
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one proof may take.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Prove on a small twin what works with a model here; write a page and JSON.

    Names, bits, logits, gradients and layouts against transformers, packed rows, cached decoding, memory. Exit codes:
    0 all that was run is proved, 1 something is not, 2 a mistake, or a model that is refused: its card says why.
    """
    begin("card")
    folder = checkpoint_folder(model, label="HF_DIR", weights=False)
    with progress.importing("PyTorch and Megatron-Core"):
        from mega_rl.parallel.accelerator import prepare

        prepare("auto")
        from mega_rl.verify import card as cards
    refusal: UserError | None = None
    try:
        made = cards.make_card(folder, names, timeout_s=timeout_s)
    except UserError as error:
        if str(error).startswith("--layouts"):
            raise
        refusal, why = error, cards.Proof("training", cards.NOT_PROVED, "refused", " ".join(str(error).split()))
        made = cards.describe("Refused", str(folder), [why])
    text = "\n".join(cards.page(made))
    disk.make_folder(out)
    disk.replace_text(out / "card.md", text + "\n")
    disk.replace_text(out / "card.json", json.dumps(plain(made), indent=1) + "\n")
    if refusal is not None:
        raise refusal
    show(plain(made), [text, f"written to {out}"], as_json=as_json)
    end(made["good"])


def _check(model: Path, options: VerifyOptions) -> tuple[Path, HFConfig]:
    """Return the model's folder, downloaded for a name on the Hub, and its architecture. Raises UserError."""
    begin("verify")
    log.info("verifying %s", model)
    folder = checkpoint_folder(model, label="--model", weights=not options.twin)
    return folder, read_hf_config(folder)


def begin(command: str) -> None:
    """Show progress; raise UserError under torchrun, which has started ranks already."""
    progress.show_progress()
    if "RANK" in os.environ:
        raise UserError(f"{command} starts its ranks itself; call it without torchrun")


def end(good: bool) -> None:
    """End the command with exit code 1 unless all is good."""
    if not good:
        raise typer.Exit(1)


def _verify(
    model: Path,
    hf: HFConfig,
    wanted: Sequence[Layout],
    options: VerifyOptions,
    *,
    layers: int = 1,
    steps: int = 1,
) -> None:
    """Measure the layouts, print the results and end with the exit code."""
    allowed = tolerances(options.dtype, options.tolerance, experts=hf.moe is not None)
    with progress.importing("PyTorch"):
        from mega_rl.parallel.accelerator.base import gpu_for_each
        from mega_rl.verify.run import prepare_model, verify
    on_gpus = gpu_for_each(max(layout.ranks for layout in wanted))  # all layouts use one device
    with tempfile.TemporaryDirectory(prefix="verify_") as folder:
        with progress.phase("making the twin" if options.twin else "reading the model"):
            twin, seed = options.twin, options.seed
            prepared, described = prepare_model(model, Path(folder), twin=twin, multiple=layers, seed=seed)
        asked = ("dtype", "packing", "transformer_impl", "seed", "timeout_s")
        plan = Plan(str(prepared), folder, (), steps=steps, **{name: getattr(options, name) for name in asked})
        verdicts = verify(plan, wanted, tolerances=allowed, timeout_s=options.timeout_s, on_gpus=on_gpus)
    header: dict[str, object] = {"model": described, "device": "cuda" if on_gpus else "cpu"}
    header |= {"dtype": options.dtype, "packing": options.packing, "steps": steps}
    good = not any(problems for _, _, problems in verdicts)
    if options.as_json:
        facts = [
            {
                **asdict(layout),
                **{"ranks": layout.ranks, "good": not problems, "problems": problems},
                "found": errors and asdict(errors),
            }
            for layout, errors, problems in verdicts
        ]
        print_json({"good": good, **header, "tolerances": allowed, "layouts": facts})
    else:
        _print_header(header)
        print_verdicts(verdicts, allowed)
    end(good)


def _print_header(header: Mapping[str, object]) -> None:
    for name, value in header.items():
        typer.echo(f"{name}: {value}")


def print_verdicts(verdicts: Sequence[Verdict], allowed: Mapping[str, float]) -> None:
    """Print a row for each layout, then its worst tensors, the tolerances and the problems."""
    rows, worst = [], []
    for layout, errors, problems in verdicts:
        title = layout.title
        numbers, word = ("-", "-", "-"), "failed"
        if errors is not None:
            numbers = (f"{errors.logprob_error:.1e}", f"{errors.loss:.6g}", f"{errors.grad_norm_error:.1e}")
            word = "DIFFERS" if problems else "equal"
            worst.append(f"{title}: worst gradient: {_worst(errors.gradients)}")
            worst.append(f"{title}: worst weight after a step: {_worst(errors.weights)}")
        rows.append((title, str(layout.ranks), *numbers, word))
    print_table(("layout", "ranks", "log-prob error", "loss", "grad-norm error", "verdict"), rows)
    lines = [*worst, "tolerances: " + ", ".join(f"{name} {value:g}" for name, value in allowed.items())]
    lines += [f"{layout.title}: {problem}" for layout, _, problems in verdicts for problem in problems]
    typer.echo("\n".join(lines))


def _worst(errors: Mapping[str, float]) -> str:
    name, error = next(iter(errors.items()))
    return f"{error:.1e} {name.removeprefix('model.')}" if error else "0"


def _plant_faults(*, timeout_s: float, as_json: bool) -> None:
    """Print how the lockstep names each planted fault, and end with the exit code."""
    with progress.importing("PyTorch"):
        from mega_rl.verify.rl import faults
    columns = ("planted fault", "run", "first off", "at", "error", "verdict")
    rows = []
    with tempfile.TemporaryDirectory(prefix="verify_") as folder:
        for fault, update, phase in faults.self_check(Path(folder), timeout_s=timeout_s):
            verdict = "named" if phase == fault.phase else f"NOT as {fault.phase}" if phase else "MISSED"
            place = ("-", "-", "-") if update is None else (phase, update.title, f"{update.errors[phase]:.1e}")
            rows.append((fault.name, fault.algorithm, *place, verdict))
    named = sum(row[-1] == "named" for row in rows)
    if as_json:
        print_json({"good": named == len(rows), "faults": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        print_table(columns, rows)
        typer.echo(f"{named} of {len(rows)} planted faults are named by their phase")
    end(named == len(rows))


def _print_lockstep(
    layout: Layout, updates: Sequence[UpdateErrors], problem: str, *, tolerances: Mapping[str, float]
) -> None:
    """Print the errors of every update on one layout, the tolerances below them, and the verdict."""
    if not updates:
        typer.echo(f"{layout.name}: failed\n{layout.name}: {problem}")
        return
    present = {phase for update in updates for phase in update.errors}
    phases = [phase for phase in tolerances if phase in present - {UPDATES}]
    rows = []
    for update in updates:
        errors = [(update.errors.get(phase), tolerances[phase]) for phase in phases]
        cells = ["-" if error is None else f"{error:.1e}" + " !" * (not error <= most) for error, most in errors]
        rows.append((update.title, *cells))
    title = f"{layout.name}, {layout.ranks} rank{'s' * (layout.ranks > 1)}"
    rows.append(("tolerance", *(f"{tolerances[phase]:g}" for phase in phases)))
    print_table(("update", *phases), rows, title=title)
    typer.echo(f"{layout.name}: " + (f"DIFFERS first at {problem}" if problem else "agrees"))


def _print_differences(title: str, differences: Sequence[Difference]) -> None:
    """Print every tensor's largest difference."""
    rows = []
    for difference in differences:
        at = "" if difference.worst is None else where(difference.worst)
        word = "equal" if difference.good else f"DIFFERS at {difference.num_beyond:,}"
        largest = f"{difference.largest:.1e}" if difference.largest else "0"
        rows.append((difference.tensor, largest, at, f"{difference.allowed:g}", word))
    print_table(("tensor", "largest difference", "at", "allowed", "verdict"), rows, title=title)


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


bench_app = Commands(name="bench", help="Tasks that show whether the trainer learns.")


@bench_app.callback()
def bench() -> None:
    """Tasks that show whether the trainer learns."""  # with a callback a group keeps the name of its one command


@bench_app.command()
def learn(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="TASK", help=f"Of {', '.join(TASKS)}; all unless given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Runs of each variant.")] = 5,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Of consecutive ones. The tasks were tuned on 0 to 14 and 100 to 104.")
    ] = 20,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Also train the variants that no statement is about.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results.")] = None,
) -> None:
    """Train small tasks that a wrong trainer fails, over seeds, and judge the statements about each.

    One process on one core, minutes for each task. Statements are about 95 % intervals over the seeds.
    """
    names = list(dict.fromkeys(names or TASKS))
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"{unknown[0]}: is not a task; legal: {' '.join(TASKS)}")
    begin("bench")
    results = []
    try:
        with stop_on_signals():
            with progress.importing("PyTorch and Megatron-Core", announce=True):
                from mega_rl.verify.learn.run import run_task
            for name in names:
                variants = [variant for variant in TASKS[name].variants if ablations or not variant.ablation]
                curves = run_task(TASKS[name], variants, seeds=range(first_seed, first_seed + seeds))
                results.append(TaskResult(TASKS[name], curves))
                _print_task(results[-1])
    except StoppedBySignal as stop:
        log.warning("stopped by %s: the run in progress does not count, no results are written", stop.signal.name)
        raise typer.Exit(stop.exit_code) from None
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([record(result) for result in results], indent=1) + "\n", encoding="utf-8")
    end(all(result.holds for result in results))


def _print_task(result: TaskResult) -> None:
    rows = []
    for name, curves in result.curves.items():
        final, last = result.finals[name], curves[0].points[-1][0]
        interval = f"{final.low:.4g} to {final.high:.4g}" if len(curves) > 1 else "-"
        rows.append((name, str(len(curves)), str(last), f"{final.mean:.4g}", interval))
    task = result.task
    print_table(("variant", "seeds", "steps", task.unit, "95 %"), rows, title=f"{task.name}: {task.summary}")
    for statement, text, holds in result.verdicts:
        typer.echo(f"{'holds' if holds else 'FAILS'}: {statement.variant}: {text}")
