"""Opens a checkpoint of any kind, checks it against the model that it claims to hold, and reads its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import DTYPES, read_hf_config
from mega_rl.converters.live.copying import BlockReader, fill
from mega_rl.converters.live.repeated import repeat_faults
from mega_rl.converters.offline.dist_keys import EXTRA_STATE, FOREIGN_PREFIXES, whole_model
from mega_rl.converters.offline.dist_metadata import METADATA_FILE, DistTensor, read_metadata
from mega_rl.converters.offline.manifest import HF_FOLDER, MANIFEST_FILE, ConversionManifest, check_fits, read_manifest
from mega_rl.converters.offline.rank_files import rank_homes, rank_tensors
from mega_rl.converters.offline.slabs import Slabs
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.compose import ColumnRange, Homes, compose, home_faults, invert
from mega_rl.converters.plan.parameters import OUTPUT, as_on_disk, hf_tensors
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.errors import UserError, UserErrors
from mega_rl.storage.safetensors_header import matrix_shape
from mega_rl.storage.safetensors_reader import CheckpointReader, TensorInfo, read_header

CheckpointKind = Literal["hf", "ranks", "torch_dist"]
RUN_COMMIT = "COMMIT"  # a file that checkpoints of runs alone have
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class ShapeAndDtype(NamedTuple):
    """A tensor or parameter of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class WeightFiles:
    """A checkpoint of any kind, its headers read and checked; nothing else is read before it is asked for.

    `tensors` are those of a Hugging Face checkpoint, else the canonical parameters of the whole model, wherever their
    parts lie. Reads as any `BlockReader`; a context manager that closes its files.
    """

    path: Path
    kind: CheckpointKind
    sharding: Sharding
    tensors: dict[str, ShapeAndDtype]
    files: CheckpointReader  # the tensors as they are stored
    homes: Homes = field(default_factory=dict)  # of each tensor; empty where each is stored as one
    ignored: tuple[str, ...] = ()  # stored names left aside
    absent: tuple[str, ...] = ()  # parameters of the model that are not stored
    manifest: ConversionManifest | None = None

    @property
    def hf(self) -> HFConfig:
        """Return the architecture."""
        return self.sharding.hf

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.files.close()

    def stored(self, copies: Iterable[Copy]) -> tuple[Copy, ...]:
        """Copies that read `tensors`, made to read the stored tensors."""
        return compose(copies, self.homes) if self.homes else tuple(copies)

    def position(self, name: str) -> tuple[str, int]:
        """(file, offset) of the first part of a tensor."""
        return self.files.position(self.homes[name][0].stored if self.homes else name)

    def read(self, name: str) -> Tensor:
        """A whole tensor or parameter."""
        rows, cols = matrix_shape(self.tensors[name].shape)
        return self.read_block(name, (0, rows), (0, cols)).view(self.tensors[name].shape)

    def read_block(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """A rectangle, rows and columns both (low, high), as a new tensor [rows, columns]."""
        result = torch.empty(rows[1] - rows[0], cols[1] - cols[0], dtype=self.tensors[name].dtype)
        self.read_into(name, rows[0], cols, [result])
        return result

    def read_into(self, name: str, row: int, cols: tuple[int, int], targets: Sequence[Tensor]) -> None:
        """Reads rows from `row` on, columns [low, high) of them, into `targets` one after the other."""
        for target in targets:
            copy = Copy(name, row, cols[0], 0, 0, len(target), cols[1] - cols[0])
            _fill_rows(target, self.stored([copy]), self.files)
            row += len(target)

    def as_hf(self, *, fused_experts: bool | None = None) -> BlockReader:
        """Return the same weights as Hugging Face tensors; `fused_experts` None: experts as in the source."""
        return self if self.kind == "hf" else _AsHF(self, fused_experts)


def _fill_rows(target: Tensor, copies: Sequence[Copy], reader: BlockReader) -> None:
    """`fill` for a target whose rows may lie apart in memory."""
    if target.is_contiguous():
        fill(target, copies, reader)
    else:
        whole = torch.empty(target.shape, dtype=target.dtype)
        fill(whole, copies, reader)
        target.copy_(whole)


class _AsHF:
    """Hugging Face tensors of a converted checkpoint, put together as they are read."""

    def __init__(self, checkpoint: WeightFiles, fused_experts: bool | None) -> None:
        self._checkpoint = checkpoint
        sharding = checkpoint.sharding
        if fused_experts is not None:
            sharding = replace(sharding, hf=replace(sharding.hf, fused_experts=fused_experts))
        self._windows = hf_windows(sharding)
        self._tensors = hf_wholes(checkpoint, sharding, self._windows)

    @property
    def tensors(self) -> Mapping[str, ShapeAndDtype]:
        """Every tensor that the parameters make."""
        return self._tensors

    def position(self, name: str) -> tuple[str, int]:
        """(file, offset) of its first part."""
        return self._checkpoint.position(str(self._windows[name][0].copies[0].hf_name))

    def read_block(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """A rectangle as a new tensor."""
        shape, dtype = self._tensors[name]
        num_rows, num_cols = matrix_shape(shape)
        windows = self._windows[name]
        low, high = rows
        if not all(is_plain(window) for window in windows):
            low, high = 0, num_rows
        result = torch.empty(high - low, num_cols, dtype=dtype)
        fill_windows(result, [rows_of(window, low, high) for window in windows], self._checkpoint)
        return result[rows[0] - low : rows[1] - low, cols[0] : cols[1]].contiguous()

    def read_into(self, name: str, row: int, cols: tuple[int, int], targets: Sequence[Tensor]) -> None:
        """Read rows from `row` on into `targets` one after the other."""
        for target in targets:
            target.copy_(self.read_block(name, (row, row + len(target)), cols))
            row += len(target)


def hf_windows(sharding: Sharding) -> dict[str, tuple[ColumnRange, ...]]:
    """Return for every Hugging Face tensor the copies that make it from whole parameters."""
    return invert(whole_model(sharding))


def hf_wholes(
    checkpoint: WeightFiles,
    sharding: Sharding,
    windows: Mapping[str, tuple[ColumnRange, ...]],
    *,
    cast: torch.dtype | None = None,
) -> dict[str, ShapeAndDtype]:
    """Return shape and dtype of every Hugging Face tensor whose parameters are stored, in the order of the model."""
    wholes = {}
    for name, tensor in hf_tensors(sharding.hf, head=sharding.head).items():
        params = {str(copy.hf_name) for window in windows[name] for copy in window.copies}
        if params & set(checkpoint.absent):
            continue
        wanted = torch.float32 if tensor.float32 and cast is not None else cast
        dtype = one_dtype(name, {param: checkpoint.tensors[param].dtype for param in sorted(params)}, cast=wanted)
        wholes[name] = ShapeAndDtype(tensor.shape, dtype)
    return wholes


def one_dtype(name: str, dtypes: Mapping[str, torch.dtype], *, cast: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of a tensor made of tensors of these dtypes. Raises UserError if they differ without `cast`."""
    distinct = set(dtypes.values())
    if cast is None and len(distinct) > 1:
        listed = ", ".join(f"{source} is {str(dtype).removeprefix('torch.')}" for source, dtype in dtypes.items())
        raise UserError(f"{name}: {listed}; give the dtype that they shall have")
    return cast if cast is not None else distinct.pop()


def is_plain(window: ColumnRange) -> bool:
    """Return whether any rows of the window can be made without the others."""
    return window.step == 1 and not any(copy.transposed for copy in window.copies)


def rows_of(window: ColumnRange, low: int, high: int) -> ColumnRange:
    """Return the part of a plain window in rows [low, high), which become rows [0, high - low)."""
    copies = []
    for copy in window.copies:
        first, last = max(copy.dst_row, low), min(copy.dst_row + copy.rows, high)
        if first < last and copy.transposed:
            assert (first, last) == (copy.dst_row, copy.dst_row + copy.rows), copy
            copies.append(copy)
        elif first < last:
            src_row = copy.src_row + first - copy.dst_row
            copies.append(copy._replace(src_row=src_row, dst_row=first - low, rows=last - first))
    return window._replace(copies=tuple(copies))


def fill_windows(matrix: Tensor, windows: Iterable[ColumnRange], source: WeightFiles) -> None:
    """Fill a matrix [rows, cols] from a checkpoint; a window of stepped columns passes through a copy of its size."""
    for window in windows:
        copies = source.stored(window.copies)
        if window.step == 1:
            fill(matrix, copies, source.files)
        else:
            turn = torch.empty(len(matrix), matrix.shape[1] // window.step, dtype=matrix.dtype)
            fill(turn, copies, source.files)
            matrix[:, window.first_col :: window.step] = turn


def open_checkpoint(path: str | Path, *, reference: str | Path | None = None) -> WeightFiles:
    """Open a Hugging Face folder, rank files or a distributed checkpoint, and check every name, shape and dtype.

    `reference` is a folder with the model's config.json: needed for a distributed checkpoint that was not made by a
    conversion, and taken before the checkpoint's own. Raises UserError or UserErrors.
    """
    folder = Path(path)
    config = Path(reference) if reference is not None else None
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder}: no such directory")
    if (folder / RUN_COMMIT).is_file():
        raise UserError(f"checkpoint {folder}: is of a run; its weights leave by 'mega-rl checkpoint export RUN OUT'")
    if (folder / MANIFEST_FILE).is_file():
        manifest = read_manifest(folder)
        config = config or folder / HF_FOLDER
        if manifest.kind == "torch_dist":
            return _open_dist(folder, config, manifest)
        hf = read_hf_config(config)
        check_fits(manifest, hf, str(folder / MANIFEST_FILE))
        return _open_ranks(folder, manifest.sharding(hf), manifest)
    if (folder / METADATA_FILE).is_file():
        if config is None:
            raise UserError(f"checkpoint {folder}: has no {MANIFEST_FILE}; name a folder with the model's config.json")
        return _open_dist(folder, config, None)
    return _open_hf(folder)


def _open_hf(folder: Path) -> WeightFiles:
    hf = read_hf_config(folder)
    reader = CheckpointReader(folder)
    sharding = Sharding(as_on_disk(hf, {name: info.shape for name, info in reader.tensors.items()}))
    faults = [] if sharding.hf.value_head in reader.tensors else repeat_faults(reader, sharding.hf, "lm")
    if faults:
        raise UserErrors([f"{folder}: {fault}" for fault in faults])
    wholes = {name: ShapeAndDtype(info.shape, info.dtype) for name, info in reader.tensors.items()}
    return WeightFiles(folder, "hf", sharding, wholes, reader)


def _open_ranks(folder: Path, sharding: Sharding, manifest: ConversionManifest) -> WeightFiles:
    """Open rank files, which must hold exactly the tensors of the manifest's layout."""
    infos: dict[str, TensorInfo] = {}
    problems: list[str] = []
    expected = [t for t in rank_tensors(sharding, origin="canonical") if t.plan.canonical not in manifest.absent]
    for file in dict.fromkeys(t.file for t in expected):
        try:
            infos |= {f"{file}:{name}": info for name, info in read_header(folder / file).items()}
        except UserErrors as error:
            problems += error.problems
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserErrors(problems)
    for tensor in expected:
        info = infos.get(tensor.stored)
        where = f"{folder / tensor.file}: {tensor.name}"
        if info is None:
            problems.append(f"{where} is missing, expected shape {list(tensor.plan.shape)}")
        elif info.shape != tensor.plan.shape:
            problems.append(f"{where} has shape {list(info.shape)}, its layout asks for {list(tensor.plan.shape)}")
    surplus = sorted(set(infos) - {t.stored for t in expected})
    problems += [f"{folder}/{name} is not part of the model of {HF_FOLDER}/config.json" for name in surplus]
    if problems:
        raise UserErrors(problems)
    homes = {name: there for name, there in rank_homes(sharding).items() if name not in manifest.absent}
    return assembled(folder, "ranks", sharding, infos, homes, (), manifest.absent, manifest)


def assembled(
    folder: Path,
    kind: CheckpointKind,
    sharding: Sharding,
    infos: Mapping[str, TensorInfo],
    homes: Homes,
    ignored: tuple[str, ...],
    absent: tuple[str, ...],
    manifest: ConversionManifest | None,
) -> WeightFiles:
    """Return the checkpoint of these parts, after checking that they make up every parameter and agree in dtype."""
    shapes = whole_shapes(sharding)
    problems = [f"{folder}: {name} is not a parameter of the model" for name in absent if name not in shapes]
    wholes = {}
    for name, shape in shapes.items():
        if name in absent:
            continue
        faults = home_faults(name, shape, homes.get(name, ()))
        dtypes = {infos[home.stored].dtype for home in homes.get(name, ())}
        problems += [f"{folder}: {fault}" for fault in faults]
        if len(dtypes) == 1 and dtypes <= set(FLOATS):
            wholes[name] = ShapeAndDtype(shape, dtypes.pop())
        elif not faults:
            problems.append(f"{folder}: {name} has parts of dtype {', '.join(sorted(map(str, dtypes)))}")
    if problems:
        raise UserErrors(problems)
    reader = CheckpointReader(folder, tensors=infos)
    return WeightFiles(folder, kind, sharding, wholes, reader, homes, ignored, absent, manifest)


def whole_shapes(sharding: Sharding) -> dict[str, tuple[int, ...]]:
    """Return the shape of every canonical parameter of the whole model, without padding of the vocabulary."""
    unpadded = replace(sharding, padded_vocab=sharding.hf.vocab_size)
    return {plan.canonical: plan.shape for plan in whole_model(unpadded, origin="canonical")}


def _open_dist(folder: Path, config: Path, manifest: ConversionManifest | None) -> WeightFiles:
    """Open a distributed checkpoint: the slabs of the model's parameters; other content is left aside."""
    tensors, objects = read_metadata(folder)
    hf = read_hf_config(config)
    if manifest is None:
        sharding = _guess(hf, tensors)
    else:
        check_fits(manifest, hf, str(folder / MANIFEST_FILE))
        sharding = manifest.sharding(hf)
    slabs = Slabs(folder, sharding, tensors)
    absent, problems = [], []
    for plan in whole_model(replace(sharding, padded_vocab=hf.vocab_size), origin="canonical"):
        there = slabs.add(plan)
        said_absent = manifest is not None and plan.canonical in manifest.absent
        if (said_absent and plan.canonical not in slabs.homes) or (plan.optional and not there):
            absent.append(plan.canonical)
        elif not there:
            problems.append(f"{folder}: {plan.canonical} is missing")
    ignored, unknown = _left_over(set(tensors) - slabs.used, objects, sharding)
    problems += slabs.problems
    problems += [f"{folder}: {key} is not part of the {hf.family} model of {config}/config.json" for key in unknown]
    if problems:
        raise UserErrors(problems)
    return assembled(folder, "torch_dist", sharding, slabs.infos, slabs.homes, ignored, tuple(absent), manifest)


def _guess(hf: HFConfig, tensors: Mapping[str, DistTensor]) -> Sharding:
    """Infer the options of a checkpoint without a manifest from its head and its prediction layers."""
    output = tensors.get(OUTPUT)
    head: Head = "value" if output is not None and output.shape == (1, hf.hidden_size) else "lm"
    if any(key.startswith("mtp.") for key in tensors):
        hf = replace(hf, mtp="load")
    return Sharding(hf, head=head)


def _left_over(keys: set[str], objects: Sequence[str], sharding: Sharding) -> tuple[tuple[str, ...], list[str]]:
    """Return (names left aside, unknown names) of a distributed checkpoint's content besides the model."""
    prefixes = (*FOREIGN_PREFIXES, *(("mtp.",) if sharding.hf.mtp == "drop" else ()))
    states = [name for name in objects if EXTRA_STATE in name]
    others = [*sorted(keys), *(name for name in objects if EXTRA_STATE not in name)]
    ignored = [name for name in others if name.startswith(prefixes)]
    if states:
        ignored.append(f"{len(states)} extra states of modules")
    return tuple(ignored), [name for name in others if not name.startswith(prefixes)]


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name like "bfloat16", None for None. Raises UserError."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"dtype={name}: must be one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
