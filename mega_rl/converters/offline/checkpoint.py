"""Open a checkpoint of any kind, check it against its model, and read its parameters.

mega_rl.json, the manifest of a conversion, holds what a distributed checkpoint itself does not say about its source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import DTYPES, read_hf_config
from mega_rl.converters.live.adapters import add
from mega_rl.converters.live.copying import BlockReader, ShapeAndDtype, TensorLike, fill
from mega_rl.converters.live.load import repeat_faults
from mega_rl.converters.offline.slabs import EXTRA_STATE, FOREIGN_PREFIXES, Slab, Slabs, whole_model
from mega_rl.converters.offline.torch_dist import METADATA_FILE, Chunk, DistTensor, read_metadata, start_of
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.compose import Homes, compose, home_faults, invert, rows_of
from mega_rl.converters.plan.parameters import OUTPUT, VALUE_HEADS, as_on_disk, hf_tensors
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import TensorSpec
from mega_rl.errors import UserError, UserErrors
from mega_rl.untrusted import parse_object

MANIFEST_FILE = "mega_rl.json"
HF_FOLDER = "hf"  # config.json, tokenizer and templates of the source, byte for byte
VERSION = 2
MAX_MANIFEST_BYTES = 64 << 20  # absent tensors are listed by name
RUN_COMMIT = "COMMIT"  # a file that only checkpoints of runs have
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ConversionManifest:
    """Facts of a converted checkpoint that its tensors do not show."""

    head: Head
    mtp: Literal["drop", "load"]
    dtype: str | None  # all weights were cast to it; None: each tensor has its own
    fused_experts: bool  # one tensor of all experts per layer in the source
    value_head: str  # its name in the source
    absent: tuple[str, ...] = ()  # canonical parameters that the source had nothing for
    version: int = VERSION


_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "version": (VERSION,),
    "head": ("lm", "value"),
    "mtp": ("drop", "load"),
    "dtype": (None, *DTYPES),
    "fused_experts": (True, False),
    "value_head": VALUE_HEADS,
}


def read_manifest(folder: Path) -> ConversionManifest:
    """Return the manifest of a folder. Raises UserError naming every wrong field."""
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"more than {MAX_MANIFEST_BYTES} bytes")
        raw = parse_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); convert the checkpoint again") from error
    wrong = sorted({field.name for field in fields(ConversionManifest)} ^ raw.keys())
    for name, values in _ALLOWED.items():
        if not any(type(raw.get(name)) is type(value) and raw.get(name) == value for value in values):
            wrong.append(f"{name}={raw.get(name)!r}")
    absent = raw.get("absent")
    if wrong or not isinstance(absent, list) or not all(isinstance(name, str) for name in absent):
        faults = ", ".join(wrong) or f"absent={absent!r}"
        raise UserError(f"{path}: is not what version {VERSION} writes ({faults}); convert the checkpoint again")
    return ConversionManifest(**raw | {"absent": tuple(absent)})


@dataclass
class WeightFiles:
    """A checkpoint of any kind, its headers read and checked; other bytes are read later.

    `tensors` are those of a Hugging Face checkpoint, else the canonical parameters of the whole model. Reads as any
    `BlockReader`; a context manager that closes its files.
    """

    path: Path
    kind: Literal["hf", "torch_dist"]
    sharding: Sharding
    tensors: Mapping[str, TensorLike]
    files: CheckpointReader  # the tensors as they are stored
    homes: Homes = field(default_factory=dict)  # places of each tensor's parts; empty if each is stored as one
    ignored: tuple[str, ...] = ()  # stored names left out
    absent: tuple[str, ...] = ()  # parameters of the model that are not stored
    dtype: str | None = None  # the conversion cast all weights to it

    @property
    def hf(self) -> HFConfig:
        """Return the architecture."""
        return self.sharding.hf

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    def stored(self, copies: Iterable[Copy]) -> tuple[Copy, ...]:
        """Return copies that read `tensors` as copies that read the stored tensors."""
        return compose(copies, self.homes) if self.homes else tuple(copies)

    def position(self, name: str) -> tuple[str, int]:
        """Return (file, offset) of the first part of a tensor."""
        return self.files.position(self.homes[name][0].stored if self.homes else name)

    def read_block(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Return a rectangle, rows and columns both (low, high), as a new tensor [rows, columns]."""
        result = torch.empty(rows[1] - rows[0], cols[1] - cols[0], dtype=self.tensors[name].dtype)
        copy = Copy(name, rows[0], cols[0], 0, 0, *result.shape)
        fill(result, self.stored([copy]), self.files)
        return result

    read_into = BlockReader.read_into

    def as_hf(self, *, fused_experts: bool | None = None) -> BlockReader:
        """Return the same weights as Hugging Face tensors; `fused_experts` None: experts as in the source."""
        if self.kind == "hf":
            return self
        hf = self.hf if fused_experts is None else replace(self.hf, fused_experts=fused_experts)
        return _AsHF(hf_outputs(self, replace(self.sharding, hf=hf)))


@dataclass(frozen=True)
class Output:
    """A tensor and how it is made of a checkpoint's tensors."""

    spec: TensorSpec
    copies: Sequence[Copy]
    source: WeightFiles
    slab: Slab | None = None  # its place in a distributed checkpoint
    adapter: Merge | None = None  # added to its values

    @property
    def is_transposed(self) -> bool:
        """Return whether rows cannot be made without the others."""
        return any(copy.transposed for copy in self.copies)

    def read(self) -> Tensor:
        """Return the whole tensor."""
        return self.read_rows(0, matrix_shape(self.spec.shape)[0]).view(self.spec.shape)

    def read_rows(self, low: int, high: int, buffer: Tensor | None = None) -> Tensor:
        """Return rows [low, high) as [rows, columns]; all rows if transposed. buffer: [bytes] uint8 for them."""
        rows, columns, dtype = high - low, matrix_shape(self.spec.shape)[1], self.spec.dtype
        matrix = torch.empty(rows, columns, dtype=dtype) if buffer is None else buffer.view(dtype).view(rows, columns)
        fill(matrix, self.source.stored(rows_of(self.copies, low, high)), self.source.files)
        if self.adapter is not None:
            a, b, scale = self.adapter
            matrix.copy_(add(matrix, a.read(), b.read_rows(low, high), scale))
        return matrix


class Merge(NamedTuple):
    """A low-rank adapter that is merged into a weight as it is written."""

    a: Output
    b: Output
    scale: float


class _AsHF:
    """Hugging Face tensors of a converted checkpoint, put together as they are read."""

    def __init__(self, outputs: Iterable[Output]) -> None:
        self._outputs = {output.spec.name: output for output in outputs}
        self.tensors = {name: ShapeAndDtype(one.spec.shape, one.spec.dtype) for name, one in self._outputs.items()}

    def position(self, name: str) -> tuple[str, int]:
        """Return (file, offset) of its first part."""
        output = self._outputs[name]
        return output.source.position(str(output.copies[0].hf_name))

    def read_block(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Return a rectangle as a new tensor."""
        output = self._outputs[name]
        matrix = output.read().flatten(0, -2)[slice(*rows)] if output.is_transposed else output.read_rows(*rows)
        return matrix[:, slice(*cols)].contiguous()

    read_into = BlockReader.read_into


def hf_outputs(origin: WeightFiles, sharding: Sharding, cast: torch.dtype | None = None) -> list[Output]:
    """Return the Hugging Face tensors of a model that a checkpoint of any kind has, in the model's order."""
    made = {} if origin.kind == "hf" else invert(whole_model(sharding))
    outputs = []
    for name, (shape, _, float32) in hf_tensors(sharding.hf, head=sharding.head).items():
        copies = made.get(name, [Copy(name, 0, 0, 0, 0, *matrix_shape(shape))])
        sources = sorted({str(copy.hf_name) for copy in copies})
        if origin.tensors.keys() >= set(sources):
            wanted = torch.float32 if float32 and cast is not None else cast
            dtype = one_dtype(name, {source: origin.tensors[source].dtype for source in sources}, cast=wanted)
            outputs.append(Output(TensorSpec(name, dtype, shape), copies, origin))
    return outputs


def one_dtype(name: str, dtypes: Mapping[str, torch.dtype], *, cast: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of a joined tensor. Raises UserError for several dtypes without `cast`."""
    distinct = set(dtypes.values())
    if cast is None and len(distinct) > 1:
        listed = ", ".join(f"{source} is {str(dtype).removeprefix('torch.')}" for source, dtype in dtypes.items())
        raise UserError(f"{name}: {listed}; give the dtype that they shall have")
    return cast if cast is not None else distinct.pop()


def open_checkpoint(path: str | Path, *, reference: str | Path | None = None) -> WeightFiles:
    """Open a Hugging Face folder or a distributed checkpoint, and check every name, shape and dtype.

    `reference` is a folder with the model's config.json. It is needed for a distributed checkpoint that was not made by
    a conversion, and replaces the checkpoint's own. Raises UserError or UserErrors.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder}: no such directory")
    if (folder / RUN_COMMIT).is_file():
        raise UserError(
            f"checkpoint {folder}: belongs to a run; export its weights by 'mega-rl checkpoint export RUN OUT'"
        )
    if (folder / MANIFEST_FILE).is_file():
        return _open_dist(folder, Path(reference or folder / HF_FOLDER), read_manifest(folder))
    if (folder / METADATA_FILE).is_file():
        if reference is None:
            raise UserError(f"checkpoint {folder}: has no {MANIFEST_FILE}; name a folder with the model's config.json")
        return _open_dist(folder, Path(reference), None)
    hf = read_hf_config(folder)
    reader = CheckpointReader(folder)
    sharding = Sharding(as_on_disk(hf, {name: info.shape for name, info in reader.tensors.items()}))
    faults = [] if sharding.hf.value_head in reader.tensors else repeat_faults(reader, sharding.hf, "lm")
    if faults:
        raise UserErrors([f"{folder}: {fault}" for fault in faults])
    return WeightFiles(folder, "hf", sharding, reader.tensors, reader)


def _open_dist(folder: Path, config: Path, manifest: ConversionManifest | None) -> WeightFiles:
    """Open a distributed checkpoint; without a manifest its head and its prediction layers show the model."""
    tensors, objects = read_metadata(folder)
    hf = read_hf_config(config)
    if manifest is not None:
        hf = replace(hf, mtp=manifest.mtp, fused_experts=manifest.fused_experts, value_head=manifest.value_head)
        sharding = Sharding(hf, head=manifest.head)
    else:
        output = tensors.get(OUTPUT)
        is_value = output is not None and output.shape == (1, hf.hidden_size)
        with_mtp = any(key.startswith("mtp.") for key in tensors)
        sharding = Sharding(replace(hf, mtp="load") if with_mtp else hf, head="value" if is_value else "lm")
    foreign = (*FOREIGN_PREFIXES, *(("mtp.",) if sharding.hf.mtp == "drop" else ()))
    absent = () if manifest is None else manifest.absent
    opened = open_boxes(folder, sharding, tensors, start_of, objects=objects, may_lack=absent, foreign=foreign)
    return replace(opened, dtype=None if manifest is None else manifest.dtype)


def open_boxes(
    folder: Path,
    sharding: Sharding,
    tensors: Mapping[str, DistTensor],
    start_of: Callable[[DistTensor, Chunk], int],
    *,
    objects: Sequence[str] = (),
    may_lack: Collection[str] = (),
    foreign: tuple[str, ...] = (),
) -> WeightFiles:
    """Open tensors stored in boxes, and check that they make every parameter of the model.

    start_of: as for `Slabs`. objects: keys of the content besides tensors. may_lack: canonical parameters that may be
    absent. foreign: prefixes of keys that are ignored. Raises UserErrors.
    """
    slabs = Slabs(folder, sharding, tensors, start_of=start_of)
    plans = {plan.canonical: plan for plan in whole_model(sharding)}
    stored = {name: slabs.add(plan) for name, plan in plans.items()}
    absent = [
        name
        for name, plan in plans.items()
        if name not in slabs.homes and (name in may_lack or (plan.optional and not stored[name]))
    ]
    states = [name for name in objects if EXTRA_STATE in name]
    others = [*sorted(slabs.unused), *(name for name in objects if EXTRA_STATE not in name)]
    ignored = [name for name in others if name.startswith(foreign)]
    problems = [f"{name} is missing" for name, there in stored.items() if not there and name not in absent]
    problems += [
        f"{name} is not part of the {sharding.hf.family} model of config.json" for name in others if name not in ignored
    ]
    problems += [f"{name} is not a parameter of the model" for name in may_lack if name not in plans]
    problems = slabs.problems + [f"{folder}: {problem}" for problem in problems]
    if problems:
        raise UserErrors(problems)
    wholes = {}
    for name in (name for name in plans if name not in absent):
        homes = slabs.homes.get(name, ())
        dtypes = {slabs.infos[home.stored].dtype for home in homes}
        problems += [f"{folder}: {fault}" for fault in home_faults(name, plans[name].shape, homes)]
        if homes and (len(dtypes) > 1 or not dtypes <= set(FLOATS)):
            problems.append(f"{folder}: {name} has parts of dtype {', '.join(sorted(map(str, dtypes)))}")
        wholes[name] = ShapeAndDtype(plans[name].shape, next(iter(dtypes), torch.float32))
    if problems:
        raise UserErrors(problems)
    if states:
        ignored.append(f"{len(states)} extra states of modules")
    reader = CheckpointReader(folder, tensors=slabs.infos)
    return WeightFiles(folder, "torch_dist", sharding, wholes, reader, slabs.homes, tuple(ignored), tuple(absent))


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name like "bfloat16", None for None. Raises UserError."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"dtype={name}: must be one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
