"""Weights of the trainer as the transports read them, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mega_rl.converters.live.export import export_hf
from mega_rl.converters.live.load import weights_of
from mega_rl.rollout.sglang.weights.reshard import Bucket, plan_buckets

if TYPE_CHECKING:
    from mega_rl.engines.base import ModelEngine


@dataclass(frozen=True)
class TrainerWeights:
    """Weights of an engine with a language model's head, in the dtype in which they travel."""

    engine: ModelEngine
    dtype: torch.dtype  # the servers'; tensors that are float32 in every model stay so

    @property
    def sharded(self) -> bool:
        """Return whether data parallelism has cut the parameters, so that reading one is collective over them."""
        return self.engine.is_sharded

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.engine.device

    @property
    def experts(self) -> bool:
        """Return whether the model has experts."""
        return self.engine.sharding.hf.moe is not None

    def buckets(self, bucket_bytes: int, *, by_stage: bool = False) -> tuple[Bucket, ...]:
        """Return the plan: see `reshard.plan_buckets`."""
        sharding, itemsize = self.engine.sharding, self.dtype.itemsize
        return plan_buckets(sharding, bucket_bytes=bucket_bytes, itemsize=itemsize, by_stage=by_stage)

    def chunks(self) -> list[nn.Module]:
        """Return the model's chunks with whole parameters, up to date; collective."""
        return self.engine.whole_chunks()

    def live(self) -> list[Mapping[str, Tensor]]:
        """Return this rank's weights by name for each chunk; collective, as is reading one where they are sharded."""
        return [weights_of(chunk) for chunk in self.chunks()]

    def export(self, *, bucket_bytes: int, own_stage: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on all ranks of a replica, which gather together; see `export_hf`."""
        place = replace(self.engine.place, bucket_bytes=bucket_bytes)
        return export_hf(self.chunks(), place, dtype=self.dtype, own_stage=own_stage)
