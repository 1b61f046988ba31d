"""Hugging Face tensors out of a live Megatron-Core model: the load plan read backwards, in buckets.

The sequence of tensors and of collectives follows from the config and the layout alone, so no rank asks another what
comes next. Within a bucket the owning pipeline stage first broadcasts each rank's shards, then every tensor-parallel
group gathers them: across stages, usually the slower link, a byte travels once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_rl.converters.blocks import matrix_shape
from mega_rl.converters.hf_config import HFConfig
from mega_rl.converters.names import canonical_name
from mega_rl.converters.plan import ExportParam, Head, Piece, export_plan
from mega_rl.converters.safetensors_writer import write_checkpoint
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

logger = logging.getLogger(__name__)

BUCKET_BYTES = 512 << 20

# Beside the weights a checkpoint directory holds these; weights of the source, and its code, are never copied.
_COMPANIONS = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "*.tiktoken")
_NOT_COMPANIONS = ("*.index.json",)


def export_hf(
    chunks: Sequence[nn.Module],
    *,
    hf: HFConfig,
    layout: ParallelLayout,
    coordinates: RankCoordinates,
    head: Head = "lm",
    padded_vocab: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every weight, the same on all ranks of a replica and in the model's order.

    Collective over the replica: every rank must exhaust the iterator. Tensors are contiguous, on the device of the
    parameters, cast to `dtype` before they travel, and the consumer's to keep: they share no memory with the model. Of
    the two buffers that a bucket needs, one is `bucket_bytes` (a larger parameter is a bucket of its own) and the other
    tp times that. Tied models have no lm_head.weight; padding of the vocabulary is cut off. `chunks` are unwrapped
    GPTModels of either spec. Groups may be None where their size is 1.
    """
    assert layout.tp == 1 or tp_group is not None, "tp_group is missing"
    assert layout.pp == 1 or pp_group is not None, "pp_group is missing"
    plan = export_plan(hf, layout, head=head, padded_vocab=padded_vocab)
    live = [
        # Only this rank's names differ between specs, so no other rank needs to know which one it has.
        {canonical_name(name, spec="te"): param for name, param in chunk.named_parameters()}
        for chunk in chunks
    ]
    assert not any(name == "output_layer.bias" for params in live for name in params), "heads have no bias on disk"
    wire = _wire_dtype(live, dtype)
    for bucket in buckets(plan, bucket_bytes=bucket_bytes, itemsize=wire.itemsize):
        shards = [live[p.vp_stage][p.name] for p in bucket] if bucket[0].pp_rank == coordinates.pp_rank else None
        if layout.tp == layout.pp == 1:
            assert shards is not None
            yield from _assemble(bucket, [[shard.detach() for shard in shards]], wire)
            continue
        flat = _flatten(bucket, shards, wire, device=next(iter(live[0].values())).device)
        gathered = _exchange(flat, owner=bucket[0].pp_rank, layout=layout, tp_group=tp_group, pp_group=pp_group)
        yield from assemble_bucket(bucket, gathered)


def save_hf(
    chunks: Sequence[nn.Module],
    directory: str | Path,
    *,
    source: str | Path,
    hf: HFConfig,
    layout: ParallelLayout,
    coordinates: RankCoordinates,
    head: Head = "lm",
    padded_vocab: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    shard_bytes: int = 5 << 30,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a Hugging Face checkpoint directory: the weights, and config, tokenizer and templates as in `source`.

    Collective over the first replica; its first rank writes, the other replicas return at once. config.json is copied
    byte for byte: rewriting it through a library would drop fields that other readers need. Raises UserError when
    `directory` is not empty.
    """
    if coordinates.dp_rank or coordinates.cp_rank:
        return
    tensors = export_hf(
        chunks,
        hf=hf,
        layout=layout,
        coordinates=coordinates,
        head=head,
        padded_vocab=padded_vocab,
        tp_group=tp_group,
        pp_group=pp_group,
        bucket_bytes=bucket_bytes,
        dtype=dtype,
    )
    if coordinates.tp_rank or coordinates.pp_rank:
        for _ in tensors:
            pass
        return
    write_checkpoint(directory, tensors, shard_bytes=shard_bytes, files=companions(Path(source)))
    logger.info("wrote %s", directory)


def companions(source: Path) -> dict[str, Path]:
    """Files of a checkpoint directory that are neither weights nor code: name -> path."""
    if not (source / "config.json").is_file():
        raise UserError(f"{source}: has no config.json to copy into the exported checkpoint")
    found = {path.name: path for pattern in _COMPANIONS for path in source.glob(pattern) if path.is_file()}
    return {name: path for name, path in sorted(found.items()) if not any(path.match(p) for p in _NOT_COMPANIONS)}


def buckets(plan: Sequence[ExportParam], *, bucket_bytes: int, itemsize: int) -> Iterator[list[ExportParam]]:
    """Consecutive parameters of one pipeline rank whose shards take at most `bucket_bytes` (or one larger one)."""
    bucket: list[ExportParam] = []
    size = 0
    for param in plan:
        nbytes = param.numel * itemsize
        if bucket and (size + nbytes > bucket_bytes or param.pp_rank != bucket[0].pp_rank):
            yield bucket
            bucket, size = [], 0
        bucket.append(param)
        size += nbytes
    if bucket:
        yield bucket


def assemble_bucket(bucket: Sequence[ExportParam], gathered: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Full tensors from `gathered` [tp, elements]: each rank's shards of the bucket, flattened one after the other."""
    sizes = [param.numel for param in bucket]
    shards = [
        [part.view(param.shape) for part, param in zip(torch.split(row, sizes), bucket, strict=True)]
        for row in gathered
    ]
    yield from _assemble(bucket, shards, gathered.dtype)


def _assemble(
    bucket: Sequence[ExportParam], shards: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors from shards[tp_rank][position in the bucket]."""
    for position, param in enumerate(bucket):
        sources = [row[position].view(matrix_shape(param.shape)) for row in shards]
        for name, shape, pieces in param.tensors:
            yield name, _join(sources, shape, pieces, dtype)


def _join(sources: Sequence[Tensor], shape: tuple[int, ...], pieces: Sequence[Piece], dtype: torch.dtype) -> Tensor:
    """One Hugging Face tensor; the pieces tile it, so memory without initial values is enough."""
    result = torch.empty(shape, dtype=dtype, device=sources[0].device)
    matrix = result.view(matrix_shape(shape))
    for tp_rank, c in pieces:
        target = matrix[c.src_row : c.src_row + c.rows, c.src_col : c.src_col + c.cols]
        target.copy_(sources[tp_rank][c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols])
    return result


def _flatten(
    bucket: Sequence[ExportParam], shards: Sequence[Tensor] | None, dtype: torch.dtype, *, device: torch.device
) -> Tensor:
    """This rank's shards one after the other; on a stage that does not own the bucket, room to receive them."""
    flat = torch.empty(sum(param.numel for param in bucket), dtype=dtype, device=device)
    if shards is not None:
        parts = torch.split(flat, [param.numel for param in bucket])
        for part, shard in zip(parts, shards, strict=True):
            part.copy_(shard.detach().reshape(-1))
    return flat


def _exchange(
    flat: Tensor,
    *,
    owner: int,
    layout: ParallelLayout,
    tp_group: dist.ProcessGroup | None,
    pp_group: dist.ProcessGroup | None,
) -> Tensor:
    """[tp, elements]: the shards of every tensor-parallel rank, on every stage. They travel as plain bytes."""
    if layout.pp > 1:
        dist.broadcast(flat.view(torch.uint8), group=pp_group, group_src=owner)
    if layout.tp == 1:
        return flat[None]
    gathered = torch.empty(layout.tp, flat.numel(), dtype=flat.dtype, device=flat.device)
    dist.all_gather_single(gathered.view(torch.uint8).view(-1), flat.view(torch.uint8), group=tp_group)
    return gathered


def _wire_dtype(live: Sequence[dict[str, nn.Parameter]], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that travels: the one asked for, else that of the parameters, which a model has only one of."""
    if dtype is not None:
        return dtype
    found = {param.dtype for params in live for param in params.values()}
    assert len(found) == 1, f"parameters of several dtypes {found}: say which to export"
    return found.pop()
