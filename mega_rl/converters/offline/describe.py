"""Description of a Hugging Face checkpoint and of each rank's share in a layout; reads headers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from mega_rl.converters.live.copying import BlockReader
from mega_rl.converters.live.load import repeat_faults
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors, ignored_tensors
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import RankCoordinates


@dataclass(frozen=True)
class StageSize:
    """Size of the share of each rank of one pipeline rank."""

    pp_rank: int
    layers: tuple[str, ...]  # "0-7", one entry for each virtual stage
    params: int
    nbytes: int  # in the checkpoint's dtype


@dataclass(frozen=True)
class Description:
    """A checkpoint against the table of its family."""

    num_tensors: int
    num_params: int
    nbytes: int
    dtypes: dict[str, int]  # number of tensors of each
    stages: tuple[StageSize, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    mis_shaped: tuple[str, ...] = ()
    contradicting: tuple[str, ...] = ()  # would be left out as copies of others, whose values they do not have

    @property
    def problems(self) -> list[str]:
        """Return the mismatches of the tensors with the model, a line each."""
        missing = [f"{name} is missing" for name in self.missing]
        unexpected = [f"{name} is not part of the model of config.json" for name in self.unexpected]
        return [*missing, *unexpected, *self.mis_shaped, *self.contradicting]


def describe(reader: BlockReader, sharding: Sharding) -> tuple[Sharding, Description]:
    """Return the sharding with the spellings on disk, and the description.

    Raises UserErrors when the model cannot be cut this way.
    """
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    sharding = replace(sharding, hf=as_on_disk(sharding.hf, shapes))
    hf, head = sharding.hf, sharding.head
    prove_complete(sharding)
    expected, ignorable = hf_tensors(hf, head=head), ignored_tensors(hf, head=head)
    sizes: Counter[int] = Counter()  # bytes by item size
    for info in reader.tensors.values():
        sizes[info.dtype.itemsize] += prod(info.shape) * info.dtype.itemsize
    usual = sizes.most_common(1)[0][0] if sizes else 0
    return sharding, Description(
        num_tensors=len(shapes),
        num_params=sum(prod(shape) for shape in shapes.values()),
        nbytes=sizes.total(),
        dtypes=dict(Counter(str(info.dtype).removeprefix("torch.") for info in reader.tensors.values()).most_common()),
        stages=_stages(sharding, usual),
        missing=tuple(name for name, t in expected.items() if name not in shapes and not t.optional),
        unexpected=tuple(sorted(shapes.keys() - expected.keys() - ignorable)),
        ignored=tuple(sorted(shapes.keys() & ignorable)),
        mis_shaped=tuple(
            f"{name}: {list(shapes[name])}, config.json asks for {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in shapes and shapes[name] != tensor.shape
        ),
        contradicting=tuple(repeat_faults(reader, hf, head)),
    )


def describe_config(sharding: Sharding) -> Description:
    """Return the description of the checkpoint that a config.json announces, for a folder without weights.

    Raises UserErrors when the model cannot be cut this way.
    """
    hf = sharding.hf
    prove_complete(sharding)
    tensors = [tensor for tensor in hf_tensors(hf, head=sharding.head).values() if not tensor.optional]
    itemsize = 4 if hf.dtype in (None, "float32") else 2
    return Description(
        num_tensors=len(tensors),
        num_params=sum(prod(tensor.shape) for tensor in tensors),
        nbytes=sum(prod(tensor.shape) * (4 if tensor.float32 else itemsize) for tensor in tensors),
        dtypes={hf.dtype or "float32": len(tensors)},
        stages=_stages(sharding, itemsize),
    )


def _stages(sharding: Sharding, itemsize: int) -> tuple[StageSize, ...]:
    """Return the size of each pipeline rank's share, which is that of each of its ranks."""
    layout, stages = sharding.layout, []
    for pp_rank in range(layout.pp):
        at = RankCoordinates(pp_rank=pp_rank)
        plans = [plan for vp_stage in range(layout.vpp) for plan in build_plan(sharding, at, vp_stage=vp_stage)]
        layers = [layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage) for vp_stage in range(layout.vpp)]
        stages.append(
            StageSize(
                pp_rank=pp_rank,
                layers=tuple(f"{held.start}-{held.stop - 1}" if held else "none" for held in layers),
                params=sum(prod(plan.shape) for plan in plans),
                nbytes=sum(prod(plan.shape) * (4 if plan.float32 else itemsize) for plan in plans),
            )
        )
    return tuple(stages)
