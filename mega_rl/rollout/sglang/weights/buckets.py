"""Bytes of a bucket and their description in SGLang's load format "flattened_bucket", version 0.5.20.

The format is one tensor of bytes and the place of each tensor in it (srt/weight_sync/tensor_bucket.py), pickled, in
base64. SGLang's unpickler admits the names of some modules only; those used here are among them. None is SGLang's own,
which this process has not installed: of a tensor's metadata SGLang reads attributes only.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.rollout.sglang.weights.reshard import Bucket, ParamWrites, Slot

FORMAT = "flattened_bucket"


@dataclass(frozen=True)
class MappedFile:
    """First bytes of a file; unpickles to a private mapping of them, uint8 [nbytes]."""

    path: str
    nbytes: int

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(torch.from_file, dtype=torch.uint8), (self.path, False, self.nbytes)


def payload(data: Any, bucket: Bucket, dtype: torch.dtype, *, offset: int = 0) -> str:
    """Return a bucket's description for one tensor-parallel rank of a server, base64 text.

    `data`: unpickles to a uint8 tensor that has the bucket at `offset`; `dtype`: of all but the float32 slots.
    """
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=torch.float32 if slot.float32 else dtype,
            start_idx=offset + slot.start,
            end_idx=offset + slot.end,
            numel=slot.end - slot.start,
        )
        for slot in bucket.slots
    ]
    content = {"flattened_tensor": data, "metadata": metadata}
    return base64.b64encode(pickle.dumps(content, protocol=4)).decode("ascii")


def slot_tensor(flat: Tensor, slot: Slot, dtype: torch.dtype) -> Tensor:
    """Return the tensor of a slot as a view of the bucket's bytes `flat` [nbytes] uint8."""
    return flat[slot.start : slot.end].view(torch.float32 if slot.float32 else dtype).view(slot.shape)


def write_parts(
    writes: Iterable[ParamWrites], live: Sequence[Mapping[str, Tensor]], flat: Tensor, dtype: torch.dtype
) -> int:
    """Copy this rank's rectangles from its parameters to their slots, cast; return the bytes written.

    `live`: weights by name of each virtual pipeline stage. `flat`: the bucket, [nbytes] uint8.
    """
    written = 0
    for vp_stage, param, parts in writes:
        tensor = live[vp_stage][param].detach()
        matrix = tensor.reshape(matrix_shape(tuple(tensor.shape)))
        for slot, c in parts:
            source = matrix[c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols]
            rows, cols = c.src_shape
            target = slot_tensor(flat, slot, dtype).view(matrix_shape(slot.shape))
            target = target[c.src_row : c.src_row + rows, c.src_col : c.src_col + cols : c.step]
            target.copy_(source.T if c.transposed else source)
            written += target.numel() * target.element_size()
    return written


def filled(
    tensors: Iterable[tuple[str, Tensor]],
    buckets: Sequence[Bucket],
    memory: Callable[[int, int], Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[Bucket, Tensor]]:
    """Yield (bucket, its bytes) for each bucket, as soon as its tensors have come.

    tensors: (Hugging Face name, full tensor), bucket after bucket, in any order within one. memory(number of the
    bucket, nbytes): where it goes, [nbytes] uint8, called before its first tensor is taken.
    """
    stream = iter(tensors)
    for number, bucket in enumerate(buckets):
        data = memory(number, bucket.nbytes)
        missing = {slot.name: slot for slot in bucket.slots}
        while missing:
            name, tensor = next(stream)
            slot_tensor(data, missing.pop(name), dtype).copy_(tensor)
        yield bucket, data
    left = next(stream, None)
    assert left is None, f"{left[0]} belongs to no bucket" if left else ""
