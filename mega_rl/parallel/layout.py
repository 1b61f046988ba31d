"""Rank arithmetic of a parallel layout; imports nothing but the standard library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from mega_rl.config.schema import EngineConfig


@dataclass(frozen=True)
class RankCoordinates:
    """Position of one rank in the layout; `ep_rank` and `etp_rank` count within its experts' ranks."""

    tp_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of every parallel dimension of one model over a world of ranks.

    Ranks are numbered as Megatron-Core does by default, order "tp-cp-ep-dp-pp": tensor parallel fastest, pipeline
    slowest (`megatron.core.parallel_state.RankGenerator`). Experts see the ranks of one pipeline rank as
    etp x ep x (expert data parallel), expert tensor parallel fastest.

    `pipeline` counts the transformer layers of every stage, first to last (pp * vpp numbers; virtual stage v of
    pipeline rank p is stage v * pp + p); None splits evenly.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 1
    pipeline: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: sizes are at least 1")
        if self.world_size % self.model_size:
            raise ValueError(
                f"world_size={self.world_size} is not a multiple of tp*cp*pp="
                f"{self.tp}*{self.cp}*{self.pp}={self.model_size}: start a multiple of {self.model_size} ranks"
            )
        if self.ep * self.etp > 1 and self.stage_size % (self.ep * self.etp):
            raise ValueError(
                f"ep*etp={self.ep}*{self.etp} does not divide the {self.stage_size} ranks of a pipeline stage"
            )
        if self.pipeline is not None and (len(self.pipeline) != self.num_stages or min(self.pipeline) < 0):
            raise ValueError(
                f"pipeline={list(self.pipeline)}: must be pp*vpp={self.num_stages} numbers of layers, none negative"
            )

    @classmethod
    def of_engine(cls, engine: EngineConfig, *, world_size: int, has_experts: bool = True) -> Self:
        """Return the layout that an engine's settings ask for; `has_experts`: some model may have experts.

        Raises ValueError for sizes that do not fit.
        """
        if engine.backend == "fsdp":
            return cls(world_size=world_size)
        chosen = engine.megatron
        return cls(
            world_size=world_size,
            tp=chosen.tp,
            pp=chosen.pp,
            vpp=chosen.vpp,
            cp=chosen.cp,
            sequence_parallel=chosen.sequence_parallel,
            ep=chosen.ep,
            etp=(chosen.etp or chosen.tp) if has_experts else 1,
            pipeline=parse_pipeline(chosen.pipeline) if chosen.pipeline else None,
        )

    @property
    def model_size(self) -> int:
        """Return the number of ranks of one replica."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Return the data-parallel size."""
        return self.world_size // self.model_size

    @property
    def stage_size(self) -> int:
        """Ranks that share a pipeline rank."""
        return self.world_size // self.pp

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones counted."""
        return self.pp * self.vpp

    def stages(self) -> Iterator[tuple[int, int]]:
        """(pp_rank, vp_stage) of every stage in the order of the layers."""
        return ((pp_rank, vp_stage) for vp_stage in range(self.vpp) for pp_rank in range(self.pp))

    def coordinates(self, rank: int) -> RankCoordinates:
        """Position of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside a world of {self.world_size}")
        tp_rank, rest = rank % self.tp, rank // self.tp
        cp_rank, rest = rest % self.cp, rest // self.cp
        dp_rank, pp_rank = rest % self.dp, rest // self.dp
        etp_rank, rest = rank % self.stage_size % self.etp, rank % self.stage_size // self.etp
        return RankCoordinates(tp_rank, cp_rank, dp_rank, pp_rank, ep_rank=rest % self.ep, etp_rank=etp_rank)

    def layers_of(self, pp_rank: int, num_layers: int, vp_stage: int = 0) -> range:
        """Global indices of the transformer layers held by one stage (interleaved as in Megatron-Core)."""
        split = self.pipeline
        if split is None:
            if num_layers % self.num_stages:
                raise ValueError(
                    f"num_layers={num_layers} is not a multiple of pp*vpp={self.pp}*{self.vpp}={self.num_stages}"
                )
            split = (num_layers // self.num_stages,) * self.num_stages
        if sum(split) != num_layers:
            raise ValueError(f"pipeline={list(split)} holds {sum(split)} layers, the model has {num_layers}")
        stage = vp_stage * self.pp + pp_rank
        first = sum(split[:stage])
        return range(first, first + split[stage])

    def __str__(self) -> str:
        others = ("pp", "vpp", "cp", "ep", "etp")
        parts = [f"tp{self.tp}"] + [f"{name}{getattr(self, name)}" for name in others if getattr(self, name) > 1]
        return "-".join([*parts, f"dp{self.dp}"]) + ("-sp" if self.sequence_parallel else "")


def parse_pipeline(text: str) -> tuple[int, ...]:
    """Parse Megatron-Core's notation of stages, "Et*3|(tt|)*2t|L" (E embedding, t layer, m MTP, L loss), into layers.

    Raises ValueError with the problem: embedding and loss belong to the first and the last stage, MTP layers to the
    last.
    """
    plain = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        # A factor of at most three digits: no model has more layers, and the text may come from anyone.
        plain = re.sub(pattern, lambda match: match[1] * int(match[2][:3]), plain)
    stages = plain.split("|")
    if set(plain) - set("EtmL|"):
        raise ValueError(f"pipeline layout {text!r}: may hold E, t, m, L, |, (...)*n and x*n only")
    body = "".join(stages)
    if not re.fullmatch("Et*m*L", body) or not stages[-1].endswith("L") or not stages[0].startswith("E"):
        raise ValueError(f"pipeline layout {text!r}: must begin with E, hold t's, then m's, and end with L")
    if any("m" in stage for stage in stages[:-1]):
        raise ValueError(f"pipeline layout {text!r}: MTP layers (m) must be in the last stage")
    return tuple(stage.count("t") for stage in stages)
