"""Tensors of a checkpoint that only repeat another one: conversion leaves them out, so they must be equal to it."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.families.deepseek import MTP_REPEATED
from mega_rl.converters.live.copying import BlockReader
from mega_rl.converters.plan.sharding import Head
from mega_rl.storage.safetensors_header import matrix_shape
from mega_rl.storage.safetensors_reader import same_bits

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_BYTES = 16 << 20


def repeat_faults(reader: BlockReader, hf: HFConfig, head: Head) -> list[str]:
    """Return a line for each tensor that is left out as a copy of another one and holds other values.

    A tied output layer that is in the file; embedding and head once more in prediction layers that are loaded. Reads
    both tensors where a copy is there, and nothing otherwise.
    """
    return [
        f"{name} {list(reader.tensors[name].shape)} differs from {original}, {why}"
        for name, original, why in _repeats(hf, head)
        if name in reader.tensors and original in reader.tensors and not _same(reader, name, original)
    ]


def _repeats(hf: HFConfig, head: Head) -> Iterator[tuple[str, str, str]]:
    """Yield (copy, original, why the copy must be equal and what to do)."""
    if hf.tied and head == "lm":
        yield (
            _HEAD,
            _EMBEDDING,
            "yet tie_word_embeddings=true in config.json makes them one; set it to false to use the file's output "
            "layer, or delete that tensor from the file to use the embedding",
        )
    if hf.mtp == "load" and FAMILIES[hf.family].mtp_ignored:
        for layer in range(hf.num_layers, hf.num_layers + hf.mtp_layers):
            for name, original in zip(MTP_REPEATED, (_EMBEDDING, _EMBEDDING if hf.tied else _HEAD), strict=True):
                why = "and Megatron-Core has one tensor for both; drop the multi-token prediction layers (mtp=drop)"
                yield name.format(layer=layer), original, why


def _same(reader: BlockReader, name: str, original: str) -> bool:
    """Return whether two tensors have the same shape and, in the wider of their dtypes, the same bits."""
    one, other = reader.tensors[name], reader.tensors[original]
    if one.shape != other.shape:
        return False
    wider = max(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    rows, width = matrix_shape(one.shape)
    step = max(1, _CHUNK_BYTES // max(1, width * wider.itemsize))
    for low in range(0, rows, step):
        block = (low, min(low + step, rows)), (0, width)
        if not same_bits(reader.read_block(name, *block).to(wider), reader.read_block(original, *block).to(wider)):
            return False
    return True
