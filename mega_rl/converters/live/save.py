"""Write a live model as a Hugging Face checkpoint folder."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mega_rl.converters.hf.companions import companions, config_changes, copy_companions, not_copied
from mega_rl.converters.live.copying import in_threads, rectangle
from mega_rl.converters.live.export import export_hf, join_pieces, usual_dtype
from mega_rl.converters.live.load import weights_of
from mega_rl.converters.live.place import ModelPlace
from mega_rl.converters.plan.export import ExportPiece, export_plan
from mega_rl.converters.plan.parameters import as_on_disk, ignored_tensors, mtp_tensors
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.storage.output_folder import check_target, output_folder
from mega_rl.storage.safetensors_header import INDEX_FILE, SINGLE_FILE, matrix_shape
from mega_rl.storage.safetensors_reader import CheckpointReader
from mega_rl.storage.safetensors_writer import SHARD_BYTES, CheckpointWriter, TensorSpec

logger = logging.getLogger(__name__)

# Tensors that wait to be written while the next ones are gathered.
QUEUE_BYTES = 64 << 20
_WRITERS = 2  # threads that write one stream; more would wait for the same file


@dataclass(frozen=True)
class SaveOptions:
    """Choices of `save_hf`."""

    dtype: torch.dtype | None = None  # None: that of the parameters
    mtp: Literal["keep", "drop"] = "keep"  # multi-token prediction layers that are no part of the model
    shard_bytes: int = SHARD_BYTES  # of a file
    overwrite: bool = False


def save_hf(
    chunks: Sequence[nn.Module],
    directory: str | Path,
    *,
    source: str | Path,
    place: ModelPlace,
    options: SaveOptions = SaveOptions(),
) -> None:
    """Write a Hugging Face checkpoint folder: the weights, and config, tokenizer and templates as in `source`.

    Collective over the ranks that hold the first copy of all weights; the first of them writes, other ranks return at
    once, unless data parallelism has cut the parameters (`place.is_sharded`): then it is collective over all. Experts
    and value heads are spelled as in `source`. Multi-token prediction layers that are no part of the model are kept as
    they are in `source`, or dropped. config.json is copied byte for byte unless one of its keys is not true any more
    (`companions.config_changes`).

    Needs the memory of `export_hf` and 64 MiB. On a single rank, where nothing is gathered, parameters are written from
    where they lie by a thread for each core, at most 8: it needs at most one tensor per thread, and none on a CPU
    without a cast.

    Raises UserError when `directory` is not empty, its disk is full, or `source` has no config.json.
    """
    if not place.gathers_first_copy:
        return
    # On every rank, so that all of them end with the same message.
    check_target(Path(directory), overwrite=options.overwrite)
    files = companions(Path(source))
    with _opened(Path(source)) as reader:
        if reader is not None:
            shapes = {name: info.shape for name, info in reader.tensors.items()}
            hf = as_on_disk(place.sharding.hf, shapes)
            place = replace(place, sharding=replace(place.sharding, hf=hf))
        stream = export_hf(chunks, place, dtype=options.dtype)
        try:
            if place.is_first:
                usual = usual_dtype(chunks) if options.dtype is None else options.dtype
                model = _Model(chunks, place.sharding, usual, None if place.needs_no_peer else stream)
                _write_folder(Path(directory), model, reader, files, options, not_copied(Path(source), files))
        finally:
            # After an error too: the other ranks are inside the same collectives.
            if not place.needs_no_peer:
                deque(stream, maxlen=0)


class _Model(NamedTuple):
    """The model that is written."""

    chunks: Sequence[nn.Module]
    sharding: Sharding
    dtype: torch.dtype  # of what is not float32 in every model
    stream: Iterator[tuple[str, Tensor]] | None  # of `export_hf`; None: parameters are written from where they lie


def _write_folder(
    directory: Path,
    model: _Model,
    reader: CheckpointReader | None,
    files: Mapping[str, Path],
    options: SaveOptions,
    left: str,
) -> None:
    """Write the whole folder; `reader` and `files` are the weights and the companions of the source.

    left: words on the files of the source that are not copied.
    """
    hf = model.sharding.hf
    kept = _kept(reader, model.sharding, model.dtype) if options.mtp == "keep" and reader is not None else []
    name = None if options.dtype is None else str(options.dtype).removeprefix("torch.")
    changes = config_changes(hf, dtype=name, mtp_dropped=options.mtp == "drop")
    with output_folder(directory, overwrite=options.overwrite) as work:
        copy_companions(work, files, changes)
        specs = [*_specs(model.sharding, model.dtype), *kept]
        with CheckpointWriter(work, specs, shard_bytes=options.shard_bytes) as writer:
            if model.stream is None:
                _write_parameters(writer, model)
            else:
                _write_stream(writer, model.stream)
            if reader is not None:
                _write_stream(writer, ((s.name, reader.read(s.name).to(s.dtype)) for s in kept))
    logger.info("wrote %s%s", directory, left)


@contextmanager
def _opened(source: Path) -> Iterator[CheckpointReader | None]:
    """Open the weights of a folder; None where it has none, only config.json and its like."""
    if any((source / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        with CheckpointReader(source) as reader:
            yield reader
    else:
        yield None


def _specs(sharding: Sharding, usual: torch.dtype) -> Iterator[TensorSpec]:
    """Yield the specification of every tensor that `export_hf` yields."""
    for unit in export_plan(sharding):
        for name, shape, _ in unit.tensors:
            yield TensorSpec(name, torch.float32 if unit.float32 else usual, shape)


def _kept(reader: CheckpointReader, sharding: Sharding, usual: torch.dtype) -> list[TensorSpec]:
    """Return the tensors of the source's multi-token prediction layers, where those are no part of the model."""
    hf = sharding.hf
    if hf.mtp == "load" or not hf.mtp_layers or sharding.head != "lm":
        return []
    names = ignored_tensors(hf, head="lm") - ignored_tensors(replace(hf, mtp_layers=0), head="lm")
    known = mtp_tensors(hf)
    return [
        TensorSpec(name, torch.float32 if name in known and known[name].float32 else usual, reader.tensors[name].shape)
        for name in sorted(names & reader.tensors.keys())
    ]


class _Task(NamedTuple):
    """A tensor to write: its pieces, and the parameters they are pieces of."""

    spec: TensorSpec
    pieces: tuple[ExportPiece, ...]
    params: Sequence[Tensor]


def _write_parameters(writer: CheckpointWriter, model: _Model) -> None:
    """Write every tensor straight from the parameters of one rank that has them all."""
    live = [weights_of(chunk) for chunk in model.chunks]
    tasks: dict[str, list[_Task]] = {}
    for unit in export_plan(model.sharding):
        params = [live[unit.vp_stage][param.name].detach() for param in unit.params]
        for name, shape, pieces in unit.tensors:
            spec = TensorSpec(name, torch.float32 if unit.float32 else model.dtype, shape)
            tasks.setdefault(writer.file_of(name).path.name, []).append(_Task(spec, pieces, params))
    # One file after the other in turn: threads that write one file wait for each other.
    in_turn = [task for group in zip_longest(*tasks.values()) for task in group if task is not None]
    with torch.no_grad():
        in_threads(in_turn, lambda task: _write_tensor(writer, task))


def _write_tensor(writer: CheckpointWriter, task: _Task) -> None:
    """Write a tensor from where its rows lie or, where they must be cast or turned, from a copy."""
    spec, pieces, params = task
    columns = matrix_shape(spec.shape)[1]
    matrices = [param.reshape(matrix_shape(tuple(param.shape))) for param in params]
    whole_rows = all(not p.copy.transposed and p.copy.cols == columns for p in pieces)
    if whole_rows and all(params[p.param].dtype == spec.dtype for p in pieces):
        ordered = sorted(pieces, key=lambda p: p.copy.src_row)
        writer.write_rows(spec.name, 0, [rectangle(matrices[p.param], p.copy) for p in ordered])
    else:
        writer.write(spec.name, join_pieces([matrices], spec.shape, pieces, spec.dtype))


def _write_stream(writer: CheckpointWriter, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors while the next ones are made; at most `QUEUE_BYTES` of them (or one) wait."""
    waiting: deque[tuple[Future[None], int]] = deque()
    size = 0
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="converter") as pool:
        for name, tensor in tensors:
            waiting.append((pool.submit(writer.write, name, tensor), tensor.nbytes))
            size += tensor.nbytes
            while size > QUEUE_BYTES:
                future, nbytes = waiting.popleft()
                future.result()
                size -= nbytes
        for future, _ in waiting:
            future.result()
