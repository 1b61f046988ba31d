"""A rank's part of a live model and the ranks that hold the other parts."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import ProcessGroup

from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import RankCoordinates

if TYPE_CHECKING:
    from mega_rl.parallel.groups import Groups

BUCKET_BYTES = 512 << 20


class Members(NamedTuple):
    """Ranks that hold one part of a parameter each, and this rank among them."""

    group: ProcessGroup | None  # None: this rank alone
    size: int
    rank: int


@dataclass(frozen=True)
class ModelPlace:
    """A model, how it is cut, and where this rank stands: what exporters need to know of a rank.

    A group may be None where its size is 1. Each is checked against the coordinates, so that two groups of one size
    cannot be mistaken for each other unless this rank has the same position in both.
    """

    sharding: Sharding
    coordinates: RankCoordinates = RankCoordinates()  # noqa: RUF009  immutable
    tp_group: ProcessGroup | None = None
    pp_group: ProcessGroup | None = None
    expert_group: ProcessGroup | None = None  # ep x etp, etp fastest
    is_sharded: bool = False  # data parallelism has cut the parameters: reading one is collective over those ranks
    bucket_bytes: int = BUCKET_BYTES  # of parameters that are gathered together

    def __post_init__(self) -> None:
        layout, at = self.sharding.layout, self.coordinates
        expected = {
            "tp_group": Members(self.tp_group, layout.tp, at.tp_rank),
            "pp_group": Members(self.pp_group, layout.pp, at.pp_rank),
        }
        if self.sharding.hf.moe is not None:
            expected["expert_group"] = self.experts
        for name, (group, size, rank) in expected.items():
            assert group is not None or size == 1, f"{name} is missing: the layout is {layout}"
            if group is not None:
                assert (group.size(), group.rank()) == (size, rank), (
                    f"{name} has rank {group.rank()} of {group.size()} here, the layout says {rank} of {size}"
                )

    @classmethod
    def of(cls, sharding: Sharding, groups: Groups, *, is_sharded: bool, bucket_bytes: int) -> ModelPlace:
        """Return the place of this rank among the process groups of a run."""
        return cls(
            sharding,
            groups.coordinates,
            tp_group=groups.tp,
            pp_group=groups.pp,
            expert_group=groups.experts,
            is_sharded=is_sharded,
            bucket_bytes=bucket_bytes,
        )

    @property
    def tensor_parallel(self) -> Members:
        """Ranks that hold everything but experts between them, on this pipeline rank."""
        return Members(self.tp_group, self.sharding.layout.tp, self.coordinates.tp_rank)

    @property
    def experts(self) -> Members:
        """Ranks that hold all experts between them, on this pipeline rank."""
        layout, at = self.sharding.layout, self.coordinates
        return Members(self.expert_group, layout.ep * layout.etp, at.ep_rank * layout.etp + at.etp_rank)

    @property
    def is_whole(self) -> bool:
        """Return whether nothing but data parallelism has cut the model."""
        layout = self.sharding.layout
        return layout.tp * layout.pp * layout.ep * layout.etp == 1

    @property
    def needs_no_peer(self) -> bool:
        """Return whether this rank has every weight itself."""
        return self.is_whole and not self.is_sharded

    @property
    def gathers_first_copy(self) -> bool:
        """Return whether exporting the first copy of all weights takes this rank: all of them where they are cut."""
        layout = self.sharding.layout
        return self.is_sharded or self._stage_rank < lcm(layout.tp, layout.ep * layout.etp)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank of the first copy: the one that writes."""
        return self._stage_rank == 0 and self.coordinates.pp_rank == 0

    @property
    def _stage_rank(self) -> int:
        """Position among the ranks that share a pipeline rank."""
        layout, at = self.sharding.layout, self.coordinates
        return at.tp_rank + layout.tp * (at.cp_rank + layout.cp * at.dp_rank)
