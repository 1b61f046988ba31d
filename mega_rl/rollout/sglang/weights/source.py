"""The weights that servers get, seen from one rank of the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    """An engine's weights, in the dtype in which they travel. Of a model with a language model's head."""

    engine: ModelEngine
    dtype: torch.dtype  # the servers'; tensors that are float32 in every model stay so

    @property
    def sharded(self) -> bool:
        """Whether a parameter is spread over data parallelism, so that reading one is collective over those ranks."""
        return self.engine.is_sharded

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.engine.device

    @property
    def experts(self) -> bool:
        """Whether the model has experts."""
        return self.engine.sharding.hf.moe is not None

    def buckets(self, bucket_bytes: int) -> tuple[Bucket, ...]:
        """The plan: see `reshard.plan_buckets`."""
        return plan_buckets(self.engine.sharding, bucket_bytes=bucket_bytes, itemsize=self.dtype.itemsize)

    def chunks(self) -> list[nn.Module]:
        """The model's chunks with whole parameters, up to date; collective."""
        return self.engine.whole_chunks()

    def live(self) -> list[Mapping[str, Tensor]]:
        """This rank's weights by name for each chunk; collective, as is reading one where they are sharded."""
        return [weights_of(chunk) for chunk in self.chunks()]

    def export(self, *, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on all ranks of a replica, which gather together; see `export_hf`."""
        engine = self.engine
        return export_hf(
            self.chunks(),
            sharding=engine.sharding,
            coordinates=engine.groups.coordinates,
            tp_group=engine.groups.tp,
            pp_group=engine.groups.pp,
            expert_group=engine.groups.experts,
            bucket_bytes=bucket_bytes,
            dtype=self.dtype,
        )
