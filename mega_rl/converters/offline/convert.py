"""Conversion without a model: Hugging Face folders into Megatron-Core's distributed checkpoints, and back.

Tensors stream from file to file, so one process needs no more memory than a fixed buffer and the largest parameter.
Everything is checked before a byte is written: the plan is complete, every tensor of the source has the name, shape and
type that it should, the target may be written and its disk has room. The target appears as a whole, at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from mega_rl.converters.architecture import Adapter
from mega_rl.converters.hf.companions import companions, config_changes, copy_companions, not_copied
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.adapters import FOLDER, add_stored, write_adapter
from mega_rl.converters.live.load import check_tensors
from mega_rl.converters.offline.checkpoint import (
    HF_FOLDER,
    MANIFEST_FILE,
    ConversionManifest,
    Merge,
    Output,
    WeightFiles,
    hf_outputs,
    one_dtype,
    open_checkpoint,
    parse_dtype,
)
from mega_rl.converters.offline.slabs import extra_state_keys, parts_of, slab_of, whole_model
from mega_rl.converters.offline.torch_dist import write_metadata
from mega_rl.converters.offline.writing import Report, check_apart, write_chunks, write_folder, write_weights
from mega_rl.converters.plan.adapters import WEIGHT, A, B, read_adapter_config
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.parameters import adapted, as_on_disk, kept_tensors, outside
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.converters.safetensors.header import PLAIN_NAMES, matrix_shape, renamed
from mega_rl.converters.safetensors.output_folder import copy_files, write_json
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import SHARD_BYTES, TensorSpec
from mega_rl.errors import UserError

logger = logging.getLogger(__name__)

# Size of one file of a distributed checkpoint; each thread writes one.
CHUNK_FILE_BYTES = 512 << 20


@dataclass(frozen=True)
class ExportOptions:
    """Choices of `export_checkpoint`."""

    shard_bytes: int = SHARD_BYTES  # size of a file
    experts: Literal["per_expert", "fused"] | None = None  # None: as in the reference or the checkpoint imported from
    dtype: str | None = None  # None: values keep their type
    mtp: Literal["keep", "drop"] = "keep"  # multi-token prediction layers that the source does not hold


def import_hf(
    source: str | Path,
    target: str | Path,
    *,
    head: Head = "lm",
    mtp: Literal["drop", "load"] = "drop",
    dtype: str | None = None,
    allow_missing: Sequence[str] = (),
    overwrite: bool = False,
    jobs: int | None = None,
) -> Report:
    """Write the Hugging Face checkpoint `source` as a distributed checkpoint `target`, which loads under any layout.

    Parameters that are float32 in every model stay so whatever `dtype` is. A value head that the source does
    not have is left out, and so are parameters whose missing tensors match the patterns of `allow_missing`; the report
    names them.

    Raises UserError or UserErrors before anything is written, with everything that is wrong.
    """
    check_apart(target, source)
    cast = parse_dtype(dtype)
    hf = replace(read_hf_config(source), mtp=mtp)
    with CheckpointReader(source) as reader:
        hf = as_on_disk(hf, {name: info.shape for name, info in reader.tensors.items()})
        sharding = Sharding(hf, head=head)
        prove_complete(sharding)
        ignored, missing = check_tensors(reader, hf, head, allow_missing=allow_missing)
        origin = WeightFiles(Path(source), "hf", sharding, reader.tensors, reader)
        outputs, absent = _parameters(origin, missing, cast)
        slabs = [(output.slab, output.spec) for output in outputs if output.slab is not None]
        manifest = ConversionManifest(head, mtp, dtype, hf.fused_experts, hf.value_head, tuple(sorted(absent)))
        files = _companions(Path(source))

        def write(work: Path) -> int:
            written = write_chunks(work, outputs, file_bytes=CHUNK_FILE_BYTES, threads=jobs)
            (work / HF_FOLDER).mkdir()
            copy_files(work / HF_FOLDER, files)
            tensors = {slab.key: (spec.dtype, (*slab.lead, *spec.shape)) for slab, spec in slabs}
            for slab, spec in slabs:
                one_dtype(slab.key, {slab.key: tensors[slab.key][0], spec.name: spec.dtype})
            write_metadata(work, tensors, written, extra_state_keys(slab for slab, _ in slabs))
            write_json(work / MANIFEST_FILE, asdict(manifest))
            return len({chunk.file for chunk in written})

        report = Report(ignored=ignored, absent=manifest.absent)
        return write_folder(target, outputs, write, report, overwrite=overwrite, label="import")


def _companions(folder: Path) -> dict[str, Path]:
    """Return the files next to the weights that a conversion copies; log the others."""
    files = companions(folder)
    if left := not_copied(folder, files):
        logger.info("%s", left.removeprefix("; "))
    return files


def _parameters(
    origin: WeightFiles, missing: frozenset[str], cast: torch.dtype | None
) -> tuple[list[Output], list[str]]:
    """Return (the parameters of a distributed checkpoint, the absent ones), of a source that lacks `missing`."""
    outputs, absent = [], []
    for plan in whole_model(origin.sharding):
        sources = list(dict.fromkeys(copy.hf_name for copy in plan.copies if copy.hf_name is not None))
        lacking = [name for name in sources if name in missing]
        if lacking and len(lacking) < len(sources):
            there = next(name for name in sources if name not in missing)
            raise UserError(f"{lacking[0]} is missing but {there} is not, and both are parts of {plan.canonical}")
        if lacking:
            absent.append(plan.canonical)
            continue
        wanted = torch.float32 if plan.float32 and cast is not None else cast
        dtype = one_dtype(plan.canonical, {name: origin.tensors[name].dtype for name in sources}, cast=wanted)
        for _, part in parts_of(plan, origin.hf) or [(0, plan)]:
            spec = TensorSpec(part.canonical, dtype, part.shape)
            outputs.append(Output(spec, part.copies, origin, slab_of(part, origin.hf)))
    return outputs, absent


def export_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    reference: str | Path | None = None,
    options: ExportOptions = ExportOptions(),
    overwrite: bool = False,
    jobs: int | None = None,
    opened: Callable[[], WeightFiles] | None = None,
) -> Report:
    """Write the distributed checkpoint `source` as a Hugging Face checkpoint `target`.

    config.json, tokenizer and templates are those of `reference`, else those that the source has kept; config.json is
    copied byte for byte but for keys that must change, which the report names. Experts have the format of the
    reference's, else of the checkpoint that the source was imported from, unless `options.experts` says otherwise.
    Multi-token prediction layers that the source does not hold are taken from the reference's weights, or dropped.
    `opened` opens a source of a kind that `open_checkpoint` does not know. Errors as in `import_hf`.
    """
    check_apart(target, source, reference)
    with ExitStack() as stack:
        origin = stack.enter_context(opened() if opened is not None else open_checkpoint(source, reference=reference))
        if origin.kind == "hf" and opened is None:
            raise UserError(f"checkpoint {source}: is a Hugging Face checkpoint already")
        weights = None
        if reference is not None and any(Path(reference).glob("*.safetensors")):
            weights = stack.enter_context(open_checkpoint(reference))
        outputs, write, report = _to_hf(origin, weights, Path(reference or Path(source) / HF_FOLDER), options, jobs)
        return write_folder(target, outputs, write, report, overwrite=overwrite, label="export")


def _to_hf(
    origin: WeightFiles,
    weights: WeightFiles | None,
    folder: Path,
    options: ExportOptions,
    jobs: int | None,
) -> tuple[list[Output], Callable[[Path], int], Report]:
    """Plan a Hugging Face checkpoint; `weights` are those of the reference, `folder` has config.json and tokenizer."""
    cast, sharding = parse_dtype(options.dtype), origin.sharding
    hf = sharding.hf
    if weights is not None:
        hf = as_on_disk(hf, {name: whole.shape for name, whole in weights.tensors.items()})
    fused = hf.fused_experts if options.experts is None else options.experts == "fused"
    hf = replace(hf, value_head=sharding.hf.value_head, fused_experts=fused)
    lacks_mtp = hf.mtp == "drop" and hf.mtp_layers > 0 and sharding.head == "lm"
    kept = {} if options.mtp == "drop" or weights is None else kept_tensors(hf, sharding.head, weights.tensors)
    if lacks_mtp and options.mtp == "keep" and not kept:
        raise UserError(
            f"{origin.path}: config.json announces {hf.mtp_layers} multi-token prediction layers, which this "
            "checkpoint does not hold; name the reference that has their weights, or drop them (mtp=drop)"
        )
    if hf.wrapper is not None and weights is None:
        raise UserError(
            f"{origin.path}: config.json describes a model of images and text, and this checkpoint holds its language "
            "model only; name the reference that has the other weights"
        )
    dropped = options.mtp == "drop" and hf.mtp_layers > 0
    sharding = replace(sharding, hf=replace(hf, mtp="drop") if dropped else hf)
    prove_complete(sharding)
    outputs, parts = _with_merges(hf_outputs(origin, sharding, cast), hf.adapter)
    prefixes = PLAIN_NAMES if weights is None else weights.files.prefixes
    if weights is not None:
        made = {output.spec.name for output in outputs}
        for name, float32 in kept.items():
            outputs.append(_copied(name, weights, torch.float32 if cast is not None and float32 else cast))
        spelled = (renamed(output.spec.name, PLAIN_NAMES, prefixes) for output in outputs)
        outputs = [
            replace(output, spec=output.spec._replace(name=name)) for output, name in zip(outputs, spelled, strict=True)
        ]
        for name in sorted(outside(hf, weights.tensors, weights.files.others) - made):
            kept[name] = False
            outputs.append(_copied(name, weights, None))
    changes = config_changes(hf, dtype=options.dtype or origin.dtype, mtp_dropped=dropped)
    files = _companions(folder)

    def write(work: Path) -> int:
        num_files = write_weights(work, outputs, shard_bytes=options.shard_bytes, threads=jobs)
        copy_companions(work, files, changes)
        if hf.adapter is not None and not hf.adapter.path:
            tensors = {name: part.read() for name, part in parts.items()}
            write_adapter(work / FOLDER, hf.adapter, tensors, base=folder, prefixes=prefixes)
        return num_files

    report = Report(ignored=origin.ignored, absent=origin.absent, kept=tuple(kept), config_changes=tuple(changes))
    return outputs, write, report


def _with_merges(outputs: list[Output], adapter: Adapter | None) -> tuple[list[Output], dict[str, Output]]:
    """Return (weights with their adapters, the adapters' tensors)."""
    parts = {output.spec.name: output for output in outputs if output.spec.name.endswith((A, B))}
    weights = []
    for output in (output for output in outputs if output.spec.name not in parts):
        a, b = (parts.get(output.spec.name.removesuffix(WEIGHT) + end) for end in (A, B))
        if adapter is not None and a is not None and b is not None:
            output = replace(output, adapter=Merge(a, b, adapter.scale))
        weights.append(output)
    return weights, parts


def merge_adapter(
    base: str | Path, folder: Path, target: str | Path, *, overwrite: bool = False, jobs: int | None = None
) -> Report:
    """Write the Hugging Face checkpoint `base` with the adapter of a PEFT folder in its weights.

    Raises UserError: the adapter is none that we compute, or that of another model.
    """

    def opened() -> WeightFiles:
        origin = open_checkpoint(base)
        settings = replace(read_adapter_config(folder), path=str(folder))
        sharding = replace(origin.sharding, hf=adapted(origin.hf, settings, "lm"))
        add_stored(origin.files, sharding.hf.adapter)
        check_tensors(origin.files, sharding.hf, "lm")
        return replace(origin, sharding=sharding)

    return export_checkpoint(folder, target, reference=base, overwrite=overwrite, jobs=jobs, opened=opened)


def _copied(name: str, weights: WeightFiles, cast: torch.dtype | None) -> Output:
    """Return a tensor as another checkpoint has it."""
    tensor = weights.tensors[name]
    whole = Copy(name, 0, 0, 0, 0, *matrix_shape(tensor.shape))
    return Output(TensorSpec(name, tensor.dtype if cast is None else cast, tensor.shape), [whole], weights)
