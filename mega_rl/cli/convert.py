"""`mega-rl convert`: move checkpoints between Hugging Face and Megatron-Core, inspect and compare them.

Every verb runs in one process on a CPU. Exit code 1: checkpoints differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from mega_rl.cli.options import Json, LayoutOptions, checkpoint, with_options
from mega_rl.cli.output import SHOWN, Commands, names_line, show, showing
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.sharding import Sharding, check_layout
from mega_rl.errors import UserError, UserErrors, in_units
from mega_rl.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from mega_rl.converters.offline.compare import Comparison, Verification

app = Commands(name="convert", help="Convert, inspect and compare checkpoints: Hugging Face and Megatron-Core.")

Head = Annotated[Literal["lm", "value"], typer.Option(help="value is that of a critic or reward model.")]
Mtp = Annotated[Literal["drop", "load"], typer.Option(help="Multi-token prediction layers.")]
Dtype = Annotated[str | None, typer.Option(help="Cast weights: bfloat16, float16 or float32.")]
AllowMissing = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Tensors that may be absent (repeat for more patterns).")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing folder, once the new one is complete.")
]
HfDir = Annotated[
    Path,
    typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint: folder, or name on the Hub.", callback=checkpoint),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Threads; default: one per core, at most 8.")]


@app.command()
@with_options
def inspect(
    path: Annotated[Path, typer.Argument(help="Hugging Face or converted checkpoint.", callback=checkpoint)],
    sizes: LayoutOptions = LayoutOptions(),
    head: Head = "lm",
    mtp: Mtp = "drop",
    as_json: Json = False,
) -> None:
    """Show a checkpoint and each rank's part of it under a layout. config.json is enough."""
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
        show(facts, _as_yaml(facts), as_json=as_json)
        return
    sharding = _sharding(path, layout, head=head, mtp=mtp)
    from mega_rl.converters.offline.compare import describe
    from mega_rl.converters.safetensors.reader import CheckpointReader

    has_weights = any(path.glob("*.safetensors*"))
    with CheckpointReader(path) if has_weights else nullcontext() as reader:
        sharding, description = describe(sharding, reader)
    kind = "hf" if has_weights else "config"
    facts = {"kind": kind, "family": sharding.hf.family, "layout": str(layout), **dataclasses.asdict(description)}
    facts["architecture"] = {k: v for k, v in dataclasses.asdict(sharding.hf).items() if k not in ("raw", "wrapper")}
    show(facts, _as_yaml(facts), as_json=as_json)
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
        from mega_rl.converters.offline.convert import import_hf

        allowed = allow_missing or ()
        report = import_hf(
            source, target, head=head, mtp=mtp, dtype=dtype, allow_missing=allowed, overwrite=overwrite, jobs=jobs
        )
    show_report(target, report, as_json=as_json)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help="Checkpoint made by import, or by Megatron-Core.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    reference: Annotated[
        Path | None,
        typer.Option("--hf", metavar="HF_DIR", help="Whose config, tokenizer, templates to copy.", callback=checkpoint),
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest file, in GB.")] = 5.0,
    experts: Annotated[
        Literal["per_expert", "fused"] | None,
        typer.Option(help="Tensors of experts; default: as the reference has them."),
    ] = None,
    dtype: Dtype = None,
    mtp: Annotated[
        Literal["keep", "drop"], typer.Option(help="Multi-token prediction layers of the reference.")
    ] = "keep",
    overwrite: Overwrite = False,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Write a Megatron-Core checkpoint as a Hugging Face one."""
    with showing():
        from mega_rl.converters.offline.convert import ExportOptions, export_checkpoint

        report = export_checkpoint(
            source,
            target,
            reference=reference,
            options=ExportOptions(int(shard_gb * 1e9), experts, dtype, mtp),
            overwrite=overwrite,
            jobs=jobs,
        )
    show_report(target, report, as_json=as_json)


@app.command()
def merge(
    base: HfDir,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of a LoRA adapter that PEFT reads.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    overwrite: Overwrite = False,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face checkpoint with a LoRA adapter merged into its weights."""
    with showing():
        from mega_rl.converters.offline.convert import merge_adapter

        report = merge_adapter(base, adapter, target, overwrite=overwrite, jobs=jobs)
    show_report(target, report, as_json=as_json)


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
    sizes: LayoutOptions = LayoutOptions(),
    head: Head = "lm",
    mtp: Mtp = "drop",
    allow_missing: AllowMissing = None,
    as_json: Json = False,
) -> None:
    """Check a conversion: every element planned once, names and every bit."""
    layout = sizes.layout()
    sharding = _sharding(first, layout, head=head, mtp=mtp)
    with showing():
        from mega_rl.converters.offline.compare import verify_checkpoint

        report = verify_checkpoint(first, second, sharding=sharding, allow_missing=allow_missing or ())
    comparison = None if report.comparison is None else _comparison_facts(report.comparison)
    facts = {"equal": report.equal, **dataclasses.asdict(report), "comparison": comparison}
    show(facts, _verification_lines(report), as_json=as_json)
    if not report.equal:
        raise typer.Exit(1)


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
    show(_comparison_facts(comparison), _comparison_lines(comparison), as_json=as_json)
    if not comparison.equal:
        raise typer.Exit(1)


def _sharding(
    path: Path, layout: ParallelLayout, *, head: Literal["lm", "value"], mtp: Literal["drop", "load"]
) -> Sharding:
    """Return the sharding of a config.json's model over `layout`. Raises UserErrors, before torch is imported."""
    hf = dataclasses.replace(read_hf_config(path), mtp=mtp)
    problems = check_layout(hf, layout)
    if mtp == "load" and not hf.mtp_layers:
        problems.append(f"--mtp=load: {path} has no multi-token prediction layers; leave the option out")
    if problems:
        raise UserErrors(problems)
    return Sharding(hf, layout, spec="local", head=head)


def _is_hf(path: Path) -> bool:
    """Return whether a folder is a Hugging Face checkpoint, not mega_rl's or Megatron-Core's."""
    return not any((path / name).is_file() for name in ("mega_rl.json", ".metadata", "COMMIT"))


def _as_yaml(facts: dict[str, Any]) -> list[str]:
    plain = json.loads(json.dumps(facts))
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=120).splitlines()


def show_report(target: Path, report: Any, *, as_json: bool) -> None:
    """Print what a conversion wrote to `target`."""
    facts = {"target": str(target), **dataclasses.asdict(report)}
    rate = report.num_bytes / max(report.seconds, 1e-9) / 1e9
    lines = [
        f"{target}: {report.num_tensors:,} tensors in {report.num_files} file(s), {in_units(report.num_bytes)}, "
        f"{report.seconds:.1f} s ({rate:.2f} GB/s)"
    ]
    for label in ("ignored", "absent", "kept"):
        lines += names_line(label, facts[label])
    show(facts, lines, as_json=as_json)


def _verification_lines(verification: Verification) -> Iterator[str]:
    yield f"proof: every element of {verification.layout} is planned exactly once"
    if verification.comparison is not None:
        yield from _comparison_lines(verification.comparison)
    if verification.returned is not None:
        yield f"import and export in memory: {verification.returned:,} tensors come back bit for bit"
        yield from names_line("do not come back", verification.lost)
    yield "equal" if verification.equal else "differs"


def _comparison_facts(comparison: Comparison) -> dict[str, Any]:
    return {"equal": comparison.equal, **dataclasses.asdict(comparison)}


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    yield f"{comparison.num_equal:,} tensors are equal bit for bit"
    yield from names_line("only in the first", comparison.only_first)
    yield from names_line("only in the second", comparison.only_second)
    yield from names_line("other type or shape", comparison.mismatched)
    yield from names_line("config.json", comparison.config)
    yield from names_line("in one only, as allowed", comparison.allowed)
    ranked = sorted(comparison.different, key=lambda d: -d.max_abs)
    for d in ranked[:SHOWN]:
        yield (
            f"  {d.name}: {d.elements:,} of {d.numel:,} elements differ, "
            f"max {d.max_abs:.3g}, mean {d.mean_abs:.3g} (largest value {d.max_of_first:.3g})"
        )
    if len(ranked) > SHOWN:
        yield f"  and {len(ranked) - SHOWN:,} more tensors"
