"""Conversion without a model: Hugging Face folders, rank files and distributed checkpoints into each other.

Tensors stream from file to file, so one process needs no more memory than a fixed buffer and the largest parameter.
Everything is checked before a byte is written: the plan is complete, every tensor of the source has the name, shape and
type that it should, the target may be written and its disk has room. The target appears as a whole, at the end.

Under torchrun the ranks share the files of the target between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.companions import companions, config_changes, copy_companions, not_copied
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.load import check_tensors
from mega_rl.converters.offline.conversion import Conversion, Report, convert
from mega_rl.converters.offline.conversion import WriteOptions as WriteOptions
from mega_rl.converters.offline.dist_keys import extra_state_keys, slab_of, whole_model
from mega_rl.converters.offline.formats import (
    ShapeAndDtype,
    WeightFiles,
    hf_wholes,
    hf_windows,
    one_dtype,
    open_checkpoint,
    parse_dtype,
)
from mega_rl.converters.offline.manifest import HF_FOLDER, Kind, manifest_of, storage_layout, write_manifest
from mega_rl.converters.offline.rank_files import rank_tensors
from mega_rl.converters.offline.streaming import Output, OutputFile, group_outputs
from mega_rl.converters.offline.torch_dist import ChunkFile, Written, write_metadata
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.compose import ColumnRange
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT, as_on_disk, hf_tensors, ignored_tensors, mtp_tensors
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.ranks import Origin, ParamPlan
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.storage.output_folder import copy_files
from mega_rl.storage.safetensors_header import matrix_shape
from mega_rl.storage.safetensors_reader import CheckpointReader
from mega_rl.storage.safetensors_writer import SHARD_BYTES, TensorSpec, shard_name, write_index

logger = logging.getLogger(__name__)

Format = Kind
# Of one file of a distributed checkpoint; files are what ranks and threads share.
CHUNK_FILE_BYTES = 512 << 20


@dataclass(frozen=True)
class ImportOptions:
    """Choices of `import_hf`."""

    spec: Spec = "te"
    head: Head = "lm"
    mtp: Literal["drop", "load"] = "drop"  # multi-token prediction layers
    dtype: str | None = None  # None: values keep their type
    padded_vocab: int | None = None  # rows of the embedding; None: the smallest that the layout allows
    allow_missing: Sequence[str] = ()  # patterns of tensors that may be absent


@dataclass(frozen=True)
class ExportOptions:
    """Choices of `export_checkpoint`."""

    shard_bytes: int = SHARD_BYTES  # of a file
    experts: Literal["per_expert", "fused"] | None = None  # None: as in the reference or the checkpoint imported from
    dtype: str | None = None  # None: values keep their type
    mtp: Literal["keep", "drop"] = "keep"  # multi-token prediction layers that the source does not hold


def import_hf(
    source: str | Path,
    target: str | Path,
    *,
    layout: ParallelLayout,
    format: Format,
    options: ImportOptions = ImportOptions(),
    writing: WriteOptions = WriteOptions(),
) -> Report:
    """Write the Hugging Face checkpoint `source` as rank files or as a distributed checkpoint `target`.

    Of `layout` a distributed checkpoint takes only the padding of the vocabulary. Parameters that are float32 in every
    model stay so whatever `options.dtype` is. A value head that the source does not have is left out, and so are
    parameters whose missing tensors match `options.allow_missing`; the report names them.

    Raises UserError or UserErrors, the same on all ranks, before anything is written, with everything that is wrong.
    """

    def prepare() -> Conversion:
        cast = parse_dtype(options.dtype)
        hf = replace(read_hf_config(source), mtp=options.mtp)
        reader = CheckpointReader(source)
        hf = as_on_disk(hf, {name: info.shape for name, info in reader.tensors.items()})
        wanted = Sharding(hf, layout, spec=options.spec, head=options.head, padded_vocab=options.padded_vocab)
        sharding = _stored(wanted, format)
        prove_complete(sharding)
        ignored, missing = check_tensors(reader, hf, options.head, allow_missing=options.allow_missing)
        wholes = {name: ShapeAndDtype(info.shape, info.dtype) for name, info in reader.tensors.items()}
        origin = WeightFiles(Path(source), "hf", sharding, wholes, reader, ignored=ignored)
        return _to_megatron(origin, sharding, format, "disk", missing, cast, _companions(Path(source)))

    return convert(prepare, target, [source], options=writing, label=f"import to {format}")


def reshard(
    source: str | Path,
    target: str | Path,
    *,
    layout: ParallelLayout,
    format: Format | None = None,
    reference: str | Path | None = None,
    spec: Spec | None = None,
    padded_vocab: int | None = None,
    writing: WriteOptions = WriteOptions(),
) -> Report:
    """Write rank files or a distributed checkpoint `source` under another layout, or in the other format.

    `format` and `spec` are the source's unless given, `padded_vocab` the smallest that the layout allows. `reference`
    is a folder with the model's config.json, for a source that was not made by a conversion. Errors as in `import_hf`.
    """

    def prepare() -> Conversion:
        origin = open_checkpoint(source, reference=reference)
        if origin.kind == "hf":
            raise UserError(f"checkpoint {source}: is a Hugging Face checkpoint; import it instead")
        kind = format or origin.kind
        held = origin.sharding
        wanted = Sharding(held.hf, layout, spec=spec or held.spec, head=held.head, padded_vocab=padded_vocab)
        sharding = _stored(wanted, kind)
        prove_complete(sharding)
        files = _companions(Path(reference) if reference is not None else Path(source) / HF_FOLDER)
        return _to_megatron(origin, sharding, kind, "canonical", frozenset(origin.absent), None, files)

    inputs = [source] if reference is None else [source, reference]
    return convert(prepare, target, inputs, options=writing, label="reshard")


def export_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    reference: str | Path | None = None,
    options: ExportOptions = ExportOptions(),
    writing: WriteOptions = WriteOptions(),
    opened: Callable[[], WeightFiles] | None = None,
) -> Report:
    """Write rank files or a distributed checkpoint `source` as a Hugging Face checkpoint `target`.

    config.json, tokenizer and templates are those of `reference`, else those that the source has kept; config.json is
    copied byte for byte but for keys that must change, which the report names. Experts have the format of the
    reference's, else of the checkpoint that the source was imported from, unless `options.experts` says otherwise.
    Multi-token prediction layers that the source does not hold are taken from the reference's weights, or dropped.
    `opened` opens the source where it is of a kind that `open_checkpoint` does not know. Errors as in `import_hf`.
    """

    def prepare() -> Conversion:
        cast = parse_dtype(options.dtype)
        origin = opened() if opened is not None else open_checkpoint(source, reference=reference)
        if origin.kind == "hf" and opened is None:
            raise UserError(f"checkpoint {source}: is a Hugging Face checkpoint already")
        files = _companions(Path(reference) if reference is not None else Path(source) / HF_FOLDER)
        return _to_hf(origin, _weights_of(reference), cast, files, options, where=str(source))

    inputs = [source] if reference is None else [source, reference]
    return convert(prepare, target, inputs, options=writing, label="export")


def _stored(sharding: Sharding, format: Format) -> Sharding:
    """Return the sharding as it is stored: no two ranks hold the same, and a distributed checkpoint is whole."""
    layout, vocab = sharding.layout, sharding.vocab
    sharding.check()
    if format == "torch_dist":
        return replace(sharding, layout=ParallelLayout(), padded_vocab=vocab)
    sizes = layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp
    return replace(sharding, layout=storage_layout(*sizes, layout.pipeline), padded_vocab=vocab)


def _to_megatron(
    origin: WeightFiles,
    sharding: Sharding,
    format: Format,
    plans_read: Origin,
    missing: frozenset[str],
    cast: torch.dtype | None,
    hf_files: Mapping[str, Path],
) -> Conversion:
    """Plan rank files or a distributed checkpoint, from a checkpoint that lacks the tensors in `missing`."""
    absent: set[str] = set()
    files: list[OutputFile] = []
    whole = whole_model(sharding, origin=plans_read)
    tables = {plan.canonical: _sources(plan) for plan in whole if plan.canonical in (EMBEDDING, OUTPUT)}

    def output_of(name: str, plan: ParamPlan) -> Output | None:
        # A rank may hold nothing but padding of a table.
        sources = _sources(plan) or tables.get(plan.canonical, tables[EMBEDDING])
        lacking = [source for source in sources if source in missing]
        if lacking and len(lacking) < len(sources):
            there = next(source for source in sources if source not in missing)
            raise UserError(f"{lacking[0]} is missing but {there} is not, and both are parts of {plan.canonical}")
        if lacking:
            absent.add(plan.canonical)
            return None
        wanted = torch.float32 if plan.float32 and cast is not None else cast
        dtype = one_dtype(plan.canonical, {source: origin.tensors[source].dtype for source in sources}, cast=wanted)
        return Output(TensorSpec(name, dtype, plan.shape), (ColumnRange(0, 1, plan.copies),), origin)

    if format == "ranks":
        tensors = rank_tensors(sharding, origin=plans_read)
        for name, group in groupby(tensors, key=lambda tensor: tensor.file):
            made = [output_of(t.name, t.plan) for t in group]
            files.append(OutputFile(name, [output for output in made if output is not None]))
        files = [file for file in files if file.outputs]
    else:
        outputs = []
        for plan in whole:
            output = output_of(plan.canonical, plan)
            if output is not None:
                outputs.append(replace(output, slab=slab_of(plan, sharding.hf)))
        files = group_outputs(outputs, CHUNK_FILE_BYTES, lambda i, count: f"__{i}_0.distcp")
    dtype = None if cast is None else str(cast).removeprefix("torch.")
    if cast is None and origin.manifest is not None:
        dtype = origin.manifest.dtype
    manifest = manifest_of(format, sharding, dtype=dtype, absent=tuple(sorted(absent)))

    def complete(work: Path, written: Sequence[Written]) -> None:
        (work / HF_FOLDER).mkdir()
        copy_files(work / HF_FOLDER, hf_files)
        if format == "torch_dist":
            _complete_dist(work, [output for file in files for output in file.outputs], written)
        write_manifest(work, manifest)

    return Conversion(files, complete, origin.ignored, manifest.absent, readers=[origin])


def _companions(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that are copied, and name the others in one line of the log."""
    files = companions(folder)
    if left := not_copied(folder, files):
        logger.info("%s", left.removeprefix("; "))
    return files


def _sources(plan: ParamPlan) -> tuple[str, ...]:
    """Return the names of the tensors that a plan reads."""
    return tuple(dict.fromkeys(copy.hf_name for copy in plan.copies if copy.hf_name is not None))


def _complete_dist(work: Path, outputs: Sequence[Output], written: Sequence[Written]) -> None:
    """Write the metadata and extra states that make chunk files a distributed checkpoint."""
    slabs = [(output.slab, output.spec) for output in outputs if output.slab is not None]
    tensors = {slab.key: (spec.dtype, (*slab.lead, *spec.shape)) for slab, spec in slabs}
    for slab, spec in slabs:
        one_dtype(slab.key, {slab.key: tensors[slab.key][0], spec.name: spec.dtype})
    with ChunkFile(work, "__extra_0.distcp") as file:
        nothing = file.write_nothing()
    write_metadata(work, tensors, written, extra_state_keys(slab for slab, _ in slabs), nothing)


def _to_hf(
    origin: WeightFiles,
    weights: _Weights | None,
    cast: torch.dtype | None,
    files: Mapping[str, Path],
    options: ExportOptions,
    *,
    where: str,
) -> Conversion:
    """Plan a Hugging Face checkpoint; `weights` and `files` are those of the reference, errors name `where`."""
    sharding = origin.sharding
    hf = sharding.hf if weights is None else as_on_disk(sharding.hf, weights.shapes)
    if options.experts is not None:
        hf = replace(hf, fused_experts=options.experts == "fused")
    hf = replace(hf, value_head=sharding.hf.value_head)
    kept = [] if sharding.head == "value" else _kept(hf, options.mtp, weights, where)
    dropped = options.mtp == "drop" and bool(hf.mtp_layers)
    sharding = replace(sharding, hf=replace(hf, mtp="drop") if dropped else hf)
    prove_complete(sharding)
    outputs = _hf_outputs(origin, sharding, cast)
    if weights is not None:
        known = mtp_tensors(hf)
        always = {name for name in kept if name in known and known[name].float32}
        outputs += [
            _copied(name, weights.checkpoint, torch.float32 if cast is not None and name in always else cast)
            for name in kept
        ]
    dtype = options.dtype if options.dtype is not None or origin.manifest is None else origin.manifest.dtype
    changes = config_changes(hf, dtype=dtype, mtp_dropped=dropped)
    shards = group_outputs(outputs, options.shard_bytes, shard_name)

    def complete(work: Path, _: Sequence[Written]) -> None:
        copy_companions(work, files, changes)
        if len(shards) > 1:
            weight_map = {output.spec.name: shard.name for shard in shards for output in shard.outputs}
            write_index(work, weight_map, total_bytes=sum(shard.nbytes for shard in shards))

    readers = [origin] if weights is None else [origin, weights.checkpoint]
    return Conversion(shards, complete, origin.ignored, origin.absent, tuple(kept), tuple(changes), readers)


class _Weights(NamedTuple):
    """The tensors of a reference."""

    checkpoint: WeightFiles
    shapes: Mapping[str, tuple[int, ...]]


def _weights_of(reference: str | Path | None) -> _Weights | None:
    """Open the weights of a reference; None where it has only a config."""
    if reference is None or not any(Path(reference).glob("*.safetensors")):
        return None
    checkpoint = open_checkpoint(reference)
    return _Weights(checkpoint, {name: whole.shape for name, whole in checkpoint.tensors.items()})


def _kept(hf: HFConfig, mtp: Literal["keep", "drop"], weights: _Weights | None, where: str) -> list[str]:
    """Return the tensors of prediction layers that the checkpoint lacks, to be taken from the reference."""
    if mtp == "drop" or not hf.mtp_layers or hf.mtp == "load":
        return []
    of_mtp = ignored_tensors(hf, head="lm") - ignored_tensors(replace(hf, mtp_layers=0), head="lm")
    kept = [] if weights is None else sorted(of_mtp & set(weights.shapes))
    if not kept:
        raise UserError(
            f"{where}: config.json announces {hf.mtp_layers} multi-token prediction layers, which this checkpoint does "
            "not hold; name the reference that has their weights, or drop them (mtp=drop)"
        )
    return kept


def _hf_outputs(origin: WeightFiles, sharding: Sharding, cast: torch.dtype | None) -> list[Output]:
    """Return every Hugging Face tensor that the checkpoint has parameters for."""
    if origin.kind == "hf":  # stored in parts
        tensors = hf_tensors(sharding.hf, head=sharding.head).items()
        return [_copied(n, origin, torch.float32 if t.float32 else cast) for n, t in tensors if n in origin.tensors]
    windows = hf_windows(sharding)
    outputs = []
    for name, tensor in hf_wholes(origin, sharding, windows, cast=cast).items():
        outputs.append(Output(TensorSpec(name, tensor.dtype, tensor.shape), windows[name], origin))
    return outputs


def _copied(name: str, weights: WeightFiles, cast: torch.dtype | None) -> Output:
    """Return a tensor as another checkpoint has it."""
    shape, dtype = weights.tensors[name]
    rows, cols = matrix_shape(shape)
    window = ColumnRange(0, 1, (Copy(name, 0, 0, 0, 0, rows, cols),))
    return Output(TensorSpec(name, dtype if cast is None else cast, shape), (window,), weights)
