"""Rank arithmetic of a parallel layout; imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankCoordinates:
    """Where one rank stands."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of every parallel dimension of one model over a world of ranks.

    Ranks are numbered as Megatron-Core does by default, order "tp-cp-ep-dp-pp": tensor parallel fastest, pipeline
    slowest (`megatron.core.parallel_state.RankGenerator`).
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "vpp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: sizes are at least 1")
        if self.world_size % self.model_size:
            raise ValueError(
                f"world_size={self.world_size} is not a multiple of tp*cp*pp="
                f"{self.tp}*{self.cp}*{self.pp}={self.model_size}: start a multiple of {self.model_size} ranks"
            )

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world_size // self.model_size

    def coordinates(self, rank: int) -> RankCoordinates:
        """Position of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside a world of {self.world_size}")
        tp_rank, rest = rank % self.tp, rank // self.tp
        cp_rank, rest = rest % self.cp, rest // self.cp
        dp_rank, pp_rank = rest % self.dp, rest // self.dp
        return RankCoordinates(tp_rank=tp_rank, cp_rank=cp_rank, dp_rank=dp_rank, pp_rank=pp_rank)

    def layers_of(self, pp_rank: int, num_layers: int, vp_stage: int = 0) -> range:
        """Global indices of the transformer layers held by one stage (even split, interleaved as in Megatron-Core)."""
        stages = self.pp * self.vpp
        if num_layers % stages:
            raise ValueError(f"num_layers={num_layers} is not a multiple of pp*vpp={self.pp}*{self.vpp}={stages}")
        per_stage = num_layers // stages
        first = (vp_stage * self.pp + pp_rank) * per_stage
        return range(first, first + per_stage)

    def __str__(self) -> str:
        parts = [f"tp{self.tp}"] + [
            f"{n}{v}" for n, v in (("pp", self.pp), ("vpp", self.vpp), ("cp", self.cp)) if v > 1
        ]
        return "-".join([*parts, f"dp{self.dp}"]) + ("-sp" if self.sequence_parallel else "")
