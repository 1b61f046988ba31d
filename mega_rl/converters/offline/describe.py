"""Description of a Hugging Face checkpoint and of each rank's share in a layout; reads headers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from mega_rl.converters.live.copying import BlockReader, TensorLike
from mega_rl.converters.live.repeated import repeat_faults
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors, ignored_tensors
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.ranks import ParamPlan, common_plan, expert_plan
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
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]
    mis_shaped: tuple[str, ...]
    contradicting: tuple[str, ...]  # would be left out as copies of others, whose values they do not have
    stages: tuple[StageSize, ...]

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
    present = set(shapes)
    itemsize = _itemsize(reader)
    description = Description(
        num_tensors=len(shapes),
        num_params=sum(prod(shape) for shape in shapes.values()),
        nbytes=sum(_nbytes(info) for info in reader.tensors.values()),
        dtypes=dict(Counter(str(info.dtype).removeprefix("torch.") for info in reader.tensors.values()).most_common()),
        missing=tuple(name for name, t in expected.items() if name not in present and not t.optional),
        unexpected=tuple(sorted(present - set(expected) - ignorable)),
        ignored=tuple(sorted(present & ignorable)),
        mis_shaped=tuple(
            f"{name}: {list(shapes[name])}, config.json asks for {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in shapes and shapes[name] != tensor.shape
        ),
        contradicting=tuple(repeat_faults(reader, hf, head)),
        stages=tuple(_stage(sharding, pp_rank, itemsize) for pp_rank in range(sharding.layout.pp)),
    )
    return sharding, description


def describe_config(sharding: Sharding) -> Description:
    """Return the description of the checkpoint that a config.json announces, where there are no weights to read.

    Raises UserErrors when the model cannot be cut this way.
    """
    hf, head = sharding.hf, sharding.head
    prove_complete(sharding)
    tensors = {name: tensor for name, tensor in hf_tensors(hf, head=head).items() if not tensor.optional}
    itemsize = 4 if hf.dtype in (None, "float32") else 2
    sizes = {name: prod(tensor.shape) * (4 if tensor.float32 else itemsize) for name, tensor in tensors.items()}
    return Description(
        num_tensors=len(tensors),
        num_params=sum(prod(tensor.shape) for tensor in tensors.values()),
        nbytes=sum(sizes.values()),
        dtypes={hf.dtype or "float32": len(tensors)},
        missing=(),
        unexpected=(),
        ignored=(),
        mis_shaped=(),
        contradicting=(),
        stages=tuple(_stage(sharding, pp_rank, itemsize) for pp_rank in range(sharding.layout.pp)),
    )


def rank_plan(sharding: Sharding, at: RankCoordinates) -> dict[int, tuple[ParamPlan, ...]]:
    """Return the plans of all parameters of one rank, by virtual stage."""
    return {
        vp_stage: common_plan(sharding, at.tp_rank, at.pp_rank, vp_stage)
        + expert_plan(sharding, at.ep_rank, at.etp_rank, at.pp_rank, vp_stage)
        for vp_stage in range(sharding.layout.vpp)
    }


def _stage(sharding: Sharding, pp_rank: int, itemsize: int) -> StageSize:
    """Return the size of a pipeline rank's share, that of each of its ranks."""
    layout = sharding.layout
    plans = [p for plan in rank_plan(sharding, RankCoordinates(pp_rank=pp_rank)).values() for p in plan]
    layers = [layout.layers_of(pp_rank, sharding.hf.num_layers, v) for v in range(layout.vpp)]
    return StageSize(
        pp_rank=pp_rank,
        layers=tuple(f"{held.start}-{held.stop - 1}" if held else "none" for held in layers),
        params=sum(prod(p.shape) for p in plans),
        nbytes=sum(prod(p.shape) * (4 if p.float32 else itemsize) for p in plans),
    )


def _itemsize(reader: BlockReader) -> int:
    """Return the item size of the dtype that most bytes of the checkpoint have."""
    sizes: Counter[int] = Counter()
    for info in reader.tensors.values():
        sizes[info.dtype.itemsize] += _nbytes(info)
    return sizes.most_common(1)[0][0] if sizes else 0


def _nbytes(tensor: TensorLike) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize
