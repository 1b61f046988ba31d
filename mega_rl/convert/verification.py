"""Comparing whole checkpoints of any kind, and checking that a conversion of one loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mega_rl.converters.compare import Comparison, compare, compare_configs, digest_of
from mega_rl.converters.fill import BlockReader
from mega_rl.converters.offline import Progress, open_checkpoint
from mega_rl.converters.plan import Sharding, as_on_disk
from mega_rl.converters.roundtrip import round_trip
from mega_rl.converters.proof import prove_complete
from mega_rl.converters.safetensors_io import CheckpointReader


@dataclass(frozen=True)
class Verification:
    """What verifying a checkpoint has shown."""

    layout: str
    comparison: Comparison | None = None  # with the second checkpoint
    returned: int | None = None  # tensors that come back from import and export in memory
    lost: tuple[str, ...] = ()  # those that do not
    digest: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing is lost and nothing differs."""
        return not self.lost and (self.comparison is None or self.comparison.equal)
