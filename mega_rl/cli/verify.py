"""`mega-rl verify`: exit code 0 when all agree with one rank of Megatron-Core, 1 when one does not, 2 for mistakes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.help import Commands
from mega_rl.cli.layout_options import choose, made, with_options
from mega_rl.cli.text.lockstep import print_faults, print_json_faults, print_lockstep
from mega_rl.cli.text.lockstep import print_json as print_lockstep_json
from mega_rl.cli.text.verify import print_json, print_verdicts
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.errors import UserError
from mega_rl.hub.resolve import checkpoint_folder
from mega_rl.tracking import progress
from mega_rl.verify.layouts import Layout, fsdp, resolve_all, stages, usual
from mega_rl.verify.plan import Plan
from mega_rl.verify.rl.inputs import STEPS, read_run
from mega_rl.verify.rl.phases import read_tolerances
from mega_rl.verify.tolerances import Tolerances, tolerances

log = logging.getLogger(__name__)

EXIT_DIFFERS = 1

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
    """The comparison of both commands; every field is an option."""

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
    layers = 1
    if options.twin:
        with progress.importing("PyTorch"):
            from mega_rl.verify.twin.shrink import shrink

        layers = stages(names)
        small = shrink(asked, where=str(model / "config.json"), multiple=layers).hf
        # What the twin can be cut by and the model itself cannot would prove nothing; its layers may be cut unevenly.
        resolve_all(names, replace(asked, num_layers=small.num_layers), nproc=nproc)
        wanted = resolve_all(names, small, nproc=nproc)
    else:
        wanted = resolve_all(names, asked, nproc=nproc)
    _verify(model, wanted, options, allowed=allowed, layers=layers)


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
    recipe, overrides = _split(settings or [])
    if self_check and settings:
        raise UserError(f"{settings[0]}: --self-check has runs of its own; leave recipe and settings out")
    run = read_run(recipe, overrides, steps=steps)
    with progress.importing("PyTorch"):
        from mega_rl.verify.rl import run as lockstep
    with lockstep.working_folder() as folder:
        if self_check:
            faults = list(lockstep.self_check(Path(folder), timeout_s=timeout_s))
            (print_json_faults if as_json else print_faults)(faults)
            _end(fault.good for fault in faults)
            return
        log.info("verifying %s", recipe or "the default algorithm")
        config, layouts = lockstep.prepare_run(run, names, Path(folder))
        header = {"recipe": recipe or "none", "model": run.description, "steps": steps}
        for name, value in {} if as_json else header.items():
            typer.echo(f"{name}: {value}")
        results = []
        for result in lockstep.follow_layouts(config, layouts, Path(folder), timeout_s=timeout_s, tolerances=allowed):
            results.append(result)
            if not as_json:
                print_lockstep(result, tolerances=allowed)
    if as_json:
        print_lockstep_json(results, header=header, tolerances=allowed)
    _end(result.good for result in results)


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


def _verify(
    model: Path,
    wanted: Sequence[Layout],
    options: VerifyOptions,
    *,
    allowed: Tolerances,
    layers: int = 1,
    steps: int | None = None,
) -> None:
    """Measure the layouts, print what was measured and end with its exit code; steps: None takes the plan's."""
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
    show = print_json if options.as_json else print_verdicts
    show(verdicts, header=header, tolerances=allowed)
    if not all(verdict.good for verdict in verdicts):
        raise typer.Exit(EXIT_DIFFERS)


def _end(good: Iterable[bool]) -> None:
    """End with exit code 1 unless all is good."""
    if not all(good):
        raise typer.Exit(EXIT_DIFFERS)


def _split(settings: list[str]) -> tuple[str | None, list[str]]:
    """Return (recipe, overrides) of the arguments. Raises UserError for a second recipe."""
    recipes = [text for text in settings if "=" not in text and not text.startswith("~")]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]}: is no KEY=VALUE, and {recipes[0]} is the recipe already; name one recipe")
    return (recipes[0] if recipes else None), [text for text in settings if text not in recipes]
