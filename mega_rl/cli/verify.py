"""`mega-rl verify`: exit code 0 if all agree with one rank of Megatron-Core, 1 if not, 2 for mistakes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_rl.cli.help import Commands
from mega_rl.cli.options import choose, made, with_options
from mega_rl.cli.text.tables import print_json, print_table
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.hub.resolve import checkpoint_folder
from mega_rl.errors import UserError
from mega_rl.tracking import progress
from mega_rl.verify.layouts import Layout, fsdp, resolve_all, stages, usual
from mega_rl.verify.plan import Plan, TensorError
from mega_rl.verify.rl.inputs import STEPS, read_run
from mega_rl.verify.tolerances import UPDATES, Tolerances, read_tolerances, tolerances

if TYPE_CHECKING:
    from mega_rl.verify.rl.run import Lockstep, PlantedFault
    from mega_rl.verify.run import Verdict

log = logging.getLogger(__name__)

app = Commands(name="verify", help="Check that parallel layouts and engines compute what one rank computes.")


Model = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="HF_DIR",
        help="Hugging Face checkpoint (folder, or name on the Hub); with --twin a config.json does.",
    ),
]


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `layouts` and `engines`; every field is an option."""

    twin: Annotated[
        bool, typer.Option("--twin", help="Verify a model of few layers, experts and tokens with the same config.")
    ] = False
    dtype: Annotated[str, typer.Option("--dtype", help="fp32 or bf16.")] = "fp32"
    packing: Annotated[bool, typer.Option(help="Pack sequences; else pad them.")] = True
    transformer_impl: Annotated[
        str, typer.Option("--transformer-impl", help="Megatron-Core's layers: auto, local or transformer_engine.")
    ] = "auto"
    tolerance: Annotated[
        str,
        typer.Option("--tolerance", metavar="NAME=NUMBER,...", help="logprob, loss, grad_norm, gradient or weight."),
    ] = ""
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the batch and of random weights.")] = 0
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one launch may take.")] = 1800.0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False


@app.command()
@with_options
def layouts(
    model: Model,
    names: Annotated[
        str | None,
        typer.Option(
            "--layouts", metavar="NAMES", help="Layouts, as tp2+sp,pp2,ep2; a dozen that the model can have by default."
        ),
    ] = None,
    options: VerifyOptions = VerifyOptions(),
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Run every layout on this number of ranks; data parallelism takes what is left."
        ),
    ] = None,
) -> None:
    """Compare log-probs, loss, every gradient and a step of each layout with one rank, with the engine that trains."""
    model, asked = _check(model, options)
    allowed = tolerances(options.dtype, options.tolerance, experts=asked.moe is not None)
    names = usual(asked) if names is None else names
    layers, checked = 1, asked
    if options.twin:
        with progress.importing("PyTorch"):
            from mega_rl.verify.twin.shrink import shrink

        layers = stages(names)
        checked = shrink(asked, where=str(model / "config.json"), multiple=layers).hf
        # A layout that fits the twin only would prove nothing about the model. The twin's layers may be cut unevenly.
        resolve_all(names, replace(asked, num_layers=checked.num_layers), nproc=nproc)
    _verify(model, resolve_all(names, checked, nproc=nproc), options, allowed=allowed, layers=layers)


@app.command()
@with_options
def engines(
    model: Model,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Run the FSDP engine on one rank, and on this number of ranks.")
    ] = 2,
    options: VerifyOptions = VerifyOptions(),
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps before weights are compared.")] = 3,
) -> None:
    """Compare log-probs, loss, every gradient and the weights after some steps of both engines, on one batch."""
    model, asked = _check(model, options)
    allowed = tolerances(options.dtype, options.tolerance, experts=asked.moe is not None)
    _verify(model, [fsdp(ranks) for ranks in sorted({1, nproc})], options, allowed=allowed, steps=steps)


@app.command()
def rl(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="Recipe (a YAML file, or the name of a packaged one) and settings that replace its own.",
        ),
    ] = None,
    names: Annotated[
        str, typer.Option("--layouts", metavar="NAMES", help="Layouts, as tp2+sp,pp2, fsdp2; 1 is one rank.")
    ] = "1,tp2,pp2,dp2,fsdp2",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Trainer steps; two updates each.")] = STEPS,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Plant faults into the independent trainer: each must be named.")
    ] = False,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="PHASE=NUMBER,...", help="As gradient=1e-4,log-probs=1e-3.")
    ] = "",
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one run may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Follow a real run of a small model in lockstep with an independent trainer, and compare every update.

    The independent trainer, transformers' model under plain torch, gets the sampled tokens and the weights at the
    start, and computes the rest, the rewards too. The recipe's algorithm and optimizer count; its model is shrunk.
    """
    progress.show_progress()
    refuse_launcher()
    allowed = read_tolerances(tolerance)
    settings = settings or []
    recipes = [text for text in settings if "=" not in text and not text.startswith("~")]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]}: is no KEY=VALUE, and {recipes[0]} is the recipe already; name one recipe")
    if self_check and settings:
        raise UserError(f"{settings[0]}: --self-check has runs of its own; leave recipe and settings out")
    recipe = recipes[0] if recipes else None
    run = read_run(recipe, [text for text in settings if text not in recipes], steps=steps)
    with progress.importing("PyTorch"):
        from mega_rl.verify.rl import run as lockstep
    with lockstep.working_folder() as folder:
        if self_check:
            faults = list(lockstep.self_check(Path(folder), timeout_s=timeout_s))
            _print_faults(faults, as_json=as_json)
            end(fault.good for fault in faults)
            return
        log.info("verifying %s", recipe or "the default algorithm")
        config, layouts = lockstep.prepare_run(run, names, Path(folder))
        header = {"recipe": recipe or "none", "model": run.description, "steps": steps}
        if not as_json:
            _print_header(header)
        results = []
        for result in lockstep.follow_layouts(config, layouts, Path(folder), timeout_s=timeout_s, tolerances=allowed):
            results.append(result)
            if not as_json:
                _print_lockstep(result, tolerances=allowed)
    if as_json:
        facts = [_lockstep_facts(result) for result in results]
        good = all(result.good for result in results)
        print_json({"good": good, **header, "tolerances": dict(allowed), "layouts": facts})
    end(result.good for result in results)


def _check(model: Path, options: VerifyOptions) -> tuple[Path, HFConfig]:
    """Return the model's folder, downloaded for a name on the Hub, and its architecture. Raises UserError."""
    progress.show_progress()
    log.info("verifying %s", model)
    choose("--dtype", options.dtype, ("fp32", "bf16"))
    choose("--transformer-impl", options.transformer_impl, ("auto", "local", "transformer_engine"))
    refuse_launcher()
    folder = checkpoint_folder(model, label="--model", weights=not options.twin)
    return folder, read_hf_config(folder)


def refuse_launcher(command: str = "verify") -> None:
    """Raise UserError under torchrun, which has started ranks already."""
    if "RANK" in os.environ:
        raise UserError(f"{command} starts its ranks itself; call it without torchrun")


def end(good: Iterable[bool]) -> None:
    """End the command with exit code 1 unless all is good."""
    if not all(good):
        raise typer.Exit(1)


def _verify(
    model: Path,
    wanted: Sequence[Layout],
    options: VerifyOptions,
    *,
    allowed: Tolerances,
    layers: int = 1,
    steps: int | None = None,
) -> None:
    """Measure the layouts, print the results and end with the exit code; steps: None takes the plan's."""
    with progress.importing("PyTorch"):
        from mega_rl.verify.run import prepare_model, use_gpus, verify, working_folder

        on_gpus = use_gpus(wanted)
    counted = {} if steps is None else {"steps": steps}
    with working_folder() as folder:
        with progress.phase("making the twin" if options.twin else "reading the model"):
            made_model = prepare_model(model, Path(folder), twin=options.twin, multiple=layers, seed=options.seed)
        verdicts = verify(
            made(Plan, options, model=str(made_model.path), folder=folder, layouts=(), **counted),
            wanted,
            tolerances=allowed,
            timeout_s=options.timeout_s,
            on_gpus=on_gpus,
        )
    header: dict[str, object] = {"model": made_model.description, "device": "cuda" if on_gpus else "cpu"}
    header |= {"dtype": options.dtype, "packing": options.packing, **counted}
    if options.as_json:
        facts = [
            {
                **asdict(verdict.layout),
                "ranks": verdict.layout.ranks,
                "good": verdict.good,
                "problems": verdict.problems,
                "found": None if verdict.errors is None else asdict(verdict.errors),
            }
            for verdict in verdicts
        ]
        good = all(verdict.good for verdict in verdicts)
        print_json({"good": good, **header, "tolerances": asdict(allowed), "layouts": facts})
    else:
        _print_header(header)
        print_verdicts(verdicts, allowed)
    end(verdict.good for verdict in verdicts)


def _print_header(header: Mapping[str, object]) -> None:
    for name, value in header.items():
        typer.echo(f"{name}: {value}")


def print_verdicts(verdicts: Sequence[Verdict], allowed: Tolerances) -> None:
    """Print a row for each layout; below the table its worst tensors, the tolerances, and the problems."""
    rows, worst = [], []
    for verdict in verdicts:
        title, errors = verdict.layout.title, verdict.errors
        numbers, word = ("-", "-", "-"), "failed"
        if errors is not None:
            numbers = (f"{errors.logprob_error:.1e}", f"{errors.loss:.6g}", f"{errors.grad_norm_error:.1e}")
            word = "equal" if verdict.good else "DIFFERS"
            worst.append(f"{title}: worst gradient: {_worst(errors.gradients)}")
            worst.append(f"{title}: worst weight after a step: {_worst(errors.weights)}")
        rows.append((title, str(verdict.layout.ranks), *numbers, word))
    print_table(("layout", "ranks", "log-prob error", "loss", "grad-norm error", "verdict"), rows)
    lines = [*worst, "tolerances: " + ", ".join(f"{name} {value:g}" for name, value in asdict(allowed).items())]
    lines += [f"{verdict.layout.title}: {problem}" for verdict in verdicts for problem in verdict.problems]
    typer.echo("\n".join(lines))


def _worst(errors: Sequence[TensorError]) -> str:
    return f"{errors[0].error:.1e} {errors[0].name.removeprefix('model.')}" if errors[0].error else "0"


def _print_lockstep(lockstep: Lockstep, *, tolerances: Mapping[str, float]) -> None:
    """Print the errors of every update on one layout, the tolerances below them, and the verdict."""
    layout = lockstep.layout
    if lockstep.updates:
        present = {phase for update in lockstep.updates for phase in update.errors}
        phases = [phase for phase in tolerances if phase in present - {UPDATES}]
        rows = []
        for update in lockstep.updates:
            errors = [(update.errors.get(phase), tolerances[phase]) for phase in phases]
            cells = ["-" if error is None else f"{error:.1e}" + " !" * (not error <= most) for error, most in errors]
            rows.append((update.title, *cells))
        title = f"{layout.name}, {layout.ranks} rank{'s' * (layout.ranks > 1)}"
        last = ("tolerance", *(f"{tolerances[phase]:g}" for phase in phases))
        print_table(("update", *phases), rows, title=title, last=last)
    verdict = "agrees" if lockstep.good else f"DIFFERS first at {lockstep.problem}" if lockstep.updates else "failed"
    typer.echo(f"{layout.name}: {verdict}")
    if not lockstep.updates:
        typer.echo(f"{layout.name}: {lockstep.problem}")


def _lockstep_facts(lockstep: Lockstep) -> dict[str, Any]:
    """Return all errors on one layout for JSON."""
    return {
        "layout": lockstep.layout.name,
        "ranks": lockstep.layout.ranks,
        "good": lockstep.good,
        "problem": lockstep.problem,
        "updates": [{**asdict(update), "errors": dict(update.errors)} for update in lockstep.updates],
    }


def _print_faults(results: Sequence[PlantedFault], *, as_json: bool) -> None:
    """Print how the lockstep named each planted fault."""
    named = [result.good for result in results]
    if as_json:
        faults = [
            {
                **{"fault": result.fault.name, "run": result.fault.algorithm, "expected": result.fault.phase},
                **{"phase": result.phase, "where": result.where, "error": result.error, "good": result.good},
            }
            for result in results
        ]
        print_json({"good": all(named), "faults": faults})
        return
    rows = []
    for result in results:
        verdict = "named" if result.good else "MISSED" if not result.phase else f"NOT as {result.fault.phase}"
        error = f"{result.error:.1e}" if result.phase else "-"
        place = (result.phase or "-", result.where or "-")
        rows.append((result.fault.name, result.fault.algorithm, *place, error, verdict))
    print_table(("planted fault", "run", "first off", "at", "error", "verdict"), rows)
    typer.echo(f"{sum(named)} of {len(results)} planted faults are named by their phase")
