"""Rank files: a folder of safetensors files, one per part that ranks share, read by any layout.

`common-pp{p}-tp{t}.safetensors` holds everything but experts of one pipeline and tensor-parallel rank,
`experts-pp{p}-ep{e}-etp{t}.safetensors` its experts; so expert parallelism stores nothing twice. Tensors are named
`{vp_stage}.{name in the live chunk}`. Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from mega_rl.converters.plan.compose import Home, homes_of
from mega_rl.converters.plan.ranks import Origin, ParamPlan, common_plan, expert_plan
from mega_rl.converters.plan.sharding import Sharding


class RankTensor(NamedTuple):
    """A tensor of a rank file and how it is filled."""

    file: str
    name: str  # within the file
    plan: ParamPlan
    part: int  # among the ranks that cut the parameter

    @property
    def stored(self) -> str:
        """Return its name over all files."""
        return f"{self.file}:{self.name}"


def rank_tensors(sharding: Sharding, *, origin: Origin = "disk") -> Iterator[RankTensor]:
    """Yield every tensor of every rank file, file by file."""
    layout = sharding.layout
    for pp_rank in range(layout.pp):
        for tp_rank, vp_stage in product(range(layout.tp), range(layout.vpp)):
            plans = common_plan(sharding, tp_rank, pp_rank, vp_stage, origin=origin)
            yield from _of_file(common_file(pp_rank, tp_rank), vp_stage, plans, tp_rank)
        if sharding.hf.moe is None:
            continue
        for ep_rank, etp_rank, vp_stage in product(range(layout.ep), range(layout.etp), range(layout.vpp)):
            plans = expert_plan(sharding, ep_rank, etp_rank, pp_rank, vp_stage, origin=origin)
            yield from _of_file(experts_file(pp_rank, ep_rank, etp_rank), vp_stage, plans, etp_rank)


def _of_file(file: str, vp_stage: int, plans: Iterable[ParamPlan], part: int) -> Iterator[RankTensor]:
    """Yield the tensors of one virtual stage in a file."""
    return (RankTensor(file, f"{vp_stage}.{plan.name}", plan, part) for plan in plans)


def rank_homes(sharding: Sharding) -> dict[str, list[Home]]:
    """Return where each whole parameter is stored; of parts that several files hold, the first."""
    homes: dict[str, list[Home]] = {}
    for tensor in rank_tensors(sharding, origin="canonical"):
        if not tensor.plan.replica and not (tensor.plan.replicated and tensor.part):
            homes.setdefault(tensor.plan.canonical, []).extend(homes_of(tensor.stored, tensor.plan))
    return homes


def common_file(pp_rank: int, tp_rank: int) -> str:
    """Return the name of the file of everything but experts."""
    return f"common-pp{pp_rank}-tp{tp_rank}.safetensors"


def experts_file(pp_rank: int, ep_rank: int, etp_rank: int) -> str:
    """Return the name of the file of a rank's experts."""
    return f"experts-pp{pp_rank}-ep{ep_rank}-etp{etp_rank}.safetensors"
