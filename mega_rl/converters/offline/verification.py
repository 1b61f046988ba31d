"""Comparison of whole checkpoints of any kind, and the check that a conversion loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mega_rl.converters.hf.companions import config_changes
from mega_rl.converters.offline.compare import Comparison, compare, compare_configs, merge
from mega_rl.converters.offline.describe import describe
from mega_rl.converters.offline.formats import WeightFiles, open_checkpoint
from mega_rl.converters.offline.roundtrip import round_trip
from mega_rl.converters.offline.streaming import ByteProgress
from mega_rl.converters.offline.world import World, joined_world
from mega_rl.converters.plan.parameters import ignored_tensors
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.errors import UserErrors
from mega_rl.storage.safetensors_reader import CheckpointReader


@dataclass(frozen=True)
class Verification:
    """Result of verifying a checkpoint."""

    layout: str  # whose plan is proved complete
    comparison: Comparison | None = None  # with the second checkpoint
    returned: int | None = None  # tensors that come back bit for bit from import and export in memory
    lost: tuple[str, ...] = ()  # those that do not

    @property
    def equal(self) -> bool:
        """Return whether nothing is lost and nothing differs."""
        return not self.lost and (self.comparison is None or self.comparison.equal)


def verify_checkpoint(
    first: Path,
    second: Path | None,
    *,
    sharding: Sharding,
    allow_missing: Sequence[str] = (),
    progress: ByteProgress,
) -> Verification:
    """Prove a layout complete, then compare every bit of `first` with `second`.

    Without `second`: against itself after import and export for the layout, in memory. Collective under torchrun.
    Raises UserErrors when the tensors are not those that config.json asks for.
    """
    layout = str(sharding.layout)
    if second is not None:
        prove_complete(sharding)
        comparison = compare_checkpoints(first, second, allow_missing=allow_missing, progress=progress)
        return Verification(layout, comparison)
    with CheckpointReader(first) as reader, joined_world() as world:
        sharding, description = describe(reader, sharding)
        if description.problems:
            raise UserErrors([f"{first}: {problem}" for problem in description.problems])
        progress.start(sum(info.nbytes for info in reader.tensors.values()) // world.size, "round trip")
        share = (world.rank, world.size)
        parts = world.each(
            lambda: round_trip(reader, sharding, share=share, advance=progress.advance),
            encode=lambda part: [part[0], list(part[1])],
            decode=lambda raw: (raw[0], tuple(raw[1])),
        )
    lost = tuple(sorted({name for _, names in parts for name in names}))
    return Verification(layout, returned=sum(good for good, _ in parts), lost=lost)


def compare_checkpoints(
    first: Path, second: Path, *, allow_missing: Sequence[str] = (), progress: ByteProgress
) -> Comparison:
    """Compare two checkpoints of one model, each of any kind, as Hugging Face tensors; collective.

    Where one of them is no Hugging Face folder, tensors that conversion leaves aside by name may be absent.
    """
    with ExitStack() as stack:
        world = stack.enter_context(joined_world())
        a = stack.enter_context(open_checkpoint(first))
        b = stack.enter_context(open_checkpoint(second, reference=first if a.kind == "hf" else None))
        allowed = [*allow_missing, *_left_aside(a, b)]
        sizes = (prod(t.shape) * t.dtype.itemsize for t in a.tensors.values())
        progress.start(sum(sizes) // world.size, "comparing")
        comparison = _compare_shares(a, b, allowed, world, progress)
    if a.kind == b.kind == "hf":
        # 8-bit blocks leave as bfloat16, and config.json says so.
        intended = [*allow_missing, *config_changes(a.hf)]
        comparison = replace(comparison, config=compare_configs(first, second, intended=intended))
    return comparison


def _compare_shares(
    a: WeightFiles, b: WeightFiles, allowed: Sequence[str], world: World, progress: ByteProgress
) -> Comparison:
    fused = next((side.hf.fused_experts for side in (a, b) if side.kind == "hf"), None)
    readers = [side.as_hf(fused_experts=fused) for side in (a, b)]
    share = (world.rank, world.size)
    parts = world.each(
        lambda: compare(*readers, allow_missing=allowed, share=share, advance=progress.advance),
        encode=Comparison.to_json,
        decode=Comparison.from_json,
    )
    return merge(parts)


def _left_aside(a: WeightFiles, b: WeightFiles) -> frozenset[str]:
    """Return the names that one side has and a conversion leaves aside."""
    if a.kind == b.kind == "hf":
        return frozenset()
    converted = a if a.kind != "hf" else b
    return ignored_tensors(converted.hf, head=converted.sharding.head)
