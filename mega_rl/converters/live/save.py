"""Write a live model as a Hugging Face checkpoint folder."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from mega_rl.converters.hf.companions import companions, config_changes, copy_companions, not_copied
from mega_rl.converters.live.adapters import FOLDER, merged, write_adapter
from mega_rl.converters.live.copying import in_threads, rectangle
from mega_rl.converters.live.export import ModelPlace, export_hf, join_pieces, usual_dtype
from mega_rl.converters.live.load import weights_of
from mega_rl.converters.plan.export import ExportPiece, export_plan
from mega_rl.converters.plan.parameters import as_on_disk, kept_tensors, outside
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import INDEX_FILE, PLAIN_NAMES, SINGLE_FILE, matrix_shape, renamed
from mega_rl.converters.safetensors.output_folder import check_target, output_folder
from mega_rl.converters.safetensors.quantised import quantisation_loss
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import SHARD_BYTES, CheckpointWriter, TensorSpec
from mega_rl.errors import UserError

logger = logging.getLogger(__name__)

# Tensors that wait to be written while the next are gathered.
QUEUE_BYTES = 64 << 20
_WRITERS = 2  # threads that write one stream; more would wait for the same file


@dataclass(frozen=True)
class SaveOptions:
    """Choices of `save_hf`."""

    dtype: torch.dtype | None = None  # None: that of the parameters
    shard_bytes: int = SHARD_BYTES  # a file's
    overwrite: bool = False


def save_hf(
    chunks: Sequence[nn.Module],
    directory: str | Path,
    *,
    source: str | Path,
    place: ModelPlace,
    options: SaveOptions = SaveOptions(),
) -> list[float]:
    """Write a Hugging Face checkpoint folder: the weights, and config, tokenizer and templates as in `source`.

    Collective over the ranks that hold the first copy of all weights; the first of them writes, other ranks return at
    once, unless data parallelism has cut the parameters (`place.is_sharded`): then it is collective over all. Names,
    experts and value heads are spelled as in `source`. Its multi-token prediction layers are kept if they are not part
    of the model, and so are all tensors outside of the language model of a checkpoint of images and text. config.json
    is copied byte for byte except for keys that are no longer true (`companions.config_changes`). Weights with adapters
    are merged with them, and a folder `adapter` has the adapters apart, as PEFT saves them.

    Needs the memory of `export_hf` and 64 MiB. On a single rank, where nothing is gathered, parameters are written from
    where they lie by a thread for each core, at most 8: it needs at most one tensor per thread, and none on a CPU
    without a cast.

    Returns on the first rank what quantising each tensor as in `source` would lose: see `quantisation_loss`.
    Raises UserError when `directory` is not empty, its disk is full, or `source` has no config.json.
    """
    if not place.gathers_first_copy:
        return []
    # On every rank, so that all of them end with the same message.
    check_target(Path(directory), overwrite=options.overwrite)
    files = companions(Path(source))
    with ExitStack() as stack:
        reader = None  # a source may have no weights, only config.json and its like
        if any((Path(source) / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
            reader = stack.enter_context(CheckpointReader(source))
            hf = as_on_disk(place.sharding.hf, {name: info.shape for name, info in reader.tensors.items()})
            place = replace(place, sharding=replace(place.sharding, hf=hf))
        elif place.sharding.hf.wrapper is not None:
            raise UserError(f"{source}: has no weights, and a checkpoint of images and text needs those of its tower")
        losses: list[float] = []
        adapter, parts = place.sharding.hf.adapter, dict[str, Tensor]()
        stream = merged(export_hf(chunks, place, dtype=options.dtype), adapter, parts)
        try:
            if place.is_first:
                usual = usual_dtype(chunks) if options.dtype is None else options.dtype
                direct = place.needs_no_peer and place.sharding.hf.quantization is None and adapter is None
                measured = stream if reader is None else _measured(stream, reader, losses)
                content = chunks if direct else measured
                _write_folder(Path(directory), place.sharding, content, parts, usual, reader, files, options)
                logger.info("wrote %s%s", directory, not_copied(Path(source), files))
        finally:
            # After an error too: the other ranks are inside the same collectives.
            if not place.needs_no_peer:
                deque(stream, maxlen=0)
    return losses


def _measured(
    stream: Iterable[tuple[str, Tensor]], reader: CheckpointReader, losses: list[float]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; append the loss of quantising those that the source has quantised."""
    for name, tensor in stream:
        info = reader.tensors.get(name)
        if info is not None and info.packed is not None:
            losses.append(quantisation_loss(info.packed, tensor))
        yield name, tensor


def _write_folder(
    directory: Path,
    sharding: Sharding,
    content: Sequence[nn.Module] | Iterator[tuple[str, Tensor]],
    parts: Mapping[str, Tensor],
    usual: torch.dtype,
    reader: CheckpointReader | None,
    files: Mapping[str, Path],
    options: SaveOptions,
) -> None:
    """Write the whole folder from the parameters of chunks, or a stream of tensors.

    parts: those of adapters, once the stream has ended. usual: dtype of weights that are not float32 in every model.
    reader, files: weights and companions of the source.
    """
    adapter, sharding = sharding.hf.adapter, sharding.merged
    prefixes = PLAIN_NAMES if reader is None else reader.prefixes
    specs = {
        name: TensorSpec(renamed(name, PLAIN_NAMES, prefixes), torch.float32 if unit.float32 else usual, shape)
        for unit in export_plan(sharding)
        for name, shape, _ in unit.tensors
    }
    kept: dict[str, TensorSpec] = {}
    if reader is not None:
        for name, float32 in kept_tensors(sharding.hf, sharding.head, reader.tensors).items():
            info = reader.tensors[name]
            kept[name] = TensorSpec(info.name, torch.float32 if float32 else usual, info.shape)
        for name in sorted(outside(sharding.hf, reader.tensors, reader.others) - specs.keys()):
            info = reader.tensors[name]
            kept[name] = TensorSpec(info.name, info.dtype, info.shape)
    cast = None if options.dtype is None else str(options.dtype).removeprefix("torch.")
    with output_folder(directory, overwrite=options.overwrite) as work:
        copy_companions(work, files, config_changes(sharding.hf, dtype=cast, scores=sharding.head == "value"))
        with CheckpointWriter(work, [*specs.values(), *kept.values()], shard_bytes=options.shard_bytes) as writer:
            if isinstance(content, Sequence):
                _write_parameters(writer, content, sharding, specs)
            else:
                _write_stream(writer, ((specs[name].name, tensor) for name, tensor in content))
            if reader is not None:
                _write_stream(writer, ((s.name, reader.read(name).to(s.dtype)) for name, s in kept.items()))
        if adapter is not None:
            base = directory if reader is None else reader.path
            write_adapter(work / FOLDER, adapter, parts, base=base, prefixes=prefixes)


def _write_parameters(
    writer: CheckpointWriter, chunks: Sequence[nn.Module], sharding: Sharding, specs: Mapping[str, TensorSpec]
) -> None:
    """Write every tensor straight from the parameters of one rank that has them all."""
    live = [weights_of(chunk) for chunk in chunks]
    tasks: dict[Path, list[tuple[TensorSpec, tuple[ExportPiece, ...], list[Tensor]]]] = defaultdict(list)
    for unit in export_plan(sharding):
        params = [live[unit.vp_stage][param.name].detach() for param in unit.params]
        for name, _, pieces in unit.tensors:
            tasks[writer.file_of(specs[name].name).path].append((specs[name], pieces, params))
    # Files take turns: threads that write one file wait for each other.
    in_turn = [task for group in zip_longest(*tasks.values()) for task in group if task is not None]
    with torch.no_grad():
        in_threads(in_turn, lambda task: _write_tensor(writer, *task))


def _write_tensor(
    writer: CheckpointWriter, spec: TensorSpec, pieces: Sequence[ExportPiece], params: Sequence[Tensor]
) -> None:
    """Write a tensor from its rows in place, or from a cast or transposed copy."""
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
