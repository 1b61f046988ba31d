"""`mega-rl verify`: exit code 0 when every layout agrees with one rank, 1 when one does not, 2 for mistakes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.converters.hf_config import read_hf_config
from mega_rl.errors import UserError
from mega_rl.verify.layouts import ALL, resolve_all, stages
from mega_rl.verify.text import print_json, print_verdicts
from mega_rl.verify.tolerances import tolerances

EXIT_DIFFERS = 1

app = typer.Typer(
    name="verify",
    help="Check that parallel layouts compute what one rank computes.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Check that parallel layouts compute what one rank computes."""


@app.command()
def layouts(
    model: Annotated[
        Path, typer.Option("--model", metavar="HF_DIR", help="Hugging Face checkpoint; with --twin a config.json does.")
    ],
    names: Annotated[
        str, typer.Option("--layouts", metavar="NAMES", help="Layouts, as tp2,tp2+sp,pp2,vpp2,cp2,ep2,tp2+pp2,dp4.")
    ] = ALL,
    twin: Annotated[
        bool, typer.Option("--twin", help="Verify a model of few layers, experts and tokens with the same config.")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="fp32 or bf16.")] = "fp32",
    packing: Annotated[bool, typer.Option(help="Pack sequences; else pad them.")] = True,
    transformer_impl: Annotated[
        str, typer.Option("--transformer-impl", help="Layers: auto, local or transformer_engine.")
    ] = "auto",
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Run every layout on so many ranks; data parallelism takes what is left."),
    ] = None,
    tolerance: Annotated[
        str,
        typer.Option("--tolerance", metavar="NAME=NUMBER,...", help="logprob, loss, grad_norm, gradient or weight."),
    ] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the batch and of random weights.")] = 0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one launch may take.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare log-probs, loss, every gradient and a step of each layout with one rank, with the engine that trains."""
    _choice("--dtype", dtype, ("fp32", "bf16"))
    _choice("--transformer-impl", transformer_impl, ("auto", "local", "transformer_engine"))
    if "RANK" in os.environ:
        raise UserError("verify starts its ranks itself; call it without torchrun")
    asked = read_hf_config(model)
    allowed = tolerances(dtype, tolerance, experts=asked.moe is not None)
    layers = 1
    if twin:
        from mega_rl.parity.shrink import shrink

        layers = stages(names)
        small = shrink(asked, where=str(model / "config.json"), multiple=layers).hf
        # What the twin can be cut by and the model itself cannot would prove nothing; its layers may be cut unevenly.
        resolve_all(names, replace(asked, num_layers=small.num_layers), nproc=nproc)
        wanted = resolve_all(names, small, nproc=nproc)
    else:
        wanted = resolve_all(names, asked, nproc=nproc)
    from mega_rl.verify.plan import Plan
    from mega_rl.verify.run import prepare_model, use_gpus, verify, working_folder

    on_gpus = use_gpus(wanted)
    with working_folder() as folder:
        made = prepare_model(model, Path(folder), twin=twin, multiple=layers, seed=seed)
        plan = Plan(
            model=str(made.path),
            folder=folder,
            layouts=(),
            dtype=dtype,
            transformer_impl=transformer_impl,
            packing=packing,
            seed=seed,
            timeout_s=timeout_s,
        )
        verdicts = verify(
            plan,
            wanted,
            tolerances=allowed,
            timeout_s=timeout_s,
            on_gpus=on_gpus,
            tell=lambda text: typer.echo(text, err=True),
        )
    header = {"model": made.description, "dtype": dtype, "device": "cuda" if on_gpus else "cpu", "packing": packing}
    show = print_json if as_json else print_verdicts
    show(verdicts, header=header, tolerances=allowed)
    if not all(verdict.good for verdict in verdicts):
        raise typer.Exit(EXIT_DIFFERS)


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option}={value}: must be one of {', '.join(allowed)}")
