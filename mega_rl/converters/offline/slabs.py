"""Lookup of a model's parameters in global tensors that are stored in boxes, by any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mega_rl.converters.offline.dist_keys import Slab, possible_slabs
from mega_rl.converters.offline.dist_metadata import Chunk, DistTensor
from mega_rl.converters.offline.torch_dist import chunk_info, chunks_by_slab
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.compose import Home
from mega_rl.converters.plan.parameters import EMBEDDING, OUTPUT
from mega_rl.converters.plan.ranks import ParamPlan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.errors import UserError
from mega_rl.storage.safetensors_reader import TensorInfo


class ChunkInfo(Protocol):
    """Function that returns the place of a chunk's elements, as a matrix or vector; `torch_dist.chunk_info` is one."""

    def __call__(self, name: str, tensor: DistTensor, chunk: Chunk, *, as_vector: bool) -> TensorInfo: ...


class Slabs:
    """Lookup of parameters in the tensors of a distributed checkpoint."""

    def __init__(
        self, folder: Path, sharding: Sharding, tensors: Mapping[str, DistTensor], *, info: ChunkInfo = chunk_info
    ) -> None:
        """`info`: returns the place of a chunk's elements, which depends on the kind of file."""
        self._folder, self._sharding, self._tensors, self._info = folder, sharding, tensors, info
        self._chunks: dict[str, Mapping[tuple[int, ...], Sequence[tuple[Chunk, int]]]] = {}
        self.used: set[str] = set()
        self.infos: dict[str, TensorInfo] = {}
        self.homes: dict[str, list[Home]] = {}
        self.problems: list[str] = []

    def add(self, plan: ParamPlan) -> bool:
        """Look up the chunks of one parameter; return False if the checkpoint has no tensor for it."""
        slabs = possible_slabs(plan, self._sharding.hf)
        slab = next((slab for slab in slabs if slab.key in self._tensors), None)
        if slab is None:
            return False
        self.used.add(slab.key)
        tensor = self._tensors[slab.key]
        if not self._fits(tensor.shape, slab, plan):
            expected = [*slab.lead, *plan.shape]
            self.problems.append(
                f"{self._folder}: {slab.key} has shape {list(tensor.shape)}, config.json asks for {expected}"
            )
            return True
        if slab.key not in self._chunks:
            self._chunks[slab.key] = chunks_by_slab(tensor, len(slab.lead))
        for chunk, position in self._chunks[slab.key].get(slab.place, ()):
            self._add_chunk(plan, slab, tensor, chunk, position)
        return True

    def _fits(self, shape: tuple[int, ...], slab: Slab, plan: ParamPlan) -> bool:
        expected = (*slab.lead, *plan.shape)
        if plan.canonical == EMBEDDING or (plan.canonical == OUTPUT and self._sharding.head == "lm"):
            return len(shape) == 2 and shape[0] >= expected[0] and shape[1] == expected[1]
        return shape == expected

    def _add_chunk(self, plan: ParamPlan, slab: Slab, tensor: DistTensor, chunk: Chunk, position: int) -> None:
        """Add the home of the part of the parameter that a chunk holds, the chunk's `position`-th."""
        stored = f"{tensor.key}@{'.'.join(map(str, chunk.offsets))}"
        row, col = (*chunk.offsets[len(slab.lead) :], 0)[:2]
        num_rows, num_cols = (*chunk.sizes[len(slab.lead) :], 1)[:2]
        # What lies below the parameter is padding of the vocabulary.
        rows = min(num_rows, plan.shape[0] - row)
        if rows <= 0:
            return
        if stored not in self.infos:
            try:
                info = self._info(stored, tensor, chunk, as_vector=len(plan.shape) == 1)
            except UserError as error:
                self.problems.append(str(error))
                return
            self.infos[stored] = info
        copy = Copy(plan.canonical, row, col, position * num_rows, 0, rows, num_cols)
        self.homes.setdefault(plan.canonical, []).append(Home(stored, copy))
