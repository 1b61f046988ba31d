"""`mega-rl convert`: Hugging Face checkpoints in and out of Megatron-Core layouts, and what there is to know of them.

Every verb runs in one process on a CPU; under torchrun the ranks share the work. Exit codes: 0, 1 when checkpoints
differ, 2 for a mistake of the user. Answers that need no tensor data import no torch.
"""

from __future__ import annotations

import dataclasses
import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.help import Commands
from mega_rl.cli.options import LayoutOptions, checkpoint, choose, description, with_options
from mega_rl.cli.text.convert import (
    copies_in_words,
    elements,
    is_main,
    print_comparison,
    print_description,
    print_facts,
    print_report,
    print_verification,
    showing,
)
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.sharding import Sharding, check_layout
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout

EXIT_DIFFERS = 1

app = Commands(name="convert", help="Convert, inspect and compare checkpoints: Hugging Face and Megatron-Core.")

Spec = Annotated[str, typer.Option("--spec", help="Whose parameter names: te (Transformer Engine) or local.")]
Head = Annotated[str, typer.Option("--head", help="lm, or value for a critic or reward model.")]
Mtp = Annotated[str, typer.Option("--mtp", help="Multi-token prediction layers: drop or load.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Cast weights: bfloat16, float16 or float32.")]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option("--allow-missing", metavar="PATTERN", help="Tensors that may be absent (repeat for more patterns)."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing folder, once the new one is complete.")
]
HfDir = Annotated[
    Path,
    typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint: folder, or name on the Hub.", callback=checkpoint),
]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Threads; default: one per core, at most 8.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command()
@with_options
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Hugging Face or converted checkpoint.", callback=checkpoint)
    ],
    sizes: LayoutOptions = LayoutOptions(),
    head: Head = "lm",
    mtp: Mtp = "drop",
    as_json: Json = False,
) -> None:
    """Show a checkpoint and what each rank of a layout would hold of it. config.json is enough."""
    layout = sizes.layout()
    if not _is_hf(path):
        from mega_rl.converters.offline.checkpoint import open_checkpoint

        with open_checkpoint(path) as opened:
            facts = {
                "kind": opened.kind,
                "family": opened.hf.family,
                "head": opened.sharding.head,
                "parameters": len(opened.tensors),
                "elements": sum(math.prod(t.shape) for t in opened.tensors.values()),
            }
        print_facts(facts, as_json)
        return
    sharding = _sharding(path, layout, head=head, mtp=mtp)
    from mega_rl.converters.offline.describe import describe, describe_config

    kind = "hf"
    if not any(path.glob("*.safetensors*")):
        kind, description = "config", describe_config(sharding)
    else:
        from mega_rl.converters.safetensors.reader import CheckpointReader

        with CheckpointReader(path) as reader:
            sharding, description = describe(reader, sharding)
    facts = {"kind": kind, "family": sharding.hf.family, "layout": str(layout), **dataclasses.asdict(description)}
    facts["architecture"] = {k: v for k, v in dataclasses.asdict(sharding.hf).items() if k != "raw"}
    if as_json:
        print_facts(facts, True)
    else:
        print_description(facts)
    if description.problems:
        raise typer.Exit(UserError.exit_code)


@app.command("import")
def import_(
    source: HfDir,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    head: Head = "lm",
    mtp: Mtp = "drop",
    dtype: Dtype = None,
    allow_missing: AllowMissing = None,
    overwrite: Overwrite = False,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face checkpoint as Megatron-Core's distributed one, which loads under any layout."""
    _sharding(source, ParallelLayout(), head=head, mtp=mtp)
    with showing():
        from mega_rl.converters.offline.convert import ImportOptions, WriteOptions, import_hf

        options = ImportOptions(head, mtp, dtype, allow_missing or ())  # type: ignore[arg-type]
        report = import_hf(source, target, options=options, writing=WriteOptions(overwrite, jobs))
    print_report(target, report, as_json)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help="Checkpoint made by import, or by Megatron-Core.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    reference: Annotated[
        Path | None,
        typer.Option("--hf", metavar="HF_DIR", help="Whose config, tokenizer, templates to copy.", callback=checkpoint),
    ] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", help="Largest file: 5GB, 500MB.")] = "5GB",
    experts: Annotated[
        str | None, typer.Option("--experts", help="per_expert or fused tensors; default: as the reference has them.")
    ] = None,
    dtype: Dtype = None,
    mtp: Annotated[
        str, typer.Option("--mtp", help="Multi-token prediction layers: keep the reference's, or drop.")
    ] = "keep",
    overwrite: Overwrite = False,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Write a Megatron-Core checkpoint as a Hugging Face one."""
    if experts is not None:
        choose("--experts", experts, ("per_expert", "fused"))
    choose("--mtp", mtp, ("keep", "drop"))
    shard_bytes = parse_size(shard_size)
    with showing():
        from mega_rl.converters.offline.convert import ExportOptions, WriteOptions, export_checkpoint

        report = export_checkpoint(
            source,
            target,
            reference=reference,
            options=ExportOptions(shard_bytes, experts, dtype, mtp),  # type: ignore[arg-type]
            writing=WriteOptions(overwrite, jobs),
        )
    print_report(target, report, as_json)


@app.command()
@with_options
def plan(
    path: Annotated[
        Path,
        typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint; a config.json does.", callback=description),
    ],
    rank: Annotated[int, typer.Option("--rank", min=0, help="Global rank.")] = 0,
    sizes: LayoutOptions = LayoutOptions(),
    spec: Spec = "te",
    head: Head = "lm",
    mtp: Mtp = "drop",
    pattern: Annotated[str, typer.Option("--param", metavar="PATTERN", help="Parameters to show.")] = "*",
    as_json: Json = False,
) -> None:
    """Show which rows of which tensors one rank would read. Reads no tensor; needs config.json only."""
    choose("--spec", spec, ("te", "local"))
    layout = sizes.layout()
    if rank >= layout.world_size:
        raise UserError(f"--rank={rank}: layout {layout} has ranks 0 to {layout.world_size - 1}")
    sharding = _sharding(path, layout, head=head, mtp=mtp, spec=spec)
    from mega_rl.converters.plan.proof import prove_complete
    from mega_rl.converters.plan.ranks import build_plan

    prove_complete(sharding)
    params = [
        (f"{vp_stage}:{param.name}" if layout.vpp > 1 else param.name, param)
        for vp_stage in range(layout.vpp)
        for param in build_plan(sharding, layout.coordinates(rank), vp_stage=vp_stage)
        if fnmatchcase(param.name, pattern)
    ]
    if as_json:
        copies = {name: {"shape": param.shape, "copies": [c._asdict() for c in param.copies]} for name, param in params}
        print_facts({"layout": str(layout), "rank": rank, "elements": elements(params), "parameters": copies}, True)
        return
    for name, param in params:
        typer.echo(f"{name} {list(param.shape)}")
        for c in copies_in_words(list(param.copies)):
            typer.echo(f"    {c}")
    typer.echo(f"rank {rank} of {layout}: {len(params)} parameters, {elements(params):,} elements; proof: complete")


@app.command()
@with_options
def verify(
    first: HfDir,
    second: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CKPT]", help="What it must equal; default: itself after a round trip.", callback=checkpoint
        ),
    ] = None,
    logits: Annotated[
        int,
        typer.Option("--logits", min=0, metavar="N", help="Compare logits of N tokens on a shrunk twin; 0: do not."),
    ] = 0,
    sizes: LayoutOptions = LayoutOptions(),
    head: Head = "lm",
    mtp: Mtp = "drop",
    allow_missing: AllowMissing = None,
    as_json: Json = False,
) -> None:
    """Check a conversion: every element planned once, names, every bit, and on request logits against transformers."""
    layout = sizes.layout()
    sharding = _sharding(first, layout, head=head, mtp=mtp)
    with showing():
        from mega_rl.converters.offline.compare import verify_checkpoint

        report = verify_checkpoint(first, second, sharding=sharding, allow_missing=allow_missing or ())
    parity = None
    if logits and is_main():
        with showing("comparing logits with transformers"):
            from mega_rl.verify.twin.compare import compare_twin

            parity = compare_twin(first, second if second is not None and _is_hf(second) else first, num_tokens=logits)
    print_verification(report, parity, as_json)
    if not (report.equal and (parity is None or parity.good)):
        raise typer.Exit(EXIT_DIFFERS)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Checkpoint.", callback=checkpoint)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Checkpoint of the same model.", callback=checkpoint)],
    allow_missing: AllowMissing = None,
    as_json: Json = False,
) -> None:
    """Show which tensors differ between two checkpoints, and by how much."""
    with showing():
        from mega_rl.converters.offline.compare import compare_checkpoints

        comparison = compare_checkpoints(first, second, allow_missing=allow_missing or ())
    print_comparison(comparison, as_json)
    if not comparison.equal:
        raise typer.Exit(EXIT_DIFFERS)


def parse_size(text: str) -> int:
    """Return the bytes of "5GB", "500MB" or a plain number; units are powers of 1000, as for file sizes of the Hub."""
    number, factor = text.strip().upper(), 1
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1)):
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), size
            break
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value * factor >= 1):
        raise UserError(f"--shard-size={text}: must be a number of bytes above 0 with a unit, as 5GB or 500MB")
    return int(value * factor)


def _sharding(path: Path, layout: ParallelLayout, *, head: str, mtp: str, spec: str = "local") -> Sharding:
    """Return the sharding of a config.json's model over `layout`. Raises UserErrors, before torch is imported."""
    choose("--head", head, ("lm", "value"))
    choose("--mtp", mtp, ("drop", "load"))
    hf = dataclasses.replace(read_hf_config(path), mtp=mtp)  # type: ignore[arg-type]
    problems = check_layout(hf, layout)
    if mtp == "load" and not hf.mtp_layers:
        problems.append(f"--mtp=load: {path} has no multi-token prediction layers; leave the option out")
    if problems:
        raise UserErrors(problems)
    return Sharding(hf, layout, spec=spec, head=head)  # type: ignore[arg-type]


def _is_hf(path: Path) -> bool:
    """Return whether a folder is meant as a Hugging Face checkpoint, not as one of mega_rl's or Megatron-Core's."""
    return not any((path / name).is_file() for name in ("mega_rl.json", ".metadata", "COMMIT"))
